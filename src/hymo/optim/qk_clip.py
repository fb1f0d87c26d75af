"""QK-clip: after an update, shrink the query and key projections of the heads whose largest logit was too large.

Source: Kimi K2, arXiv 2507.20534, section 2.1. For a head whose largest logit S passed the threshold t, with g = t / S:
the parts without position (query and key) shrink by sqrt(g) each, the head's rotary query by g, and the rotary key,
which all heads share, stays, so every logit of the head shrinks by g.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hymo.distributed.exchange import layout_of, world
from hymo.optim.base import local


@torch.no_grad()
def clip_heads(
    q_b: Tensor, kv_b: Tensor, logit_max_H: Tensor, threshold: float, *, nope: int, rope: int, v_dim: int
) -> None:
    """In place: q_b [H * (nope + rope), r] and kv_b [H * (nope + v_dim), r], head-major, plain or sharded by rows.

    logit_max_H: the largest logit of each head since the last update. Heads at or below the threshold keep their bits.
    """
    gamma_H = (threshold / logit_max_H.double().clamp_min(threshold)).to(q_b.device)
    root_H = gamma_H.sqrt()
    query_HR = torch.cat([root_H[:, None].expand(-1, nope), gamma_H[:, None].expand(-1, rope)], 1)
    key_HR = torch.cat([root_H[:, None].expand(-1, nope), torch.ones_like(root_H)[:, None].expand(-1, v_dim)], 1)
    _scale_rows(q_b, query_HR.flatten())
    _scale_rows(kv_b, key_HR.flatten())


def _scale_rows(weight: Tensor, factors: Tensor) -> None:
    if factors.numel() != weight.shape[0]:
        raise ValueError(f"qk_clip: found {weight.shape[0]} rows, accepted: {factors.numel()} by the heads' sizes")
    ranks, layout = layout_of(weight, False, "qk_clip")
    (low, high), _ = layout.box(ranks.index(world()[0]))
    local(weight).mul_(factors[low:high].to(weight.dtype)[:, None])


@torch.no_grad()
def clip_qk(
    model: nn.Module, logit_max_LH: Any, threshold: float, masters: Mapping[Tensor, Tensor] | None = None
) -> None:
    """Apply `clip_heads` to the latent attention of every layer, in the order of the modules.

    logit_max_LH: [attention layers, heads], or a sequence of [heads]. A layer is a module with q_b, kv_b and the sizes
    nope, rope, v_dim. masters: full-precision copies of weights held in half precision; they are clipped and rounded.
    """
    layers: list[Any] = [m for m in model.modules() if hasattr(m, "q_b") and hasattr(m, "kv_b")]
    if len(layers) != len(logit_max_LH):
        raise ValueError(f"qk_clip: found logits of {len(logit_max_LH)} layers, accepted: {len(layers)}")
    for layer, logit_max_H in zip(layers, logit_max_LH, strict=True):
        weights = (layer.q_b.weight, layer.kv_b.weight)
        q_b, kv_b = ((masters or {}).get(weight, weight) for weight in weights)
        clip_heads(q_b, kv_b, logit_max_H, threshold, nope=layer.nope, rope=layer.rope, v_dim=layer.v_dim)
        for weight, values in zip(weights, (q_b, kv_b), strict=True):
            if values is not weight:
                local(weight).copy_(local(values))
