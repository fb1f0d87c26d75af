"""What a person sees: an aligned line of numbers, a progress bar on a terminal, plain lines when piped."""

from __future__ import annotations

import math
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from hymo.distributed import reduce
from hymo.observe.units import count, duration, size


class Log:
    """Lines and progress on rank 0; the other ranks say nothing.

    On a terminal a bar stays under the lines; when piped there are only lines, so a log file reads well.
    """

    def __init__(self) -> None:
        self.main = reduce.is_main()
        # A pipe gets whole lines: rich would otherwise break them at 80 columns.
        self.console = Console(highlight=False, soft_wrap=True, file=sys.stdout)
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    @property
    def interactive(self) -> bool:
        return self.main and self.console.is_terminal

    def line(self, text: str = "") -> None:
        if self.main:
            self.console.print(text, markup=False)

    def warn(self, text: str) -> None:
        self.line(f"warning: {text}")

    def start(self, what: str, total: int, done: int = 0) -> None:
        """Begin a progress bar (on a terminal alone)."""
        self.stop()
        if self.interactive:
            self._progress = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                TextColumn("{task.fields[note]}"), console=self.console, transient=True,
            )  # fmt: skip
            self._progress.start()
            self._task = self._progress.add_task(what, total=total, completed=done, note="")

    def advance(self, done: int, note: str = "") -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, note=note)

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def step_line(row: dict[str, Any], total_steps: int, eta: float) -> str:
    """The line of one logged step: units beside the numbers, columns that stay in place."""
    width = len(str(total_steps))
    parts = [
        f"step {row['step']:>{width}}/{total_steps}",
        f"loss {_fixed(row['loss'], 4)}",
        f"norm {_fixed(row['grad_norm'], 3)}",
        f"lr {row['lr_muon']:.2e} {row['lr_adamw']:.2e}",
    ]
    if row.get("tokens_per_s"):
        parts.append(f"{count(row['tokens_per_s']):>6} tok/s")
    parts.append(f"MFU {row['mfu']:.1%}" if row.get("mfu") is not None else "MFU n/a")
    if row.get("memory_peak"):
        parts.append(f"mem {size(row['memory_peak'])}")
    parts.append(f"data {row.get('data_wait', 0.0):.1%}")
    parts.append(f"ETA {duration(eta)}")
    if row.get("skipped"):
        parts.append("SKIPPED")
    return " | ".join(parts)


def _fixed(value: float | None, digits: int) -> str:
    return "nan" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"
