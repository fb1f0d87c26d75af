"""Grouped matrix product: rows sorted by group, one matrix a group.

Back ends, chosen by rule:
- ``torch``: ``torch.nn.functional.grouped_mm`` (``torch._grouped_mm`` before it was public). No host synchronisation,
  traceable; on CUDA for bfloat16.
- ``loop``: one product a group on slices of the sorted rows; needs the group sizes on the host. The reference, and the
  way for dtypes and devices that the product does not take. On a CPU it is as fast and takes every dtype.

A group without rows gets a gradient of exactly 0. The last offset must equal the number of rows: rows beyond it would
be uninitialised memory.

Shape suffixes: M rows, K inner size, N outer size, E groups.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_grouped_mm = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def choose_backend(x_MK: Tensor) -> str:
    """``torch`` or ``loop`` by the rule above."""
    if _grouped_mm is None:
        return "loop"
    if x_MK.device.type == "cpu":
        traced = torch.compiler.is_compiling() and x_MK.dtype in (torch.float32, torch.bfloat16)
        return "torch" if traced else "loop"
    aligned = x_MK.shape[-1] * x_MK.element_size() % 16 == 0
    return "torch" if x_MK.dtype == torch.bfloat16 and aligned else "loop"


class _GroupedLoop(torch.autograd.Function):
    """out[rows of e] = x[rows of e] @ w[e]^T, with the gradients written into place (no slices to sum up again)."""

    @staticmethod
    def forward(ctx, x_MK, w_ENK, sizes):
        ctx.save_for_backward(x_MK, w_ENK)
        ctx.sizes = sizes
        out_MN = x_MK.new_empty(x_MK.shape[0], w_ENK.shape[1])
        for x, w, out in zip(x_MK.split(sizes), w_ENK, out_MN.split(sizes), strict=True):
            torch.mm(x, w.t(), out=out)
        return out_MN

    @staticmethod
    def backward(ctx, grad_MN):
        x_MK, w_ENK = ctx.saved_tensors
        grad_x, grad_w = torch.empty_like(x_MK), torch.empty_like(w_ENK)
        grads = zip(grad_MN.split(ctx.sizes), x_MK.split(ctx.sizes), grad_x.split(ctx.sizes), strict=True)
        for e, (grad, x, out) in enumerate(grads):
            torch.mm(grad, w_ENK[e], out=out)
            torch.mm(grad.t(), x, out=grad_w[e])  # no rows: exactly zero
        return grad_x, grad_w, None


def grouped_linear(x_MK: Tensor, w_ENK: Tensor, counts_E: Tensor, backend: str = "auto") -> Tensor:
    """x[rows of group e] @ w[e]^T for rows sorted by group.

    Args:
        x_MK: rows, those of group 0 first.
        w_ENK: one matrix [N, K] a group, in x's dtype.
        counts_E: integer rows of each group; they sum to M.
        backend: ``auto``, ``torch`` or ``loop``.

    Returns:
        [M, N] in x's dtype.
    """
    if backend == "auto":
        backend = choose_backend(x_MK)
    if backend == "loop":
        return _GroupedLoop.apply(x_MK, w_ENK, counts_E.tolist())
    if backend != "torch":
        raise ValueError(f"backend: found {backend!r}; accepted: 'auto', 'torch', 'loop'")
    if _grouped_mm is None:
        raise RuntimeError("backend 'torch': this torch has no grouped_mm; accepted: 'auto', 'loop'")
    return _grouped_mm(x_MK, w_ENK.transpose(1, 2), offs=counts_E.cumsum(0).to(torch.int32))
