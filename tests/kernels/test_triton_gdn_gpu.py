"""The Triton kernels on the CPU, in Triton's interpreter, against float64 (float32 and float16)."""

import json
from pathlib import Path

import pytest

from hymo.kernels.recurrence import HAS_TRITON, _next_power_of_2
from interpreter import run_interpreted

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
SCRIPT = Path(__file__).with_name("interpret_recurrence.py")
TOLERANCES = {
    "any decay, packed": 1e-6,
    "bounded, packed": 1e-6,
    "bounded, whole": 1e-6,
    "large rates": 1e-6,
    "held, packed": 3e-6,
    "held, whole": 3e-6,
    "held, strong decay": 5e-4,  # exp(-8) where a token leaves less
    "held, one in ten": 1e-3,
    "held, one in ten, no decay else": 1e-3,
    "float16": 2e-3,
    "large heads": 1e-6,
}


@pytest.fixture(scope="module")
def results():
    return json.loads(run_interpreted(str(SCRIPT)))


@pytest.mark.parametrize("case", TOLERANCES)
def test_forward_parity_atol(results, case):
    for quantity, error in results[case].items():
        if not quantity.startswith("d"):
            assert error is True or error < TOLERANCES[case], (quantity, error)


@pytest.mark.parametrize("case", TOLERANCES)
def test_backward_grads_match_pytorch(results, case):
    gradients = {quantity: error for quantity, error in results[case].items() if quantity.startswith("d")}
    assert len(gradients) >= 5
    for quantity, error in gradients.items():
        assert error < TOLERANCES[case], (quantity, error)


@pytest.mark.parametrize("case", ["any decay, packed", "large heads"])
def test_forward_non_power_of_2_pads_correctly(results, case):
    """Heads of 8 x 5 and 40 x 36: padded tiles, and blocks with a padded rest."""
    assert results[case]["o"] < 1e-6


def test_the_step_kernel_continues_a_sequence(results):
    assert results["steps"]["o"] < 1e-6
    assert results["steps"]["state"] < 1e-6


def test_held_gates_get_gradients_of_their_true_decay(results):
    """Where all are held, what reaches a gate is exp(-15) of what reaches v, and right to a few exp(-8)."""
    errors = results["held, all gates"]
    assert max(errors[name] for name in ("dv", "db", "dc")) < 5e-4
    assert errors["dg"] < 3e-3
    assert errors["dA_log"] < 1e-2


@pytest.mark.parametrize("case", ["prefix, any decay", "prefix, bounded", "held, prefix", "slices", "library"])
def test_exact_properties(results, case):
    assert all(results[case].values()), results[case]


def test_triton_importable():
    from hymo.kernels import triton_op

    assert triton_op.LAUNCHES


def test_the_form_follows_from_the_type_and_the_bound():
    import torch

    from hymo.kernels.triton_op import form_of

    bounds = (None, 5.0, 6.0)
    assert [form_of(torch.bfloat16, bound) for bound in bounds] == ["held", "leaf", "held"]
    assert [form_of(torch.float32, bound) for bound in bounds] == ["dyadic", "leaf", "dyadic"]
    assert [form_of(torch.float16, bound) for bound in bounds] == ["dyadic"] * 3


def test_pad_helper():
    from hymo.kernels.triton_op import _tile

    assert [_next_power_of_2(n) for n in (1, 5, 24, 32)] == [1, 8, 32, 32]
    assert [_tile(n) for n in (1, 16, 17, 24, 32)] == [16, 16, 32, 32, 32]


def test_segments_fill_the_gpu_and_stay_few(monkeypatch):
    import torch

    from hymo.kernels import triton_op

    monkeypatch.setattr(triton_op, "_multiprocessors", lambda device: 132)
    triton_op.segment_length.cache_clear()
    for T in (1, 63, 64, 100, 512, 4096, 4097, 65536, 10**6):
        for rows in (1, 28, 160, 1280):
            segment = triton_op.segment_length(T, rows, 8, torch.device("cuda"))
            assert segment % triton_op.BLOCK == 0
            assert -(-T // segment) <= triton_op.MAX_SEGMENTS
