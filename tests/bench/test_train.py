"""``hymo bench train``: which part a profiled operator belongs to."""

from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType
from torch.autograd.profiler_util import Interval, Kernel

from hymo.bench.train import PREFIX, measure, time_by_part
from hymo.config_io import load_config


def event(name, parent=None, number=-1, ms=0.0):
    """An operator as the profiler reports it, with ``ms`` of its own."""
    return SimpleNamespace(name=name, cpu_parent=parent, sequence_nr=number, self_cpu_time_total=ms * 1e3, kernels=[])


def forward_and_backward(hooked):
    """One part's forward, and its backward; FSDP2's hooks take the number off the engine's own range."""
    part = event(f"{PREFIX}GDN")
    forward = event("CompiledFunction", part, 917, ms=1)
    engine = event("autograd::engine::evaluate_function: CompiledFunctionBackward", None, -1 if hooked else 917)
    gather = event("FSDP::pre_backward", engine)
    waits = event("aten::copy_", gather, ms=8)
    node = event("CompiledFunctionBackward", engine, 917)
    product = event("aten::mm", node, 44, ms=2)
    return [part, forward, engine, gather, waits, node, product, event("aten::add_", None, 917, ms=4)]


@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "hooked"])
def test_a_backward_operator_belongs_to_the_part_that_made_its_node(hooked):
    times = time_by_part(forward_and_backward(hooked), "cpu")
    ms = {part: round(seconds * 1e3, 6) for part, seconds in times.items()}
    assert ms == {"GDN": 3, "gather and reduce": 8, "other": 4}


def on_gpu(name, start, end, stream=7, annotation=False):
    """A kernel as the profiler reports it, in microseconds."""
    return SimpleNamespace(
        name=name, cpu_parent=None, sequence_nr=-1, kernels=[], device_type=DeviceType.CUDA, device_index=0,
        device_resource_id=stream, time_range=Interval(start, end), is_user_annotation=annotation,
    )  # fmt: skip


def test_kernels_that_overlap_on_a_stream_count_once():
    part, gather = event(f"{PREFIX}GDN"), event("FSDP::pre_forward")
    first, second, third = event("aten::mm", part), event("aten::mm", part), event("aten::copy_", gather)
    compiled = event("triton_poi_0", part)  # Inductor calls its range as the kernel
    operators = [part, gather, first, second, third, compiled]
    for x in operators:
        x.device_type, x.is_user_annotation = DeviceType.CPU, x in (part, gather)
    first.kernels = [Kernel("gemm", 0, 100.0)]
    second.kernels = [Kernel("gemm", 0, 90.0), Kernel("add", 0, 10.0)]
    compiled.kernels = [Kernel("triton_poi_0", 0, 7.0)]
    third.kernels = [Kernel("copy", 0, 50.0)]
    gather.kernels = [Kernel("FSDP::pre_forward", 0, 500.0)]  # the range itself, drawn on the GPU
    kernels = [on_gpu("gemm", 1000, 1100), on_gpu("gemm", 1060, 1150), on_gpu("add", 1140, 1150)]
    kernels += [on_gpu("triton_poi_0", 1200, 1207)]
    kernels += [on_gpu("newton_schulz", 2000, 2030)]  # launched by no operator
    kernels += [on_gpu("copy", 1050, 1100, stream=9), on_gpu("FSDP::pre_forward", 900, 1400, annotation=True)]
    times = time_by_part(operators + kernels, "cuda")
    assert {part: round(seconds * 1e6, 3) for part, seconds in times.items()} == {
        "GDN": 157,
        "gather and reduce": 50,
        "launched by no operator": 30,
    }


def test_real_steps_leave_little_without_a_part():
    keys = ["--training.device=cpu", "--training.fsdp=true", "--training.seq_len=32", "--training.global_batch_size=16"]
    result = measure(load_config("tiny", keys), steps=2)
    busy = sum(result.parts.values())
    assert {"embedding", "GDN", "attention", "MoE", "head and losses", "optimizer"} <= set(result.parts)
    assert result.parts["other"] < 0.25 * busy
    assert busy <= result.profiled_step_s
