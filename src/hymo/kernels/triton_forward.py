"""Triton kernels of the forward pass: what segments add to the state, then the walk that writes the outputs.

The sequence is cut into segments. ``segment_kernel`` runs each from a zero state and keeps what it adds to the state
and the sum of its gates. ``forward_kernel`` composes those of the segments before its own and walks its segment in
chunks of 16 tokens by the formulas of ``hymo.kernels.chunked``. The backward pass uses ``segment_kernel`` too, with
c and do in the place of b and v, from the end.

Layouts: v, o [B,T,H,D]; b, c [B,T,H,S], rows contiguous and tokens ``*_stride`` apart; g [B,T,H];
A_log [H,S]; D [H]; doc ids [B,T].
"""

import triton
import triton.language as tl

from hymo.kernels.triton_common import (
    LEVELS,
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
    transposed,
)


@triton.jit(do_not_specialize=["T", "n_segments", "segment"])
def segment_kernel(
    v_ptr, b_ptr, g_ptr, A_log_ptr, doc_ptr, carry_ptr, kept_ptr, T, n_segments, segment,
    H: tl.constexpr, v_stride: tl.constexpr, b_stride: tl.constexpr,
    D: tl.constexpr, S: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr,
    REVERSE: tl.constexpr, HAS_DOCS: tl.constexpr, MASK: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """carry [B*H,N,S,D] = sum of v_t (x) b_t times the decay to the segment's end (REVERSE: from its start).

    kept [B*H,N]: the sum of the segment's gates, or -1 if a document's start cuts it. The last segment (REVERSE: the
    first) has no program: nothing comes after it.
    """
    bh, n = tl.program_id(0), tl.program_id(1) + (1 if REVERSE else 0)
    h, first = bh % H, n * segment
    row = (bh // H).to(tl.int64) * T + first
    t, s, d = tl.arange(0, BT), tl.arange(0, BS), tl.arange(0, BD)
    a = load_rates(A_log_ptr, h, s, S)
    v_ptr += row * v_stride + h * D
    b_ptr += row * b_stride + h * S
    g_ptr += row * H + h
    doc_ptr += (bh // H).to(tl.int64) * T
    tokens = tl.minimum(segment, T - first)
    n_chunks = tl.cdiv(tokens, BT)
    chosen = (t[None, :] <= t[:, None]) if REVERSE else (t[None, :] > t[:, None])
    state = tl.zeros([BS, BD], tl.float32)
    kept, cut = 0.0, 0
    step = -BT if REVERSE else BT
    x = (n_chunks - 1) * (BT if REVERSE else 0)
    total = tl.sum(load_gates(g_ptr + x * H, t, H, tokens - x, MASK), 0)
    for k in range(n_chunks):
        v = load_tile(v_ptr + x * v_stride, t, d, v_stride, tokens - x, D, BD, MASK)
        b = load_tile(b_ptr + x * b_stride, t, s, b_stride, tokens - x, S, BS, MASK)
        g = load_gates(g_ptr + x * H, t, H, tokens - x, MASK)
        # Triton fetches tiles ahead, but no vectors: this load is for the next chunk's sum, and brings in its gates
        x_next = x + tl.where(k + 1 < n_chunks, step, 0)
        g_next = load_gates(g_ptr + x_next * H, t, H, tokens - x_next, MASK)
        high, low = split_gates(g, BS, SPLIT)
        factor = tl.exp2(a[None, :] * gate_sums(chosen, high, low, SPLIT))
        through = tl.exp2(a * total)
        if HAS_DOCS:
            before, last = load_ends(doc_ptr, first + x, T, BT)
            if before != last:
                reached = load_ids(doc_ptr, t, first + x, T) == (before if REVERSE else last)
                factor = tl.where(reached[:, None], factor, 0.0)
                through = through * 0.0
                cut = 1
        scaled = b.to(tl.float32) * factor
        state = dot(transposed(scaled, b.dtype), v, state * through[:, None], PRECISION)
        if REVERSE and SPLIT:
            state = dot(transposed(remainder(scaled, scaled.to(b.dtype)), b.dtype), v, state, PRECISION)
        kept += total
        total = tl.sum(g_next, 0)
        x = x_next
    at = bh.to(tl.int64) * n_segments + n
    tl.store(carry_ptr + at * (BD * BS) + s[:, None] * BD + d[None, :], state)
    tl.store(kept_ptr + at, tl.where(cut > 0, -1.0, kept))


@triton.jit
def add_segment(state, a, carry_ptr, kept_ptr, at, s, d, BS: tl.constexpr, BD: tl.constexpr):
    """The state after segment ``at`` from the state before it; s, d, a: the tile's indices and rates, broadcastable."""
    kept = tl.load(kept_ptr + at)
    carry = tl.load(carry_ptr + at * (BS * BD) + s * BD + d)
    return state * tl.where(kept < 0, 0.0, tl.exp2(a * kept)) + carry


@triton.jit
def load_state(ptr, bh, s, d, S: tl.constexpr, D: tl.constexpr):
    """A tile of a state tensor [B*H,S,D]; s, d: the tile's indices, broadcastable, in either order."""
    return tl.load(ptr + bh.to(tl.int64) * (S * D) + s * D + d, mask=(s < S) & (d < D), other=0.0)


@triton.jit
def store_state(ptr, value, bh, s, d, S: tl.constexpr, D: tl.constexpr):
    tl.store(ptr + bh.to(tl.int64) * (S * D) + s * D + d, value, mask=(s < S) & (d < D))


@triton.jit
def chunk_scores(
    b, c, g, a, through, t, ids, before, last,
    FORM: tl.constexpr, HAS_DOCS: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """P [T,T] of one chunk, c times the decay from its start and b times the decay to its end, in float32."""
    i, j = t[:, None], t[None, :]
    BT: tl.constexpr = t.shape[0]
    BS: tl.constexpr = a.shape[0]
    high, low = split_gates(g, BS, SPLIT)
    b32, c32 = b.to(tl.float32), c.to(tl.float32)
    if FORM != "dyadic":
        chosen = j <= i
        if HAS_DOCS:
            chosen = chosen & (ids[:, None] == ids[None, :])
        log_L = a[None, :] * gate_sums(chosen, high, low, SPLIT)
        C_in = c32 * tl.exp2(log_L)
        if FORM == "held":
            E = held_sums(chosen & (j > 0), g, a, SPLIT)
            C_pair, B_pair = c32 * tl.exp2(E), b32 * tl.exp2(-E)
        else:
            C_pair, B_pair = C_in, b32 * tl.exp2(-log_L)
        P = dot(C_pair.to(c.dtype), transposed(B_pair, c.dtype), tl.zeros([BT, BT], tl.float32), PRECISION)
        P = tl.where(chosen, P, 0.0)
        if FORM == "held" or HAS_DOCS:
            B_out = b32 * tl.exp2(a[None, :] * gate_sums(j > i, high, low, SPLIT))
        else:
            B_out = B_pair * through[None, :]
    else:
        C_in = c32 * tl.exp2(a[None, :] * gate_sums(j <= i, high, low, SPLIT))
        B_out = b32 * tl.exp2(a[None, :] * gate_sums(j > i, high, low, SPLIT))
        P = dot(c, transposed(b, c.dtype), tl.zeros([BT, BT], tl.float32), PRECISION)
        P = tl.where(i == j, P, 0.0)
        for level in tl.static_range(LEVELS):
            factor = tl.exp2(a[None, :] * gate_sums(half_sum_mask(i, j, level), high, low, SPLIT))
            half = tl.where(is_right(i, level), c32, b32) * factor
            pairs = dot(half.to(c.dtype), transposed(half, c.dtype), tl.zeros([BT, BT], tl.float32), PRECISION)
            P = tl.where(pair_mask(i, j, level), pairs, P)
        if HAS_DOCS:
            P = tl.where(ids[:, None] == ids[None, :], P, 0.0)
    if HAS_DOCS:
        C_in = tl.where((ids == before)[:, None], C_in, 0.0)
        B_out = tl.where((ids == last)[:, None], B_out, 0.0)
    return P, C_in, B_out


@triton.jit
def forward_chunk(
    v, b, c, g, state, a, total, skip, t, doc_ptr, t0, T,
    FORM: tl.constexpr, HAS_D: tl.constexpr, HAS_DOCS: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Outputs of the chunk at token t0 and the state after it. HAS_DOCS: a document may start in it."""
    if HAS_DOCS:
        ids = load_ids(doc_ptr, t, t0, T)
        before, last = load_ends(doc_ptr, t0, T, t.shape[0])
    else:
        ids, before, last = t, 0, 0
    through = tl.exp2(a * total)
    P, C_in, B_out = chunk_scores(b, c, g, a, through, t, ids, before, last, FORM, HAS_DOCS, SPLIT, PRECISION)
    if HAS_D:
        P = tl.where(t[:, None] == t[None, :], P + skip, P)
    if HAS_DOCS:
        through = tl.where(before == last, through, 0.0)
    o = dot(P.to(v.dtype), v, tl.zeros(v.shape, tl.float32), PRECISION)
    o = dot(C_in.to(c.dtype), transposed(state, c.dtype), o, PRECISION)
    state = dot(tl.trans(v), B_out.to(b.dtype), state * through[None, :], PRECISION)
    return o, state


@triton.jit(do_not_specialize=["T", "n_segments", "segment"])
def forward_kernel(
    v_ptr, b_ptr, c_ptr, g_ptr, A_log_ptr, D_ptr, h0_ptr, doc_ptr, carry_ptr, kept_ptr, o_ptr, hT_ptr, saved_ptr,
    T, n_segments, segment,
    H: tl.constexpr, v_stride: tl.constexpr, b_stride: tl.constexpr, c_stride: tl.constexpr,
    D: tl.constexpr, S: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr,
    FORM: tl.constexpr, HAS_D: tl.constexpr, HAS_H0: tl.constexpr, HAS_DOCS: tl.constexpr, SAVE: tl.constexpr,
    MASK: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o, the final state hT [B*H,S,D], and with SAVE the state before every 64th token [B*H,ceil(T/64),S,D]."""
    bh, n = tl.program_id(0), tl.program_id(1)
    h, first = bh % H, n * segment
    row = (bh // H).to(tl.int64) * T + first
    t, s, d = tl.arange(0, BT), tl.arange(0, BS), tl.arange(0, BD)
    a = load_rates(A_log_ptr, h, s, S)
    skip = tl.load(D_ptr + h) if HAS_D else 0.0
    v_ptr += row * v_stride + h * D
    o_ptr += (row * H + h) * D
    b_ptr += row * b_stride + h * S
    c_ptr += row * c_stride + h * S
    g_ptr += row * H + h
    doc_ptr += (bh // H).to(tl.int64) * T
    saved_ptr += (bh.to(tl.int64) * tl.cdiv(T, 64) + first // 64) * (BD * BS)
    tokens = tl.minimum(segment, T - first)
    n_chunks = tl.cdiv(tokens, BT)
    sj, di = s[None, :], d[:, None]  # the state is kept as a tile [D,S]
    state = load_state(h0_ptr, bh, sj, di, S, D) if HAS_H0 else tl.zeros([BD, BS], tl.float32)
    for m in range(n):
        state = add_segment(state, a[None, :], carry_ptr, kept_ptr, bh.to(tl.int64) * n_segments + m, sj, di, BS, BD)
    total = tl.sum(load_gates(g_ptr, t, H, tokens, MASK), 0)
    v = load_tile(v_ptr, t, d, v_stride, tokens, D, BD, MASK)
    x = n * 0  # the chunk's first token, counted from the segment's
    for _ in range(n_chunks):
        b = load_tile(b_ptr + x * b_stride, t, s, b_stride, tokens - x, S, BS, MASK)
        c = load_tile(c_ptr + x * c_stride, t, s, c_stride, tokens - x, S, BS, MASK)
        g = load_gates(g_ptr + x * H, t, H, tokens - x, MASK)
        x_next = tl.minimum(x + BT, (n_chunks - 1) * BT)
        g_next = load_gates(g_ptr + x_next * H, t, H, tokens - x_next, MASK)
        v_next = load_tile(v_ptr + x_next * v_stride, t, d, v_stride, tokens - x_next, D, BD, MASK)
        if SAVE:  # noqa: SIM102 (one is known when compiling, the other when running)
            if x % 64 == 0:
                tl.store(saved_ptr + sj * BD + di, state.to(saved_ptr.dtype.element_ty))
                saved_ptr += BD * BS
        if HAS_DOCS and starts_document(doc_ptr, first + x, T, BT):
            o, state = forward_chunk(
                v, b, c, g, state, a, total, skip, t, doc_ptr, first + x, T, FORM, HAS_D, True, SPLIT, PRECISION
            )
        else:
            o, state = forward_chunk(
                v, b, c, g, state, a, total, skip, t, doc_ptr, first + x, T, FORM, HAS_D, False, SPLIT, PRECISION
            )
        store_tile(o_ptr + x * H * D, o, t, d, H * D, tokens - x, D, BD, MASK)
        v, total, x = v_next, tl.sum(g_next, 0), x + BT
    if n == n_segments - 1:
        store_state(hT_ptr, state, bh, sj, di, S, D)
