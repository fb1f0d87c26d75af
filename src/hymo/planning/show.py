"""What `hymo plan` prints of memory, traffic and time on N GPUs."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich.table import Table

from hymo.config import HyMoConfig
from hymo.data.loader import Deal
from hymo.distributed.fsdp import resolve_reshard
from hymo.models.model import HyMo
from hymo.observe.devices import Device
from hymo.observe.units import duration, size
from hymo.optim.partition import Partition
from hymo.planning.memory import Memory, Snapshot, memory_of, snapshot_of
from hymo.planning.traffic import Traffic, traffic_of

MODES = ("none", "selective", "block")


@dataclass(frozen=True)
class RankPlan:
    """The plan of one rank of ``gpus``; ``device`` None: an unknown GPU, whose memory is not compared."""

    config: HyMoConfig
    model: HyMo  # on the meta device
    gpus: int
    device: Device | None

    @property
    def reshard(self) -> str:
        memory = 0.0 if self.device is None else self.device.memory
        return resolve_reshard(self.config.training.reshard, self.model, "cuda", memory)

    @property
    def memory(self) -> Memory:
        return memory_of(self.config, self.model, self.gpus, self.reshard)

    @property
    def snapshot(self) -> Snapshot:
        return snapshot_of(self.config, self.model, self.gpus)

    @property
    def traffic(self) -> Traffic:
        return traffic_of(self.config, self.model, self.gpus, self.reshard)

    def with_training(self, **changes: object) -> RankPlan:
        training = self.config.training.model_copy(update=changes)
        return RankPlan(self.config.model_copy(update={"training": training}), self.model, self.gpus, self.device)

    def largest_micro_batch(self, **changes: object) -> int:
        """The most sequences of a micro-batch that fit into the device's memory; 0 where one does not."""
        assert self.device is not None
        high, room = -(-self.config.training.global_batch_size // self.gpus), self.device.memory

        def fits(size: int) -> bool:
            return self.with_training(micro_batch_size=size, **changes).memory.needed <= room

        if self.config.training.cuda_graphs:  # up to two micro-batches record nothing: needs do not grow all the way
            return next((size for size in range(high, 0, -1) if fits(size)), 0)
        return bisect.bisect_left(range(1, high + 1), True, key=lambda size: not fits(size))


def plain_table(title: str, *columns: str) -> Table:
    """A table that stays readable at 80 columns: names to the left, numbers to the right."""
    table = Table(*columns, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def memory_table(plan: RankPlan) -> Table:
    """Bytes of one rank at its peak, and what the other moments of a step would take."""
    t, memory = plan.config.training, plan.memory
    table = plain_table(
        f"Memory of a rank (reshard {plan.reshard}, {t.micro_batch_size} x {t.seq_len:,} tokens, "
        f"recomputed: {t.activation_checkpointing})",
        "term",
        "a layer",
        "in all",
    )
    table.add_row("parameters, fp32", "", size(memory.parameters))
    table.add_row("optimizer state, fp32", "", size(memory.states))
    peak = memory.moments[memory.peak_moment]
    for term, n_bytes in peak.items():
        table.add_row(term, "", size(n_bytes))
        if term == "activations" and memory.peak_moment.startswith("head"):
            for name, (layers, _) in memory.activations.layers.items():
                one = memory.activations.of_layer(name) * memory.tokens
                table.add_row(f"  {layers} x {name}" if layers > 1 else f"  {name}", size(one), size(layers * one))
    table.add_section()
    table.add_row(f"peak: {memory.peak_moment}", "", size(memory.peak))
    for name, terms in memory.moments.items():
        if name != memory.peak_moment:
            table.add_row(f"at: {name}", "", size(memory.parameters + memory.states + sum(terms.values())))
    if memory.graph:
        table.add_row("reserved by the CUDA graph beside it", "", size(memory.graph))
    if plan.device is not None:
        table.add_row("the device has", "", size(plan.device.memory))
    if plan.config.checkpoint.asynchronous:
        snapshot = plan.snapshot
        table.add_section()
        table.add_row("host: copy of a background save", "", size(snapshot.copied))
        table.add_row("  pinned, in powers of two", "", size(snapshot.pinned))
    return table


def fit_lines(plan: RankPlan) -> Iterator[str]:
    """Whether it fits, and what to change where it does not."""
    if plan.config.training.fused_gdn is False:
        yield "training.fused_gdn false: the chunked form keeps far more than the activations counted here"
    yield "CUDA's context, NCCL's buffers and fragmentation come on top: leave 5 % free"
    if plan.device is None:
        yield "give --device to see whether this fits"
        return
    largest = largest_by_mode(plan)
    yield "largest micro_batch_size that fits: " + ", ".join(f"{n} ({mode})" for mode, n in largest.items())
    memory = plan.memory
    if memory.needed <= plan.device.memory:
        return
    yield f"WARNING: it does not fit: {size(memory.needed)} of {size(plan.device.memory)}"
    ways = ways_to_fit(plan, largest)
    if plan.config.training.cuda_graphs:
        plain = plan.with_training(cuda_graphs=False)
        rest = [] if memory.peak <= plan.device.memory else ways_to_fit(plain, largest_by_mode(plain))
        ways.append(" with ".join(["--training.cuda_graphs false", *rest[:1]]))
    if not ways:
        ways.append(f"more than {plan.gpus} GPUs, a shorter training.seq_len, or a smaller model")
    yield "change: " + "; or ".join(ways)


def largest_by_mode(plan: RankPlan) -> dict[str, int]:
    """The largest micro-batch by how much is recomputed; a CUDA graph takes no recomputed blocks."""
    modes = MODES[:1] if plan.config.training.cuda_graphs else MODES
    return {mode: plan.largest_micro_batch(activation_checkpointing=mode) for mode in modes}


def ways_to_fit(plan: RankPlan, largest: dict[str, int]) -> list[str]:
    """Options that make a plan fit which does not, without another GPU or model."""
    assert plan.device is not None
    ways, own = [], plan.config.training.activation_checkpointing
    if largest.get(own):
        ways.append(f"--training.micro_batch_size {largest[own]}")
    better = next((mode for mode, n in largest.items() if mode != own and n > largest.get(own, 0)), None)
    if better is not None:
        ways.append(f"--training.activation_checkpointing {better} with micro_batch_size {largest[better]}")
    anew = plan.reshard != "layer" and not plan.config.training.cuda_graphs
    if anew and plan.with_training(reshard="layer").memory.needed <= plan.device.memory:
        ways.append("--training.reshard layer")
    return ways


def traffic_table(plan: RankPlan) -> Table:
    """Bytes that one rank sends in a step, with their formulas."""
    traffic = plan.traffic
    table = Table("sent by a rank in a step", "calls", "bytes", "formula", title="Traffic", title_justify="left")
    table.columns[1].justify = table.columns[2].justify = "right"
    for term in traffic.terms:
        table.add_row(f"{term.name} ({term.kind})", f"{term.calls:,}", size(term.n_bytes), term.formula)
    table.add_section()
    table.add_row("in all", f"{sum(term.calls for term in traffic.terms):,}", size(traffic.total), "")
    return table


def time_lines(plan: RankPlan, flops_per_token: float, mfu: float) -> Iterator[str]:
    """Operations and time of a step at a stated utilisation."""
    tokens = plan.config.tokens_per_step
    work = flops_per_token * tokens
    yield f"a step is {work / 1e12:,.1f} TFLOP in all, {work / plan.gpus / 1e12:,.1f} a rank"
    if plan.device is None:
        return
    seconds = work / (plan.gpus * plan.device.peak * mfu)
    steps = plan.config.scheduler.total_steps or 0
    rate = tokens / seconds
    yield f"at {mfu:.0%} of {plan.device.peak / 1e12:,.0f} TFLOP/s a GPU: {seconds:.3f} s a step, {rate:,.0f} tokens/s"
    yield f"({rate / plan.gpus:,.0f} a GPU), {duration(steps * seconds)} for {steps:,} updates"
    needed = plan.traffic.total / seconds / 1e9
    if needed:
        yield f"to hide what is sent behind that, a rank needs {needed:,.1f} GB/s each way"


def partition_lines(table: Partition, placements: Mapping[str, str]) -> list[str]:
    """The partition parameter by parameter; ``placements``: a last column, where each is cut (empty: no column)."""
    lines = str(table).splitlines()
    if not placements:
        return lines
    head, summary = lines[: len(table) + 1], lines[len(table) + 1 :]
    cells, width = ["placement", *(placements[row.name] for row in table)], max(map(len, head))
    return [f"{line:<{width}}  {cell}" for line, cell in zip(head, cells, strict=True)] + summary


def deal_line(plan: RankPlan) -> str:
    t = plan.config.training
    deal = Deal(t.global_batch_size, plan.gpus, t.micro_batch_size)
    filler = f", {deal.padded_share:.1%} of them filler" if deal.padded_share else ""
    copies = f"{t.replicas} copies of {plan.gpus // t.replicas} shards; " if t.replicas > 1 else ""
    n = deal.n_micro_batches
    return f"{copies}a rank runs {n} micro-batch{'es' if n > 1 else ''} of {t.micro_batch_size} an update{filler}"
