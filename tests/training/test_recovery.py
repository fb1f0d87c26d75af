"""The configuration that a run goes on with is the one its checkpoint was made with, whatever its file says."""

import shutil

import pytest

from hymo.errors import HyMoError
from hymo.training.recovery import resumed_config


@pytest.fixture
def run(trained_run, tmp_path):
    return shutil.copytree(trained_run, tmp_path / "run")


def edit(run, old, new):
    file = run / "config.yaml"
    before = file.read_text()
    assert old in before
    file.write_text(before.replace(old, new))


@pytest.mark.parametrize(
    "old,new,said",
    [
        ("seed: 0", "seed: 7", "training.seed: the run has 0, found 7"),
        ("seq_len: 64", "seq_len: 32", "training.seq_len: the run has 64, found 32"),
        ("total_steps: 6", "total_steps: 60", "scheduler.total_steps: the run has 6, found 60"),
        ("muon_lr: 0.02", "muon_lr: 0.5", "optimizer.muon_lr: the run has 0.02, found 0.5"),
    ],
)
def test_a_file_edited_by_hand_is_refused_like_an_option(old, new, said, run):
    edit(run, old, new)
    with pytest.raises(HyMoError, match=said):
        resumed_config(run, None, [])


def test_a_file_that_was_emptied_is_refused(run):
    (run / "config.yaml").write_text("")
    with pytest.raises(HyMoError, match=r"model\.dim: the run has 32, found 896"):
        resumed_config(run, None, [])


def test_keys_that_may_change_may_be_changed_in_the_file(run):
    edit(run, "eval_every: 100", "eval_every: 5")
    config, changed = resumed_config(run, None, ["--logging.every=3"])
    assert (config.training.eval_every, config.logging.every) == (5, 3)
    assert set(changed) >= {"training.eval_every", "logging.every"}
