"""``hymo bench train CONFIG``: tokens a second of real training steps, and where their time goes.

The steps are the trainer's own, on real tokens with document masks. The table by part comes from the profiler: a
kernel belongs to the part whose forward launched it, and a backward kernel to the part of the forward operator that its
autograd node was made by (they share a sequence number). Where a kernel begins before the one before it on the stream
ends, the time of both is the first one's.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from hymo.config import HyMoConfig
from hymo.models.gdn import GatedDeltaNetBlock
from hymo.models.mla import MLABlock
from hymo.models.model import HyMo, LMHead
from hymo.models.mtp import MTPDepth
from hymo.observe.metrics import memory_bytes
from hymo.observe.units import count, size
from hymo.plan import part_flops
from hymo.training.garbage import long_lived_objects
from hymo.training.trainer import Trainer

PREFIX = "part: "
PROFILED = 2  # steps under the profiler
COMPILED_BLOCK = "attention and MoE"
NO_OPERATOR = "launched by no operator"  # as the optimizer launches its Triton kernels


@dataclass(frozen=True)
class TrainBench:
    """Figures of one benchmark. Times in seconds; ``parts`` is device (or CPU) time a step by part."""

    first_step_s: float
    step_s: float
    tokens_per_s: float
    mfu: float | None
    peak_memory: int
    data_wait_s: float
    loss: float
    parts: dict[str, float]
    profiled_step_s: float


def run(config: HyMoConfig, *, steps: int = 20, trace: Path | None = None) -> int:
    """Run the benchmark and print its figures."""
    result = measure(config, steps=steps, trace=trace)
    print_result(config, result)
    return 0


def measure(config: HyMoConfig, *, steps: int, trace: Path | None = None) -> TrainBench:
    """Time ``steps`` steps (the median of the last half counts), then profile two more."""
    trainer = Trainer(config)
    device = trainer.device
    times, waits, loss = [], [], float("nan")
    with long_lived_objects() as keep_objects:
        for i in range(steps):
            began = time.perf_counter()
            loss = trainer.train_step().loss
            _synchronize(device)
            times.append(time.perf_counter() - began)
            waits.append(trainer.stream().wait_s)
            if i == 0:
                keep_objects()
    late = times[len(times) // 2 :]
    step_s = statistics.median(late)
    tokens_per_s = config.tokens_per_step / step_s
    peak = memory_bytes(device).get("memory_peak", 0)
    if trainer.replay is not None:  # what a graph launches belongs to no operator
        trainer.log.line("training.cuda_graphs: the profiled steps run without it")
        trainer.replay = None
    parts, profiled = _profile(trainer, trace)
    mfu = None if trainer.peak_flops is None else tokens_per_s * trainer.flops_per_token / trainer.peak_flops
    trainer.stream().close()
    return TrainBench(times[0], step_s, tokens_per_s, mfu, peak, statistics.median(waits), loss, parts, profiled)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _profile(trainer: Trainer, trace: Path | None) -> tuple[dict[str, float], float]:
    """(seconds a step by part, wall seconds of a profiled step)."""
    activities = [ProfilerActivity.CPU]
    if trainer.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with _marked(trainer), profile(activities=activities) as recorded:
        began = time.perf_counter()
        for _ in range(PROFILED):
            trainer.train_step()
        _synchronize(trainer.device)
        wall = (time.perf_counter() - began) / PROFILED
    if trace is not None:
        recorded.export_chrome_trace(str(trace))
    events = recorded.events() or []
    return {part: t / PROFILED for part, t in time_by_part(events, trainer.device.type).items()}, wall


@contextmanager
def _marked(trainer: Trainer) -> Iterator[None]:
    """Wrap the forward of each part, and the optimizer's step, in a profiler range of its name."""
    undo: list[Callable[[], None]] = []
    for name, module in parts_of(trainer.model):
        undo.append(_wrap(module, "forward", name))
    undo.append(_wrap(trainer.optimizers, "step", "optimizer"))
    yield
    for restore in undo:
        restore()


def _wrap(owner: Any, method: str, part: str) -> Callable[[], None]:
    inner = getattr(owner, method)

    def ranged(*args: Any, **kwargs: Any) -> Any:
        with record_function(PREFIX + part):
            return inner(*args, **kwargs)

    setattr(owner, method, ranged)
    return lambda: delattr(owner, method)


def parts_of(model: HyMo) -> Iterator[tuple[str, nn.Module]]:
    """(part, module): the modules that the table tells apart."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            yield "embedding", module
        elif isinstance(module, GatedDeltaNetBlock):
            yield "GDN", module
        elif isinstance(module, MTPDepth):
            yield "MTP", module
        elif isinstance(module, LMHead):
            yield "head and losses", module
    for block in model.layers:
        if isinstance(block, MLABlock) and block.use_compile:
            yield COMPILED_BLOCK, block  # one graph; a range inside it would compile it anew
        elif isinstance(block, MLABlock):
            yield "attention", block.attn
            yield "MoE", block.ffn


def time_by_part(events: list[FunctionEvent], device_type: str) -> dict[str, float]:
    """Seconds by part; what no part launched is ``other``; kernels that no operator launched have their own row."""
    part_of_sequence: dict[int, str] = {}
    for event in events:
        part = _enclosing_part(event)
        if part is not None and event.sequence_nr >= 0 and not _is_backward(event):
            part_of_sequence.setdefault(event.sequence_nr, part)
    seconds: dict[str, float] = defaultdict(float)
    alone = _without_overlap(events) if device_type == "cuda" else {}
    for event in events:
        spent = _own_time(event, device_type, alone)
        if spent:
            seconds[_part_of(event, part_of_sequence)] += spent
    if unclaimed := sum(map(sum, alone.values())):
        seconds[NO_OPERATOR] += unclaimed * 1e-6
    return dict(seconds)


def _own_time(event: FunctionEvent, device_type: str, alone: dict[tuple[str, float], deque[float]]) -> float:
    """Seconds that this operator itself spent: its kernels on a GPU, without those of its children; else on the CPU."""
    if event.name.startswith((PREFIX, "ProfilerStep")):
        return 0.0
    if device_type != "cuda":
        return event.self_cpu_time_total * 1e-6
    if event.is_user_annotation:  # its "kernel" is the range that it draws on the GPU
        return 0.0
    times = [alone.get((kernel.name, kernel.duration)) for kernel in event.kernels]
    return sum(queue.popleft() for queue in times if queue) * 1e-6


def _without_overlap(events: list[FunctionEvent]) -> dict[tuple[str, float], deque[float]]:
    """(name, duration) of kernels -> for each of them in order the microseconds that no kernel before it had.

    Kernels of one stream may begin before the one before ends (cuBLAS launches some so on Hopper); their durations add
    up to more than the step.
    """
    found: dict[tuple[str, float], deque[float]] = defaultdict(deque)
    ends: dict[tuple[int, int], float] = defaultdict(float)
    kernels = [event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation]
    for kernel in sorted(kernels, key=lambda event: event.time_range.start):
        start, end = kernel.time_range.start, kernel.time_range.end
        stream = kernel.device_index, kernel.device_resource_id
        found[kernel.name, end - start].append(max(0.0, end - max(start, ends[stream])))
        ends[stream] = max(ends[stream], end)
    return found


def _is_backward(event: FunctionEvent) -> bool:
    node: FunctionEvent | None = event
    while node is not None:
        if node.name.startswith("autograd::engine"):
            return True
        node = node.cpu_parent
    return False


def _enclosing_part(event: FunctionEvent) -> str | None:
    node: FunctionEvent | None = event
    while node is not None:
        if node.name.startswith(PREFIX):
            return node.name[len(PREFIX) :]
        node = node.cpu_parent
    return None


def _part_of(event: FunctionEvent, part_of_sequence: dict[int, str]) -> str:
    node: FunctionEvent | None = event
    below = event
    while node is not None:
        if node.name.startswith(PREFIX):
            return node.name[len(PREFIX) :]
        if node.name.startswith("FSDP::"):
            return "gather and reduce"
        if node.name.startswith("autograd::engine"):
            # A node with hooks before it, as FSDP2 sets them, carries its number on the call inside alone
            number = node.sequence_nr if node.sequence_nr >= 0 else below.sequence_nr
            if number in part_of_sequence:
                return part_of_sequence[number]
        below, node = node, node.cpu_parent
    return "other"


def print_result(config: HyMoConfig, r: TrainBench) -> None:
    """The figures, then the table by part with each part's limit by arithmetic beside it."""
    console = Console(highlight=False, soft_wrap=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    mfu = "n/a" if r.mfu is None else f"{r.mfu:.1%}"
    console.print(f"torch {torch.__version__}, {device}")
    console.print(
        f"{r.tokens_per_s:,.0f} tokens/s ({r.step_s * 1e3:,.0f} ms a step of {count(config.tokens_per_step)} tokens) | "
        f"MFU {mfu} | peak memory {size(r.peak_memory)} | first step {r.first_step_s:.1f} s | "
        f"data wait {r.data_wait_s * 1e3:.1f} ms | loss {r.loss:.4f}"
    )
    from hymo.observe.metrics import device_peak_flops

    peak = device_peak_flops(torch.device("cuda")) if torch.cuda.is_available() else None
    flops = part_flops(config.model, config.training.seq_len)
    flops[COMPILED_BLOCK] = flops["attention"] + flops["MoE"]
    table = Table(
        "part", "ms", "share", "matrix FLOPs at peak, ms", title="A step under the profiler", title_justify="left"
    )
    busy = sum(r.parts.values())
    for part, seconds in sorted(r.parts.items(), key=lambda item: -item[1]):
        limit = ""
        if peak is not None and part in flops:
            limit = f"{flops[part] * config.tokens_per_step / peak * 1e3:,.1f}"
        table.add_row(part, f"{seconds * 1e3:,.1f}", f"{seconds / r.profiled_step_s:.1%}", limit)
    idle = max(0.0, r.profiled_step_s - busy)
    on_gpu = torch.cuda.is_available()
    table.add_row(
        "idle" if on_gpu else "outside of operators", f"{idle * 1e3:,.1f}", f"{idle / r.profiled_step_s:.1%}", ""
    )
    console.print(table)
