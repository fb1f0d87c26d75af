"""Small parts that every block uses: RMSNorm, SwiGLU, rotary embedding, the layout of packed documents.

Shape suffixes: B batch, T sequence, D width of the last axis, F inner width of a feed-forward layer, H heads,
R half of the rotary size, N any leading axes flattened.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from hymo.kernels.attention import AttentionMask, build_mask
from hymo.kernels.recurrence import HAS_TRITON


class DocLayout(NamedTuple):
    """What packed documents mean to a batch, computed once and read by every layer.

    ``doc_ids_BT`` int32, non-decreasing along a row (None: each row is one document). ``cos_BTR`` and ``sin_BTR`` are
    the fp32 rotary angles with positions that restart at each document ([1, T, 1, R] without documents).
    ``mask`` is what ``kernels.attention.attention`` takes.
    """

    doc_ids_BT: Tensor | None
    cos_BTR: Tensor
    sin_BTR: Tensor
    mask: AttentionMask


def wide_dtype(x: Tensor) -> torch.dtype:
    """fp32, or fp64 for fp64 inputs: what norms, angles, gates and the router compute in."""
    return torch.promote_types(x.dtype, torch.float32)


def wide(x: Tensor) -> Tensor:
    return x.to(wide_dtype(x))


def document_positions(doc_ids_BT: Tensor) -> Tensor:
    """Position of each token in its document, int64 [B, T], counted from the document's first token in the row."""
    t = torch.arange(doc_ids_BT.shape[1], device=doc_ids_BT.device)
    starts = torch.ones_like(doc_ids_BT, dtype=torch.bool)
    starts[:, 1:] = doc_ids_BT[:, 1:] != doc_ids_BT[:, :-1]
    return t - torch.where(starts, t, 0).cummax(dim=1).values


def document_layout(doc_ids_BT: Tensor | None, length: int, rope_dim: int, theta: float, device) -> DocLayout:
    """The layout of one batch of rows of ``length`` tokens."""
    if doc_ids_BT is None:
        positions = torch.arange(length, device=device)[None]
    else:
        positions = document_positions(doc_ids_BT)
    cos, sin = rotary_angles(positions, rope_dim, theta)
    return DocLayout(doc_ids_BT, cos, sin, build_mask(doc_ids_BT))


def rotary_angles(positions_BT: Tensor, rope_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32 [B, T, 1, rope_dim / 2], of position * theta^(-2i / rope_dim) (RoFormer, arXiv 2104.09864)."""
    exponents = torch.arange(0, rope_dim, 2, device=positions_BT.device, dtype=torch.float32) / rope_dim
    angles = positions_BT[..., None, None].float() * theta**-exponents
    return angles.cos(), angles.sin()


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype``, and no operation where it has it already.

    Compiled by torch 2.11, an autograd.Function whose output is the result of an operation that returns its own input
    (``to`` the same dtype, or one in place) has zero gradients, without a word.
    """
    return x if x.dtype == dtype else x.to(dtype)


class _RotateFunction(torch.autograd.Function):
    """The rotation in place of one copy; its gradient is the rotation back."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotate_tail(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return _rotate_tail(grad, cos, -sin), None, None


def _rotate_tail(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out, half = x.clone(), cos.shape[-1]
    first, second = wide(x[..., -2 * half : -half]), wide(x[..., -half:])
    out[..., -2 * half : -half] = first * cos - second * sin
    out[..., -half:] = second * cos + first * sin
    return out


def rotate(x_BTHD: Tensor, cos_BTR: Tensor, sin_BTR: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i+R}) of the last 2R entries of the last axis; those before them pass unchanged.

    fp32 inside, x's dtype out.
    """
    return _RotateFunction.apply(x_BTHD, cos_BTR, sin_BTR)


class _RMSNormFunction(torch.autograd.Function):
    """RMSNorm with its gradient written out: a third of the time of the composite on a CPU, and less saved."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        x32, weight32 = wide(x), weight.to(wide_dtype(x))
        mean_square = torch.linalg.vector_norm(x32, dim=-1, keepdim=True).square() / x.shape[-1]
        rstd = torch.rsqrt(mean_square + eps)
        ctx.save_for_backward(x, weight, rstd)
        return narrow(x32 * rstd * weight32, x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, rstd = ctx.saved_tensors
        x32, grad32, weight32, width = wide(x), wide(grad), weight.to(wide_dtype(x)), x.shape[-1]
        product = (grad32 * x32).reshape(-1, width)
        if x.is_cuda:  # fused reductions
            grad_weight, along_x = (product * rstd.view(-1, 1)).sum(0), (product * weight32).sum(-1)
        else:  # products with a vector are several times faster on a CPU than reductions
            grad_weight, along_x = rstd.view(-1) @ product, product @ weight32
        along_x = along_x.view_as(rstd) * rstd.pow(3) / width
        grad_x = (grad32 * weight32).mul_(rstd).addcmul_(x32, along_x, value=-1)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; fp32 inside, x's dtype out (arXiv 1910.07467)."""
    return _RMSNormFunction.apply(x, weight, eps)


class RMSNorm(nn.Module):
    """``rms_norm`` with its weight."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class _SwiGLUFunction(torch.autograd.Function):
    """silu(gate) * up on a fused [gate | up] tensor; one gradient tensor for the two halves."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up  # not in place: see `narrow`

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if x.is_cuda and HAS_TRITON and x.dtype != torch.float64:
            from hymo.kernels.triton_swiglu import swiglu_backward

            return swiglu_backward(x, grad)
        gate, up = x.chunk(2, dim=-1)
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return torch.cat((grad_gate, F.silu(gate).mul_(grad)), dim=-1)


def swiglu(x_gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where the last axis of the input is [gate | up] (arXiv 2002.05202)."""
    return _SwiGLUFunction.apply(x_gate_up)


class CompilableBlock(nn.Module):
    """A block whose computation can run through ``torch.compile``, one graph for all blocks of a shape.

    The computation is the method ``_compute``; hooks on the module stay outside of the graph. ``use_compile`` True
    compiles with inductor at the next call; None and False compute eagerly. ``checkpointing``: ``none`` keeps every
    activation for the backward pass; ``block`` recomputes the whole block there (but for the chosen experts, which
    rounding could choose otherwise); ``selective`` keeps the results of matrix products, attention and recurrence too.
    """

    def __init__(self):
        super().__init__()
        self._use_compile: bool | None = None
        self._compiled: Callable[..., Any] | None = None
        self.checkpointing = "none"

    @property
    def checkpointing(self) -> str:
        return self._checkpointing

    @checkpointing.setter
    def checkpointing(self, mode: str) -> None:
        self._checkpointing, self._kept = mode, kept_operators(mode)

    @property
    def use_compile(self) -> bool | None:
        return self._use_compile

    @use_compile.setter
    def use_compile(self, on: bool | None) -> None:
        if on:
            self.compile_compute()
        else:
            self._use_compile, self._compiled = on, None

    def compile_compute(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Run ``_compute`` through ``torch.compile`` with this backend from now on."""
        # All kinds of blocks share the code of ``_body`` and so its limit of graphs, 8 as torch ships it: each kind in
        # training and in evaluation is as many, and one more ends the run.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        self._compiled = torch.compile(self._body, fullgraph=True, dynamic=False, backend=backend)
        self._use_compile = True

    def _compute(self, *args: Any) -> Any:
        raise NotImplementedError

    def _body(self, *args: Any) -> Any:
        if self.checkpointing == "none" or not torch.is_grad_enabled():
            return self._compute(*args)
        context = functools.partial(create_selective_checkpoint_contexts, self._kept)
        return checkpoint(self._compute, *args, use_reentrant=False, context_fn=context)

    def _run(self, *args: Any) -> Any:
        return (self._compiled or self._body)(*args)


def kept_operators(checkpointing: str) -> list[Any]:
    """Operators whose results a recomputed forward pass takes from the first one.

    Compiled FlexAttention outside of a compiled block is no operator to the one who keeps them: it runs again.
    """
    if checkpointing == "none":
        return []
    names, aten = ["choose_experts"], torch.ops.aten
    kept: list[Any] = []
    if checkpointing == "selective":
        if HAS_TRITON:
            importlib.import_module("hymo.kernels.triton_mixer")  # registers the operators
        names += ["grouped_linear", "recurrence", "gated_mixer"]
        # No bmm: the chunked recurrence changes the results of its batched products in place.
        kept += [aten.mm.default, aten.addmm.default, torch.ops.higher_order.flex_attention]
        kept += [
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            aten._scaled_dot_product_cudnn_attention.default,
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_efficient_attention.default,
        ]
    ours = torch.ops.hymo
    # An operator that no imported module has registered is not in the block either.
    return kept + [getattr(ours, name).default for name in names if hasattr(ours, name)]


class SwiGLU(nn.Module):
    """Dense feed-forward layer: ``w_in`` (rows gate | up), then ``w_out``."""

    def __init__(self, dim: int, d_ff: int):
        super().__init__()
        self.w_in = nn.Linear(dim, 2 * d_ff, bias=False)
        self.w_out = nn.Linear(d_ff, dim, bias=False)
        self.row_blocks = {"w_in.weight": (d_ff, d_ff)}

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.w_out(swiglu(self.w_in(x_BTD)))
