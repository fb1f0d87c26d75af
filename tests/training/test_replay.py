"""What a recording does with errors and with batches; with a stand-in for CUDA's graphs (tests/gpu has real ones)."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from hymo.data.batch import Batch
from hymo.errors import HyMoError
from hymo.training.replay import Replay


class Graph:
    """Records nothing; after an error in between it cannot be ended without one of its own, as CUDA's."""

    broken = False
    replays = 0

    def capture_begin(self, pool, capture_error_mode):
        pass

    def capture_end(self):
        if Graph.broken:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self):
        Graph.replays += 1


@pytest.fixture
def replay(monkeypatch):
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {
        "CUDAGraph": Graph,
        "Stream": lambda device: stream,
        "current_stream": lambda: stream,
        "stream": lambda stream: nullcontext(),
        "graph_pool_handle": lambda: 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    Graph.broken, Graph.replays = False, 0
    return Replay(torch.device("cuda"))


def batch(rows=2):
    tokens = torch.arange(rows * 4).view(rows, 4)
    return Batch(tokens, torch.zeros_like(tokens), tokens[None], torch.ones(rows, dtype=torch.bool))


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            RuntimeError("Cannot copy\nmore"),
            HyMoError,
            r"but a micro-batch cannot be recorded \(Cannot copy\); accepted",
        ),
        (RuntimeError(), HyMoError, r"but a micro-batch cannot be recorded \(RuntimeError\(\)\); accepted"),
        (NotImplementedError("a loss of mine"), NotImplementedError, "a loss of mine"),
        (torch.OutOfMemoryError("no room"), torch.OutOfMemoryError, "no room"),
        (ValueError("a loss of mine"), ValueError, "a loss of mine"),
        (KeyboardInterrupt("by hand"), KeyboardInterrupt, "by hand"),
    ],
)
def test_the_first_error_is_the_one_that_is_told(replay, error, kind, message):
    model = torch.nn.Linear(2, 2)
    model.weight.grad = torch.ones(2, 2)

    def compute(batch):
        Graph.broken = True
        raise error

    with pytest.raises(kind, match=message):
        replay.record(model, batch(), compute)
    assert model.weight.grad is None, "gradients of micro-batches before it would leak into the next attempt"


def test_a_recording_works_on_its_own_copy_of_the_batch(replay):
    seen = []
    replay.record(torch.nn.Linear(2, 2), batch(), seen.append)
    (own,) = seen
    other = batch()
    other.tokens_BL.add_(100)
    replay(other)
    assert Graph.replays == 1 and torch.equal(own.tokens_BL, other.tokens_BL) and own.tokens_BL is not other.tokens_BL
    with pytest.raises(ValueError, match="batch: found a tensor of"):
        replay(batch(1))
