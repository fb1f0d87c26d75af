"""How FSDP2 cuts a model: its units with their parameters, and what a rank holds of each, by arithmetic.

A parameter's part is its cut axis over the shards, rounded up: that is what FSDP2 stores, gathers and reduces, also on
ranks whose own rows are fewer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from hymo.config import HyMoConfig
from hymo.distributed.fsdp import find_units, placement, replicated_parameters
from hymo.models.model import HyMo
from hymo.models.moe import DeepSeekMoE


@dataclass(frozen=True)
class Unit:
    """What is gathered and reduced as one: ``numel`` parameters, of which a rank holds ``held`` (padding included).

    ``kind``: embedding, gdn, mla, mtp, head, experts (of a block, where they compute in float32) or root. ``wide``: it
    computes in float32 whatever ``fsdp_mixed_precision`` says.
    """

    name: str
    kind: str
    numel: int
    held: int
    wide: bool = False


@dataclass(frozen=True)
class Shards:
    """A model over ``replicas`` copies of ``shards`` parts each."""

    shards: int
    replicas: int
    units: tuple[Unit, ...]
    replicated: int  # parameters that every rank holds whole
    n_replicated: int  # how many tensors these are

    @property
    def ranks(self) -> int:
        return self.shards * self.replicas

    @property
    def numel(self) -> int:
        return sum(unit.numel for unit in self.units)

    @property
    def held(self) -> int:
        return sum(unit.held for unit in self.units)


def padded_part(shape: tuple[int, ...], shards: int) -> int:
    """Elements that FSDP2 keeps of a parameter on each rank."""
    axis = placement(shape, shards).dim
    return math.prod(shape) // shape[axis] * -(-shape[axis] // shards)


KINDS = {"GatedDeltaNetBlock": "gdn", "MLABlock": "mla", "MTPDepth": "mtp", "Embedding": "embedding", "LMHead": "head"}


def shards_of(config: HyMoConfig, model: HyMo, ranks: int) -> Shards:
    """The units of ``model`` (it may be on the meta device) on ``ranks`` processes under ``config``."""
    t = config.training
    replicas = t.replicas
    shards = ranks // replicas
    whole = replicated_parameters(model)
    taken = {id(p) for p in whole.values()}
    units = []
    wide_experts = not t.moe_mixed_precision and t.fsdp_mixed_precision != "float32"
    for name, module, kind in _modules(model, wide_experts):
        own = [p for p in module.parameters() if id(p) not in taken]
        taken |= {id(p) for p in own}
        numel = sum(p.numel() for p in own)
        held = sum(padded_part(tuple(p.shape), shards) for p in own)
        if own:
            units.append(Unit(name, kind, numel, held, kind == "experts"))
    replicated = sum(p.numel() for p in whole.values())
    return Shards(shards, replicas, tuple(units), replicated, len(whole))


def _modules(model: HyMo, wide_experts: bool) -> Iterator[tuple[str, nn.Module, str]]:
    """Inner units first, since a parameter belongs to the innermost; the root takes what is left."""
    if wide_experts:
        for name, module in model.named_modules():
            if isinstance(module, DeepSeekMoE):
                yield name, module, "experts"
    for name, module in find_units(model):
        yield name, module, KINDS[type(module).__name__]
    yield "", model, "root"


def gathers_once(unit: Unit) -> bool:
    """Whether a unit's weights are gathered once a micro-batch even where units are freed after their forward.

    The embedding's backward needs no weight, the head's comes right after its forward, and the root stays.
    """
    return unit.kind in ("embedding", "head", "root")
