"""`hymo train --init-from`: weights alone from a run, a checkpoint or an export; what is recorded; what is refused."""

import json
import shutil

import pytest
import torch
from torch.distributed.tensor import DTensor

pytest.importorskip("safetensors")
from hymo.checkpoint.export import export
from hymo.checkpoint.store import read_manifest
from hymo.checkpoint.weights import fill, open_weights
from hymo.cli import main
from hymo.config_io import load_config
from hymo.distributed.fsdp import wrap_model_with_fsdp
from hymo.models.model import build_hymo
from hymo.runs import open_run
from hymo.training.trainer import Trainer


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def parent(tmp_path_factory, session_flags):
    """A trained run and an export of it."""
    folder = tmp_path_factory.mktemp("parent")
    flags = [*session_flags, "--optimizer.muon_lr=0.01", f"--data.cache_dir={folder / 'cache'}"]
    assert main(["train", *flags, "--run-dir", str(folder / "run")]) == 0
    export(folder / "run", folder / "out")
    return folder


def first_loss(config, run):
    """Of the parent's weights on the first batch, by hand."""
    trainer = Trainer(config)
    trainer.model.load_state_dict(open_run(run).model.state_dict())
    return trainer.train_step().loss


@pytest.mark.parametrize("source", ["run", "run/checkpoints/step-6", "out"])
def test_a_new_run_starts_from_the_weights_and_from_nothing_else(parent, small_flags, tmp_path, capsys, source):
    child = tmp_path / "child"
    flags = [*small_flags, "--training.seed=3", "--scheduler.total_steps=2"]
    assert main(["train", *flags, "--init-from", str(parent / source), "--run-dir", str(child)]) == 0
    out = capsys.readouterr().out
    assert f"weights from {parent / source}" in out and "(step 6)" in out
    row = rows(child)[0]
    assert (row["step"], row["attempt"], row["tokens"]) == (1, 1, 128)
    assert row["loss"] == pytest.approx(first_loss(load_config("tiny", flags), parent / "run"), rel=1e-6)
    recorded = read_manifest(child / "checkpoints" / "step-2").meta["config"]["training"]["init_from"]
    assert recorded == str(parent / source) == open_run(child).config.training.init_from


def test_a_run_that_is_resumed_keeps_where_it_began(parent, small_flags, tmp_path, monkeypatch, capsys):
    child, flags = str(tmp_path / "child"), [*small_flags, "--scheduler.total_steps=2"]
    monkeypatch.chdir(parent)
    words = ["train", *flags, "--init-from", "out", "--run-dir", child, "--resume"]
    assert main(words) == 0, "with --resume, a run that is not there yet starts from the weights"
    assert "weights from" in capsys.readouterr().out
    assert main(["train", "tiny", *flags, "--run-dir", child, "--resume"]) == 0
    out = capsys.readouterr().out
    assert "resumed from" in out and "weights from" not in out
    assert open_run(child).config.training.init_from == str(parent / "out")
    assert main(["train", *flags, "--init-from", "run", "--run-dir", child, "--resume"]) == 2
    assert "training.init_from: the run has" in capsys.readouterr().err


def test_another_shape_is_refused_with_the_tensors_before_any_text_is_read(parent, small_flags, tmp_path, capsys):
    flags = [f for f in small_flags if not f.startswith("--data.source")]
    words = [
        *flags,
        "--data.source=/no/such/text",
        "--model.d_ff=24",
        "--model.mtp_depth=1",
        "--model.mtp_weights=[0.1]",
    ]
    for source in ("run", "out"):
        assert main(["train", *words, "--init-from", str(parent / source), "--run-dir", str(tmp_path / "child")]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert any(line.startswith("hymo: mtp.depths.1.") and line.endswith("not in this model") for line in lines)
        assert lines[-2].startswith("hymo: ... and ")
        assert lines[-1].endswith("accepted: weights of this model's shape")
    assert not (tmp_path / "child").exists()
    assert main(["train", *flags, "--data.source=/no/such/text", "--model.d_ff=24", "--init-from", str(parent / "out"),
                 "--run-dir", str(tmp_path / "child")]) == 2  # fmt: skip
    lines = capsys.readouterr().err.splitlines()
    assert "hymo: layers.1.ffn.w_in: [4, 32, 32] in the weights, [4, 48, 32] in this model" in lines


def fill_sharded(source, flags):
    """Both ranks: the weights put into a sharded model; the parameters after that, whole."""
    config = load_config("tiny", flags)
    model = build_hymo(config, device="meta")
    wrap_model_with_fsdp(model, config)
    fill(model, open_weights(source))
    state = model.state_dict()
    return {name: t.full_tensor() if isinstance(t, DTensor) else t.clone() for name, t in state.items()}


@pytest.mark.parametrize("source", ["run", "out"])
def test_a_sharded_model_gets_its_parts(pool, parent, small_flags, source):
    expected = open_run(parent / "run").model.state_dict()
    for found in pool(2, fill_sharded, str(parent / source), [*small_flags, "--training.fsdp=true"]):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_run_that_died_before_its_first_checkpoint_says_that_it_begins_anew(small_flags, tmp_path, capsys):
    words = ["train", "tiny", *small_flags, "--run-dir", str(tmp_path / "run")]
    assert main(words) == 0
    assert "holds no checkpoint yet" not in capsys.readouterr().out
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert main([*words, "--resume"]) == 0
    assert "holds no checkpoint yet: from the start" in capsys.readouterr().out
