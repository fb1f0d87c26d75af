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
