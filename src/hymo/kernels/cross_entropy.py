"""Cross entropy of a linear head, chunk by chunk, so that the full logits never exist.

The gradients are computed in the forward pass, while a chunk's logits are at hand; that saves recomputing them (a third
of the head's work), and leaves one [N, D] gradient a hidden tensor and one fp32 [V, D] for the head. The price: the
weights of the terms must be known beforehand, so ``linear_cross_entropy`` takes ``term_weights_K``.

Shape suffixes: N tokens, D width, V vocabulary, K terms (one a hidden tensor), C tokens of a chunk.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100
"""Label of a token that counts for nothing."""

CHUNK_BYTES = {"cpu": 8 << 20, "cuda": 1 << 30}
"""Size of a chunk's fp32 logits; the CPU's stays in its cache."""


def chunk_rows(vocab_size: int, device_type: str) -> int:
    """Tokens of a chunk."""
    return max(1, CHUNK_BYTES.get(device_type, 256 << 20) // (4 * vocab_size))


def wide_dtype(x: Tensor) -> torch.dtype:
    """fp32, or fp64 for fp64 inputs: what sums are kept in."""
    return torch.promote_types(x.dtype, torch.float32)


def _wide(x: Tensor) -> Tensor:
    return x.to(wide_dtype(x))


def _chunk_terms(
    logits_CV: Tensor, labels_C: Tensor, weight: Tensor, z_weight: Tensor, needs_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of cross entropy and of lse^2 over the valid tokens, and d(weight * ce + z_weight * lse^2) / d logits.

    The logits are used up as the buffer of all this; the gradient has their dtype.
    """
    valid_C1 = (labels_C != IGNORE)[:, None]
    safe_C1 = labels_C[:, None].clamp(min=0)
    wide_CV = _wide(logits_CV)
    top_C1 = wide_CV.amax(-1, keepdim=True)
    wide_CV = wide_CV.sub_(top_C1)
    picked_C1 = wide_CV.gather(1, safe_C1)
    exps_CV = wide_CV.exp_()
    sums_C1 = exps_CV.sum(-1, keepdim=True)
    log_sums_C1 = sums_C1.log()
    lse_C1 = top_C1 + log_sums_C1
    ce = torch.where(valid_C1, log_sums_C1 - picked_C1, 0).sum()
    z = torch.where(valid_C1, lse_C1.square(), 0).sum()
    if not needs_grad:
        return ce, z, logits_CV
    scale_C1 = torch.where(valid_C1, (weight + 2 * z_weight * lse_C1) / sums_C1, 0)
    at_label_C1 = torch.where(valid_C1, picked_C1.exp() * scale_C1 - weight, 0)
    grad_CV = exps_CV.mul_(scale_C1).to(logits_CV.dtype)
    return ce, z, grad_CV.scatter_(1, safe_C1, at_label_C1.to(grad_CV.dtype))


@functools.cache
def _chunk_function(device_type: str, dtype: torch.dtype) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """A Triton kernel on CUDA, where the passes over the logits would cost as much as their products."""
    if device_type == "cuda" and dtype != torch.float64 and importlib.util.find_spec("triton") is not None:
        from hymo.kernels.triton_cross_entropy import chunk_terms

        return chunk_terms
    return _chunk_terms


class _LinearCrossEntropy(torch.autograd.Function):
    """See ``linear_cross_entropy``; the backward pass only scales what the forward pass has computed."""

    @staticmethod
    def forward(ctx, weight_VD, term_weights_K, z_weight, labels_KN, needs_grad, rows, *hidden_list):
        device, chunk_terms = weight_VD.device, _chunk_function(weight_VD.device.type, weight_VD.dtype)
        ce_sums, z_sum = [], torch.zeros((), device=device)
        grad_weight = torch.zeros_like(weight_VD if needs_grad else weight_VD[:0], dtype=wide_dtype(weight_VD))
        grad_hidden = [torch.empty_like(h) if needs_grad else h for h in hidden_list]
        for k, hidden_ND in enumerate(hidden_list):
            ce_sum = torch.zeros((), device=device)
            for start in range(0, hidden_ND.shape[0], rows):
                chunk = slice(start, start + rows)
                labels_C = labels_KN[k, chunk]
                # Zero, not what stands there: a masked token's inf or NaN would be 0 * inf in the products below.
                hidden_CD = hidden_ND[chunk].masked_fill((labels_C == IGNORE)[:, None], 0)
                logits_CV = F.linear(hidden_CD, weight_VD)
                z_of_k = z_weight if k == 0 else torch.zeros_like(z_weight)
                ce, z, grad = chunk_terms(logits_CV, labels_C, term_weights_K[k], z_of_k, needs_grad)
                ce_sum = ce_sum + ce
                z_sum = z_sum + z if k == 0 else z_sum
                if needs_grad:
                    grad_hidden[k][chunk] = grad @ weight_VD
                    _add_product(grad_weight, grad, hidden_CD)
            ce_sums.append(ce_sum)
        if needs_grad:
            ctx.save_for_backward(grad_weight, term_weights_K, z_weight, *grad_hidden)
            ctx.weight_dtype = weight_VD.dtype
        return torch.stack(ce_sums), z_sum

    @staticmethod
    def backward(ctx, grad_ce_K, grad_z):
        grad_weight, term_weights_K, z_weight, *grad_hidden = ctx.saved_tensors
        given = torch.cat((grad_ce_K, grad_z.reshape(1))).to(term_weights_K.dtype)
        built = torch.cat((term_weights_K, z_weight.reshape(1)))
        factor = (given @ built) / (built @ built).clamp(min=torch.finfo(torch.float32).tiny)
        # A loss that weighs the terms otherwise than announced would get a wrong gradient: make it NaN instead.
        fits = ((given - factor * built).abs() <= 1e-4 * given.abs().amax()).all()
        factor = torch.where(fits, factor, torch.nan)
        return (
            (grad_weight * factor).to(ctx.weight_dtype),
            *(None,) * 5,
            *(g * factor.to(g.dtype) for g in grad_hidden),
        )


def _add_product(total_VD: Tensor, grad_CV: Tensor, hidden_CD: Tensor) -> None:
    """total += grad^T hidden, accumulated in fp32."""
    if grad_CV.dtype == total_VD.dtype:
        total_VD.addmm_(grad_CV.t(), hidden_CD)
    elif grad_CV.is_cuda:
        torch.addmm(total_VD, grad_CV.t(), hidden_CD, out_dtype=torch.float32, out=total_VD)
    else:
        total_VD.addmm_(grad_CV.t().float(), hidden_CD.float())


def linear_cross_entropy(
    hidden_list: Sequence[Tensor],
    weight_VD: Tensor,
    labels_list: Sequence[Tensor],
    *,
    term_weights_K: Tensor | None = None,
    z_weight: Tensor | float | None = None,
    rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Sums of cross entropy of one head over several hidden tensors.

    Args:
        hidden_list: K tensors [N, D]; the first is the main one.
        weight_VD: the head.
        labels_list: K int64 tensors [N]; -100 counts for nothing.
        term_weights_K: fp32 [K], the weight that each sum has in the loss, up to a common factor. Given: one gradient
            of the head in all, and the loss must be ``sum_k term_weights[k] * ce_sum[k] + z_weight * z_sum`` up to a
            factor; any other gets NaN gradients. None: any loss is exact, at the price of one gradient of the head a
            term.
        z_weight: weight of ``z_sum`` in that loss (without ``term_weights_K`` any but 0 and None will do). None: 0, and
            ``z_sum`` is for reading only.
        rows: tokens of a chunk; None = by the device.

    Returns:
        ce_sum_K fp32 [K] in nats, and z_sum fp32: the sum of logsumexp^2 over the main term's valid tokens.
    """
    rows = rows or chunk_rows(weight_VD.shape[0], weight_VD.device.type)
    needs_grad = torch.is_grad_enabled() and (weight_VD.requires_grad or any(h.requires_grad for h in hidden_list))
    labels_KN = torch.stack(list(labels_list))
    one = weight_VD.new_ones(1, dtype=wide_dtype(weight_VD))

    def compute(hidden: Sequence[Tensor], labels: Tensor, weights: Tensor, z_weight: Tensor) -> tuple[Tensor, Tensor]:
        return _LinearCrossEntropy.apply(weight_VD, weights, z_weight, labels, needs_grad, rows, *hidden)

    if term_weights_K is not None:
        z = 0 * one[0] if z_weight is None else z_weight * one[0]
        return compute(hidden_list, labels_KN, term_weights_K.to(one), z)
    if not needs_grad:
        return compute(hidden_list, labels_KN, one.expand(len(hidden_list)), 0 * one[0])
    sums = [compute([h], labels_KN[k : k + 1], one, 0 * one[0]) for k, h in enumerate(hidden_list)]
    z_sum = sums[0][1].detach()
    if z_weight is not None and (isinstance(z_weight, Tensor) or z_weight != 0):
        z_sum = compute(hidden_list[:1], labels_KN[:1], 0 * one, one[0])[1]
    return torch.cat([ce for ce, _ in sums]), z_sum
