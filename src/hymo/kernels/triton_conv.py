"""The causal convolution with SiLU as Triton kernels: each pass reads its inputs once and writes its outputs once.

The input is [B,T,C] with tokens ``x_stride`` apart (a slice of a projection); the output comes in three parts, each
contiguous, as the recurrence takes them, and so come their gradients. A program has 32 to 256 channels of one part.
The backward pass walks a stretch of tokens from its end and keeps what overlaps in registers: the last inputs, and the
gradients before the SiLU of the next tokens. Sums are fp32; the taps' gradients are added up in a fixed order.

Letters: t token, c channel; ``tap j`` multiplies the input j tokens earlier.
"""

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hymo.kernels.triton_common import LOG2E
from hymo.kernels.triton_launch import launch

Parts = tuple[Tensor, Tensor, Tensor]
MOST_TAPS = 4
STRETCH = 64  # tokens that a program walks
FORWARD, BACKWARD = {"num_warps": 1}, {"num_warps": 1, "maxnreg": 128}


@triton.jit
def choose_part(k, p0, p1, p2, n0, n1, C0, C1, C2, BC: tl.constexpr, EVEN: tl.constexpr):
    """Of the k-th block of channels: its part's tensor, size and first channel, and its channels within the part."""
    block, ptr, size, first = k, p0, C0, 0
    if k >= n0 + n1:
        block, ptr, size, first = k - n0 - n1, p2, C2, C0 + C1
    elif k >= n0:
        block, ptr, size, first = k - n0, p1, C1, C0
    if EVEN:  # what is known before the branches is not known after them: without this, rows go in words of 2 bytes
        size, first = size // 32 * 32, first // 32 * 32
    return ptr, size, first, block * BC + tl.arange(0, BC)


@triton.jit
def start_of(ptr, offset, EVEN: tl.constexpr):
    """Where a sequence starts in a part."""
    if EVEN:
        return tl.multiple_of(ptr + offset, 16)
    else:
        return ptr + offset


@triton.jit
def load_tap(w_ptr, c, inside, j: tl.constexpr, K: tl.constexpr):
    if j < K:
        return tl.load(w_ptr + c * K + (K - 1 - j), mask=inside, other=0.0).to(tl.float32)
    else:
        return tl.zeros(c.shape, tl.float32)


@triton.jit
def load_row(ptr, t, stride, c, inside, T, EVEN: tl.constexpr):
    """Channels of token t in float32; zeros outside of the sequence."""
    at = t + 0 * c  # a vector: the interpreter cannot join a vector's condition with a number's
    within = (at >= 0) & (at < T)
    if not EVEN:
        within = within & inside
    return tl.load(ptr + t * stride + c, mask=within, other=0.0).to(tl.float32)


@triton.jit
def store_row(ptr, value, t, stride, c, inside, T, EVEN: tl.constexpr):
    within = t + 0 * c < T
    if not EVEN:
        within = within & inside
    tl.store(ptr + t * stride + c, value.to(ptr.dtype.element_ty), mask=within)


@triton.jit
def load_id(doc_ptr, t, T, HAS_DOCS: tl.constexpr):
    """Document of token t; the first's and the last's outside of the sequence, where all values are zero."""
    if HAS_DOCS:
        return tl.load(doc_ptr + tl.minimum(tl.maximum(t, 0), T - 1))
    else:
        return t * 0


@triton.jit
def keep_same(id, other, value, CHECK: tl.constexpr):
    """The value where both tokens are of one document, else zeros (no product: 0 * inf is no zero)."""
    if CHECK:
        return tl.where(id == other, value, 0.0)
    else:
        return value


@triton.jit
def sigmoid(x):
    """By a root and no division, which would take three times the instructions."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2E))
    return root * root


@triton.jit
def row_output(x0, x1, x2, x3, d0, d1, d2, d3, w0, w1, w2, w3, CHECK: tl.constexpr):
    """The convolution at one token, from the inputs x_j j tokens earlier."""
    y = w0 * x0 + w1 * keep_same(d0, d1, x1, CHECK)
    return y + w2 * keep_same(d0, d2, x2, CHECK) + w3 * keep_same(d0, d3, x3, CHECK)


@triton.jit
def four_outputs(
    y_ptr, t, size, at, inside, T, x0, x1, x2, x3, x4, x5, x6, d0, d1, d2, d3, d4, d5, d6, w0, w1, w2, w3,
    CHECK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Write the outputs at t .. t+3; x_j, d_j: input and document j tokens before t+3."""
    y = row_output(x3, x4, x5, x6, d3, d4, d5, d6, w0, w1, w2, w3, CHECK)
    store_row(y_ptr, y * sigmoid(y), t, size, at, inside, T, EVEN)
    y = row_output(x2, x3, x4, x5, d2, d3, d4, d5, w0, w1, w2, w3, CHECK)
    store_row(y_ptr, y * sigmoid(y), t + 1, size, at, inside, T, EVEN)
    y = row_output(x1, x2, x3, x4, d1, d2, d3, d4, w0, w1, w2, w3, CHECK)
    store_row(y_ptr, y * sigmoid(y), t + 2, size, at, inside, T, EVEN)
    y = row_output(x0, x1, x2, x3, d0, d1, d2, d3, w0, w1, w2, w3, CHECK)
    store_row(y_ptr, y * sigmoid(y), t + 3, size, at, inside, T, EVEN)


@triton.jit(do_not_specialize=["T", "n0", "n1"])
def conv_kernel(
    x_ptr, w_ptr, doc_ptr, y0_ptr, y1_ptr, y2_ptr, T, x_stride, n0, n1, C0, C1, C2,
    K: tl.constexpr, STRETCH: tl.constexpr, BC: tl.constexpr, HAS_DOCS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """y = silu(sum over j of tap j times x[t-j] of the same document)."""
    n_rows = tl.cdiv(T, STRETCH)
    batch, t = tl.program_id(0) // n_rows, (tl.program_id(0) % n_rows) * STRETCH
    y_ptr, size, first, at = choose_part(tl.program_id(1), y0_ptr, y1_ptr, y2_ptr, n0, n1, C0, C1, C2, BC, EVEN)
    inside, c = at < size, first + at
    row = batch.to(tl.int64) * T
    x_ptr += row * x_stride
    y_ptr = start_of(y_ptr, row * size, EVEN)
    doc_ptr += row
    w0, w1 = load_tap(w_ptr, c, inside, 0, K), load_tap(w_ptr, c, inside, 1, K)
    w2, w3 = load_tap(w_ptr, c, inside, 2, K), load_tap(w_ptr, c, inside, 3, K)
    x4, x5 = load_row(x_ptr, t - 1, x_stride, c, inside, T, EVEN), load_row(x_ptr, t - 2, x_stride, c, inside, T, EVEN)
    x6 = load_row(x_ptr, t - 3, x_stride, c, inside, T, EVEN)
    d4, d5 = load_id(doc_ptr, t - 1, T, HAS_DOCS), load_id(doc_ptr, t - 2, T, HAS_DOCS)
    d6 = load_id(doc_ptr, t - 3, T, HAS_DOCS)
    for _ in range(STRETCH // 4):
        x0, x1 = (
            load_row(x_ptr, t + 3, x_stride, c, inside, T, EVEN),
            load_row(x_ptr, t + 2, x_stride, c, inside, T, EVEN),
        )
        x2, x3 = load_row(x_ptr, t + 1, x_stride, c, inside, T, EVEN), load_row(x_ptr, t, x_stride, c, inside, T, EVEN)
        d0, d1 = load_id(doc_ptr, t + 3, T, HAS_DOCS), load_id(doc_ptr, t + 2, T, HAS_DOCS)
        d2, d3 = load_id(doc_ptr, t + 1, T, HAS_DOCS), load_id(doc_ptr, t, T, HAS_DOCS)
        if d0 == d6:  # one document, as nearly always: the ids never decrease
            four_outputs(
                y_ptr, t, size, at, inside, T, x0, x1, x2, x3, x4, x5, x6, d0, d1, d2, d3, d4, d5, d6,
                w0, w1, w2, w3, False, EVEN,
            )  # fmt: skip
        else:
            four_outputs(
                y_ptr, t, size, at, inside, T, x0, x1, x2, x3, x4, x5, x6, d0, d1, d2, d3, d4, d5, d6,
                w0, w1, w2, w3, HAS_DOCS, EVEN,
            )  # fmt: skip
        x4, x5, x6, d4, d5, d6, t = x0, x1, x2, d0, d1, d2, t + 4


@triton.jit
def row_gradient(dy, x0, x1, x2, x3, d0, d1, d2, d3, w0, w1, w2, w3, CHECK: tl.constexpr):
    """Gradient before the SiLU of one token, from the inputs x_j j tokens earlier."""
    y = row_output(x0, x1, x2, x3, d0, d1, d2, d3, w0, w1, w2, w3, CHECK)
    s = sigmoid(y)
    return dy * (s + y * (s - s * s))


@triton.jit
def finish_row(
    dx_ptr, t, T, dx_stride, c, inside, dy, x0, x1, x2, x3, d0, d1, d2, d3, g1, g2, g3, e1, e2, e3,
    w0, w1, w2, w3, dw0, dw1, dw2, dw3, CHECK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One token: write its input's gradient, add to the taps'. g_j, e_j: gradient and document of the token j later."""
    x1, x2, x3 = keep_same(d0, d1, x1, CHECK), keep_same(d0, d2, x2, CHECK), keep_same(d0, d3, x3, CHECK)
    g0 = row_gradient(dy, x0, x1, x2, x3, d0, d1, d2, d3, w0, w1, w2, w3, False)
    dx = w0 * g0 + w1 * keep_same(d0, e1, g1, CHECK)
    dx += w2 * keep_same(d0, e2, g2, CHECK) + w3 * keep_same(d0, e3, g3, CHECK)
    store_row(dx_ptr, dx, t, dx_stride, c, inside, T, EVEN)
    return g0, dw0 + g0 * x0, dw1 + g0 * x1, dw2 + g0 * x2, dw3 + g0 * x3


@triton.jit
def four_gradients(
    dx_ptr, t, T, dx_stride, c, inside, dya, dyb, dyc, dyd, x0, x1, x2, x3, x4, x5, x6, d0, d1, d2, d3, d4, d5, d6,
    g1, g2, g3, e1, e2, e3, w0, w1, w2, w3, dw0, dw1, dw2, dw3, CHECK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The tokens t, t-1, t-2, t-3; x_j, d_j: input and document j tokens before t."""
    ga, dw0, dw1, dw2, dw3 = finish_row(
        dx_ptr, t, T, dx_stride, c, inside, dya, x0, x1, x2, x3, d0, d1, d2, d3, g1, g2, g3, e1, e2, e3,
        w0, w1, w2, w3, dw0, dw1, dw2, dw3, CHECK, EVEN,
    )  # fmt: skip
    gb, dw0, dw1, dw2, dw3 = finish_row(
        dx_ptr, t - 1, T, dx_stride, c, inside, dyb, x1, x2, x3, x4, d1, d2, d3, d4, ga, g1, g2, d0, e1, e2,
        w0, w1, w2, w3, dw0, dw1, dw2, dw3, CHECK, EVEN,
    )  # fmt: skip
    gc, dw0, dw1, dw2, dw3 = finish_row(
        dx_ptr, t - 2, T, dx_stride, c, inside, dyc, x2, x3, x4, x5, d2, d3, d4, d5, gb, ga, g1, d1, d0, e1,
        w0, w1, w2, w3, dw0, dw1, dw2, dw3, CHECK, EVEN,
    )  # fmt: skip
    gd, dw0, dw1, dw2, dw3 = finish_row(
        dx_ptr, t - 3, T, dx_stride, c, inside, dyd, x3, x4, x5, x6, d3, d4, d5, d6, gc, gb, ga, d2, d1, d0,
        w0, w1, w2, w3, dw0, dw1, dw2, dw3, CHECK, EVEN,
    )  # fmt: skip
    return gd, gc, gb, dw0, dw1, dw2, dw3


@triton.jit(do_not_specialize=["T", "n0", "n1"])
def conv_backward_kernel(
    x_ptr, w_ptr, doc_ptr, dy0_ptr, dy1_ptr, dy2_ptr, dx_ptr, dw_ptr, T, x_stride, dx_stride, n0, n1, C0, C1, C2,
    K: tl.constexpr, STRETCH: tl.constexpr, BC: tl.constexpr, HAS_DOCS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """dx, tokens ``dx_stride`` apart, and each stretch's sum for the taps, dw [B*N,C,K]."""
    n_rows = tl.cdiv(T, STRETCH)
    batch, n = tl.program_id(0) // n_rows, tl.program_id(0) % n_rows
    dy_ptr, size, offset, at = choose_part(tl.program_id(1), dy0_ptr, dy1_ptr, dy2_ptr, n0, n1, C0, C1, C2, BC, EVEN)
    inside, c = at < size, offset + at
    row = batch.to(tl.int64) * T
    x_ptr += row * x_stride
    dy_ptr = start_of(dy_ptr, row * size, EVEN)
    dx_ptr += row * dx_stride
    doc_ptr += row
    w0, w1 = load_tap(w_ptr, c, inside, 0, K), load_tap(w_ptr, c, inside, 1, K)
    w2, w3 = load_tap(w_ptr, c, inside, 2, K), load_tap(w_ptr, c, inside, 3, K)
    zero = tl.zeros([BC], tl.float32)
    dw0, dw1, dw2, dw3 = zero, zero, zero, zero
    # The three tokens after the stretch: they only send gradients into it.
    t = (n + 1) * STRETCH + 2
    x0, x1 = load_row(x_ptr, t, x_stride, c, inside, T, EVEN), load_row(x_ptr, t - 1, x_stride, c, inside, T, EVEN)
    x2 = load_row(x_ptr, t - 2, x_stride, c, inside, T, EVEN)
    d0, d1 = load_id(doc_ptr, t, T, HAS_DOCS), load_id(doc_ptr, t - 1, T, HAS_DOCS)
    d2 = load_id(doc_ptr, t - 2, T, HAS_DOCS)
    g1, g2, g3 = zero, zero, zero
    e1, e2, e3 = d0, d0, d0
    for _ in tl.static_range(3):
        x3, d3 = load_row(x_ptr, t - 3, x_stride, c, inside, T, EVEN), load_id(doc_ptr, t - 3, T, HAS_DOCS)
        dy = load_row(dy_ptr, t, size, at, inside, T, EVEN)
        g0 = row_gradient(dy, x0, x1, x2, x3, d0, d1, d2, d3, w0, w1, w2, w3, HAS_DOCS)
        g1, g2, g3, e1, e2, e3 = g0, g1, g2, d0, e1, e2
        x0, x1, x2, d0, d1, d2, t = x1, x2, x3, d1, d2, d3, t - 1
    for _ in range(STRETCH // 4):
        # All loads of four tokens come first: nothing is loaded ahead across the stores.
        x3, x4 = (
            load_row(x_ptr, t - 3, x_stride, c, inside, T, EVEN),
            load_row(x_ptr, t - 4, x_stride, c, inside, T, EVEN),
        )
        x5, x6 = (
            load_row(x_ptr, t - 5, x_stride, c, inside, T, EVEN),
            load_row(x_ptr, t - 6, x_stride, c, inside, T, EVEN),
        )
        dya, dyb = load_row(dy_ptr, t, size, at, inside, T, EVEN), load_row(dy_ptr, t - 1, size, at, inside, T, EVEN)
        dyc, dyd = (
            load_row(dy_ptr, t - 2, size, at, inside, T, EVEN),
            load_row(dy_ptr, t - 3, size, at, inside, T, EVEN),
        )
        d3, d4 = load_id(doc_ptr, t - 3, T, HAS_DOCS), load_id(doc_ptr, t - 4, T, HAS_DOCS)
        d5, d6 = load_id(doc_ptr, t - 5, T, HAS_DOCS), load_id(doc_ptr, t - 6, T, HAS_DOCS)
        if d6 == e3:  # one document, as nearly always: the ids never decrease
            g1, g2, g3, dw0, dw1, dw2, dw3 = four_gradients(
                dx_ptr, t, T, dx_stride, c, inside, dya, dyb, dyc, dyd, x0, x1, x2, x3, x4, x5, x6, d0, d1, d2, d3, d4,
                d5, d6, g1, g2, g3, e1, e2, e3, w0, w1, w2, w3, dw0, dw1, dw2, dw3, False, EVEN,
            )  # fmt: skip
        else:
            g1, g2, g3, dw0, dw1, dw2, dw3 = four_gradients(
                dx_ptr, t, T, dx_stride, c, inside, dya, dyb, dyc, dyd, x0, x1, x2, x3, x4, x5, x6, d0, d1, d2, d3, d4,
                d5, d6, g1, g2, g3, e1, e2, e3, w0, w1, w2, w3, dw0, dw1, dw2, dw3, HAS_DOCS, EVEN,
            )  # fmt: skip
        e1, e2, e3 = d3, d2, d1
        x0, x1, x2, d0, d1, d2, t = x4, x5, x6, d4, d5, d6, t - 4
    dw_ptr += (tl.program_id(0).to(tl.int64) * (C0 + C1 + C2) + c) * K
    tl.store(dw_ptr + K - 1, dw0, mask=inside)
    if K > 1:
        tl.store(dw_ptr + K - 2, dw1, mask=inside)
    if K > 2:
        tl.store(dw_ptr + K - 3, dw2, mask=inside)
    if K > 3:
        tl.store(dw_ptr + K - 4, dw3, mask=inside)


def supports(x: Tensor, w: Tensor) -> bool:
    """Whether the kernels take this input: up to 4 taps, 16 or 32 bits a number."""
    return 1 <= w.shape[1] <= MOST_TAPS and x.dtype in (torch.bfloat16, torch.float16, torch.float32)


@cache
def _blocks(sizes: tuple[int, int, int]) -> tuple[int, bool, tuple[int, int, int]]:
    """Channels of a program, whether they divide every part, and how many programs each part needs."""
    even = [block for block in (128, 64, 32) if all(size % block == 0 for size in sizes)]
    block = even[0] if even else min(64, max(32, triton.next_power_of_2(max(sizes))))
    return block, bool(even), (-(-sizes[0] // block), -(-sizes[1] // block), -(-sizes[2] // block))


def run_forward(x: Tensor, w: Tensor, doc_ids: Tensor | None, sizes: tuple[int, int, int]) -> Parts:
    """silu(conv(x)) in three parts of ``sizes`` channels, each [B,T,size] contiguous in x's dtype.

    x [B,T,C] as ``rows`` gives it, w [C,K] contiguous, doc_ids int32.
    """
    B, T, _ = x.shape
    p0, p1, p2 = (torch.empty(B, T, n, dtype=x.dtype, device=x.device) for n in sizes)
    block, even, counts = _blocks(sizes)
    args = (x, w, x if doc_ids is None else doc_ids, p0, p1, p2, T, x.stride(1), counts[0], counts[1], *sizes)
    launch(conv_kernel, (B * -(-T // STRETCH), sum(counts)), args, _constants(w, block, doc_ids, even), FORWARD)
    return p0, p1, p2


def run_backward(dys: Sequence[Tensor], x: Tensor, w: Tensor, doc_ids: Tensor | None, dx: Tensor) -> Tensor:
    """Write the gradient of x into dx (tokens one stride apart); return that of w in float32. dys: contiguous."""
    B, T, C = x.shape
    sizes = (dys[0].shape[-1], dys[1].shape[-1], dys[2].shape[-1])
    stretches = -(-T // STRETCH)
    dw = torch.empty(B * stretches, C, w.shape[1], dtype=torch.float32, device=x.device)
    block, even, counts = _blocks(sizes)
    strides = (x.stride(1), dx.stride(1))
    args = (
        x,
        w,
        x if doc_ids is None else doc_ids,
        dys[0],
        dys[1],
        dys[2],
        dx,
        dw,
        T,
        *strides,
        counts[0],
        counts[1],
        *sizes,
    )
    constants = _constants(w, block, doc_ids, even)
    launch(conv_backward_kernel, (B * stretches, sum(counts)), args, constants, BACKWARD)
    return dw.sum(0)


def _constants(w: Tensor, block: int, doc_ids: Tensor | None, even: bool) -> dict[str, int | bool]:
    return {"K": w.shape[1], "STRETCH": STRETCH, "BC": block, "HAS_DOCS": doc_ids is not None, "EVEN": even}


def rows(x: Tensor) -> Tensor:
    """x with its channels together and its tokens one stride apart (a slice of a projection is)."""
    return x if x.stride(2) == 1 and x.stride(0) == x.shape[1] * x.stride(1) else x.contiguous()


def as_int32(doc_ids: Tensor | None) -> Tensor | None:
    return None if doc_ids is None else doc_ids.to(torch.int32).contiguous()
