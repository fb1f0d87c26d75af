"""Loss curves of several runs laid over each other, by matplotlib (extra `report`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

COLOURS = ("#0072b2", "#d55e00", "#225522", "#9977ff", "#663344", "#bb8888")
DASHES = ("-", (0, (4, 2)), ":", "-.")


def largest_difference(losses: Mapping[str, Sequence[float]]) -> float:
    """Of any run to the first one, over the steps that both made."""
    first, *others = losses.values()
    return max((abs(a - b) for other in others for a, b in zip(first, other, strict=False)), default=0.0)


def draw(losses: Mapping[str, Sequence[float]], path: Path) -> float:
    """Write the picture of losses by run, one number a step; returns ``largest_difference``."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    first, apart = next(iter(losses.values())), largest_difference(losses)
    look = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    with pyplot.rc_context(look):
        figure, (above, below) = pyplot.subplots(
            2, 1, figsize=(7, 5), sharex=True, height_ratios=(3, 1), layout="constrained", facecolor="white"
        )
        for i, (name, values) in enumerate(losses.items()):
            style = {"color": COLOURS[i % len(COLOURS)], "ls": DASHES[i % len(DASHES)], "lw": 1.6}
            above.plot(range(1, len(values) + 1), values, label=name, **style)
            if i:
                steps = [b - a for a, b in zip(first, values, strict=False)]
                below.plot(range(1, len(steps) + 1), steps, **style)
        above.set_ylabel("loss, nats a token")
        above.legend(frameon=False)
        below.axhline(0, color="#5b606b", lw=0.7)
        below.set_ylabel("difference")
        below.set_xlabel("update")
        below.set_title(f"to {next(iter(losses))}: at most {apart:.4f}", loc="left", fontsize=9)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
        pyplot.close(figure)
    return apart
