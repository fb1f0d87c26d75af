"""What a logged attempt measures beside its losses: gradient norms and update sizes by part, attention logits.

All of it runs in logged attempts alone; the others make no collective and no transfer for it. Exactly what the numbers
are:

- ``grad_norm_PART``: norm of the gradient of a part of the model, before clipping, over all ranks.
- ``update_rms_PART``: root mean square of what the optimizer's step (decay included) changed in a part's weights. Of a
  tensor of up to ``SAMPLE`` elements on a rank all are looked at; of a larger one every n-th, so that no second copy of
  the weights is needed (the sampling error of 65,536 elements is below 1 %).
- ``attention_logit_max``: without ``optimizer.qk_clip``, the largest logit of up to ``QUERIES`` evenly spaced queries
  of each row of the attempt's first micro-batch on each rank, over all keys that they see, all heads and layers, those
  of MTP included: at most the true maximum. With ``qk_clip`` it is the true one, which the step has anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hymo.distributed import reduce
from hymo.models.mla import MLABlock

SAMPLE, QUERIES = 65_536, 256
PARTS = {"embedding": "embedding", "head": "head", "mtp": "mtp", ".ffn": "experts", ".attn": "attention"}
"""Part of a parameter by what its name begins with or holds; other parameters of ``layers`` are of the recurrence."""


def part_of(name: str) -> str:
    """The part of the model that a parameter belongs to: embedding, head, mtp, experts, attention, gdn or other."""
    for key, part in PARTS.items():
        if name.startswith(key + ".") or (key.startswith(".") and key in name):
            return part
    return "gdn" if name.startswith("layers.") else "other"


class Probe:
    """Measures one model, attempt after attempt; see the module for what.

    The order of calls in an attempt: ``attention`` around a forward pass, ``gradient_norms`` after the last reduction
    and before the clip, ``before_step`` and ``update_sizes`` around the optimizer's step. The last three are
    collectives.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.parts: dict[str, list[Tensor]] = {}
        for name, parameter in model.named_parameters():
            self.parts.setdefault(part_of(name), []).append(parameter)
        self._logits: list[Tensor] = []
        self._before: dict[str, list[Tensor]] = {}

    @contextmanager
    def attention(self) -> Iterator[None]:
        """While a forward pass runs: look at the input of each attention block (its weights are gathered then)."""
        self._logits = []

        def look(block: nn.Module, args: tuple) -> None:
            assert isinstance(block, MLABlock)
            x_BTC, layout, real_B = args
            with torch.no_grad():
                self._logits.append(block.attn.sampled_logit_max(block.attn_norm(x_BTC), layout, real_B, QUERIES))

        blocks = [module for module in self.model.modules() if isinstance(module, MLABlock)]
        unseen = [block for block in blocks if not block.attn.track_logit_max]  # with qk_clip the pass itself says more
        hooks = [block.register_forward_pre_hook(look) for block in unseen]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def gradient_norms(self) -> dict[str, float]:
        """``grad_norm_PART`` of each part."""
        return {f"grad_norm_{part}": norm for part, norm in reduce.verdict(0.0, self.parts).norms.items()}

    def before_step(self) -> None:
        """Keep the sample of the weights that ``update_sizes`` compares with."""
        self._before = {
            part: [_sample(p).clone() for p in parameters]  # a clone: the sample may be a view
            for part, parameters in self.parts.items()
        }

    @torch.no_grad()
    def update_sizes(self) -> dict[str, float]:
        """``update_rms_PART`` of each part, and ``attention_logit_max`` where ``attention`` saw any block."""
        squares = torch.stack([_squares(p, self._before[part]) for part, p in self.parts.items()])
        numel = [sum(p.numel() for p in parameters) for parameters in self.parts.values()]
        self._before = {}
        sums = reduce.sum_across(squares).tolist()
        sizes = {
            f"update_rms_{part}": (total / n) ** 0.5 for part, total, n in zip(self.parts, sums, numel, strict=True)
        }
        if self._logits:
            sizes["attention_logit_max"] = float(reduce.max_across(torch.stack(self._logits).max()))
            self._logits = []
        return sizes


def _sample(parameter: Tensor) -> Tensor:
    flat = reduce.local(parameter).detach().flatten()
    return flat[:: max(1, flat.numel() // SAMPLE)]


def _squares(parameters: Iterable[Tensor], before: list[Tensor]) -> Tensor:
    """Sum of squared changes of this rank's pieces, estimated from the samples; each piece is counted on one rank."""
    total: Tensor | None = None
    for parameter, old in zip(parameters, before, strict=True):
        change = (_sample(parameter).float() - old.float()).square().sum(dtype=torch.float64)
        scale = reduce.local(parameter).numel() / max(1, old.numel()) * reduce.counts_here(parameter)
        total = change * scale if total is None else total + change * scale
    assert total is not None
    return total
