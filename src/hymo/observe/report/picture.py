"""``hymo report --png FILE``: the main charts as one picture for a paper, drawn by matplotlib (extra ``report``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hymo.errors import HyMoError
from hymo.observe.report.charts import page_data
from hymo.observe.report.read import Run
from hymo.observe.units import count, size

SHOWN = ("loss", "val_bpb", "lr_muon", "grad_norm", "speed", "experts", "val_loss", "memory", "total_loss")
MOST = 6
SMOOTHING, FEW = 0.8, 60  # of charts that jitter and have more than a few points
# Those of the page in the light.
COLOURS = ("#0072b2", "#d55e00", "#225522", "#9977ff", "#663344", "#bb8888", "#880077", "#4422aa")
DASHES = ("-", "--", ":", "-.")


def draw(runs: Sequence[Run], path: Path) -> None:
    """Write the picture; the ending of ``path`` says whether as PNG, PDF or SVG.

    Raises HyMoError without matplotlib, and where there is nothing to draw.
    """
    try:
        import matplotlib
    except ImportError:
        raise HyMoError("--png: found no matplotlib; accepted: pip install 'hymo[report]'") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    data = page_data(runs)
    charts = {chart["id"]: chart for chart in data["charts"]}
    wanted = [name for name in SHOWN if name in charts or (name == "experts" and data["runs"][0]["experts"])][:MOST]
    if not wanted:
        raise HyMoError(f"--png: found no rows in {', '.join(run.name for run in runs)}; accepted: a run with some")
    columns = min(3, len(wanted))
    lines = -(-len(wanted) // columns)
    look: Any = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "pdf.fonttype": 42}
    with pyplot.rc_context(look):
        figure, axes = pyplot.subplots(
            lines, columns, figsize=(3.1 * columns, 2.3 * lines), squeeze=False, layout="constrained"
        )
        for place, name in zip(axes.flat, wanted, strict=False):
            if name == "experts":
                _heat(figure, place, data["runs"][0])
            else:
                _chart(place, charts[name], data["runs"])
        for place in axes.flat[len(wanted) :]:
            place.remove()
        handles, labels = axes.flat[0].get_legend_handles_labels()
        if len(runs) > 1:
            figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(runs)), frameon=False)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=200)
        except OSError as error:
            raise HyMoError(f"--png: {path} cannot be written ({error.strerror}); accepted: another place") from None
        finally:
            pyplot.close(figure)


def _chart(axes: Any, chart: dict[str, Any], runs: Sequence[dict[str, Any]]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    longest = max(len(run["series"][name]["y"]) for run in runs for name in chart["series"] if name in run["series"])
    smooth = chart["smooth"] and longest > FEW
    for r, run in enumerate(runs):
        for s, name in enumerate(chart["series"]):
            if name in run["series"]:
                _line(
                    axes,
                    chart,
                    run,
                    name,
                    colour=COLOURS[(r if len(runs) > 1 else s) % len(COLOURS)],
                    dash=s,
                    smooth=smooth,
                )
        for mark in run["marks"]:
            if mark["kind"] == "skip":
                axes.plot(mark["step"], 1.0, "v", color="#b3400a", ms=3, transform=axes.get_xaxis_transform())
            else:
                axes.axvline(mark["step"], color="#5b606b", lw=0.7, ls="-" if mark["kind"] == "branch" else "--")
    axes.set_title(chart["title"], loc="left", fontsize=9)
    axes.set_xlabel("update")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value >= 10_000 else f"{value:g}")
    if chart["log"]:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
    formats = {"bytes": size, "count": count, "percent": lambda v: f"{v:.0%}"}
    if chart["unit"] in formats:
        axes.yaxis.set_major_formatter(lambda value, _: formats[chart["unit"]](value))
    if len(chart["series"]) > 1:
        axes.legend(frameon=False, fontsize=7)


def _line(
    axes: Any, chart: dict[str, Any], run: dict[str, Any], name: str, colour: str, dash: int, smooth: bool
) -> None:
    series = run["series"][name]
    x = run["axes"][series["axis"]]["step"]
    y = _array(series["y"])
    style = DASHES[dash % len(DASHES)]
    label = run["name"] if len(chart["series"]) == 1 else name.removesuffix("@eval")
    if chart["kind"] == "rate" and run["schedule"]:
        axes.plot(run["schedule"]["step"], run["schedule"][name], color=colour, lw=0.8, alpha=0.5)
    if "lo" in series:
        axes.fill_between(x, _array(series["lo"]), _array(series["hi"]), color=colour, alpha=0.2, lw=0)
    if smooth:
        if "lo" not in series:
            axes.plot(x, y, color=colour, lw=0.6, alpha=0.3)
        y = _smoothed(y)
    marker = "o" if chart["kind"] == "dots" or len(x) == 1 else None
    axes.plot(x, y, style, color=colour, lw=1.2, marker=marker, ms=2.5, label=label)


def _array(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if v is None else v for v in values], dtype=float)


def _smoothed(y: np.ndarray) -> np.ndarray:
    """As the page does: all values, weighed by SMOOTHING^distance to both sides."""
    kernel = SMOOTHING ** np.abs(np.arange(-FEW, FEW + 1))
    there = np.isfinite(y)
    sums, weights = (
        np.convolve(values, kernel)[FEW : FEW + len(y)] for values in (np.where(there, y, 0.0), there.astype(float))
    )
    return np.where(there, sums / np.maximum(weights, 1e-12), np.nan)


def _heat(figure: Any, axes: Any, run: dict[str, Any]) -> None:
    from matplotlib.colors import LogNorm

    experts = run["experts"]
    image = axes.imshow(experts["load"][-1], aspect="auto", cmap="PuOr_r", norm=LogNorm(0.5, 2.0))
    axes.set_title(f"Expert load, update {experts['step'][-1]:,.0f}", loc="left", fontsize=9)
    axes.set_yticks(range(len(experts["layers"])), experts["layers"])
    axes.set_xlabel("expert")
    figure.colorbar(image, ax=axes, ticks=[0.5, 1, 2], format="%g").minorticks_off()
