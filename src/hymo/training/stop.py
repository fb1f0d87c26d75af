"""When a run must stop early: SIGTERM, SIGINT, or the clock. All ranks stop at the same step."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from hymo.distributed import reduce

IMPATIENT_S = 3.0


class Stopped(BaseException):
    """A stop was asked for while there was nothing to save yet: while a run starts, or after its last step."""


class StopRequest:
    """Turns SIGTERM and SIGINT into a flag that is read between steps, so that the run can save first.

    Outside of `between_steps` there is nothing to save, and a signal raises `Stopped` at once. A second signal after
    3 s ends the process. Signals reach the main thread only; elsewhere (a test, a notebook) only the clock counts.

    A rank that waits for another in a collective hears a signal when the collective ends: with an error, if the other
    has gone already. `heard`, the signal that came while there was nothing to save, tells it from a real error.
    """

    def __init__(self, max_hours: float | None):
        self._deadline = None if max_hours is None else time.monotonic() + max_hours * 3600
        self._signal: int | None = None
        self._first_at = 0.0
        self._before: dict[int, object] = {}
        self._training = False
        self.heard: str | None = None

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """While steps run: signals wait to be asked for by `reason`."""
        self._training = True
        try:
            yield
        finally:
            self._training = False

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signal is None:
            self._signal, self._first_at = number, now
            if not self._training:
                self.heard = signal.Signals(number).name
                raise Stopped(self.heard)
        elif now - self._first_at >= IMPATIENT_S:
            os._exit(128 + number)

    def seconds_left(self, grace_s: float) -> float | None:
        """What is left of ``grace_s`` since the first signal; None where no signal came (the clock can wait).

        The same on all ranks, the least of any (a collective): of several hosts one alone may be taken away.
        """
        own = None if self._signal is None else max(0.0, grace_s - (time.monotonic() - self._first_at))
        return min((left for left in reduce.gather_objects(own) if left is not None), default=None)

    def reason(self, clock: bool = True) -> str | None:
        """Why to stop now, the same on all ranks (one small all-reduce), or None. ``clock`` False: signals alone."""
        code = 0
        if clock and self._deadline is not None and time.monotonic() >= self._deadline:
            code = -1
        if self._signal is not None:
            code = self._signal
        if reduce.world_size() > 1:
            # Signals are positive and the clock is negative: either on any rank stops all of them. A CPU tensor goes by
            # gloo, so that asking never waits for the GPU.
            signals = reduce.max_across(torch.tensor([code, -code]))
            code = int(signals[0]) or -int(signals[1])
        if code == 0:
            return None
        return "training.max_hours" if code < 0 else signal.Signals(code).name
