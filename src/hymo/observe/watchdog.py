"""No silent hang: a rank that died ends the whole job within a minute, with everybody's stacks in the run folder.

A thread in each process counts up a number in the job's store and watches the next rank's. A process that is only late
(a slow disk, a long compilation, a debugger's pause in Python) still counts; one that was killed does not, and a
collective that waits for it would wait until its timeout, or for ever. Whoever notices raises an alarm in the store,
and every rank then writes its stacks to ``RUN/stacks/rank-N.txt`` and ends with exit code 1. A rank that raises an
exception sounds the alarm itself; a rank that hears it has a few seconds to end in its own way, as where all of them
raise the same. A worker whose launcher is gone ends too, so that none is left over.

The same thread writes the stacks, without ending anything, when nothing moves on for longer than ``stall_s``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from hymo.distributed.mesh import launched_by_torchrun
from hymo.distributed.reduce import is_distributed, rank, world_size
from hymo.errors import HyMoError
from hymo.training.stop import Stopped

ALARM = "alarm"
STACKS = "stacks"


class Watchdog:
    """Watches the ranks of a job between ``with`` and its end. On one process it only watches for stalls.

    Args:
        run_dir: where ``stacks/rank-N.txt`` goes; None writes them to stderr.
        interval_s: between two counts (and looks at the neighbour); by default 2, or less with little patience.
        patience_s: a neighbour whose count stands still for so long has died. With the defaults, a death ends the job
            within 30 seconds (one that was stopped by a signal, within 60: torchrun waits 30 before it kills).
        stall_s: time without a ``tick`` after which this rank's stacks are written, once a stall.
        end: how this process ends (for tests).
    """

    def __init__(
        self,
        run_dir: Path | None,
        *,
        interval_s: float | None = None,
        patience_s: float = 20.0,
        stall_s: float = 600.0,
        end: Callable[[int], Any] = os._exit,
        store: Any = None,
        who: tuple[int, int] | None = None,
    ):
        self.run_dir, self.patience_s, self.stall_s = run_dir, patience_s, stall_s
        self.interval_s = min(2.0, patience_s / 8) if interval_s is None else interval_s
        self.rank, self.size = who if who is not None else (rank(), world_size())
        self._end, self._store = end, store if store is not None else _own_connection()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._launcher = os.getppid() if launched_by_torchrun() else None
        self._ticked, self._stall_told = time.monotonic(), False
        self._count, self._seen, self._seen_at = 0, b"", time.monotonic()

    def __enter__(self) -> Watchdog:
        self._beat()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join(self.interval_s + 5)
        if self._store is None:
            return
        try:
            if error is not None and not isinstance(error, SystemExit | KeyboardInterrupt | Stopped):
                said = f"rank {self.rank} raised {type(error).__name__}: {' '.join(str(error).split())}"[:300]
                if not isinstance(error, HyMoError):  # a fault of the user: its one line says it all
                    self._append(said, "".join(traceback.format_exception(error)))
                self._sound(said)
            self._store.set(self._key(self.rank), b"ended")
        except RuntimeError:
            pass  # the store's host has ended already

    def tick(self) -> None:
        """The main thread moves on: call it at each step, at each batch of an evaluation, and before a long phase."""
        self._ticked, self._stall_told = time.monotonic(), False

    # --- the thread ---

    def _watch(self) -> None:
        while not self._done.wait(self.interval_s):
            self._look_for_stall()
            if self._launcher is not None and os.getppid() != self._launcher:
                self._finish("the launcher of this job is gone")
            if self._store is None:
                continue
            grace = 2 * self.interval_s  # the main thread may end by itself, as that of the rank that raised
            try:
                self._beat()
                reason = self._alarm()
                if reason is None:
                    reason, grace = self._look_at_neighbour(), 0.0
            except RuntimeError as error:
                reason = f"the job's store does not answer ({str(error).splitlines()[0]}): its host has ended"
            if reason and not self._done.wait(grace):
                self._finish(reason)

    def _beat(self) -> None:
        if self._store is not None:
            self._count += 1
            self._store.set(self._key(self.rank), str(self._count))

    def _alarm(self) -> str | None:
        return self._store.get(ALARM).decode() if self._store.check([ALARM]) else None

    def _look_at_neighbour(self) -> str | None:
        """Each rank watches the next one, so the work does not grow with their number."""
        other = (self.rank + 1) % self.size
        key, now = self._key(other), time.monotonic()
        seen = self._store.get(key) if self._store.check([key]) else b""
        if seen == b"ended" or seen != self._seen:
            self._seen, self._seen_at = seen, now
        silent = now - self._seen_at
        if silent < self.patience_s:
            return None
        reason = f"rank {other} has not answered for {silent:.0f} s: it died or was stopped"
        self._sound(reason)
        return reason

    def _sound(self, reason: str) -> None:
        self._store.set(ALARM, reason)

    def _finish(self, reason: str) -> None:
        where = self._write_stacks(reason)
        with contextlib.suppress(OSError, ValueError):  # whoever read it may be gone: that must not keep it from ending
            print(f"[rank {self.rank}] ending the job: {reason}; stacks in {where}", file=sys.stderr, flush=True)
        self._end(1)
        self._done.set()

    def _look_for_stall(self) -> None:
        waited = time.monotonic() - self._ticked
        if waited < self.stall_s or self._stall_told:
            return
        self._stall_told = True
        said = f"nothing has moved on for {waited:.0f} s"
        where = self._write_stacks(said)
        with contextlib.suppress(OSError, ValueError):
            print(f"[rank {self.rank}] {said}; stacks in {where}", file=sys.stderr, flush=True)

    def _write_stacks(self, reason: str) -> str:
        if self.run_dir is None:
            faulthandler.dump_traceback(all_threads=True)
            return "stderr"
        return self._append(reason, None)

    def _append(self, reason: str, text: str | None) -> str:
        """Add to this rank's file: a text, or the stacks of all threads. Returns where, in words."""
        if self.run_dir is None:
            return "stderr"
        file = self.run_dir / STACKS / f"rank-{self.rank}.txt"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with open(file, "a", encoding="utf-8") as stream:
                stream.write(f"{datetime.now().isoformat(timespec='seconds')} rank {self.rank}: {reason}\n{text or ''}")
                stream.flush()
                if text is None:
                    faulthandler.dump_traceback(stream, all_threads=True)
                stream.write("\n")
        except OSError as error:  # a full disk must not keep a job from ending
            return f"nowhere ({error})"
        return str(file)

    @staticmethod
    def _key(of: int) -> str:
        return f"beat/{of}"


def _own_connection() -> Any:
    """The job's store over a connection of its own: a main thread that waits in the store must not stop the count."""
    if not is_distributed() or world_size() == 1:
        return None
    store: Any = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore("watchdog", store.clone())
