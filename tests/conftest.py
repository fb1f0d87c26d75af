"""What all tests share: the cores of this machine, a small model on real text, a cache of their own."""

import json
import os
from pathlib import Path

import pytest

from hymo.config import HyMoConfig
from hymo.config_io import load_config, to_dict

SMALL_FLAGS = [
    "--model.dim=32", "--model.n_layers=2", "--model.gdn_heads=2", "--model.gdn_head_dim=8", "--model.gdn_state_dim=8",
    "--model.mla_heads=2", "--model.q_lora_rank=16", "--model.kv_lora_rank=16", "--model.qk_nope_dim=8",
    "--model.qk_rope_dim=4", "--model.v_head_dim=8", "--model.d_ff=16", "--training.seq_len=32",
    "--training.global_batch_size=4", "--training.micro_batch_size=2", "--training.device=cpu",
    "--scheduler.total_steps=6",
    "--training.eval_every=3", "--training.eval_tokens=256", "--checkpoint.every=2", "--logging.every=1",
    "--logging.sample_tokens=8",
]  # fmt: skip

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models of the tests are too small for more: cores go to processes
LONGEST = ("training", "checkpoint", "distributed")  # folders


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """`pytest` alone runs the suite in as many processes as there are cores (up to 4), a file in one of them.

    What is named on the command line runs in this process, unless `-n` says otherwise.
    """
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and "PYTEST_XDIST_WORKER" not in os.environ
    option = config.option
    if whole and config.pluginmanager.hasplugin("xdist") and option.numprocesses is None and not option.usepdb:
        option.numprocesses, option.dist, option.loadscopereorder = min(os.cpu_count() or 1, 4), "loadfile", False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The folders of the longest files first, so that no process is left alone with one at the end."""
    items.sort(key=lambda item: not set(LONGEST) & set(item.path.parts))


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


@pytest.fixture(scope="session")
def session_flags(text_folder: str) -> tuple[str, ...]:
    return (*SMALL_FLAGS, f"--data.source={text_folder}")


@pytest.fixture
def small_flags(session_flags: tuple[str, ...]) -> list[str]:
    return [*session_flags]


@pytest.fixture
def small_config(small_flags: list[str]) -> HyMoConfig:
    return load_config("tiny", small_flags)


TRAINED_SHAPE = [
    "--model.dim=32", "--model.n_layers=2", "--model.mla_every=2", "--model.gdn_heads=2", "--model.gdn_head_dim=8",
    "--model.gdn_state_dim=8", "--model.mla_heads=2", "--model.q_lora_rank=16", "--model.kv_lora_rank=16",
    "--model.qk_nope_dim=8", "--model.qk_rope_dim=4", "--model.v_head_dim=8", "--model.d_ff=16",
    "--model.vocab_size=260", "--training.seq_len=64", "--scheduler.total_steps=6", "--training.device=cpu",
]  # fmt: skip


@pytest.fixture(scope="session")
def make_run(tmp_path_factory):
    """``make_run(*flags)``: the folder of a run that has one checkpoint, of a model whose greedy texts are not dull."""
    import torch

    from hymo.checkpoint.store import save
    from hymo.models.model import build_hymo
    from hymo.runs import write_config

    def make(*flags: str) -> Path:
        config = load_config("tiny", [*TRAINED_SHAPE, *flags])
        model = build_hymo(config, seed=5)
        for p in model.parameters():
            p.data.mul_(1 if p.dim() < 2 else 3)  # at 0.02 all logits are alike
        for i, moe in enumerate(model.expert_layers()):
            moe.gate_bias.copy_(torch.linspace(-0.1, 0.1, moe.n_routed).roll(i))
            moe.ema_expert_counts.fill_(i + 1.0)
        run = tmp_path_factory.mktemp("runs") / "run"
        save(run, 6, 6, {"model": model.state_dict()}, {"config": to_dict(config)})
        write_config(run, config)
        return run

    return make


@pytest.fixture(scope="session")
def trained_run(make_run):
    return make_run()
