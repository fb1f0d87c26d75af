"""The fused mixer of a recurrence block on the CPU, in Triton's interpreter, against float64."""

import json
from pathlib import Path

import pytest

from hymo.kernels.recurrence import HAS_TRITON
from interpreter import run_interpreted

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
SCRIPT = Path(__file__).with_name("interpret_mixer.py")


@pytest.fixture(scope="module")
def results():
    return json.loads(run_interpreted(str(SCRIPT)))


@pytest.mark.parametrize("case", ["whole", "packed", "short", "two taps", "one tap", "float16"])
def test_the_convolution_and_its_gradients(results, case):
    for quantity, error in results[case].items():
        assert error < (2e-3 if case == "float16" else 1e-6), (quantity, error)


def test_another_document_never_changes_a_bit(results):
    assert results["documents"]["unchanged"]


@pytest.mark.parametrize("case", ["block", "block, packed", "block, any decay", "block, float16"])
def test_the_block_and_every_gradient(results, case):
    assert len(results[case]) == 11
    # without a bound on the decay some outputs are near zero before their norm: the parts in float32 differ as much
    bound = {"block, float16": 5e-3, "block, any decay": 1e-4}.get(case, 1e-5)
    for quantity, error in results[case].items():
        assert error < bound, (quantity, error)


def test_the_gradient_of_swiglu(results):
    assert results["swiglu"]["dx"] < 1e-6


def test_the_operator_keeps_the_rules_of_the_library(results):
    assert results["library"]["opcheck"]
