"""``--profile START:STOP``: a trace of some steps, in the format that Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from hymo.distributed import reduce
from hymo.errors import HyMoError


def parse_range(text: str) -> tuple[int, int]:
    """``10:13`` is updates 10, 11 and 12."""
    start, colon, stop = text.partition(":")
    if not colon or not start.isdigit() or not stop.isdigit() or not 0 < int(start) < int(stop):
        raise HyMoError(f"--profile: found {text!r}; accepted: START:STOP with 0 < START < STOP, for example 10:13")
    return int(start), int(stop)


class StepProfiler:
    """Records updates START to STOP - 1 into RUN/profile/steps-START-STOP-rankN.json."""

    def __init__(self, run_dir: Path | None, steps: tuple[int, int] | None):
        self._folder = None if run_dir is None else run_dir / "profile"
        self._steps = steps
        self._profile: profile | None = None

    @contextmanager
    def step(self, update: int) -> Iterator[None]:
        """Wrap the update that is about to be tried."""
        if self._steps is None or self._folder is None:
            yield
            return
        start, stop = self._steps
        if update == start and self._profile is None:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities, record_shapes=True)
            self._profile.start()
        yield
        if update >= stop - 1:
            self.close()

    def close(self) -> None:
        """Write what was recorded, also where the run ends before STOP."""
        if self._profile is None or self._steps is None or self._folder is None:
            return
        start, stop = self._steps
        self._profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._folder / f"steps-{start}-{stop}-rank{reduce.rank()}.json"))
        self._profile, self._steps = None, None
