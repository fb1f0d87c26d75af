"""The recurrence's kernels with bfloat16's roundings on the CPU, in the forms taken on a GPU, against float64."""

import json
from pathlib import Path

import pytest

from hymo.kernels.recurrence import HAS_TRITON
from interpreter import run_interpreted

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
# dg and dA_log: above these is one where factors are in one part, where what enters the state's gradient is in one, and
# where factors are not cut or differences not in three parts (one in ten)
DECAYS = {
    "leaf": (3.0e-3, 2.5e-3),
    "leaf, packed": (2.5e-3, 2.5e-3),
    "leaf, weak": (3.2e-3, 3.0e-3),
    "held": (3.3e-3, 2.5e-3),
    "held, packed": (3.6e-3, 2.2e-3),
    "held, strong": (6.5e-3, 3.2e-3),  # few gates matter, and their errors do not average out
    "held, padded heads": (3e-3, 2.5e-3),
    "held, one in ten": (2.5e-3, 3.2e-3),
    "float16": (4e-3, 2.5e-3),
}


@pytest.fixture(scope="module")
def results():
    return json.loads(run_interpreted(str(Path(__file__).with_name("interpret_bfloat16.py"))))


@pytest.mark.parametrize("case", DECAYS)
def test_errors_are_those_of_bfloat16(results, case):
    limits = dict(zip(("dg", "dA_log"), DECAYS[case], strict=True)) | {"dD": 1e-2}  # one number, whose terms cancel
    for quantity, error in results[case].items():
        assert error < limits.get(quantity, 4e-3), (quantity, error)
    if case != "float16":
        assert results[case]["o"] > 1e-3  # nothing was computed in float32 by mistake
