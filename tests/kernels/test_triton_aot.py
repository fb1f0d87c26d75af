"""The Triton kernels compiled ahead for sm_80 and sm_90, without a GPU: their instructions and what they spill.

`.ci/run` also compiles the three that take 15 s each, the backward kernels for packed documents.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).with_name("compile_ahead.py")
CASES = ("segment", *(f"{kernel} {form}" for kernel in ("forward", "backward") for form in ("leaf", "held", "dyadic")))
NAMES = [f"{case}, sm_90{docs}" for case in CASES for docs in ("", ", packed") if not (docs and "backward" in case)]


@pytest.fixture(scope="module")
def reports():
    done = subprocess.run([sys.executable, "-W", "ignore", SCRIPT, "fewer"], capture_output=True, text=True)
    assert done.stdout, done.stderr[-3000:]
    return {report.pop("case"): report for report in json.loads(done.stdout.splitlines()[-1])}


@pytest.mark.parametrize("name", [*NAMES, "segment, sm_80", "forward leaf, sm_80"])
def test_compiles_without_a_gpu(reports, name):
    assert all(reports[name].values()), reports[name]
