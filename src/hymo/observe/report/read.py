"""What lies in a run folder, as a page needs it: rows, events, configuration, samples. Reads, never writes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hymo.config import HyMoConfig
from hymo.config_io import load_config, read_yaml
from hymo.errors import HyMoError

# The same names as in hymo.runs and hymo.checkpoint.branch, which load torch (a test compares them).
CONFIG, METRICS, SAMPLES, BRANCH = "config.yaml", "metrics.jsonl", "samples.jsonl", "branch.json"

Row = dict[str, Any]


@dataclass(frozen=True)
class Mark:
    """Something that happened at an update. ``kind``: skip, resume, rewind or branch."""

    step: float
    kind: str
    text: str


@dataclass
class Run:
    """One run as it stands.

    ``updates``: rows of updates that count, ascending in step. ``evaluations``: rows of evaluations, likewise.
    ``config``: the typed configuration, or None if this version cannot read it; ``settings`` is then still what the
    file says. ``unreadable``: lines of metrics.jsonl that are no row. ``inherited``: updates that are the parent's, and
    drawn with it.
    """

    name: str
    path: Path
    updates: list[Row] = field(default_factory=list)
    evaluations: list[Row] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    config: HyMoConfig | None = None
    branch: dict[str, Any] | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)
    unreadable: int = 0
    attempts: int = 0
    inherited: int = 0

    @property
    def step(self) -> int:
        """Updates done."""
        return int(self.updates[-1]["step"]) if self.updates else 0

    @property
    def total_steps(self) -> int | None:
        return self.config.scheduler.total_steps if self.config is not None else None

    def count(self, kind: str) -> int:
        return sum(mark.kind == kind for mark in self.marks)


class RowFile:
    """The rows of a growing JSONL file: each `read` takes in what was added since the last one.

    A file that was replaced or cut back (a resumed run does both) is read from its start. A last line without its end
    counts as soon as it is whole; lines that are no JSON object are counted in ``unreadable``.
    """

    def __init__(self, path: Path):
        self.path = path
        self.rows: list[Row] = []
        self.unreadable = 0
        self._offset = 0
        self._identity: tuple[int, int] | None = None

    def read(self) -> list[Row]:
        try:
            with self.path.open("rb") as file:
                about = os.fstat(file.fileno())
                if (about.st_dev, about.st_ino) != self._identity or about.st_size < self._offset:
                    self.rows, self.unreadable, self._offset = [], 0, 0
                    self._identity = (about.st_dev, about.st_ino)
                file.seek(self._offset)
                added = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise HyMoError(f"{self.path}: cannot be read ({error.strerror}); accepted: a file of a run") from None
        *whole, tail = added.split(b"\n")
        self._offset += len(added) - len(tail)
        for line in whole:
            self._take(line)
        last = _row(tail)  # a whole row whose line has no end yet
        return self.rows if last is None else [*self.rows, last]

    def _take(self, line: bytes) -> None:
        row = _row(line)
        if row is not None:
            self.rows.append(row)
        elif line.strip():
            self.unreadable += 1


def _row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


class RunReader:
    """Reads one run folder again and again."""

    def __init__(self, path: Path, name: str):
        self.path, self.name = path, name
        self._metrics, self._samples = RowFile(path / METRICS), RowFile(path / SAMPLES)

    def changed_at(self) -> tuple[tuple[int, int], ...]:
        """Equal as long as no file that the page shows has changed."""
        return tuple(_stamp(self.path / name) for name in (METRICS, SAMPLES, CONFIG, BRANCH))

    def read(self) -> Run:
        run = Run(self.name, self.path)
        _take_rows(run, self._metrics.read())
        run.unreadable += self._metrics.unreadable
        run.samples = [s for s in self._samples.read() if isinstance(s.get("text"), str)]
        if (self.path / CONFIG).is_file():
            try:
                run.settings = read_yaml(self.path / CONFIG)
                run.config = load_config(self.path / CONFIG)
            except HyMoError:  # of another version: what can be read of it is still shown
                pass
        run.branch = _branch(self.path / BRANCH)
        if run.branch is not None:
            start = ("resume", run.branch["step"], f"resumed from {run.branch.get('checkpoint')}")
            run.marks = [mark for mark in run.marks if (mark.kind, mark.step, mark.text) != start]
            text = f"branched from {Path(str(run.branch['parent'])).name} ({run.branch.get('kind', 'branch')})"
            run.marks.append(Mark(run.branch["step"], "branch", text))
        run.marks.sort(key=lambda mark: mark.step)
        return run


def read_runs(readers: Iterable[RunReader]) -> list[Run]:
    """Every run as it stands; what a branch took over from a parent that is among them is left to the parent."""
    runs = [reader.read() for reader in readers]
    folders = {str(run.path.resolve()) for run in runs}
    for run in runs:
        if run.branch is not None and run.branch["parent"] in folders:
            start = run.branch["step"]
            run.inherited = sum(row["step"] <= start for row in run.updates)
            # The row of the start stays, so that the line leaves the parent's.
            run.updates = [row for row in run.updates if row["step"] >= start]
            run.evaluations = [row for row in run.evaluations if row["step"] >= start]
            run.marks = [mark for mark in run.marks if mark.kind == "branch" or mark.step > start]
    return runs


def open_readers(paths: Iterable[str | Path]) -> list[RunReader]:
    """A reader for each run folder, once each, under names that tell them apart.

    Raises HyMoError for a path that is no run.
    """
    folders: dict[Path, Path] = {}
    for path in paths:
        folder = Path(path)
        if not folder.is_dir() or not ((folder / METRICS).is_file() or (folder / CONFIG).is_file()):
            raise HyMoError(f"{path}: no such run; accepted: the folder of a run ({CONFIG}, {METRICS})")
        folders.setdefault(folder.resolve(), folder)
    return [RunReader(path, name) for path, name in zip(folders, _names(list(folders)), strict=True)]


def _names(folders: list[Path]) -> list[str]:
    """The folders' names, with as many of their parents as tell them apart."""
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            break
    return names


def number(value: Any) -> float | None:
    """A finite number, else None: booleans, texts, nulls and NaN are none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number beyond all floats
        return None


def _take_rows(run: Run, rows: Iterable[Row]) -> None:
    """Sort rows into updates, evaluations and marks.

    Of an attempt that is there twice the last row counts; after a rewind, so does the last row of each update.
    """
    attempts: dict[tuple[bool, Any], Row] = {}
    for row in rows:
        if number(row.get("step")) is None:
            run.unreadable += 1
            continue
        attempt = number(row.get("attempt"))
        attempts[("loss" in row, ("step", row["step"]) if attempt is None else attempt)] = row
    updates: dict[float, Row] = {}
    evaluations: dict[float, Row] = {}
    done = 0.0
    for (is_attempt, _), row in attempts.items():
        step = row["step"]
        if not is_attempt:
            evaluations[step] = row
            continue
        run.attempts += 1
        if "resumed_from" in row:
            run.marks.append(Mark(step - 1, "resume", f"resumed from {row['resumed_from']}"))
        elif step <= done:
            run.marks.append(Mark(step - 1, "rewind", f"went back from update {done:.0f} to {step - 1:.0f}"))
        done = step - 1 if row.get("skipped") else step
        if row.get("skipped"):
            run.marks.append(Mark(step, "skip", f"attempt {row.get('attempt', '?')} skipped"))
        else:
            updates[step] = row
    run.updates = [updates[step] for step in sorted(updates) if step <= done]
    run.evaluations = [evaluations[step] for step in sorted(evaluations) if step <= done]


def _branch(path: Path) -> dict[str, Any] | None:
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    ok = isinstance(about, dict) and number(about.get("step")) is not None and "parent" in about
    return about if ok else None


def _stamp(path: Path) -> tuple[int, int]:
    try:
        about = path.stat()
    except OSError:
        return (0, 0)
    return about.st_mtime_ns, about.st_size


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """section.key -> value."""
    found: dict[str, Any] = {}
    for section, values in settings.items():
        if isinstance(values, Mapping):
            found |= {f"{section}.{key}": value for key, value in values.items()}
        else:
            found[str(section)] = values
    return found


def differences(runs: list[Run]) -> list[tuple[str, list[Any]]]:
    """Keys in which the configurations of several runs differ: (section.key, the value of each run)."""
    tables = [flat(run.settings) for run in runs]
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = [(key, [table.get(key, MISSING) for table in tables]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]


class _Missing:
    def __repr__(self) -> str:
        return "not set"


MISSING = _Missing()
