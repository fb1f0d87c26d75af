"""Numbers of a run: metrics.jsonl, throughput, MFU and memory."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import torch

from hymo.observe.devices import DEVICES


def device_peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of a known CUDA device, else None."""
    known = DEVICES.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if known is None else known.peak


def jsonable(value: Any) -> Any:
    """Non-finite numbers as null, since JSON has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: jsonable(v) for key, v in value.items()}
    if isinstance(value, list):
        return [jsonable(v) for v in value]
    return value


class MetricsFile:
    """``metrics.jsonl``: one row an attempt, with the system when `write` returns. Rank 0 alone writes.

    A disk that is full ends nothing: rows wait in memory, and the next `write` that can takes them all.

    What is there of later attempts than ``attempt`` is of steps that a resumed run does again, so it is cut off (by a
    rewrite and a rename): no attempt is in the file twice, and none is missing.
    """

    def __init__(self, path: Path, attempt: int):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._cut_back(attempt)
        self._file = path.open("ab", buffering=0)
        self._waiting = b""

    def _cut_back(self, attempt: int) -> None:
        """Keep the rows up to an attempt; a last line that a killed process left without its end goes too."""
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if row.get("attempt", 0) <= attempt:
                kept.append(line + "\n")
        temporary = self.path.with_name(f".{self.path.name}.part")
        temporary.write_text("".join(kept), encoding="utf-8")
        temporary.replace(self.path)

    def write(self, row: dict[str, Any]) -> str | None:
        """Add a row. Where that cannot be, why, the first time; the row then waits for the next call."""
        waited = bool(self._waiting)
        self._waiting += (json.dumps(jsonable(row), allow_nan=False) + "\n").encode()
        problem = self._write_waiting()
        return (
            None if problem is None or waited else f"{self.path} could not be written: {problem}; rows wait for space"
        )

    def close(self) -> str | None:
        """Write what waits; what cannot be written is lost, and said."""
        problem = self._write_waiting() if self._waiting else None
        self._file.close()
        return None if problem is None else f"{self.path} lacks its last rows: {problem}"

    def _write_waiting(self) -> str | None:
        """Append all rows that wait. A part of them stays in the file, the rest goes on waiting behind it."""
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            return str(error.strerror or error)
        return None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a ``metrics.jsonl``; of attempts that a resumed run did again, only the last is kept."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows[("step" if "loss" in row else "eval", row.get("attempt", len(rows)))] = row
    return sorted(rows.values(), key=lambda row: row.get("attempt", 0))


def has_evaluation(path: Path, attempt: int) -> bool:
    """Whether a ``metrics.jsonl`` has the evaluation that was made after an attempt."""
    if not path.exists():
        return False
    return any("loss" not in row and row.get("attempt") == attempt for row in read_metrics(path))


class Throughput:
    """Tokens a second and the share of time spent waiting for data, since the last `read`."""

    def __init__(self) -> None:
        self.tokens = 0
        self.data_wait = 0.0
        self._since = self._before = time.perf_counter()
        self._last = 0.0

    def add(self, tokens: int, data_wait: float) -> None:
        """Count an attempt that has just ended."""
        now = time.perf_counter()
        self.tokens += tokens
        self.data_wait += data_wait
        self._last, self._before = tokens / max(now - self._before, 1e-9), now

    def last(self) -> float:
        """Tokens a second of the last attempt alone."""
        return self._last

    def pause(self, seconds: float) -> None:
        """Leave out time spent evaluating or saving."""
        self._since += seconds
        self._before += seconds

    def read(self) -> tuple[float, float]:
        """(tokens a second, share of the time that waited for data); starts anew."""
        elapsed = max(time.perf_counter() - self._since, 1e-9)
        speed, wait = self.tokens / elapsed, self.data_wait / elapsed
        self.tokens, self.data_wait, self._since = 0, 0.0, time.perf_counter()
        return speed, wait


def memory_bytes(device: torch.device) -> dict[str, int]:
    """Bytes of a CUDA device allocated and reserved, now and at most; the process's peak resident size on a CPU."""
    if device.type == "cuda":
        return {
            "memory_allocated": torch.cuda.memory_allocated(device),
            "memory_reserved": torch.cuda.memory_reserved(device),
            "memory_peak": torch.cuda.max_memory_allocated(device),
            "memory_peak_reserved": torch.cuda.max_memory_reserved(device),
        }
    try:
        import resource
    except ImportError:  # Windows
        return {}
    import sys

    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB elsewhere
    return {"memory_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
