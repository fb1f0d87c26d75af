"""`hymo average`: the mean of the right checkpoints, said in the manifest, used like a run; mixed models refused."""

import numpy as np
import pytest
import torch

from hymo.checkpoint import average as module
from hymo.checkpoint.average import average
from hymo.checkpoint.manifest import read_manifest
from hymo.checkpoint.store import save
from hymo.cli import main
from hymo.config_io import load_config, to_dict
from hymo.errors import HyMoError
from hymo.models.model import build_hymo
from hymo.runs import open_run, write_config

FLAGS = [
    "--model.dim=16", "--model.n_layers=2", "--model.mla_every=2", "--model.gdn_heads=2", "--model.d_ff=8",
    "--model.vocab_size=260", "--scheduler.total_steps=100", "--scheduler.warmup_frac=0.1",
    "--scheduler.decay_frac=0.2", "--training.device=cpu",
]  # fmt: skip


def state_of(config, seed):
    model = build_hymo(config, seed=seed)
    for moe in model.expert_layers():
        moe.gate_bias.copy_(torch.linspace(-1, 1, moe.n_routed) * seed)
        moe.ema_expert_counts.fill_(float(seed))
    return {"model": model.state_dict(), "optimizer": {"momentum": torch.zeros(3)}}


def make(run, *flags, steps=(5, 10, 40, 60, 80, 90)):
    """A run of 100 updates (10 warm-up, 70 stable, 20 decay)."""
    config = load_config("tiny", [*FLAGS, *flags])
    write_config(run, config)
    for step in steps:
        save(run, step, step, state_of(config, step), {"config": to_dict(config)})
    save(run, 60, 61, state_of(config, 61), {"config": to_dict(config)})  # the same update after a skip
    return run, config


@pytest.fixture
def run(tmp_path):
    return make(tmp_path / "runs" / "base")


def test_the_last_of_the_stable_phase_one_a_step(run, monkeypatch):
    folder, config = run
    monkeypatch.setattr(module, "AT_ONCE", 5_000)  # several groups
    made = average([folder], last=3)
    assert made == folder.with_name("base-average-3") / "checkpoints" / "step-80"
    averaged = read_manifest(made).meta["weights_only"]["averaged"]
    assert [one["step"] for one in averaged] == [40, 60, 80]
    assert averaged[1]["checkpoint"] == str(folder / "checkpoints" / "step-60-a61")

    states = [state_of(config, seed)["model"] for seed in (40, 61, 80)]
    found = open_run(made.parent.parent).model.state_dict()
    assert found.keys() == states[0].keys()
    for name, tensor in found.items():
        exact = np.mean([state[name].double().numpy() for state in states], axis=0)
        assert np.array_equal(tensor.numpy(), exact.astype(np.float32)), name
    assert float(found["layers.1.ffn.ema_expert_counts"][0]) == pytest.approx((40 + 61 + 80) / 3)


def test_it_is_read_like_a_run_and_no_run_goes_on_from_it(run, tmp_path, capsys):
    folder, _ = run
    assert main(["average", str(folder), "--last", "2", "--out", str(tmp_path / "mean")]) == 0
    assert "the mean of 2 checkpoints, steps 60, 80" in capsys.readouterr().out
    mean, text = str(tmp_path / "mean"), tmp_path / "text.txt"
    text.write_text("import os\n" * 20)
    assert main(["generate", mean, "import ", "--max-tokens", "3"]) == 0
    assert main(["eval", mean, "--data", str(text)]) == 0
    assert main(["inspect", mean]) == 0
    assert "weights_only" in capsys.readouterr().out
    assert main(["branch", mean, "--at", "80", "--decay", "5"]) == 2
    assert "holds weights alone" in capsys.readouterr().err


def test_a_run_may_be_named_from_within(run, monkeypatch):
    """By "." and by what lies in it. Switched off: a traceback, or a folder among the run's checkpoints."""
    folder, _ = run
    for where, paths, last in [
        (folder, ["."], 2),
        (folder, ["checkpoints/step-5", "checkpoints/step-10", "checkpoints/step-40"], None),
        (folder / "checkpoints", ["step-5", "step-10", "step-40", "step-80"], None),
        (folder / "checkpoints" / "step-10", ["../step-5", "../step-40", "../step-80", "../step-90", "."], None),
    ]:
        monkeypatch.chdir(where)
        made = average(paths, last)
        assert made.parent.parent == folder.with_name(f"base-average-{last or len(paths)}")
    with pytest.raises(HyMoError, match="step-10 twice"):
        average([".", "../step-10"])


def test_two_runs_of_one_model_can_be_averaged(run, tmp_path):
    folder, config = run
    other, _ = make(tmp_path / "runs" / "other", steps=(70,))
    chosen = [folder / "checkpoints" / "step-40", other / "checkpoints" / "step-70"]
    found = open_run(average(chosen, out=tmp_path / "mean")).model.state_dict()
    a, b = (state_of(config, seed)["model"] for seed in (40, 70))
    assert torch.equal(
        found["embedding.weight"], ((a["embedding.weight"].double() + b["embedding.weight"]) / 2).float()
    )


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--model.rope_theta=500", r"model\.rope_theta is 10000\.0 in .* and 500\.0"),
        ("--model.dim=24", r"model\.dim is 16"),
    ],
)
def test_mixed_models_are_refused(run, tmp_path, flag, message):
    other, _ = make(tmp_path / "runs" / "other", flag, steps=(70,))
    with pytest.raises(HyMoError, match=message):
        average([run[0] / "checkpoints" / "step-40", other / "checkpoints" / "step-70"], out=tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def test_what_cannot_be_is_refused(run, tmp_path):
    folder, _ = run
    for paths, settings, message in [
        ([folder], {"last": 9}, r"--last: found 9; accepted: at most .*\(10, 40, 60, 80\)"),
        ([folder], {"last": 1}, "accepted: a whole number >= 2"),
        ([folder], {}, "found 1 checkpoint; accepted: a run with --last K"),
        ([folder, folder], {"last": 2}, "found beside 2 paths"),
        ([folder / "checkpoints" / "step-40"] * 2, {}, "step-40 twice"),
        ([tmp_path / "none"], {"last": 2}, "no such run"),
        ([folder], {"last": 2, "out": folder}, "exists already"),
    ]:
        with pytest.raises(HyMoError, match=message):
            average(paths, **settings)
    file = next((folder / "checkpoints" / "step-80").glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(HyMoError, match="step-80 is damaged"):
        average([folder], last=2)
