"""The GPU form of the step in Triton's interpreter against plain tensor operations. On a real GPU: tests/gpu."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

HERE = Path(__file__).parent


def interpret(*command: str) -> None:
    """Run a script with Triton's interpreter, which has to be chosen before the kernels are imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.stdout.strip() == "same", done.stderr[-3000:]


def test_the_kernels_equal_plain_operations():
    interpret(str(HERE / "interpreted_kernels.py"))


def test_the_kernels_on_shards_of_two_processes():
    """Rows cut over both, and replicas of which only one sends: there the other's momentum must move too."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    interpret(*launcher, str(HERE / "interpreted_shards.py"))
