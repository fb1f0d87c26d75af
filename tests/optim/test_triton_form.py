"""The GPU form of the step in Triton's interpreter against plain tensor operations. On a real GPU: tests/gpu."""

import importlib.util
from pathlib import Path

import pytest

from interpreter import run_interpreted

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

HERE = Path(__file__).parent


def test_the_kernels_equal_plain_operations():
    assert run_interpreted(str(HERE / "interpreted_kernels.py")) == "same"


def test_the_kernels_on_shards_of_two_processes():
    """Rows cut over both, and replicas of which only one sends: there the other's momentum must move too."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert run_interpreted(*launcher, str(HERE / "interpreted_shards.py")) == "same"
