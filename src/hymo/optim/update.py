"""The formulas of the Muon family as functions of plain tensors: shape scale, second moment, cautious decay.

Nothing here knows of parameters, groups or processes. B = matrices in a batch, m = rows, n = columns.
Sources: NorMuon, arXiv 2510.05491, algorithm 1; cautious weight decay, arXiv 2510.12402, algorithm 1.
"""

import math

import torch
from torch import Tensor

TINY = 1e-30
SCALES = ("original", "match_rms_adamw", "spectral", "fixed_rms", "grad_norm", "none")
MASKS = ("update", "momentum", "grad")
AXES = ("row", "long")
DECAYS = ("lr", "lr_squared")


def shape_scale(scale: str, m: int, n: int) -> float:
    """Factor on the orthogonal factor of an m x n matrix. The same words mean other formulas elsewhere; here:

    `original` sqrt(max(1, m/n)); `match_rms_adamw` 0.2 sqrt(max(m, n)), the RMS of a usual AdamW update (Moonlight);
    `spectral` sqrt(m/n); `fixed_rms` 0.2 sqrt(mn), to be divided by the norm of the update (NorMuon's paper);
    `grad_norm` 1, to be multiplied by the gradient's Frobenius norm; `none` 1.
    """
    if scale == "original":
        return math.sqrt(max(1.0, m / n))
    if scale == "match_rms_adamw":
        return 0.2 * math.sqrt(max(m, n))
    if scale == "spectral":
        return math.sqrt(m / n)
    if scale == "fixed_rms":
        return 0.2 * math.sqrt(m * n)
    if scale in ("grad_norm", "none"):
        return 1.0
    raise ValueError(f"scale: found {scale!r}, accepted: {', '.join(SCALES)}")


def statistic_axis(axis: str, m: int, n: int) -> int:
    """Dimension that the second moment averages over: -1 = one value a row, -2 = one value a column."""
    if axis == "row":
        return -1
    if axis == "long":
        return -1 if m >= n else -2
    raise ValueError(f"axis: found {axis!r}, accepted: {', '.join(AXES)}")


def lerp_second_moment(v: Tensor, sum_squares: Tensor, count: int, beta2: float) -> None:
    """v <- beta2 v + (1 - beta2) sum_squares / count, in place. No bias correction: the rescaling cancels it."""
    v.lerp_(sum_squares.to(v.dtype) / count, 1.0 - beta2)


def inverse_root(v: Tensor, eps: float) -> Tensor:
    """1 / (sqrt(v) + eps): eps outside the root."""
    return (v.sqrt() + eps).reciprocal()


def rescale_factor(
    scale: str, shape: float, norm_before: Tensor, norm_after: Tensor, grad_norm: Tensor | None
) -> Tensor:
    """What multiplies a normalised update so that it has the wanted norm; norms are float64 [B]."""
    safe = norm_after.clamp_min(TINY)
    if scale == "fixed_rms":
        return torch.where(norm_after > 0, shape / safe, 0.0)
    factor = shape * norm_before / safe
    return factor * grad_norm if scale == "grad_norm" and grad_norm is not None else factor


def opposes(source: Tensor, w: Tensor) -> Tensor:
    """Where source * w < 0, by signs: the product underflows for tiny values. (Where w is 0 it does not matter.)"""
    return ((source < 0) != (w < 0)).logical_and_(source != 0)


def apply_update(
    w: Tensor, u: Tensor, lr: Tensor | float, weight_decay: Tensor | float, mask_source: Tensor | None
) -> None:
    """w <- w - lr (u + weight_decay * 1[source * w >= 0] * w), in place; u is overwritten.

    u is exactly what is subtracted without decay. mask_source None = decay everywhere; the decay uses the plain rate.
    """
    if isinstance(weight_decay, Tensor) or weight_decay:
        decay = w * weight_decay
        if mask_source is not None:
            decay.masked_fill_(opposes(mask_source, w), 0.0)
        u.add_(decay)
    w.sub_(u.mul_(lr))
