import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch


@pytest.fixture
def state():
    """A small state of the kinds that a run has: matrices, vectors, a scalar counter, int64, bf16, nested dicts."""
    g = torch.Generator().manual_seed(0)
    return {
        "model": {
            "layers.0.w": torch.randn(8, 5, generator=g),
            "layers.0.b": torch.randn(5, generator=g, dtype=torch.float64),
            "half": torch.randn(3, 2, generator=g).bfloat16(),
        },
        "optimizer": {"state": {"layers.0.w": {"momentum": torch.randn(8, 5, generator=g), "step": torch.tensor(7.0)}}},
        "counts": torch.arange(4),
    }


@pytest.fixture
def blank(state):
    """The same tensors, emptied, to load into."""
    from torch.utils._pytree import tree_map

    return tree_map(lambda t: torch.full_like(t, 77), state)


@pytest.fixture(scope="session")
def pool():
    """``pool(world_size, function, *args)``: run a function on real gloo processes (see tests/gloo_pool.py)."""
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    if "gloo_pool" not in sys.modules:
        file = Path(__file__).parents[1] / "gloo_pool.py"
        spec = importlib.util.spec_from_file_location("gloo_pool", file)
        sys.modules["gloo_pool"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["gloo_pool"])
    return sys.modules["gloo_pool"].shared()
