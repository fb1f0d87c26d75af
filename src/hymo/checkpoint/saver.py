"""Saving while training goes on: a copy of the state first, then the writing in the background.

The copy is complete before ``save`` returns, so no later step can leak into the file. The writing is ``store.save`` on
a thread of its own with a process group of its own: its messages never mix with those of a step. One save is in flight
at a time; the next one waits for it.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hymo.checkpoint import store
from hymo.checkpoint.manifest import CheckpointError
from hymo.checkpoint.store import flatten
from hymo.distributed.mesh import new_gloo_group
from hymo.distributed.reduce import local

Outcome = Path | CheckpointError


class Saver:
    """The saves of one run, in the foreground or in the background, with one way to hear how they ended.

    A save that fails (a full disk) is no reason to stop: it is an outcome that the caller reports, and the next save
    tries again. Every rank makes the same calls in the same order.

    Args:
        run_dir: the run's folder, shared by all ranks.
        asynchronous: write in the background. Holds host memory for one copy of this rank's state, from the first save
            on (pinned on a GPU's host).
        keep, keep_every, protect: retention, as in ``store.save``.
        timeout_s: how long a background write may wait for another rank before it fails.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        asynchronous: bool = False,
        keep: int | None = None,
        keep_every: int | None = None,
        protect: Iterable[int] = (),
        timeout_s: float = 1800.0,
    ):
        self.run_dir, self.asynchronous = run_dir, asynchronous
        self._retention: dict[str, Any] = {"keep": keep, "keep_every": keep_every, "protect": tuple(protect)}
        self._group = new_gloo_group(timeout_s) if asynchronous else None
        self._thread: threading.Thread | None = None
        self._outcomes: list[Outcome] = []
        self._copy: dict[str, Tensor] | None = None

    def save(self, step: int, attempt: int, state: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Begin a save (and end it, in the foreground). How it went is told by ``outcomes``.

        Waits for the one before. When it returns, ``state`` may change freely.
        """
        self.wait()
        if not self.asynchronous:
            self._write(step, attempt, state, meta)
            return
        self._copy = snapshot(state, into=self._copy)
        copied_meta = copy.deepcopy(dict(meta))
        self._thread = threading.Thread(
            target=self._write, args=(step, attempt, self._copy, copied_meta), name=f"save-{step}", daemon=True
        )
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the save in flight, at most ``timeout`` seconds; True if none is in flight any more."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def outcomes(self) -> list[Outcome]:
        """How saves ended since the last call: a folder, or the error that kept it from being written."""
        ended, self._outcomes = self._outcomes, []
        return ended

    def _write(self, step: int, attempt: int, state: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        try:
            outcome: Outcome = store.save(
                self.run_dir, step, attempt, state, meta, group=self._group, **self._retention
            )
        except CheckpointError as error:
            outcome = error
        except Exception as error:
            if not self.asynchronous:
                raise
            outcome = CheckpointError(f"step {step} could not be saved in {self.run_dir}: {error}")
        self._outcomes.append(outcome)


def snapshot(state: Mapping[str, Any], into: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """A copy of a state in the host's memory, flat; a sharded tensor's copy is sharded alike.

    Tensors that are on the CPU already are copied too: the next update would change them under the writer. ``into`` is
    the result of an earlier call whose memory is used again (pinned memory is dear to get and fast to fill).
    """
    tensors = flatten(state)
    copies = {} if into is None else into
    for key in copies.keys() - tensors.keys():
        del copies[key]
    with torch.no_grad():
        for key, tensor in tensors.items():
            if key not in copies or not _alike(copies[key], tensor):
                copies[key] = _host_memory_for(tensor)
            local(copies[key]).copy_(local(tensor), non_blocking=True)
    if any(local(tensor).is_cuda for tensor in tensors.values()):
        torch.cuda.synchronize()
    return copies


def _host_memory_for(tensor: Tensor) -> Tensor:
    """Memory of the tensor's kind on the CPU: pinned for a GPU's, wrapped alike for a sharded one."""
    piece = local(tensor)
    try:
        memory = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=piece.is_cuda and piece.numel() > 0)
    except RuntimeError:  # the host has not so much to pin: a slower copy then
        memory = torch.empty(piece.shape, dtype=piece.dtype)
    if not isinstance(tensor, DTensor):
        return memory
    wrapped: Any = tensor.detach().to("cpu", copy=True)
    wrapped._local_tensor = memory  # as DCP's own staging does; from_local would move it to the mesh's device
    return wrapped


def _alike(a: Tensor, b: Tensor) -> bool:
    return local(a).shape == local(b).shape and a.dtype == b.dtype and a.shape == b.shape
