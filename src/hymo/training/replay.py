"""Micro-batches as a CUDA graph: recorded once in an attempt and replayed, so that the host launches nothing between.

Small micro-batches leave the GPU waiting: launching 2,500 kernels takes the host longer than the GPU takes to run them.
The first micro-batch of an attempt runs as ever, which gathers the weights and makes the gradients' buffers, and so
does the last, which reduces the gradients; all between have the same addresses and shapes. A recording holds for its
attempt: the next one gathers the weights anew, wherever there is room.

What is recorded may neither wait for the device nor copy from the host.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import nn

from hymo.data.batch import Batch
from hymo.distributed import fsdp
from hymo.errors import HyMoError

ANOTHER_FAULT = (torch.OutOfMemoryError, NotImplementedError, RecursionError)
"""RuntimeErrors that turning the graphs off would not mend."""


class Replay:
    """Records a micro-batch's computation and repeats it on others of the same shape."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: Batch | None = None

    def record(self, model: nn.Module, batch: Batch, compute: Callable[[Batch], None]) -> None:
        """Record ``compute`` on a copy of ``batch``; it does not run.

        Raises HyMoError where something in it cannot be recorded; the gradients so far are dropped then.
        """
        self._batch = batch.clone()
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        fsdp.let_gather_streams_be(model)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                compute(self._batch)
                graph.capture_end()
            except BaseException as reason:
                with suppress(RuntimeError):  # a recording that went wrong cannot be ended without an error of its own
                    graph.capture_end()
                fsdp.drop_gradients(model)
                if not isinstance(reason, RuntimeError) or isinstance(reason, ANOTHER_FAULT):
                    raise
                why = f"a micro-batch cannot be recorded ({(str(reason).strip() or repr(reason)).splitlines()[0]})"
                raise HyMoError(f"training.cuda_graphs: found true, but {why}; accepted: false") from reason
        here.wait_stream(self._stream)
        self._graph = graph  # until here the one before it kept the pool's memory

    def __call__(self, batch: Batch) -> None:
        """What was recorded, on another batch."""
        assert self._graph is not None and self._batch is not None
        self._batch.copy_(batch)
        self._graph.replay()
