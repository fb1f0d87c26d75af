"""Generation over long contexts: the recurrent state stays as it is, and nothing of a prompt's square is ever held."""

import importlib
from pathlib import Path

import pytest
import torch

from alive import Alive
from hymo.config_io import load_config
from hymo.models.model import build_hymo


@pytest.fixture(scope="module")
def generation():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield importlib.import_module("generation")


def test_prompts_take_memory_by_their_length_and_the_recurrent_cache_none(generation):
    model = build_hymo(load_config("tiny"), device="cpu").eval()
    peaks, caches = [], []
    for context in (512, 1024, 2048):
        cache = model.init_cache(1, context)
        with Alive() as peak:
            model.prefill(torch.zeros(1, context, dtype=torch.int64), cache)
        peaks.append(peak.most)
        caches.append(generation.cache_bytes(cache))
    assert caches[0]["recurrent"] == caches[2]["recurrent"] > 0
    assert caches[2]["attention"] == 4 * caches[0]["attention"]
    assert peaks[2] - peaks[1] == pytest.approx(2 * (peaks[1] - peaks[0]), rel=0.05)  # a line: no term of the square


def test_a_row_of_the_benchmark(generation):
    config = load_config("tiny")
    row = generation.measure(build_hymo(config, device="cpu").eval(), 64, 4, torch.device("cpu"))
    state = 2 * (6 * 16 * 16 + 3 * 6 * 48) * 4  # two blocks: the state and three inputs of the convolution, float32
    assert row["cache"] == {"recurrent": state, "attention": 2 * (64 + 8 + 4) * (48 + 8) * 4}
    assert row["tokens_per_s"] > 0 and row["prefill_s"] > 0
    assert generation.line(row).split()[0] == "64"
