"""Triton kernels of the optimizer step: passes over many tensors at once, and symmetric matrix products.

Tensors are named by a table of addresses (int64), so one launch serves all parts of one shape, wherever they are.
Every kernel reads each input once and writes each output once. No atomics: equal inputs give equal bits.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# Columns of the address table of a part.
GRAD, MOMENTUM, WEIGHT, SECOND_MOMENT = range(4)
FLAT_BLOCK = 4096
ROWS, COLUMNS = 8, 512


@triton.jit
def _pointer(table, piece, column: tl.constexpr, dtype: tl.constexpr):
    return tl.load(table + piece * 4 + column).to(tl.pointer_type(dtype))


@triton.jit
def _elements(table, piece, column: tl.constexpr, offsets, ALIGNED: tl.constexpr):
    """Addresses of consecutive float32 elements; ALIGNED promises multiples of 16 bytes, for wide loads."""
    pointers = _pointer(table, piece, column, tl.float32) + offsets
    if ALIGNED:
        pointers = tl.multiple_of(pointers, [16])
    return pointers


@triton.jit
def momentum_kernel(
    table, out, numel, beta, NESTEROV: tl.constexpr, WRITE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    """M <- bM + (1 - b)G of `numel` elements of each part; writes M, or (1 - b)G + bM, in the dtype of `out`."""
    piece = tl.program_id(1)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < numel
    momenta = _elements(table, piece, 1, offsets, ALIGNED)
    g = tl.load(_elements(table, piece, 0, offsets, ALIGNED), mask=inside, other=0.0)
    m = tl.load(momenta, mask=inside, other=0.0)
    m += (1.0 - beta) * (g - m)
    tl.store(momenta, m, mask=inside)
    if WRITE:
        u = g + beta * (m - g) if NESTEROV else m
        tl.store(out + piece.to(tl.int64) * numel + offsets, u.to(out.dtype.element_ty), mask=inside)


@triton.jit
def row_statistics_kernel(
    table, results, squares, inverse, rows, cols, beta2, eps, R: tl.constexpr, C: tl.constexpr, NORMALIZE: tl.constexpr
):
    """Sum of squares of each row of each part; with NORMALIZE also v <- lerp and 1 / (sqrt(v) + eps)."""
    piece = tl.program_id(1)
    row = tl.program_id(0) * R + tl.arange(0, R)
    base = results + piece.to(tl.int64) * rows * cols
    total = tl.zeros((R, C), tl.float32)
    for start in range(0, cols, C):
        col = start + tl.arange(0, C)
        inside = (row < rows)[:, None] & (col < cols)[None, :]
        x = tl.load(base + row[:, None] * cols + col[None, :], mask=inside, other=0.0).to(tl.float32)
        total += x * x
    sums = tl.sum(total, 1)
    where = piece * rows + row
    tl.store(squares + where, sums, mask=row < rows)
    if NORMALIZE:
        moments = _pointer(table, piece, 3, tl.float32)
        v = tl.load(moments + row, mask=row < rows, other=1.0)
        v += (1.0 - beta2) * (sums / cols - v)
        tl.store(moments + row, v, mask=row < rows)
        tl.store(inverse + where, 1.0 / (tl.sqrt(v) + eps), mask=row < rows)


@triton.jit
def norms_kernel(squares, inverse, totals, rows, count, NORMALIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Squared norms of each part before and after the second moment, float64, into totals [3, count]."""
    piece = tl.program_id(0)
    before = tl.zeros((BLOCK,), tl.float64)
    after = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        s = tl.load(squares + piece * rows + row, mask=row < rows, other=0.0).to(tl.float64)
        before += s
        if NORMALIZE:
            i = tl.load(inverse + piece * rows + row, mask=row < rows, other=0.0).to(tl.float64)
            after += s * i * i
    total = tl.sum(before, 0)
    tl.store(totals + piece, total)
    tl.store(totals + count + piece, tl.sum(after, 0) if NORMALIZE else total)


@triton.jit
def apply_kernel(
    table,
    results,
    inverse,
    totals,
    rate,
    numel,
    cols,
    count,
    shape_scale,
    weight_decay,
    RESCALE: tl.constexpr,  # "keep" the norm from before, or "fixed": divide by the norm after
    NORMALIZE: tl.constexpr,
    MASK: tl.constexpr,  # "none" | "update" | "momentum" | "grad"
    SQUARED: tl.constexpr,  # decay by the square of the rate
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """w <- w - lr (u + wd * 1[source * w >= 0] * w), u = the normalised, rescaled result."""
    piece = tl.program_id(1)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < numel
    before, after = tl.load(totals + piece), tl.load(totals + count + piece)
    norm_after = tl.maximum(tl.sqrt(after), 1e-30)
    factor = shape_scale / norm_after
    if RESCALE == "keep":
        factor = factor * tl.sqrt(before)
    else:
        factor = tl.where(after > 0, factor, 0.0)
    lr = tl.load(rate).to(tl.float32)
    u = tl.load(results + piece.to(tl.int64) * numel + offsets, mask=inside, other=0.0).to(tl.float32)
    if NORMALIZE:
        u *= tl.load(inverse + piece * (numel // cols) + offsets // cols, mask=inside, other=0.0)
    u *= factor.to(tl.float32)
    weights = _elements(table, piece, 2, offsets, ALIGNED)
    w = tl.load(weights, mask=inside, other=0.0)
    decay = w * weight_decay
    if SQUARED:
        decay *= lr
    if MASK != "none":
        if MASK == "update":
            source = u
        elif MASK == "momentum":
            source = tl.load(_elements(table, piece, 1, offsets, ALIGNED), mask=inside, other=0.0)
        else:
            source = tl.load(_elements(table, piece, 0, offsets, ALIGNED), mask=inside, other=0.0)
        opposed = ((source > 0) & (w < 0)) | ((source < 0) & (w > 0))
        decay = tl.where(opposed, 0.0, decay)
    tl.store(weights, w - lr * (u + decay), mask=inside)


@triton.jit
def adamw_kernel(
    table,  # int64 [tensors, 4]: gradient, first moment, weight, second moment
    corrections,  # float32 [tensors, 2]: 1 / (1 - beta^t) of both moments
    sizes,  # int32 [tensors]: elements / UNIT
    programs,  # int32 [programs, 2]: tensor, block
    rate,
    beta1,
    beta2,
    eps,
    weight_decay,
    MASK: tl.constexpr,
    ALIGNED: tl.constexpr,
    UNIT: tl.constexpr,  # 4 lets the compiler load four elements at a time
    BLOCK: tl.constexpr,
):
    """AdamW with masked decay over many tensors."""
    program = tl.program_id(0)
    tensor, block = tl.load(programs + program * 2), tl.load(programs + program * 2 + 1)
    offsets = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < tl.load(sizes + tensor).to(tl.int64) * UNIT
    firsts, seconds = _elements(table, tensor, 1, offsets, ALIGNED), _elements(table, tensor, 3, offsets, ALIGNED)
    weights = _elements(table, tensor, 2, offsets, ALIGNED)
    g = tl.load(_elements(table, tensor, 0, offsets, ALIGNED), mask=inside, other=0.0)
    m = tl.load(firsts, mask=inside, other=0.0)
    v = tl.load(seconds, mask=inside, other=0.0)
    w = tl.load(weights, mask=inside, other=0.0)
    m += (1.0 - beta1) * (g - m)
    v = beta2 * v + (1.0 - beta2) * g * g
    tl.store(firsts, m, mask=inside)
    tl.store(seconds, v, mask=inside)
    first, second = tl.load(corrections + tensor * 2), tl.load(corrections + tensor * 2 + 1)
    u = m * first / (tl.sqrt(v * second) + eps)
    lr = tl.load(rate).to(tl.float32)
    decay = w * weight_decay
    if MASK != "none":
        if MASK == "grad":
            source = g
        elif MASK == "momentum":
            source = m
        else:
            source = u
        opposed = ((source > 0) & (w < 0)) | ((source < 0) & (w > 0))
        decay = tl.where(opposed, 0.0, decay)
    tl.store(weights, w - lr * (u + decay), mask=inside)


@triton.jit
def symmetric_kernel(
    x,
    addend,
    out,
    scale,
    size,
    depth,
    x_batch,
    x_row,
    x_depth,
    tiles,
    alpha,
    beta,
    diagonal,
    POWER: tl.constexpr,  # the result is multiplied by scale^POWER, one scale a matrix
    ADD: tl.constexpr,
    COPY: tl.constexpr,  # x is a tensor descriptor: "rows" of [N, size, depth], "columns" of [N, depth, size]; or ""
    EVEN: tl.constexpr,  # depth divides by K, size by B
    B: tl.constexpr,
    K: tl.constexpr,
):
    """out = scale^POWER (alpha x x^T + beta addend + diagonal I), lower triangle of tiles computed, upper mirrored.

    x: [N, size, depth] by strides (so x may be a transposed view); addend, out: [N, size, size], symmetric, contiguous.
    """
    program = tl.program_id(0)
    batch = (program // tiles).to(tl.int64)
    t = program % tiles
    i = ((tl.sqrt(8.0 * t + 1.0) - 1.0) / 2.0).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > t, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= t, i + 1, i)
    j = t - i * (i + 1) // 2
    rows = i * B + tl.arange(0, B)
    cols = j * B + tl.arange(0, B)
    ks = tl.arange(0, K)
    total = tl.zeros((B, B), tl.float32)
    if COPY == "rows":
        for k in range(0, depth, K):
            a = tl.reshape(x.load([program // tiles, i * B, k]), (B, K))
            b = tl.reshape(x.load([program // tiles, j * B, k]), (B, K))
            total = tl.dot(a, b.T, total)
    elif COPY == "columns":
        for k in range(0, depth, K):
            a = tl.reshape(x.load([program // tiles, k, i * B]), (K, B))
            b = tl.reshape(x.load([program // tiles, k, j * B]), (K, B))
            total = tl.dot(a.T, b, total)
    else:
        a_pointers = x + batch * x_batch + rows[:, None] * x_row + ks[None, :] * x_depth
        b_pointers = x + batch * x_batch + cols[None, :] * x_row + ks[:, None] * x_depth
        for k in range(0, depth, K):
            if EVEN:
                a = tl.load(a_pointers)
                b = tl.load(b_pointers)
            else:
                inside = k + ks < depth
                a = tl.load(a_pointers, mask=(rows < size)[:, None] & inside[None, :], other=0.0)
                b = tl.load(b_pointers, mask=(cols < size)[None, :] & inside[:, None], other=0.0)
            total = tl.dot(a, b, total)
            a_pointers += K * x_depth
            b_pointers += K * x_depth
    where = batch * size * size + rows[:, None] * size + cols[None, :]
    inside = (rows < size)[:, None] & (cols < size)[None, :]
    value = total * alpha
    if ADD:
        value += beta * tl.load(addend + where, mask=inside, other=0.0).to(tl.float32)
        value += tl.where(rows[:, None] == cols[None, :], diagonal, 0.0)
    if POWER > 0:
        s = tl.load(scale + batch)
        value *= s
        if POWER > 1:
            value *= s
    result = value.to(out.dtype.element_ty)
    tl.store(out + where, result, mask=inside)
    if i != j:
        mirrored = batch * size * size + cols[:, None] * size + rows[None, :]
        tl.store(out + mirrored, tl.trans(result), mask=(cols < size)[:, None] & (rows < size)[None, :])


def symmetric(
    x: Tensor,
    addend: Tensor | None,
    *,
    alpha: float,
    beta: float = 0.0,
    diagonal: float = 0.0,
    scale: Tensor | None = None,
    power: int = 0,
    block: int = 128,
    depth_block: int = 64,
    warps: int = 4,
    stages: int = 3,
    copies: bool = True,
) -> Tensor:
    """scale^power (alpha x x^T + beta addend + diagonal I) for x [N, s, k] of any strides, by half the products."""
    count, size, depth = x.shape
    out = torch.empty(count, size, size, dtype=x.dtype, device=x.device)
    side = triton.cdiv(size, block)
    tiles = side * (side + 1) // 2
    source, copy = _descriptor(x, block, depth_block) if copies else (x, "")
    symmetric_kernel[(count * tiles,)](
        source,
        x if addend is None else addend,
        out,
        out if scale is None else scale,
        size,
        depth,
        *x.stride(),
        tiles,
        alpha,
        beta,
        diagonal,
        POWER=power,
        ADD=addend is not None,
        COPY=copy,
        EVEN=size % block == 0 and depth % depth_block == 0,
        B=block,
        K=depth_block,
        num_warps=warps,
        num_stages=stages,
    )
    return out


def _descriptor(x: Tensor, block: int, depth_block: int) -> tuple[Any, str]:
    """(x for the bulk copies of the hardware, the way it lies), or (x, "") where its addresses do not suit them."""
    if x.data_ptr() % 16 or not x.is_cuda or torch.version.hip or torch.cuda.get_device_capability(x.device) < (9, 0):
        return x, ""
    if x.stride(2) == 1 and x.stride(1) * x.element_size() % 16 == 0:
        return TensorDescriptor.from_tensor(x, [1, block, depth_block]), "rows"
    if x.stride(1) == 1 and x.stride(2) * x.element_size() % 16 == 0:
        return TensorDescriptor.from_tensor(x.mT, [1, depth_block, block]), "columns"
    return x, ""
