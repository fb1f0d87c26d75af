"""The Triton kernel of the backward pass: one walk from the end that writes every gradient.

A program walks its segment backwards in blocks of 64 tokens. The forward pass kept the state before each block; the
states before the block's chunks of 16 are rebuilt into a scratch of four tiles. ``dstate`` is the gradient of the
state at the current chunk's end; it starts from what the later segments add to it (``segment_kernel``, REVERSE).

The gradient of a gate needs, for every decay factor f = exp(a e) in use, y = f df, row by row; e is a sum of gates,
so y goes to each gate of the sum: dlog [u,s] collects them, dg_u = sum_s a_s dlog_us and da_s = sum_u g_u dlog_us.
Nothing is subtracted, so bfloat16 products keep their accuracy at any decay.

Layouts: as in ``hymo.kernels.triton_forward``; dA [B*H,N,S] and dD [B*H,N] are sums of one segment each.
"""

import triton
import triton.language as tl

from hymo.kernels.triton_common import (
    LEVELS,
    dot,
    gate_sums,
    half_sum_mask,
    is_right,
    load_documents,
    load_gates,
    load_rates,
    load_tile,
    pair_mask,
    split_gates,
    store_tile,
    sums_towards,
    transposed,
)
from hymo.kernels.triton_forward import add_segment, load_state, store_state

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def rebuild_states(
    v_ptr, b_ptr, g_ptr, doc_ptr, saved_ptr, scratch_ptr, a, t, s, d, x, first, tokens, T, H, v_stride, b_stride,
    D: tl.constexpr, S: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr,
    HAS_DOCS: tl.constexpr, MASK: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the states before the four chunks of the block at token x to the scratch, [4,S,D]."""
    at = s[:, None] * BD + d[None, :]
    state = tl.load(saved_ptr + at).to(tl.float32)
    tl.store(scratch_ptr + at, state.to(scratch_ptr.dtype.element_ty))
    for _ in range(3):
        v = load_tile(v_ptr + x * v_stride, t, d, v_stride, tokens - x, D, BD, MASK)
        b = load_tile(b_ptr + x * b_stride, t, s, b_stride, tokens - x, S, BS, MASK)
        g = load_gates(g_ptr + x * H, t, H, tokens - x, MASK)
        high, low = split_gates(g, BS, SPLIT)
        to_end = tl.exp2(a[None, :] * gate_sums(t[None, :] > t[:, None], high, low, SPLIT))
        through = tl.exp2(a * tl.sum(g, 0))
        if HAS_DOCS:
            ids, before, last = load_documents(doc_ptr, t, first + x, T)
            to_end = tl.where((ids == last)[:, None], to_end, 0.0)
            through = tl.where(before == last, through, 0.0)
        state = dot(transposed(b.to(tl.float32) * to_end, b.dtype), v, state * through[:, None], PRECISION)
        scratch_ptr += BS * BD
        tl.store(scratch_ptr + at, state.to(scratch_ptr.dtype.element_ty))
        x += BT
    tl.debug_barrier()


@triton.jit
def dyadic_pairs(b, c, a, t, high, low, P, dP, dlog, db, dc, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """All pairs of a chunk but the diagonal, level by level: adds to P, dlog, db and dc.

    P is the mirror image P[j,i] above the diagonal; dP is symmetric: dP[i,j] and its mirror image.
    """
    i, j = t[:, None], t[None, :]
    b32, c32 = b.to(tl.float32), c.to(tl.float32)
    for level in tl.static_range(LEVELS):
        right = is_right(i, level)
        factor = tl.exp2(a[None, :] * gate_sums(half_sum_mask(i, j, level), high, low, SPLIT))
        half = tl.where(right, c32, b32) * factor
        half_low = half.to(c.dtype)
        pairs = dot(half_low, transposed(half, c.dtype), tl.zeros_like(P), PRECISION)
        P = tl.where(pair_mask(j, i, level), pairs, P)
        dpairs = tl.where(pair_mask(i, j, level) | pair_mask(j, i, level), dP, 0.0).to(c.dtype)
        dhalf = dot(dpairs, half_low, tl.zeros_like(dlog), PRECISION)
        dlog = sums_towards(half_sum_mask(j, i, level), half * dhalf, dlog, SPLIT)
        dhalf *= factor
        dc += tl.where(right, dhalf, 0.0)
        db += tl.where(right, 0.0, dhalf)
    return P, dlog, db, dc


@triton.jit
def leaf_gates(B_low, C_leaf, a, t, g, same, dP, dP_mirror, dA, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """What the pairs of a leaf send to the gates, [BT], and to dA, [BT,S].

    W[i,j] = dP[i,j] sum_s a_s C_is B_js goes to every gate after j up to i; rates get dP[i,j] times the gates between.
    """
    i, j = t[:, None], t[None, :]
    BT: tl.constexpr = t.shape[0]
    zeros = tl.zeros([BT, BT], tl.float32)
    W_mirror = dot(B_low, transposed(C_leaf * a[None, :], B_low.dtype), zeros, PRECISION) * dP_mirror
    W_mirror = tl.where((i < j) & same, W_mirror, 0.0)
    sums = sums_towards(i <= j, tl.trans(W_mirror), zeros, SPLIT)
    dg = tl.sum(tl.where(j < i, sums, 0.0), 1)
    high, low = split_gates(g, BT, SPLIT)
    to_row = gate_sums((j <= i) & same, high, low, SPLIT)
    between = dP * (to_row - tl.trans(to_row))
    between = tl.where((i > j) & same, between, 0.0).to(B_low.dtype)
    dA += C_leaf * dot(between, B_low, tl.zeros_like(dA), PRECISION)
    return dg, dA


@triton.jit
def leaf_pairs(
    B_start, C_leaf, from_start, from_start_inverse, db, dC_in, dP, dP_mirror, a, t, g, same, dA,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """All pairs of a chunk with the diagonal: P (mirror image), db, dc, the gates' share and dA."""
    i, j = t[:, None], t[None, :]
    BT: tl.constexpr = t.shape[0]
    B_low = B_start.to(dtype)
    P_mirror = dot(B_low, transposed(C_leaf, dtype), tl.zeros([BT, BT], tl.float32), PRECISION)
    P_mirror = tl.where((i <= j) & same, P_mirror, 0.0)
    pairs = tl.where((i <= j) & same, dP_mirror, 0.0).to(dtype)
    db += from_start_inverse * dot(pairs, C_leaf.to(dtype), tl.zeros_like(db), PRECISION)
    dc = from_start * dot(tl.where((i >= j) & same, dP, 0.0).to(dtype), B_low, dC_in, PRECISION)
    dg, dA = leaf_gates(B_low, C_leaf, a, t, g, same, dP, dP_mirror, dA, SPLIT, PRECISION)
    return P_mirror, db, dc, dg, dA


@triton.jit(do_not_specialize=["T", "H", "n_segments", "segment"])
def backward_kernel(
    v_ptr, b_ptr, c_ptr, g_ptr, A_log_ptr, D_ptr, doc_ptr, saved_ptr, scratch_ptr, do_ptr, dhT_ptr, carry_ptr, kept_ptr,
    dv_ptr, db_ptr, dc_ptr, dg_ptr, dA_ptr, dD_ptr, dh0_ptr,
    T, H, n_segments, segment, v_stride, b_stride, c_stride,
    D: tl.constexpr, S: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr,
    LEAF: tl.constexpr, HAS_D: tl.constexpr, HAS_DHT: tl.constexpr, HAS_H0: tl.constexpr, HAS_DOCS: tl.constexpr,
    MASK: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dv, db, dc, dg (contiguous), the segments' sums dA and dD, and dh0 [B*H,S,D]."""
    bh, n = tl.program_id(0), tl.program_id(1)
    h, first = bh % H, n * segment
    row = (bh // H).to(tl.int64) * T + first
    t, s, d = tl.arange(0, BT), tl.arange(0, BS), tl.arange(0, BD)
    i, j = t[:, None], t[None, :]
    a = load_rates(A_log_ptr, h, s, S)
    skip = tl.load(D_ptr + h) if HAS_D else 0.0
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
    dstate = load_state(dhT_ptr, bh, si, dj, S, D) if HAS_DHT else tl.zeros([BS, BD], tl.float32)
    for m in range(n_segments - 1 - n):
        later = bh.to(tl.int64) * n_segments + n_segments - 1 - m
        dstate = add_segment(dstate, a[:, None], carry_ptr, kept_ptr, later, si, dj, BS, BD)
    dA = tl.zeros([BT, BS], tl.float32)
    dD = 0.0
    n_blocks = tl.cdiv(tokens, 64)
    for block in range(n_blocks):
        x0 = (n_blocks - 1 - block) * 64
        rebuild_states(
            v_ptr, b_ptr, g_ptr, doc_ptr, saved_ptr + (x0 // 64) * (BD * BS), scratch_ptr, a, t, s, d, x0, first,
            tokens, T, H, v_stride, b_stride, D, S, BD, BS, BT, HAS_DOCS, MASK, SPLIT, PRECISION,
        )  # fmt: skip
        for k in range(4):
            x = x0 + (3 - k) * BT
            v = load_tile(v_ptr + x * v_stride, t, d, v_stride, tokens - x, D, BD, MASK)
            do = load_tile(do_ptr + x * H * D, t, d, H * D, tokens - x, D, BD, MASK)
            b = load_tile(b_ptr + x * b_stride, t, s, b_stride, tokens - x, S, BS, MASK)
            c = load_tile(c_ptr + x * c_stride, t, s, c_stride, tokens - x, S, BS, MASK)
            g = load_gates(g_ptr + x * H, t, H, tokens - x, MASK)
            state = tl.load(scratch_ptr + (3 - k) * (BD * BS) + si * BD + dj)
            high, low = split_gates(g, BS, SPLIT)
            b32, c32 = b.to(tl.float32), c.to(tl.float32)
            through = tl.exp2(a * tl.sum(g, 0))
            same = i >= 0
            if HAS_DOCS:
                ids, before, last = load_documents(doc_ptr, t, first + x, T)
                same = ids[:, None] == ids[None, :]
                see, reach = (ids == before)[:, None], (ids == last)[:, None]
                through = tl.where(before == last, through, 0.0)
            log_L = a[None, :] * gate_sums((j <= i) & same, high, low, SPLIT)
            from_start, from_start_inverse = tl.exp2(log_L), tl.exp2(-log_L)
            C_leaf = c32 * from_start
            if LEAF and not HAS_DOCS:
                to_end = from_start_inverse * through[None, :]
            else:
                to_end = tl.exp2(a[None, :] * gate_sums(j > i, high, low, SPLIT))
            # through the states at the chunk's two ends
            dB_out = dot(v, transposed(dstate, v.dtype), tl.zeros([BT, BS], tl.float32), PRECISION)
            dC_in = dot(do, tl.trans(state), tl.zeros([BT, BS], tl.float32), PRECISION)
            B_out, C_in = b32 * to_end, C_leaf
            if HAS_DOCS:
                B_out, C_in = tl.where(reach, B_out, 0.0), tl.where(see, C_in, 0.0)
                dB_out, dC_in = tl.where(reach, dB_out, 0.0), tl.where(see, dC_in, 0.0)
            passed = through * tl.sum(state.to(tl.float32) * dstate, 1)
            dlog = tl.broadcast_to(passed[None, :], [BT, BS])
            dlog = sums_towards(i > j, B_out * dB_out, dlog, SPLIT)
            dlog = sums_towards(i <= j, C_in * dC_in, dlog, SPLIT)
            # inside the chunk; "mirror": the image [j,i] of a matrix [i,j]
            dP = dot(do, tl.trans(v), tl.zeros([BT, BT], tl.float32), PRECISION)
            dP_mirror = dot(v, tl.trans(do), tl.zeros([BT, BT], tl.float32), PRECISION)
            diagonal = tl.sum(tl.where(i == j, dP, 0.0), 1)
            dD += tl.sum(diagonal, 0)
            if LEAF:
                P_mirror, db, dc, dg_pairs, dA = leaf_pairs(
                    b32 * from_start_inverse, C_leaf, from_start, from_start_inverse, to_end * dB_out, dC_in,
                    dP, dP_mirror, a, t, g, same, dA, SPLIT, PRECISION, b.dtype,
                )  # fmt: skip
            else:
                db = to_end * dB_out + diagonal[:, None] * c32
                dc = from_start * dC_in + diagonal[:, None] * b32
                P_mirror = dot(b, tl.trans(c), tl.zeros([BT, BT], tl.float32), PRECISION)
                P_mirror = tl.where(i == j, P_mirror, 0.0)
                dP = tl.where((i > j) & same, dP, tl.where(same, dP_mirror, 0.0))
                P_mirror, dlog, db, dc = dyadic_pairs(
                    b, c, a, t, high, low, P_mirror, dP, dlog, db, dc, SPLIT, PRECISION
                )
                if HAS_DOCS:
                    P_mirror = tl.where(same, P_mirror, 0.0)
                dg_pairs = tl.zeros([BT], tl.float32)
            P_mirror = tl.where(i == j, P_mirror + skip, P_mirror)
            dv = dot(B_out.to(b.dtype), dstate.to(b.dtype), tl.zeros([BT, BD], tl.float32), PRECISION)
            dv = dot(P_mirror.to(v.dtype), do, dv, PRECISION)
            dstate = dot(transposed(C_in, c.dtype), do, dstate * through[:, None], PRECISION)
            store_tile(dv_ptr + x * H * D, dv, t, d, H * D, tokens - x, D, BD, MASK)
            store_tile(db_ptr + x * H * S, db, t, s, H * S, tokens - x, S, BS, MASK)
            store_tile(dc_ptr + x * H * S, dc, t, s, H * S, tokens - x, S, BS, MASK)
            dg = LN2 * (tl.sum(dlog * a[None, :], 1) + dg_pairs)
            if MASK:
                tl.store(dg_ptr + (x + t) * H, dg, mask=x + t < tokens)
            else:
                tl.store(dg_ptr + (x + t) * H, dg)
            dA += g[:, None] * dlog
        tl.debug_barrier()  # the scratch is written anew
    tl.store(dA_ptr + at * S + s, tl.sum(dA, 0), mask=s < S)
    tl.store(dD_ptr + at, dD)
    if HAS_H0:  # noqa: SIM102 (one is known when compiling, the other when running)
        if n == 0:
            store_state(dh0_ptr, dstate, bh, si, dj, S, D)
