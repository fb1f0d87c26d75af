"""What all tests share: a small model on real text, a cache of their own."""

import json
from pathlib import Path

import pytest

from hymo.config import HyMoConfig
from hymo.config_io import load_config

SMALL_FLAGS = [
    "--model.dim=32", "--model.n_layers=2", "--model.gdn_heads=2", "--model.gdn_head_dim=8", "--model.gdn_state_dim=8",
    "--model.mla_heads=2", "--model.q_lora_rank=16", "--model.kv_lora_rank=16", "--model.qk_nope_dim=8",
    "--model.qk_rope_dim=4", "--model.v_head_dim=8", "--model.d_ff=16", "--training.seq_len=32",
    "--training.global_batch_size=4", "--training.micro_batch_size=2", "--training.device=cpu",
    "--scheduler.total_steps=6",
    "--training.eval_every=3", "--training.eval_tokens=256", "--checkpoint.every=2", "--logging.every=1",
    "--logging.sample_tokens=8",
]  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Token shards of tests go into one folder of this test run, never into the user's."""
    folder = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("HYMO_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def text_folder() -> str:
    """Real text that every Python has: the json package."""
    return str(Path(json.__file__).parent)


@pytest.fixture
def small_flags(text_folder: str) -> list[str]:
    return [*SMALL_FLAGS, f"--data.source={text_folder}"]


@pytest.fixture
def small_config(small_flags: list[str]) -> HyMoConfig:
    return load_config("tiny", small_flags)
