"""Which charts there are, and the numbers behind them, thinned to what a screen can show."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hymo.observe.report.read import Row, Run, number
from hymo.training.scheduler import JointWSDScheduler

BUCKETS = 1500
"""Longer series than twice this are shown as so many buckets: the mean, within the least and the largest value."""

HEAT_BUCKETS = 96
"""Moments that the map of expert load keeps of a run."""

EXPERT_LOAD = "expert_load"
"""The row's key of assignments by layer and expert: a list of lists."""


TokensAt = Callable[[float], int | None]
"""Update -> tokens read until then."""


@dataclass(frozen=True)
class Chart:
    """``series``: regular expressions of the names in a row. ``unit``: how JavaScript and the picture format a value.

    ``kind``: line (connected), dots (evaluations), rate (with the schedule's whole curve behind it).
    """

    id: str
    section: str
    title: str
    series: tuple[str, ...]
    about: str = ""
    unit: str = "number"
    kind: str = "line"
    log: bool = False
    smooth: bool = False
    wide: bool = False


PARTS = "(?:embedding|head|mtp|experts|attention|gdn|other)"  # as in hymo.training.probe

CHARTS = (
    Chart("loss", "Learning", "Training loss", ("loss",), "Cross entropy of the next token, nats a token", smooth=True,
          wide=True),
    Chart("val_loss", "Learning", "Validation loss", (r".+_loss@eval",), "Nats a token", kind="dots"),
    Chart("val_bpb", "Learning", "Validation bits per byte", (r".+_bpb@eval",), "Comparable between tokenizers",
          kind="dots"),
    Chart("total_loss", "Learning", "Total loss", ("total_loss",), "With the further predictions, weighed, and z-loss",
          smooth=True),
    Chart("mtp", "Learning", "Further predictions", (r"mtp_\d+",), "Cross entropy of tokens beyond the next, nats",
          smooth=True),
    Chart("lr_muon", "Rates", "Rate of the matrices", ("lr_muon",), "Muon family; the faint line is the schedule",
          "rate", kind="rate"),
    Chart("lr_adamw", "Rates", "Rate of the rest", ("lr_adamw",), "AdamW; the faint line is the schedule", "rate",
          kind="rate"),
    Chart("grad_norm", "Gradients and updates", "Gradient norm", ("grad_norm",), "Before clipping", log=True,
          smooth=True),
    Chart("grad_algorithms", "Gradients and updates", "Gradient norm by algorithm", (rf"grad_norm_(?!{PARTS}$).+",),
          log=True, smooth=True),
    Chart("grad_parts", "Gradients and updates", "Gradient norm by part", (rf"grad_norm_{PARTS}",), log=True,
          smooth=True),
    Chart("update_parts", "Gradients and updates", "Update size by part", (r"update_rms_.+",),
          "Root mean square of what an update changes in the weights", log=True, smooth=True),
    Chart("logits", "Gradients and updates", "Largest attention logit", (r"attention_logit_max.*",), smooth=True),
    Chart("speed", "Speed and memory", "Throughput", ("tokens_per_s",), "Tokens a second, all ranks", "count",
          smooth=True),
    Chart("mfu", "Speed and memory", "Model FLOPs utilisation", ("mfu",), "Of the dense bf16 peak", "percent"),
    Chart("memory", "Speed and memory", "Memory", (r"memory_.+",), "Device, or the process on a CPU; rank 0", "bytes"),
    Chart("data_wait", "Speed and memory", "Waiting for data", ("data_wait",), "Share of the time", "percent"),
    Chart("router_entropy", "Experts", "Router entropy", (r"router_entropy.*",), "Nats, mean over layers", smooth=True),
    Chart("expert_max", "Experts", "Fullest expert", ("expert_load_max",), "Load over the mean, in the worst layer",
          smooth=True),
    Chart("dropped", "Experts", "Dropped assignments", ("dropped_share",), "Over capacity, share of all", "percent"),
)  # fmt: skip

NOT_CHARTED = {"step", "attempt", "tokens", "skipped", "skipped_share"}


def page_data(runs: Sequence[Run]) -> dict[str, Any]:
    """All numbers of the page as JSON values; charts without a number in any run are left out."""
    columns = [_columns(run) for run in runs]
    names = list(dict.fromkeys(name for table in columns for name in table))
    charts = []
    for chart in [*CHARTS, *_further(names)]:
        found = [n for n in names if any(re.fullmatch(pattern, n) for pattern in chart.series)]
        if found:
            charts.append(asdict(chart) | {"series": found})
    shown = {name for chart in charts for name in chart["series"]}
    return {
        "charts": charts,
        "runs": [
            _run(run, {k: v for k, v in table.items() if k in shown}) for run, table in zip(runs, columns, strict=True)
        ],
    }


def _further(names: Iterable[str]) -> list[Chart]:
    """A small chart for every number that a row has and no chart knows."""
    known = [re.compile(pattern) for chart in CHARTS for pattern in chart.series]
    unknown = [n for n in names if not n.endswith("@eval") and not any(pattern.fullmatch(n) for pattern in known)]
    return [Chart(f"further-{i}", "Further numbers", name, (re.escape(name),)) for i, name in enumerate(unknown[:24])]


def _columns(run: Run) -> dict[str, list[Row]]:
    """Which rows have which number. Names from evaluations end in ``@eval``."""
    found: dict[str, list[Row]] = {}
    for rows, end in ((run.updates, ""), (run.evaluations, "@eval")):
        for name in dict.fromkeys(key for row in rows for key in row if key not in NOT_CHARTED):
            having = [row for row in rows if number(row.get(name)) is not None]
            if having:
                # A number that most rows have shares the x values of all rows, with gaps.
                found[name + end] = rows if 2 * len(having) > len(rows) else having
    return found


def _run(run: Run, columns: dict[str, list[Row]]) -> dict[str, Any]:
    axes: dict[tuple[float, ...], int] = {}
    tables: list[dict[str, Sequence[float | None]]] = []
    tokens_at = _tokens(run.updates)
    series = {}
    for name, rows in columns.items():
        steps = tuple(float(row["step"]) for row in rows)
        if steps not in axes:
            axes[steps] = len(tables)
            shown = _ends(steps)
            tables.append({"step": shown, "tokens": [tokens_at(step) for step in shown]})
        values = [number(row.get(name.removesuffix("@eval"))) for row in rows]
        series[name] = {"axis": axes[steps]} | _thin(values)
    return {
        "name": run.name,
        "step": run.step,
        "total": run.total_steps,
        "axes": tables,
        "series": series,
        "schedule": _schedule(run, tokens_at),
        "marks": [asdict(m) | {"tokens": tokens_at(m.step)} for m in run.marks],
        "experts": _experts(run, tokens_at),
    }


def is_thinned(n: int) -> bool:
    """Whether so many values are more than the page keeps."""
    return n > 2 * BUCKETS


def _edges(n: int) -> np.ndarray:
    return np.linspace(0, n, BUCKETS + 1).astype(int)[:-1]


def _thin(values: Sequence[float | None]) -> dict[str, list[float | None]]:
    """Values as they are, or by bucket: mean ``y``, least ``lo`` and largest ``hi``."""
    if not is_thinned(len(values)):
        return {"y": _short(values)}
    array = np.array([np.nan if v is None else v for v in values])
    edges = _edges(len(values))
    there = np.add.reduceat(np.isfinite(array).astype(float), edges)
    with np.errstate(invalid="ignore"):
        mean = np.add.reduceat(np.nan_to_num(array), edges) / there
    low, high = np.fmin.reduceat(array, edges), np.fmax.reduceat(array, edges)
    return {"y": _short(mean), "lo": _short(low), "hi": _short(high)}


def _ends(steps: Sequence[float]) -> list[float]:
    """Steps as they are, or of each bucket the last."""
    if is_thinned(len(steps)):
        steps = [steps[i] for i in (*(_edges(len(steps))[1:] - 1), len(steps) - 1)]
    return [_integer(step) for step in steps]


def _short(values: Iterable[float | None]) -> list[float | None]:
    """Six digits are more than a screen shows, and half of the bytes."""
    return [None if v is None or not np.isfinite(v) else _integer(float(f"{v:.6g}")) for v in values]


def _integer(value: float) -> float | int:
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


def _tokens(updates: list[Row]) -> TokensAt:
    """step -> tokens read until then, by the rows (None where they do not say)."""
    pairs = [(row["step"], number(row.get("tokens"))) for row in updates]
    known = [(step, tokens) for step, tokens in pairs if tokens is not None]
    if not known:
        return lambda step: None
    steps, tokens = (np.array([0, *column], dtype=float) for column in zip(*known, strict=True))
    a_step = tokens[-1] / max(steps[-1], 1)

    def at(step: float) -> int:
        if step > steps[-1]:  # the part of the schedule that is yet to come
            return round(tokens[-1] + (step - steps[-1]) * a_step)
        return round(float(np.interp(step, steps, tokens)))

    return at


def _schedule(run: Run, tokens_at: TokensAt) -> dict[str, Any] | None:
    """The schedule's whole curve at 300 updates and at its corners."""
    if run.config is None or run.total_steps is None:
        return None
    try:
        schedule = JointWSDScheduler(run.config.scheduler)
    except ValueError:
        return None
    wanted = {round(u) for u in np.linspace(1, schedule.total_steps, 300)} | {u for u, _ in schedule.landmarks()}
    steps = sorted(wanted)
    factors = [schedule.get_factor(step) for step in steps]
    optimizer = run.config.optimizer
    curves = {"lr_muon": optimizer.muon_lr, "lr_adamw": optimizer.adamw_lr}
    tokens = [tokens_at(step) for step in steps]
    return {"step": steps, "tokens": tokens} | {k: _short(f * lr for f in factors) for k, lr in curves.items()}


def _experts(run: Run, tokens_at: TokensAt) -> dict[str, Any] | None:
    """Load of every expert over the mean of its layer, [moment][layer][expert], averaged over spans of updates."""
    found = [(row["step"], load) for row in run.updates if (load := _load(row)) is not None]
    found = [(step, load) for step, load in found if load.shape == found[-1][1].shape]
    if not found:
        return None
    spans = np.array_split(np.arange(len(found)), min(HEAT_BUCKETS, len(found)))
    maps = [np.mean([found[i][1] for i in span], axis=0) for span in spans]
    shares = [load / np.maximum(load.mean(1, keepdims=True), 1e-12) for load in maps]
    steps = [found[span[-1]][0] for span in spans]
    return {
        "step": steps,
        "tokens": [tokens_at(step) for step in steps],
        "layers": _layer_names(run, maps[0].shape[0]),
        "load": [[[round(float(x), 3) for x in layer] for layer in share] for share in shares],
    }


def _load(row: Row) -> np.ndarray | None:
    try:
        load = np.array(row.get(EXPERT_LOAD), dtype=float)
    except (TypeError, ValueError, OverflowError):
        return None
    return load if load.ndim == 2 and load.size and np.isfinite(load).all() else None


def _layer_names(run: Run, n: int) -> list[str]:
    """The trunk's number of each layer with experts, where the configuration tells."""
    if run.config is not None:
        model = run.config.model
        with_experts = [i for i in range(model.n_layers) if (i + 1) % model.mla_every == 0]
        if len(with_experts) == n:
            return [f"layer {i}" for i in with_experts]
    return [f"MoE {i}" for i in range(n)]
