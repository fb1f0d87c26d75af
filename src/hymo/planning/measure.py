"""Memory as a run takes it, term by term, in the terms of `planning.memory`."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hymo.distributed.reduce import local
from hymo.observe.metrics import memory_bytes
from hymo.training.trainer import Trainer


class MemoryProbe:
    """Watches the steps of a trainer from its construction on; ``read()`` after a step gives that step's figures.

    Parameters, gradients and optimizer state are the sizes of the tensors themselves. The rest is the CUDA allocator's
    peak over what these three take: in forward and backward, and in the optimizer's step. On a CPU there is no such
    count: ``peak`` is the largest resident size of the process so far, with everything that it has loaded.
    """

    def __init__(self, trainer: Trainer):
        self.trainer, self.cuda = trainer, trainer.device.type == "cuda"
        self._states = sum(_n_bytes(values.values()) for values in trainer.optimizers.state.values())
        self._gradients = self._peak = self._seconds = 0.0
        self._events: list[Any] = []
        self._inner = trainer.optimizers.step
        trainer.optimizers.step = self._step  # type: ignore[method-assign]

    def close(self) -> None:
        del self.trainer.optimizers.step

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        self._gradients = _n_bytes(p.grad for p in self.trainer.model.parameters() if p.grad is not None)
        if not self.cuda:
            began = time.perf_counter()
            result = self._inner(*args, **kwargs)
            self._seconds = time.perf_counter() - began
            return result
        self._peak = torch.cuda.max_memory_allocated()  # the host's count: no wait for the device
        torch.cuda.reset_peak_memory_stats()
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._events[0].record()
        result = self._inner(*args, **kwargs)
        self._events[1].record()
        return result

    def optimizer_s(self) -> float:
        """Seconds of the last step's optimizer, on the device; call after the device is done."""
        if self._events:
            return float(self._events[0].elapsed_time(self._events[1])) * 1e-3
        return self._seconds

    def read(self) -> dict[str, float]:
        """Bytes by term of the step that has just ended, and the allocator's peak starts anew."""
        found = {
            "parameters": float(_n_bytes(self.trainer.model.parameters())),
            "gradients": self._gradients,
            "optimizer state": float(self._states),
        }
        if not self.cuda:
            return found | {"peak": float(memory_bytes(self.trainer.device).get("memory_peak", 0))}
        held, later = sum(found.values()), float(torch.cuda.max_memory_allocated())
        found |= {"forward and backward": self._peak - held, "optimizer step": later - held}
        torch.cuda.reset_peak_memory_stats()
        return found | {"peak": max(self._peak, later), "reserved": float(torch.cuda.memory_reserved())}


def _n_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local(t).numel() * local(t).element_size() for t in tensors)
