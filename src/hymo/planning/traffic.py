"""Bytes that a rank sends in a step, and how often, term by term: arithmetic that ``observe.collectives`` confirms."""

from __future__ import annotations

from dataclasses import dataclass

from hymo.config import HyMoConfig
from hymo.data.loader import Deal
from hymo.models.model import HyMo
from hymo.optim.build import plan_step
from hymo.optim.partition import Partition, partition
from hymo.planning.shards import Shards, Unit, gathers_once, shards_of

FP32, FP64 = 4, 8


@dataclass(frozen=True)
class Term:
    """One kind of sending in a step: collectives, bytes that one rank sends in all of them, and the formula."""

    name: str
    kind: str
    calls: int
    n_bytes: float
    formula: str


@dataclass(frozen=True)
class Traffic:
    """A step of ``micro_batches`` on each rank, its weights gathered by the rule of ``reshard``."""

    terms: tuple[Term, ...]
    micro_batches: int
    reshard: str

    @property
    def total(self) -> float:
        return sum(term.n_bytes for term in self.terms)

    def of_kind(self, kind: str) -> float:
        return sum(term.n_bytes for term in self.terms if term.kind == kind)

    def calls_of_kind(self, kind: str) -> int:
        return sum(term.calls for term in self.terms if term.kind == kind)


def gathers(unit: Unit, reshard: str, micro_batches: int) -> int:
    """How often a unit's weights are gathered in a step."""
    if reshard == "step":
        return 1
    return micro_batches * (1 if reshard == "never" or gathers_once(unit) else 2)


def reductions(config: HyMoConfig, reshard: str, micro_batches: int) -> int:
    """How often a unit's gradients are reduced in a step."""
    each = config.training.reduce_each_micro_batch and reshard != "step"
    return micro_batches if each else 1


def traffic_of(config: HyMoConfig, model: HyMo, ranks: int, reshard: str, *, device_type: str = "cuda") -> Traffic:
    """What one step sends under ``config`` on ``ranks`` processes; ``reshard`` is layer, step or never.

    ``device_type`` cpu: the optimizer's matrices travel in fp32 there. The figures are of the rank that sends most.
    """
    t = config.training
    m = Deal(t.global_batch_size, ranks, t.micro_batch_size).n_micro_batches
    table = partition(model, config.optimizer)
    s = shards_of(config, model, ranks)
    terms = _weights(config, s, reshard, m) if s.shards > 1 else []
    if s.replicas > 1:
        sent = 2 * (s.replicas - 1) / s.replicas * FP32 * s.held
        terms.append(Term("gradients between copies", "all-reduce", len(s.units), sent, "2 (R-1)/R 4 P/W, once"))
    terms += _optimizer(config, table, s, device_type) + _small(config, s)
    return Traffic(tuple(term for term in terms if term.n_bytes), m, reshard)


def _weights(config: HyMoConfig, s: Shards, reshard: str, m: int) -> list[Term]:
    narrow = 2 if config.training.fsdp_mixed_precision == "bfloat16" else 4
    width = {unit: FP32 if unit.wide else narrow for unit in s.units}
    counts = {unit: gathers(unit, reshard, m) for unit in s.units}
    sent = sum((s.shards - 1) * width[unit] * unit.held * counts[unit] for unit in s.units)
    times = "once" if reshard == "step" else f"{m} x {'1' if reshard == 'never' else '2 (embedding, head: 1)'}"
    n = reductions(config, reshard, m)
    reduced = n * sum((s.shards - 1) * FP32 * unit.held for unit in s.units)
    often = "once" if n == 1 else f"{n} x"
    return [
        Term("weights", "all-gather", sum(counts.values()), sent, f"(W-1)/W {narrow} P, {times}"),
        Term("gradients", "reduce-scatter", n * len(s.units), reduced, f"(W-1)/W 4 P, {often}"),
    ]


def _optimizer(config: HyMoConfig, table: Partition, s: Shards, device_type: str) -> list[Term]:
    """Matrices to their owners and back, and the two sums over processes of what belongs to cut matrices."""
    itemsize = wire_itemsize(config, device_type)
    plan = plan_step(table, s.shards, config.optimizer, itemsize=itemsize, replicas=s.replicas)
    if not plan.matrices or s.ranks == 1:
        return []
    formula = f"{itemsize} bytes an element of NorMuon, there and back"
    sent = max(plan.sent_bytes)
    norms = 2 * (s.ranks - 1) / s.ranks * FP64 * 3 * len(plan.matrices)
    calls, cut = 1, cut_statistics(config, plan)
    if cut:
        calls, norms = 2, norms + 2 * (s.ranks - 1) / s.ranks * FP64 * cut
    return [
        Term("matrices to their owners and back", "all-to-all", 2 * len(plan.buckets), sent, formula),
        Term("norms of matrices", "all-reduce", calls, norms, "24 bytes a matrix"),
    ]


def cut_statistics(config: HyMoConfig, plan) -> int:  # type: ignore[no-untyped-def]
    """Entries of the second moments that average over a cut axis: their partial sums are added over processes."""
    from hymo.optim.update import statistic_axis

    total = 0
    for matrix in plan.matrices:
        m, n = matrix.shape
        axis = statistic_axis(config.optimizer.axis, m, n)
        if config.optimizer.normalize and matrix.layout.cuts_dimension(len(matrix.layout.shape) + axis):
            total += m if axis == -1 else n
    return total


def wire_itemsize(config: HyMoConfig, device_type: str) -> int:
    """Bytes of an element that NorMuon sends."""
    import torch

    from hymo.optim.orthogonalize import get_orthogonalizer, wire_dtype

    record = get_orthogonalizer(config.optimizer.orthogonalize, config.optimizer.ns_iterations)
    if record.form == "exact":
        return FP32
    return wire_dtype(record, _OnDevice(device_type, torch.float32)).itemsize  # type: ignore[arg-type]


class _OnDevice:
    """As much of a tensor as the rule of the wire's dtype looks at."""

    def __init__(self, device_type: str, dtype):  # type: ignore[no-untyped-def]
        from types import SimpleNamespace

        self.dtype, self.device = dtype, SimpleNamespace(type=device_type)


def _small(config: HyMoConfig, s: Shards) -> list[Term]:
    """The replicated parameters' gradients in one all-reduce; counts, verdict and metrics in three tiny ones."""
    if s.ranks == 1:
        return []
    ring = 2 * (s.ranks - 1) / s.ranks
    m = config.model
    terms, layers = 1 + m.mtp_depth, m.n_layers // m.mla_every if m.n_routed else 0
    figures = FP64 * (1 + terms + 2 * layers + layers * m.n_routed)
    verdict = FP64 * (2 + 2 * s.ranks)
    small = ring * (FP64 * terms + figures + verdict)
    replicated = ring * FP32 * (s.replicated + s.n_replicated)
    return [
        Term("gradients of replicated parameters", "all-reduce", 1, replicated, "2 (n-1)/n 4 P_replicated"),
        Term("counts, verdict, metrics", "all-reduce", 3, small, "a few kB"),
    ]
