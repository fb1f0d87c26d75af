"""Grouped matrix product: rows sorted by group, one matrix a group.

Back ends, chosen by rule:
- ``torch``: ``torch.nn.functional.grouped_mm`` (``torch._grouped_mm`` before it was public); on CUDA in bfloat16. No
  host synchronisation.
- ``loop``: one product a group on slices of the sorted rows; reads the group sizes on the host. Everywhere else: on a
  CPU it is as fast as torch's (8192 rows, 8 groups, 112 x 128, forward and backward: 8.9 ms to 9.6) and takes every
  dtype.

Both are one operator to torch.compile: the group sizes cannot break a graph, and inductor cannot hand the backward
product operands that are contiguous along the grouped axis, which CUDA refuses (a device assertion, torch 2.11).

A group without rows gets a gradient of exactly 0. The last offset must equal the number of rows: rows beyond it would
be uninitialised memory.

Shape suffixes: M rows, K inner size, N outer size, E groups.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hymo.kernels.operators import register_operator

_grouped_mm: Any = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def choose_backend(x_MK: Tensor) -> str:
    """``torch`` or ``loop`` by the rule above."""
    aligned = x_MK.shape[-1] * x_MK.element_size() % 16 == 0
    fits = _grouped_mm is not None and x_MK.is_cuda and x_MK.dtype == torch.bfloat16 and aligned
    return "torch" if fits else "loop"


def _offsets(counts_E: Tensor) -> Tensor:
    return counts_E.cumsum(0).to(torch.int32)


def _forward(x_MK: Tensor, w_ENK: Tensor, counts_E: Tensor, backend: str) -> Tensor:
    x_MK, w_ENK = x_MK.contiguous(), w_ENK.contiguous()
    if backend == "torch":
        return _grouped_mm(x_MK, w_ENK.transpose(1, 2), offs=_offsets(counts_E))
    sizes = counts_E.tolist()
    out_MN = x_MK.new_empty(x_MK.shape[0], w_ENK.shape[1])
    for x, w, out in zip(x_MK.split(sizes), w_ENK, out_MN.split(sizes), strict=True):
        torch.mm(x, w.t(), out=out)
    return out_MN


def _gradients(grad_MN: Tensor, x_MK: Tensor, w_ENK: Tensor, counts_E: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    grad_MN, x_MK, w_ENK = grad_MN.contiguous(), x_MK.contiguous(), w_ENK.contiguous()
    if backend == "torch":
        offsets = _offsets(counts_E)
        return _grouped_mm(grad_MN, w_ENK, offs=offsets), _grouped_mm(grad_MN.t(), x_MK, offs=offsets)
    sizes = counts_E.tolist()
    grad_x, grad_w = torch.empty_like(x_MK), torch.empty_like(w_ENK)
    parts = zip(grad_MN.split(sizes), x_MK.split(sizes), grad_x.split(sizes), strict=True)
    for e, (grad, x, out) in enumerate(parts):
        torch.mm(grad, w_ENK[e], out=out)
        torch.mm(grad.t(), x, out=grad_w[e])  # no rows: exactly zero
    return grad_x, grad_w


def _forward_shape(x_MK, w_ENK, counts_E, backend):
    return x_MK.new_empty(x_MK.shape[0], w_ENK.shape[1])


def _gradient_shapes(grad_MN, x_MK, w_ENK, counts_E, backend):
    return x_MK.new_empty(x_MK.shape), w_ENK.new_empty(w_ENK.shape)


def _save_inputs(ctx, inputs, output):
    *tensors, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad_MN):
    return *_grouped_backward(grad_MN, *ctx.saved_tensors, ctx.backend), None, None


_grouped_backward = register_operator("grouped_linear_backward", _gradients, _gradient_shapes)
_grouped = register_operator("grouped_linear", _forward, _forward_shape, setup_context=_save_inputs, backward=_backward)


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
    if backend not in ("torch", "loop"):
        raise ValueError(f"backend: found {backend!r}; accepted: 'auto', 'torch', 'loop'")
    if backend == "torch" and _grouped_mm is None:
        raise RuntimeError("backend 'torch': this torch has no grouped_mm; accepted: 'auto', 'loop'")
    return _grouped(x_MK, w_ENK, counts_E, backend)
