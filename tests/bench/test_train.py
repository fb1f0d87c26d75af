"""``hymo bench train``: which part a profiled operator belongs to."""

from types import SimpleNamespace

import pytest

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


def test_real_steps_leave_little_without_a_part():
    keys = ["--training.device=cpu", "--training.fsdp=true", "--training.seq_len=32", "--training.global_batch_size=16"]
    result = measure(load_config("tiny", keys), steps=2)
    busy = sum(result.parts.values())
    assert {"embedding", "GDN", "attention", "MoE", "head and losses", "optimizer"} <= set(result.parts)
    assert result.parts["other"] < 0.25 * busy
    assert busy <= result.profiled_step_s
