"""What a step sends, counted as it is sent; and how much of the time of sending nothing else was computed.

The bytes are those that a rank must send whatever the algorithm: of an all-gather its own part to each other rank, of a
reduce-scatter every other rank's part, of an all-reduce the two after one another, of an all-to-all what is for others.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType

Interval = tuple[float, float]


@dataclass
class Sent:
    """Calls and bytes that this rank sent, by kind of collective and size of its group."""

    calls: Counter[tuple[str, int]] = field(default_factory=Counter)
    n_bytes: Counter[tuple[str, int]] = field(default_factory=Counter)

    @property
    def total(self) -> float:
        return sum(self.n_bytes.values())

    def of_kind(self, kind: str) -> float:
        return sum(n for (name, _), n in self.n_bytes.items() if name == kind)

    def calls_of_kind(self, kind: str) -> int:
        return sum(n for (name, _), n in self.calls.items() if name == kind)


def _n_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _gathered(size: int, rank: int, output: torch.Tensor, input: torch.Tensor, *_: Any) -> float:
    return (size - 1) * _n_bytes(input)


def _scattered(size: int, rank: int, output: torch.Tensor, input: torch.Tensor, *_: Any) -> float:
    return (size - 1) * _n_bytes(output)


def _all_reduced(size: int, rank: int, tensor: torch.Tensor, *_: Any) -> float:
    return 2 * (size - 1) / size * _n_bytes(tensor)


def _exchanged(
    size: int, rank: int, output: torch.Tensor, input: torch.Tensor, receive: Any = None, send: Any = None, *_: Any
) -> float:
    if not send:
        return (size - 1) / size * _n_bytes(input)
    return (sum(send) - send[rank]) * input.element_size()


# torch 2.13 has new names for two of them; FSDP2 calls these.
RULES: dict[str, tuple[str, Callable[..., float]]] = {
    "all_gather_into_tensor": ("all-gather", _gathered),
    "all_gather_single": ("all-gather", _gathered),
    "reduce_scatter_tensor": ("reduce-scatter", _scattered),
    "reduce_scatter_single": ("reduce-scatter", _scattered),
    "all_reduce": ("all-reduce", _all_reduced),
    "all_to_all_single": ("all-to-all", _exchanged),
}
_PARAMETERS = {
    "output": "output", "output_tensor": "output", "input": "input", "input_tensor": "input", "tensor": "tensor",
    "output_split_sizes": "receive", "input_split_sizes": "send",
}  # fmt: skip


@contextmanager
def counted() -> Iterator[Sent]:
    """Count the tensor collectives that are called from Python inside the block, FSDP2's included."""
    sent, inside = Sent(), [0]
    originals = {name: getattr(dist, name) for name in RULES if hasattr(dist, name)}
    for name, original in originals.items():
        setattr(dist, name, _counting(original, *RULES[name], sent, inside))
    try:
        yield sent
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _counting(
    original: Callable[..., Any], kind: str, rule: Callable[..., float], sent: Sent, inside: list[int]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not inside[0]:  # one name may call another
            group = kwargs.get("group")
            size = dist.get_world_size(group)
            named = {_PARAMETERS[key]: value for key, value in kwargs.items() if key in _PARAMETERS}
            sent.calls[kind, size] += 1
            sent.n_bytes[kind, size] += rule(size, dist.get_rank(group), *args, **named)  # type: ignore[assignment]
        inside[0] += 1
        try:
            return original(*args, **kwargs)
        finally:
            inside[0] -= 1

    return call


# --- time of collectives, and what of it is not hidden behind computation ---


@dataclass(frozen=True)
class CommunicationTime:
    """Seconds on the device: of collectives, of those while nothing else ran, of all else, and when nothing ran."""

    collectives: float
    exposed: float
    other: float
    idle: float


def communication_time(events: Iterable[Any]) -> CommunicationTime | None:
    """From a profiler's raw events (``profile.profiler.kineto_results.events()``); None without a CUDA kernel.

    A collective is a kernel of NCCL. One that waits for a late rank counts as long as it waits: that is time in
    collectives for the one who pays it.
    """
    sending: list[Interval] = []
    computing: list[Interval] = []
    for event in events:
        name = event.name()
        if event.device_type() != DeviceType.CUDA or event.is_user_annotation() or _is_mark(name):
            continue
        span = (event.start_ns() * 1e-9, (event.start_ns() + event.duration_ns()) * 1e-9)
        (sending if "nccl" in name.lower() else computing).append(span)
    if not sending and not computing:
        return None
    sends, computes = merged(sending), merged(computing)
    busy = merged([*sends, *computes])
    whole = busy[-1][1] - busy[0][0]
    exposed = length(busy) - length(computes)
    return CommunicationTime(length(sends), exposed, length(computes), whole - length(busy))


def _is_mark(name: str) -> bool:
    """Ranges and waits that the profiler draws on a device's line, which are no work."""
    return name.startswith(("nccl:", "FSDP::", "ProfilerStep", "part: ")) or name.endswith(" Sync")


def merged(spans: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, in order, none touching another."""
    found: list[Interval] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def length(spans: Iterable[Interval]) -> float:
    return sum(stop - start for start, stop in spans)
