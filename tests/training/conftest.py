import importlib.util
import os
import sys
from pathlib import Path

import pytest


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
