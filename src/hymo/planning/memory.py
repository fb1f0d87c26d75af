"""What a rank's memory holds in a step, term by term, by arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from hymo.config import HyMoConfig
from hymo.distributed.fsdp import replicated_parameters
from hymo.models.model import HyMo
from hymo.optim.partition import Partition, partition
from hymo.planning.shards import padded_part, shards_of

FP32 = 4


@dataclass(frozen=True)
class Memory:
    """Bytes by term."""

    parameters: float
    gradients: float
    states: float

    def by_name(self) -> dict[str, float]:
        return {"parameters": self.parameters, "gradients": self.gradients, "optimizer state": self.states}

    @property
    def peak(self) -> float:
        return self.parameters + self.gradients + self.states


def memory_of(config: HyMoConfig, model: HyMo, ranks: int, reshard: str, *, device_type: str = "cuda") -> Memory:
    """What one of ``ranks`` processes holds, on the rank that holds most."""
    s = shards_of(config, model, ranks)
    held = 4.0 * (s.held + s.replicated)
    return Memory(held, held, state_bytes(model, partition(model, config.optimizer), s.shards))


def state_bytes(model: HyMo, table: Partition, shards: int) -> float:
    """The optimizer's state: two moments of an AdamW parameter, or the momentum and a moment a row of a matrix."""
    whole, total = set(replicated_parameters(model)), 0.0
    for row in table:
        part = row.numel if row.name in whole else padded_part(row.shape, shards)
        total += FP32 * part * (2 if row.algorithm == "adamw" else 1)
        if row.algorithm == "normuon":
            total += FP32 * part / row.shape[-1]
    return total
