import importlib.util
import os
import sys
from pathlib import Path

import pytest


def shared_module(name):
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def pool():
    """``pool(world_size, function, *args)``: run a function on real gloo processes (see tests/gloo_pool.py)."""
    return shared_module("gloo_pool").shared()


@pytest.fixture(scope="session")
def lives():
    """``lives.start(words, folder, ...)``: real `hymo train` processes (see tests/lives.py)."""
    lives = shared_module("lives").Lives()
    yield lives
    lives.close()
