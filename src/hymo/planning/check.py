"""`hymo plan --check`: three steps of a configuration on this machine, and what they took beside the plan."""

from __future__ import annotations

import torch
from rich.table import Table

from hymo.config import HyMoConfig
from hymo.distributed import mesh, reduce
from hymo.models.model import build_hymo
from hymo.observe.collectives import counted
from hymo.observe.units import size
from hymo.planning.measure import MemoryProbe
from hymo.planning.memory import memory_of
from hymo.planning.traffic import traffic_of
from hymo.training.trainer import Trainer

STEPS = 3


def check(config: HyMoConfig) -> int:
    """Run the steps on all processes of this job and print, on rank 0, predicted beside measured."""
    trainer = Trainer(config)
    ranks, kind = reduce.world_size(), trainer.device.type
    sharding = getattr(trainer.model, "sharding", None)
    reshard = "layer" if sharding is None else sharding.reshard
    model = build_hymo(config, device="meta")
    memory = memory_of(config, model, ranks, reshard, device_type=kind)
    traffic = traffic_of(config, model, ranks, reshard, device_type=kind)
    probe, n_sent = MemoryProbe(trainer), 0.0
    most: dict[str, float] = {}
    for step in range(STEPS):
        with counted() as sent:
            result = trainer.train_step()
        n_sent = sent.total
        if kind == "cuda":
            torch.cuda.synchronize()
        most = {name: max(n, most.get(name, 0.0)) for name, n in probe.read().items()}
        trainer.log.line(f"step {step + 1}: loss {result.loss:.4f}")
    trainer.stream().close()
    probe.close()
    every = reduce.gather_objects((most, n_sent))
    measured = {name: max(own[name] for own, _ in every) for name in most}
    planned = memory.by_name() | {"peak": memory.peak}
    table = Table("of the fullest rank", "predicted", "measured", "apart", title="Check", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    resident = measured.pop("peak") if kind == "cpu" else None
    for name, n in planned.items():
        _row(table, name, n, measured.get(name))
    _row(table, "sent in a step", traffic.total if sharding is not None else None, max(n for _, n in every))
    trainer.log.console.width = max(trainer.log.console.width, 80)
    if reduce.is_main():
        trainer.log.console.print(table)
    if kind == "cpu":
        trainer.log.line(
            "a CPU has no count of activations and peaks: those rows are the plan for a GPU; the process took "
            f"{size(resident or 0)} with all that it has loaded"
        )
    if sharding is None:
        trainer.log.line("one process without FSDP2 sends nothing; start this under torchrun to count bytes")
    mesh.shutdown()
    return 0


def _row(table: Table, name: str, planned: float | None, measured: float | None) -> None:
    apart = ""
    if planned and measured:
        apart = f"{planned / measured - 1:+.1%}"
    table.add_row(name, *("" if n is None else size(n) for n in (planned, measured)), apart)
