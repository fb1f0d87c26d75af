"""The learning-rate schedule: linear warm-up, a stable plateau, a decay (WSD), in whole updates.

Everything is an integer count of updates: N total, W warm-up, D decay, S = N - W - D stable. ``factor(u)`` is a pure
function of the update u = 1..N that both optimizers' peak rates are multiplied by, so a resumed run needs one integer,
and a longer run (``extend_phases``) or a decay from the middle (``branch_phases``) repeats the old factors bit for bit.

WSD: Hu et al., MiniCPM, arXiv 2404.06395; the ``one_minus_sqrt`` shape: Haegele et al., arXiv 2405.18392.
This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, NamedTuple, NewType, Protocol

Step = NewType("Step", int)
"""A count of updates done (never of micro-batches or attempts)."""

DECAY_KINDS = ("linear", "cosine", "sqrt", "one_minus_sqrt")


class Phases(NamedTuple):
    """Lengths of the three phases, in updates: W warm-up, S stable, D decay."""

    W: int
    S: int
    D: int

    @property
    def total(self) -> int:
        """N, the number of updates of the run."""
        return self.W + self.S + self.D

    @property
    def decay_start(self) -> int:
        """N - D: the last update at the peak rate, and the last one that a branch or an extension may start from."""
        return self.W + self.S


class ScheduleSettings(Protocol):
    """What the scheduler reads of a config (``SchedulerConfig`` once its step counts are resolved)."""

    @property
    def total_steps(self) -> int | None: ...
    @property
    def warmup_steps(self) -> int | None: ...
    @property
    def decay_steps(self) -> int | None: ...
    @property
    def min_lr_ratio(self) -> float: ...
    @property
    def decay(self) -> str: ...


def resolve_phases(
    total_steps: int,
    warmup_frac: float | str = 0.02,
    stable_frac: float | str | None = None,
    decay_frac: float | str = 0.15,
    warmup_steps: int | None = None,
    decay_steps: int | None = None,
) -> Phases:
    """Turn fractions of a run into whole updates.

    W = floor(N * warmup_frac) and D = floor(N * decay_frac), computed in exact decimals (0.15 of 57,220 is 8583, never
    8582.999); ``warmup_steps`` and ``decay_steps``, where given, replace their fraction. The stable phase is always the
    rest, so the three add up to N. ``stable_frac`` is only checked: given, the three fractions must sum to exactly 1.

    Raises ValueError with the key, what was found and what is accepted.
    """
    _check_count("total_steps", total_steps, least=1)
    warmup, decay = _fraction("warmup_frac", warmup_frac), _fraction("decay_frac", decay_frac)
    if stable_frac is not None:
        total = warmup + _fraction("stable_frac", stable_frac) + decay
        if total != 1:
            raise ValueError(
                f"warmup_frac + stable_frac + decay_frac: found {warmup_frac} + {stable_frac} + {decay_frac} = {total}"
                ", accepted: a sum of exactly 1 (or leave stable_frac out, it is then the rest)"
            )
    W = math.floor(total_steps * warmup) if warmup_steps is None else _check_count("warmup_steps", warmup_steps)
    D = math.floor(total_steps * decay) if decay_steps is None else _check_count("decay_steps", decay_steps)
    if total_steps < W + D:
        raise ValueError(
            f"warmup_steps + decay_steps: found {W} + {D} = {W + D}, accepted: at most total_steps = {total_steps}"
        )
    return Phases(W, total_steps - W - D, D)


def steps_for_tokens(total_tokens: int, tokens_per_step: int) -> int:
    """Whole updates in a token budget: floor(total_tokens / tokens_per_step), at least 1 or ValueError."""
    steps = int(total_tokens) // int(tokens_per_step)
    if steps < 1:
        raise ValueError(f"total_tokens: found {total_tokens}, accepted: at least one step of {tokens_per_step} tokens")
    return steps


def eligible(phases: Phases, step: int) -> bool:
    """Whether a branch or an extension may start at update ``step``: warm-up done, decay not begun."""
    return phases.W <= step <= phases.decay_start


def branch_phases(phases: Phases, at: int, decay_steps: int) -> Phases:
    """The schedule of a run that leaves ``phases`` at update ``at`` and decays over the next ``decay_steps``."""
    _check_start(phases, at)
    _check_count("decay_steps", decay_steps, least=1)
    return Phases(phases.W, at - phases.W, decay_steps)


def extend_phases(
    phases: Phases, total_steps: int, decay_frac: float | str = 0.15, decay_steps: int | None = None
) -> Phases:
    """A longer run with the warm-up it began with: W kept, D = floor(total * decay_frac) or ``decay_steps``.

    Refused if the new decay would begin before the old one did, since factors already used would then change.
    """
    _check_count("total_steps", total_steps, least=1)
    D = math.floor(total_steps * _fraction("decay_frac", decay_frac)) if decay_steps is None else decay_steps
    _check_count("decay_steps", D)
    if total_steps - D < phases.decay_start:
        raise ValueError(
            f"total_steps: found {total_steps} with a decay of {D}, which would begin at update {total_steps - D}; "
            f"accepted: a total whose decay begins at update {phases.decay_start} or later (there the old decay began)"
        )
    return Phases(phases.W, total_steps - D - phases.W, D)


class JointWSDScheduler:
    """One factor for both optimizers' rates, by the number of the update.

    ``factor(u) = u / W`` up to W; 1 up to N - D; then ``min + (1 - min) * f((u - (N - D)) / D)``. So factor(W) = 1 and
    (if D > 0) factor(N) = min, exactly; factor(0) = 0, or 1 without warm-up; beyond N it stays at min.
    The trainer asks for ``get_factor(step + 1)``: the update about to be done, not the ones done.

    Args:
        config: anything with ``total_steps, warmup_steps, decay_steps, min_lr_ratio, decay`` (resolved integers).
    """

    def __init__(self, config: ScheduleSettings):
        self.total_steps = _check_count("total_steps", config.total_steps, least=1)
        self.phases = resolve_phases(
            self.total_steps,
            warmup_steps=_check_count("warmup_steps", config.warmup_steps),
            decay_steps=_check_count("decay_steps", config.decay_steps),
        )
        self.warmup_steps, self.stable_steps, self.decay_steps = self.phases
        self.min_lr_ratio = float(config.min_lr_ratio)
        self.decay_kind = str(config.decay)
        if not 0.0 <= self.min_lr_ratio <= 1.0:
            raise ValueError(f"min_lr_ratio: found {config.min_lr_ratio}, accepted: 0 to 1")
        if self.decay_kind not in DECAY_KINDS:
            raise ValueError(f"decay: found {config.decay!r}, accepted: {', '.join(DECAY_KINDS)}")

    def get_factor(self, step: int) -> float:
        """The factor of update ``step`` (1..N); pure: no state is read but the settings, none is written."""
        if step < 0:
            raise ValueError(f"step: found {step}, accepted: 0 or more")
        if step > self.total_steps:
            return self.min_lr_ratio
        if step < self.warmup_steps:
            return step / self.warmup_steps
        since_decay_start = step - self.phases.decay_start
        if since_decay_start <= 0:
            return 1.0
        shape = self._decay_factor(since_decay_start / self.decay_steps, self.decay_kind)
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * shape

    @staticmethod
    def _decay_factor(progress: float, kind: str) -> float:
        """f(p) for p in [0, 1]: 1 at 0 and 0 at 1 exactly, for each of the four kinds."""
        if not 0.0 <= progress <= 1.0:
            raise ValueError(f"progress: found {progress}, accepted: 0 to 1")
        if kind == "linear":
            return 1.0 - progress
        if kind == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        if kind == "sqrt":
            return math.sqrt(1.0 - progress)
        if kind == "one_minus_sqrt":
            return 1.0 - math.sqrt(progress)
        raise ValueError(f"decay: found {kind!r}, accepted: {', '.join(DECAY_KINDS)}")

    def state_dict(self) -> dict[str, Any]:
        """The settings (there is nothing else: the position is the run's step). Plain numbers and a string."""
        return {
            "total_steps": self.total_steps,
            "warmup_steps": self.warmup_steps,
            "stable_steps": self.stable_steps,
            "decay_steps": self.decay_steps,
            "min_lr_ratio": self.min_lr_ratio,
            "decay": self.decay_kind,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that ``state`` is the schedule that this object already has.

        A schedule that changed under a running job would make rates jump (or rise again), so every difference is
        refused with old and new; a longer run is ``extend``, a decay from the middle is ``branch``.
        """
        mine = self.state_dict()
        changed = [f"{key}: {state.get(key)!r} -> {mine[key]!r}" for key in mine if state.get(key) != mine[key]]
        if changed:
            raise ValueError(
                "the schedule differs from the one that was saved (" + "; ".join(changed) + "); "
                "accepted: the same one, or a new run by `hymo branch --decay` or `hymo branch --extend`"
            )

    def landmarks(self) -> list[tuple[int, str]]:
        """Updates worth a row in a table, ascending, each with what happens there."""
        N, start = self.total_steps, self.phases.decay_start
        rows = {1: "first update", max(self.warmup_steps, 1): "peak reached", max(start, 1): "last at the peak"}
        if self.decay_steps:
            rows[min(start + 1, N)] = "decay begins"
            rows[start + max(self.decay_steps // 2, 1)] = "half of the decay"
        rows[N] = "last update"
        return sorted(rows.items())

    def picture(self, width: int = 60, height: int = 8) -> str:
        """The factors drawn with characters: ``height`` lines of ``width`` columns over updates 1..N, and an axis."""
        columns = [self.get_factor(1 + round(i * (self.total_steps - 1) / max(width - 1, 1))) for i in range(width)]
        lines = []
        for level in range(height, 0, -1):
            low, middle = (level - 1) / height, (level - 0.5) / height
            row = "".join("█" if f >= middle else "▄" if f > low else " " for f in columns)
            label = "1.00" if level == height else f"{self.min_lr_ratio:.2f}" if level == 1 else ""
            lines.append(f"{label:>5} ┤{row.rstrip()}")
        lines.append(f"{'':>5} └{'─' * width}")
        lines.append(f"{'':>6} 1{self.total_steps:>{max(width - 1, 1)},}")
        return "\n".join(lines)


def _fraction(name: str, value: float | str) -> Decimal:
    """A fraction as the decimal that was written, not as the binary float beside it."""
    try:
        fraction = Decimal(str(value))
    except ArithmeticError:
        raise ValueError(f"{name}: found {value!r}, accepted: a number from 0 to 1") from None
    if not (fraction.is_finite() and 0 <= fraction <= 1):
        raise ValueError(f"{name}: found {value}, accepted: 0 to 1")
    return fraction


def _check_count(name: str, value: Any, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: found {value!r}, accepted: a whole number of updates, {least} or more")
    return value


def _check_start(phases: Phases, at: int) -> None:
    if not eligible(phases, at):
        raise ValueError(
            f"step {at} cannot be branched from: warm-up ends at update {phases.W} and decay begins after "
            f"{phases.decay_start}; accepted: {phases.W} to {phases.decay_start}"
        )
