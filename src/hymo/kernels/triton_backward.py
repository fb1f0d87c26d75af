"""The Triton kernel of the backward pass: one walk from the end that writes every gradient.

A program walks its segment backwards in blocks of 64 tokens. The forward pass kept the state before each block; the
states before the block's chunks of 16 are rebuilt into a scratch of four tiles. ``dstate`` is the gradient of the
state at the current chunk's end; it starts from what the later segments add to it (``segment_kernel``, REVERSE).

State rows are worked on in two parts of 16: the rows are independent but for sums (P, dv, the gates), and a part
leaves the registers before the next one comes in.

The gradient of a gate needs, for every decay factor f = exp(a e) in use, y = f df, row by row; e is a sum of gates,
so y goes to each gate of the sum: dlog [u,s] collects them, dg_u = sum_s a_s dlog_us and da_s = sum_u g_u dlog_us.
Nothing is subtracted, but for the pairs of a chunk in one product (``part_gradients``).

Layouts: as in ``hymo.kernels.triton_forward``; dA [B*H,N,S] and dD [B*H,N] are sums of one segment each.
"""

import triton
import triton.language as tl

from hymo.kernels.triton_common import (
    HELD,
    LEVELS,
    differences_towards,
    dot,
    gate_sums,
    half_sum_mask,
    held_sums,
    is_right,
    load_ends,
    load_gates,
    load_ids,
    load_rates,
    load_tile,
    pair_mask,
    remainder,
    split_gates,
    starts_document,
    store_tile,
    sums_towards,
    transposed,
    two_parts,
)
from hymo.kernels.triton_forward import add_segment, load_state, store_state

LN2 = tl.constexpr(0.6931471805599453)
PART = tl.constexpr(16)  # state rows worked on at a time: a whole tile of 32 needs more registers than there are


@triton.jit
def advance(state, b, v, a, high, low, total, t, reach, keep, HAS_DOCS: tl.constexpr, SPLIT: tl.constexpr,
            PRECISION: tl.constexpr):  # fmt: skip
    """The state rows of one part after a chunk."""
    to_end = tl.exp2(a[None, :] * gate_sums(t[None, :] > t[:, None], high, low, SPLIT))
    through = tl.exp2(a * total)
    if HAS_DOCS:
        to_end = tl.where(reach, to_end, 0.0)
        through = tl.where(keep, through, 0.0)
    return dot(transposed(b.to(tl.float32) * to_end, b.dtype), v, state * through[:, None], PRECISION)


@triton.jit
def rebuild_states(
    v_ptr, b_ptr, g_ptr, doc_ptr, saved_ptr, scratch_ptr, a0, a1, t, s, d, x, first, tokens, T, H, v_stride, b_stride,
    D: tl.constexpr, S: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr,
    HAS_DOCS: tl.constexpr, MASK: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the states before the four chunks of the block at token x to the scratch, [4,S,D]."""
    at0 = s[:, None] * BD + d[None, :]
    state0 = tl.load(saved_ptr + at0).to(tl.float32)
    tl.store(scratch_ptr + at0, state0.to(scratch_ptr.dtype.element_ty))
    if BS > PART:
        at1 = at0 + PART * BD
        state1 = tl.load(saved_ptr + at1).to(tl.float32)
        tl.store(scratch_ptr + at1, state1.to(scratch_ptr.dtype.element_ty))
    for _ in range(3):
        v = load_tile(v_ptr + x * v_stride, t, d, v_stride, tokens - x, D, BD, MASK)
        b0 = load_tile(b_ptr + x * b_stride, t, s, b_stride, tokens - x, S if S < PART else PART, PART, MASK)
        g = load_gates(g_ptr + x * H, t, H, tokens - x, MASK)
        high, low = split_gates(g, PART, SPLIT)
        total = tl.sum(g, 0)
        reach, keep = t[:, None] >= 0, True
        if HAS_DOCS:
            before, last = load_ends(doc_ptr, first + x, T, BT)
            keep = before == last
            if before != last:
                reach = (load_ids(doc_ptr, t, first + x, T) == last)[:, None]
        scratch_ptr += BS * BD
        state0 = advance(state0, b0, v, a0, high, low, total, t, reach, keep, HAS_DOCS, SPLIT, PRECISION)
        tl.store(scratch_ptr + at0, state0.to(scratch_ptr.dtype.element_ty))
        if BS > PART:
            b1 = load_tile(b_ptr + x * b_stride, t, s + PART, b_stride, tokens - x, S, BS, MASK)
            state1 = advance(state1, b1, v, a1, high, low, total, t, reach, keep, HAS_DOCS, SPLIT, PRECISION)
            tl.store(scratch_ptr + at1, state1.to(scratch_ptr.dtype.element_ty))
        x += BT
    tl.debug_barrier()


@triton.jit
def dyadic_pairs(
    b32, c32, a, t, high, low, P, dP, dlog, db, dc, SPLIT: tl.constexpr, PRECISION: tl.constexpr, dtype: tl.constexpr
):
    """All pairs of a chunk but the diagonal, level by level: adds to P (mirror image), dlog, db and dc."""
    i, j = t[:, None], t[None, :]
    for level in tl.static_range(LEVELS):
        right = is_right(i, level)
        factor = tl.exp2(a[None, :] * gate_sums(half_sum_mask(i, j, level), high, low, SPLIT))
        half = tl.where(right, c32, b32) * factor
        half_low = half.to(dtype)
        pairs = dot(half_low, transposed(half, dtype), tl.zeros_like(P), PRECISION)
        P += tl.where(pair_mask(j, i, level), pairs, 0.0)
        dpairs = tl.where(pair_mask(i, j, level) | pair_mask(j, i, level), dP, 0.0).to(dtype)
        dhalf = dot(dpairs, half_low, tl.zeros_like(dc), PRECISION)
        dlog = sums_towards(half_sum_mask(j, i, level), half * dhalf, dlog, SPLIT)
        dhalf *= factor
        dc += tl.where(right, dhalf, 0.0)
        db += tl.where(right, 0.0, dhalf)
    return P, dlog, db, dc


@triton.jit
def part_gradients(
    b, c, v, do, state, dstate, a, t, g, high, low, total, same, see, reach, keep,
    dP, dP_low, dP_mirror_low, dv, P, dg,
    FORM: tl.constexpr, HAS_DOCS: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One part of the state rows of a chunk: returns db, dc, the new dstate, dlog, and adds to dv, P and dg.

    "Mirror" is the image [j,i] of a matrix [i,j]; P is built so. dP holds (dyadic) both triangles or is used through
    dP_low and its mirror image.

    In one product of factors C and B (leaf, held) the pair (i,j) sends y = dP_ij C_is B_js to the gates after j up to
    i: as part of row i's sum to all up to i, and as part of column j's back from all up to j. The two cancel, since
    both products take the same factors, in two parts: to 2^-17 in the leaf form, whose y then enters the sums in two
    parts itself; to float32's last digits in the held form, whose factors are cut to what two parts hold exactly. What
    a row reads of the state at the chunk's start is, in the leaf form, one more such pair. Through a gate that is held
    the pairs come with the decay at which it is held; what is beyond is taken off again.
    """
    i, j = t[:, None], t[None, :]
    BT: tl.constexpr = t.shape[0]
    zeros = tl.zeros([BT, PART], tl.float32)
    dtype: tl.constexpr = b.dtype
    b32, c32 = b.to(tl.float32), c.to(tl.float32)
    through = tl.exp2(a * total)
    if HAS_DOCS:
        through = tl.where(keep, through, 0.0)
    # in the held form only rows of the document that the chunk begins with use it: all before them are in it too
    log_L = a[None, :] * gate_sums((j <= i) & same if FORM == "leaf" else j <= i, high, low, SPLIT)
    from_start = tl.exp2(log_L)
    if FORM == "leaf":
        factor, inverse = from_start, tl.exp2(-log_L)
    if FORM == "leaf" and not HAS_DOCS:
        to_end = inverse * through[None, :]
    else:
        to_end = tl.exp2(a[None, :] * gate_sums(j > i, high, low, SPLIT))
    B_out, C_in = b32 * to_end, c32 * from_start
    dB_out = dot(v, transposed(dstate, dtype), zeros, PRECISION)
    dC_in = dot(do, tl.trans(state), zeros, PRECISION)
    if HAS_DOCS:
        B_out, C_in = tl.where(reach, B_out, 0.0), tl.where(see, C_in, 0.0)
        dB_out, dC_in = tl.where(reach, dB_out, 0.0), tl.where(see, dC_in, 0.0)
    dv = dot(B_out.to(dtype), dstate.to(dtype), dv, PRECISION)
    passed = through * tl.sum(state.to(tl.float32) * dstate, 1)
    dlog = tl.broadcast_to(passed[None, :], [BT, PART])
    db = to_end * dB_out
    dlog = sums_towards(i > j, b32 * db, dlog, SPLIT)
    dstate = dot(transposed(C_in, dtype), do, dstate * through[:, None], PRECISION)
    if SPLIT:
        dstate = dot(transposed(remainder(C_in, C_in.to(dtype)), dtype), do, dstate, PRECISION)
    if FORM == "dyadic":
        dlog = sums_towards(i <= j, C_in * dC_in, dlog, SPLIT)
        diagonal = tl.sum(tl.where(i == j, dP, 0.0), 1)[:, None]
        db, dc = db + diagonal * c32, from_start * dC_in + diagonal * b32
        P += tl.where(i == j, dot(b, tl.trans(c), tl.zeros_like(P), PRECISION), 0.0)
        P, dlog, db, dc = dyadic_pairs(b32, c32, a, t, high, low, P, dP, dlog, db, dc, SPLIT, PRECISION, dtype)
    else:
        if FORM == "held":
            dc = from_start * dC_in
            dlog = sums_towards((i <= j) & same, c32 * dc, dlog, SPLIT)
            E = held_sums((j <= i) & (j > 0) & same, g, a, SPLIT)
            factor, inverse = tl.exp2(E), tl.exp2(-E)
        C, B = c32 * factor, b32 * inverse
        if SPLIT and FORM == "held":
            C, B = two_parts(C), two_parts(B)
        C_low, B_low = C.to(dtype), B.to(dtype)
        P = dot(B_low, transposed(C, dtype), P, PRECISION)
        dC, dB = dC_in if FORM == "leaf" else zeros, zeros
        if SPLIT:
            dC = dot(dP_low, remainder(B, B_low), dC, PRECISION)
            dB = dot(dP_mirror_low, remainder(C, C_low), dB, PRECISION)
        dC, dB = dot(dP_low, B_low, dC, PRECISION), dot(dP_mirror_low, C_low, dB, PRECISION)
        y = C * dC - B * dB
        db += inverse * dB
        if FORM == "leaf":
            dc = factor * dC
            dlog = differences_towards((i <= j) & same, y, dlog, 2, SPLIT)
        else:
            dc += factor * dC
            beyond = tl.exp2(tl.minimum(a[None, :] * g[:, None] + HELD, 0.0))
            dlog += beyond * differences_towards((i <= j) & same, y, zeros, 3, SPLIT)
    dg += tl.sum(dlog * a[None, :], 1)
    return db, dc, dstate, dv, P, dg, dlog


@triton.jit
def halved(x):
    """The lower half of the rows added to the upper one; a thread holds both, and a sum takes half the registers."""
    return tl.sum(tl.reshape(x, [2, x.shape[0] // 2, x.shape[1]]), 0)


@triton.jit
def chunk_gradients(
    v_ptr, b_ptr, c_ptr, g_ptr, doc_ptr, state_ptr, do_ptr, dv_ptr, db_ptr, dc_ptr, dg_ptr,
    dstate0, dstate1, dA0, dA1, dD, a0, a1, skip, t, s, d, first, x, tokens, T, H, v_stride, b_stride, c_stride,
    D: tl.constexpr, S: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr,
    FORM: tl.constexpr, HAS_DOCS: tl.constexpr, MASK: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the chunk at token x; returns dstate at its start and the sums with its part added.

    HAS_DOCS: a document may start in the chunk. The parts of the state rows are 0 and 1; what only the second one needs
    is loaded after the first: loaded with the rest, it would hold registers all the time.
    """
    i, j = t[:, None], t[None, :]
    at = s[:, None] * BD + d[None, :]  # states are kept as tiles [S,D]
    v = load_tile(v_ptr + x * v_stride, t, d, v_stride, tokens - x, D, BD, MASK)
    do = load_tile(do_ptr + x * H * D, t, d, H * D, tokens - x, D, BD, MASK)
    g = load_gates(g_ptr + x * H, t, H, tokens - x, MASK)
    b = load_tile(b_ptr + x * b_stride, t, s, b_stride, tokens - x, S if S < PART else PART, PART, MASK)
    c = load_tile(c_ptr + x * c_stride, t, s, c_stride, tokens - x, S if S < PART else PART, PART, MASK)
    state = tl.load(state_ptr + at)
    high, low = split_gates(g, PART, SPLIT)
    total = tl.sum(g, 0)
    same = i >= 0
    see, reach, keep = same, same, True
    if HAS_DOCS:
        ids = load_ids(doc_ptr, t, first + x, T)
        before, last = load_ends(doc_ptr, first + x, T, BT)
        same = ids[:, None] == ids[None, :]
        see, reach, keep = (ids == before)[:, None], (ids == last)[:, None], before == last
    # "mirror": the image [j,i] of a matrix [i,j]
    zeros = tl.zeros([BT, BT], tl.float32)
    dP = dot(do, tl.trans(v), zeros, PRECISION)
    dP_mirror = dot(v, tl.trans(do), zeros, PRECISION)
    dD += tl.sum(tl.sum(tl.where(i == j, dP, 0.0), 1), 0)
    if FORM == "dyadic":
        dP = tl.where((i >= j) & same, dP, tl.where(same, dP_mirror, 0.0))
        dP_low, dP_mirror_low = dP, dP
    else:
        dP_low = tl.where((i >= j) & same, dP, 0.0).to(b.dtype)
        dP_mirror_low = tl.where((i <= j) & same, dP_mirror, 0.0).to(b.dtype)
    dv, P = tl.zeros([BT, BD], tl.float32), zeros
    dg = tl.zeros([BT], tl.float32)
    db, dc, dstate0, dv, P, dg, dlog = part_gradients(
        b, c, v, do, state, dstate0, a0, t, g, high, low, total, same, see, reach, keep, dP, dP_low,
        dP_mirror_low, dv, P, dg, FORM, HAS_DOCS, SPLIT, PRECISION,
    )  # fmt: skip
    dA0 += halved(g[:, None] * dlog)
    store_tile(db_ptr + x * H * S, db, t, s, H * S, tokens - x, S if S < PART else PART, PART, MASK)
    store_tile(dc_ptr + x * H * S, dc, t, s, H * S, tokens - x, S if S < PART else PART, PART, MASK)
    if BS > PART:
        b = load_tile(b_ptr + x * b_stride, t, s + PART, b_stride, tokens - x, S, BS, MASK)
        c = load_tile(c_ptr + x * c_stride, t, s + PART, c_stride, tokens - x, S, BS, MASK)
        state = tl.load(state_ptr + PART * BD + at)
        db, dc, dstate1, dv, P, dg, dlog = part_gradients(
            b, c, v, do, state, dstate1, a1, t, g, high, low, total, same, see, reach, keep, dP, dP_low,
            dP_mirror_low, dv, P, dg, FORM, HAS_DOCS, SPLIT, PRECISION,
        )  # fmt: skip
        dA1 += halved(g[:, None] * dlog)
        store_tile(db_ptr + x * H * S, db, t, s + PART, H * S, tokens - x, S, BS, MASK)
        store_tile(dc_ptr + x * H * S, dc, t, s + PART, H * S, tokens - x, S, BS, MASK)
    if FORM != "dyadic":
        P = tl.where((i <= j) & same, P, 0.0)
    elif HAS_DOCS:
        P = tl.where(same, P, 0.0)
    P = tl.where(i == j, P + skip, P)
    dv = dot(P.to(v.dtype), do, dv, PRECISION)
    store_tile(dv_ptr + x * H * D, dv, t, d, H * D, tokens - x, D, BD, MASK)
    if MASK:
        tl.store(dg_ptr + (x + t) * H, dg * LN2, mask=x + t < tokens)
    else:
        tl.store(dg_ptr + (x + t) * H, dg * LN2)
    return dstate0, dstate1, dA0, dA1, dD


@triton.jit
def block_gradients(
    v_ptr, b_ptr, c_ptr, g_ptr, doc_ptr, saved_ptr, scratch_ptr, do_ptr, dv_ptr, db_ptr, dc_ptr, dg_ptr,
    dstate0, dstate1, dA0, dA1, dD, a0, a1, skip, first, x0, tokens, T,
    H: tl.constexpr, v_stride: tl.constexpr, b_stride: tl.constexpr, c_stride: tl.constexpr,
    D: tl.constexpr, S: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr,
    FORM: tl.constexpr, HAS_DOCS: tl.constexpr, MASK: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``chunk_gradients`` of the four chunks at token x0, from their end. HAS_DOCS: a document may start there."""
    t, s, d = tl.arange(0, BT), tl.arange(0, PART), tl.arange(0, BD)
    rebuild_states(
        v_ptr, b_ptr, g_ptr, doc_ptr, saved_ptr + (x0 // 64) * (BD * BS), scratch_ptr, a0, a1, t, s, d, x0, first,
        tokens, T, H, v_stride, b_stride, D, S, BD, BS, BT, HAS_DOCS, MASK, SPLIT, PRECISION,
    )  # fmt: skip
    for k in range(4):
        dstate0, dstate1, dA0, dA1, dD = chunk_gradients(
            v_ptr, b_ptr, c_ptr, g_ptr, doc_ptr, scratch_ptr + (3 - k) * (BD * BS), do_ptr, dv_ptr, db_ptr, dc_ptr,
            dg_ptr, dstate0, dstate1, dA0, dA1, dD, a0, a1, skip, t, s, d, first, x0 + (3 - k) * BT, tokens, T, H,
            v_stride, b_stride, c_stride, D, S, BD, BS, BT, FORM, HAS_DOCS, MASK, SPLIT, PRECISION,
        )  # fmt: skip
    tl.debug_barrier()  # the scratch is written anew
    return dstate0, dstate1, dA0, dA1, dD


@triton.jit(do_not_specialize=["T", "n_segments", "segment"])
def backward_kernel(
    v_ptr, b_ptr, c_ptr, g_ptr, A_log_ptr, D_ptr, doc_ptr, saved_ptr, scratch_ptr, do_ptr, dhT_ptr, carry_ptr, kept_ptr,
    dv_ptr, db_ptr, dc_ptr, dg_ptr, dA_ptr, dD_ptr, dh0_ptr,
    T, n_segments, segment,
    H: tl.constexpr, v_stride: tl.constexpr, b_stride: tl.constexpr, c_stride: tl.constexpr,
    D: tl.constexpr, S: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr,
    FORM: tl.constexpr, HAS_DHT: tl.constexpr, HAS_H0: tl.constexpr, HAS_DOCS: tl.constexpr,
    MASK: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dv, db, dc, dg (contiguous), the segments' sums dA and dD, and dh0 [B*H,S,D]."""
    bh, n = tl.program_id(0), tl.program_id(1)
    h, first = bh % H, n * segment
    row = (bh // H).to(tl.int64) * T + first
    s, d = tl.arange(0, PART), tl.arange(0, BD)
    a0 = load_rates(A_log_ptr, h, s, S)
    a1 = load_rates(A_log_ptr, h, s + PART, S)
    skip = tl.load(D_ptr + h)
    v_ptr += row * v_stride + h * D
    do_ptr += (row * H + h) * D
    dv_ptr += (row * H + h) * D
    b_ptr += row * b_stride + h * S
    c_ptr += row * c_stride + h * S
    g_ptr += row * H + h
    db_ptr += (row * H + h) * S
    dc_ptr += (row * H + h) * S
    dg_ptr += row * H + h
    doc_ptr += (bh // H).to(tl.int64) * T
    at = bh.to(tl.int64) * n_segments + n
    saved_ptr += (bh.to(tl.int64) * tl.cdiv(T, 64) + first // 64) * (BD * BS)
    scratch_ptr += at * (4 * BD * BS)
    tokens = tl.minimum(segment, T - first)
    si, dj = s[:, None], d[None, :]  # states are kept as tiles [S,D]
    dstate0 = load_state(dhT_ptr, bh, si, dj, S, D) if HAS_DHT else tl.zeros([PART, BD], tl.float32)
    dstate1 = load_state(dhT_ptr, bh, si + PART, dj, S, D) if HAS_DHT else tl.zeros([PART, BD], tl.float32)
    for m in range(n_segments - 1 - n):
        later = bh.to(tl.int64) * n_segments + n_segments - 1 - m
        dstate0 = add_segment(dstate0, a0[:, None], carry_ptr, kept_ptr, later, si, dj, BS, BD)
        if BS > PART:
            dstate1 = add_segment(dstate1, a1[:, None], carry_ptr, kept_ptr, later, si + PART, dj, BS, BD)
    dA0, dA1 = tl.zeros([BT // 2, PART], tl.float32), tl.zeros([BT // 2, PART], tl.float32)
    dD = 0.0
    n_blocks = tl.cdiv(tokens, 64)
    for block in range(n_blocks):
        x0 = (n_blocks - 1 - block) * 64
        # One form for the whole block: a choice in each chunk would cost registers in all of them
        if HAS_DOCS and starts_document(doc_ptr, first + x0, T, 64):
            dstate0, dstate1, dA0, dA1, dD = block_gradients(
                v_ptr, b_ptr, c_ptr, g_ptr, doc_ptr, saved_ptr, scratch_ptr, do_ptr, dv_ptr, db_ptr, dc_ptr, dg_ptr,
                dstate0, dstate1, dA0, dA1, dD, a0, a1, skip, first, x0, tokens, T, H, v_stride, b_stride, c_stride,
                D, S, BD, BS, BT, FORM, True, MASK, SPLIT, PRECISION,
            )  # fmt: skip
        else:
            dstate0, dstate1, dA0, dA1, dD = block_gradients(
                v_ptr, b_ptr, c_ptr, g_ptr, doc_ptr, saved_ptr, scratch_ptr, do_ptr, dv_ptr, db_ptr, dc_ptr, dg_ptr,
                dstate0, dstate1, dA0, dA1, dD, a0, a1, skip, first, x0, tokens, T, H, v_stride, b_stride, c_stride,
                D, S, BD, BS, BT, FORM, False, MASK, SPLIT, PRECISION,
            )  # fmt: skip
    tl.store(dA_ptr + at * S + s, tl.sum(dA0, 0), mask=s < S)
    if BS > PART:
        tl.store(dA_ptr + at * S + s + PART, tl.sum(dA1, 0), mask=s + PART < S)
    tl.store(dD_ptr + at, dD)
    if HAS_H0:  # noqa: SIM102 (one is known when compiling, the other when running)
        if n == 0:
            store_state(dh0_ptr, dstate0, bh, si, dj, S, D)
            if BS > PART:
                store_state(dh0_ptr, dstate1, bh, si + PART, dj, S, D)


@triton.jit(do_not_specialize=["B", "H", "n_segments"])
def finish_kernel(
    A_log_ptr, dA_parts_ptr, dD_parts_ptr, dA_log_ptr, dD_ptr, B, H, n_segments, S: tl.constexpr, BS: tl.constexpr
):
    """dA_log [H,S] and dD [H] from the sums of the segments; a program is one head, and adds in a fixed order."""
    h = tl.program_id(0)
    s = tl.arange(0, BS)
    dA, dD = tl.zeros([BS], tl.float32), 0.0
    for row in range(B):
        at = (row * H + h) * n_segments
        for n in range(n_segments):
            dA += tl.load(dA_parts_ptr + (at + n) * S + s, mask=s < S, other=0.0)
            dD += tl.load(dD_parts_ptr + at + n)
    rate = tl.exp(tl.load(A_log_ptr + h * S + s, mask=s < S, other=0.0))
    tl.store(dA_log_ptr + h * S + s, -rate * dA, mask=s < S)
    tl.store(dD_ptr + h, dD)
