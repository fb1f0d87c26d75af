"""The gradient of SwiGLU as one Triton kernel: both halves are written in one pass over the inputs.

Inductor writes the joined gradient by a kernel that works out each half for every place; on an H200 that takes twice as
long. Letters: N rows, F inner size; the input is [N, gate | up].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hymo.kernels.operators import register_operator
from hymo.kernels.triton_conv import sigmoid
from hymo.kernels.triton_launch import launch

ROWS, COLUMNS = 8, 256
OPTIONS = {"num_warps": 4}


@triton.jit(do_not_specialize=["N"])
def swiglu_backward_kernel(x_ptr, dy_ptr, dx_ptr, N, F, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    f = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (n < N) & (f < F)
    at = n * (2 * F) + f
    gate = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + at + F, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + n * F + f, mask=inside, other=0.0).to(tl.float32)
    s = sigmoid(gate)
    dgate = dy * up * (s + gate * (s - s * s))
    tl.store(dx_ptr + at, dgate.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dx_ptr + at + F, (dy * gate * s).to(dx_ptr.dtype.element_ty), mask=inside)


def _swiglu_backward(x: Tensor, dy: Tensor) -> Tensor:
    """d silu(gate) * up / dx for x [..., gate | up], given the gradient dy of the result, in x's dtype."""
    x, dy = x.contiguous(), dy.contiguous()
    F = dy.shape[-1]
    N, dx = dy.numel() // max(F, 1), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if N > 0:
        grid, constants = (-(-N // ROWS), -(-F // COLUMNS)), {"ROWS": ROWS, "COLUMNS": COLUMNS}
        launch(swiglu_backward_kernel, grid, (x, dy, dx, N, F), constants, OPTIONS)
    return dx


def _shape(x, dy):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


swiglu_backward = register_operator("swiglu_backward", _swiglu_backward, _shape)
