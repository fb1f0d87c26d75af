"""Time of collectives by intervals, from events such as the profiler gives."""

from dataclasses import dataclass

import pytest
from torch.autograd import DeviceType

from hymo.observe.collectives import communication_time, length, merged


@dataclass
class Event:
    label: str
    start: float
    stop: float
    device: DeviceType = DeviceType.CUDA
    annotation: bool = False

    def name(self):
        return self.label

    def device_type(self):
        return self.device

    def is_user_annotation(self):
        return self.annotation

    def start_ns(self):
        return self.start * 1e9

    def duration_ns(self):
        return (self.stop - self.start) * 1e9


def test_what_a_collective_does_not_share_with_a_kernel_is_exposed():
    """Kernels from 0 to 2 and 3 to 5, sending from 1 to 4 and 6 to 7: exposed are 2 to 3 and 6 to 7; idle 5 to 6."""
    events = [
        Event("gemm", 0, 2), Event("elementwise", 1, 2), Event("gemm", 3, 5),
        Event("ncclDevKernel_AllGather_RING_LL", 1, 4), Event("ncclDevKernel_ReduceScatter_Sum_f32", 6, 7),
    ]  # fmt: skip
    times = communication_time(events)
    assert (times.collectives, times.exposed, times.other, times.idle) == pytest.approx((4, 2, 4, 1))


def test_ranges_that_are_no_work_do_not_count():
    """Left in, a range over the whole step would hide every collective."""
    events = [
        Event("gemm", 0, 1), Event("ncclDevKernel_AllGather", 1, 2),
        Event("nccl:_all_gather_base", 0, 9), Event("FSDP::all_gather", 0, 9), Event("step", 0, 9, annotation=True),
        Event("aten::mm", 0, 9, device=DeviceType.CPU), Event("Event Sync", 0, 9),
    ]  # fmt: skip
    times = communication_time(events)
    assert (times.collectives, times.exposed, times.other, times.idle) == pytest.approx((1, 1, 1, 0))
    assert communication_time(events[2:]) is None


def test_unions_of_intervals():
    assert merged([(3, 4), (0, 1), (0.5, 2), (2, 2.5)]) == [(0, 2.5), (3, 4)]
    assert length(merged([])) == 0
