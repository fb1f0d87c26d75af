import errno
import json
import os

import pytest
import torch

from hymo.checkpoint import branch as module
from hymo.checkpoint import manifest
from hymo.checkpoint.branch import branch, eligible_checkpoints, extend, read_branch
from hymo.checkpoint.store import flatten, list_checkpoints, load, save
from hymo.config_io import load_config, to_dict
from hymo.errors import HyMoError
from hymo.models.model import build_hymo
from hymo.runs import write_config
from hymo.training.scheduler import JointWSDScheduler

FLAGS = [
    "--model.dim=16", "--model.n_layers=2", "--model.mla_every=2", "--model.gdn_heads=2", "--model.d_ff=8",
    "--model.vocab_size=260", "--scheduler.total_steps=100", "--scheduler.warmup_frac=0.1",
    "--scheduler.decay_frac=0.2",
]  # fmt: skip


@pytest.fixture(scope="module")
def config():
    return load_config("tiny", FLAGS)


@pytest.fixture
def parent(tmp_path, config):
    """A run of 100 updates (10 warm-up, 70 stable, 20 decay) saved at 5, 10, 40, 80 and 90, with a skipped attempt."""
    run = tmp_path / "runs" / "base"
    model = build_hymo(config, seed=1)
    write_config(run, config)
    for step in (5, 10, 40, 80, 90):
        state = {"model": model.state_dict(), "optimizer": {"momentum": torch.full((3,), float(step))}}
        save(run, step, step + 1, state, {"config": to_dict(config), "position": step * 4})
    rows = [{"step": max(a - 1, 1), "attempt": a, "loss": 3.0 - a / 100} for a in range(1, 92)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"step": 92, "att')
    return run


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_branch_is_a_run_of_its_own(parent, config):
    before = contents(parent)
    new = branch(parent, 40, 25)
    assert new == parent.with_name("base-decay-40")
    assert sorted(p.name for p in new.iterdir()) == ["branch.json", "checkpoints", "config.yaml", "metrics.jsonl"]
    after = contents(parent)
    assert after.pop("checkpoints/step-40.pinned").decode() == f"decay in {new}\n"
    assert after == before, "the parent is as it was, but for the note that keeps the checkpoint"

    s = load_config(new / "config.yaml").scheduler
    assert (s.total_steps, s.warmup_steps, s.stable_steps, s.decay_steps) == (65, 10, 30, 25)
    (start,) = list_checkpoints(new)
    assert manifest.verify(start).step == 40
    model = build_hymo(config, seed=9)
    load(start, {"model": model.state_dict()}, only=("model",))
    right = flatten({"m": build_hymo(config, seed=1).state_dict()})
    assert all(torch.equal(t, right[k]) for k, t in flatten({"m": model.state_dict()}).items())


def test_a_branch_ends_at_the_minimum_in_exactly_its_steps(parent, config):
    old = JointWSDScheduler(config.scheduler)
    new = JointWSDScheduler(load_config(branch(parent, 40, 25) / "config.yaml").scheduler)
    assert [new.get_factor(u) for u in range(1, 41)] == [old.get_factor(u) for u in range(1, 41)]
    assert new.get_factor(41) < 1.0
    assert new.get_factor(64) > config.scheduler.min_lr_ratio
    assert new.get_factor(65) == config.scheduler.min_lr_ratio


def test_the_record_goes_on_without_a_gap(parent):
    rows = [json.loads(line) for line in (branch(parent, 40, 25) / "metrics.jsonl").read_text().splitlines()]
    assert [r["attempt"] for r in rows] == list(range(1, 42))


def test_where_it_came_from_and_what_differs_is_written_down(parent, config):
    new = branch(parent, 80, 10, ["--optimizer.adamw_lr", "1e-4", "--data.source=/other", "--scheduler.decay=sqrt"])
    about = read_branch(new)
    assert (about.kind, about.parent, about.checkpoint) == ("decay", str(parent), "step-80")
    assert (about.step, about.attempt, about.before, about.after) == (80, 81, [10, 70, 20], [10, 70, 10])
    assert about.differences["optimizer.adamw_lr"] == [config.optimizer.adamw_lr, 1e-4]
    assert about.differences["data.source"] == [None, ["/other"]]
    assert about.differences["scheduler.total_steps"] == [100, 90]
    assert about.differences["scheduler.decay"] == ["linear", "sqrt"]
    assert not [k for k in about.differences if k.startswith("model.")]
    assert read_branch(parent) is None


def test_an_extension_keeps_the_warm_up_and_every_factor_before_the_old_decay(parent, config):
    new = extend(parent, 300)
    about = read_branch(new)
    assert (new.name, about.kind, about.step) == ("base-extend-300", "extend", 80)
    longer = load_config(new / "config.yaml").scheduler
    assert (longer.warmup_steps, longer.stable_steps, longer.decay_steps) == (10, 230, 60)
    old, s = JointWSDScheduler(config.scheduler), JointWSDScheduler(longer)
    assert [s.get_factor(u) for u in range(81)] == [old.get_factor(u) for u in range(81)]
    assert s.get_factor(90) == 1.0
    assert read_branch(extend(parent, 300, at=40, decay_steps=7)).after == [10, 283, 7]


def test_an_extended_run_can_be_extended_and_branched_again(parent):
    once = extend(parent, 300)
    twice = extend(once, 400)
    assert read_branch(twice).before == [10, 230, 60]
    assert read_branch(twice).after == [10, 310, 80]
    assert read_branch(branch(twice, 80, 5)).after == [10, 70, 5]


@pytest.mark.parametrize("at", [5, 41, 90])
def test_only_saved_updates_of_the_stable_phase_are_eligible(parent, at):
    assert [p.name for p in eligible_checkpoints(parent)] == ["step-10", "step-40", "step-80"]
    with pytest.raises(HyMoError, match=rf"--at: found {at}; accepted: .*stable phase \(10 to 80\): 10, 40, 80"):
        branch(parent, at, 10)


def test_what_cannot_be_is_refused_and_leaves_nothing(parent, tmp_path):
    runs = parent.parent
    with pytest.raises(HyMoError, match="model: found another shape"):
        branch(parent, 40, 10, ["--model.dim=32"])
    with pytest.raises(HyMoError, match=r"scheduler\.decay_steps: found beside a branch"):
        branch(parent, 40, 10, ["--scheduler.decay_steps=3"])
    with pytest.raises(ValueError, match=r"training\.sed"):
        branch(parent, 40, 10, ["--training.sed=3"])
    with pytest.raises(HyMoError, match=r"--extend: total_steps: found 90 .*update 80 or later"):
        extend(parent, 90)
    with pytest.raises(HyMoError, match="no such run"):
        branch(runs / "nowhere", 40, 10)
    with pytest.raises(HyMoError, match="exists already"):
        branch(parent, 40, 10, run_dir=parent)
    assert [p.name for p in runs.iterdir()] == ["base"]


def test_a_damaged_parent_is_refused(parent):
    file = next((parent / "checkpoints" / "step-40").glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(HyMoError, match="step-40 is damaged"):
        branch(parent, 40, 10)


def test_retention_leaves_the_parent_of_a_branch(parent):
    branch(parent, 40, 10)
    manifest.prune(parent, keep=1)
    assert [p.name for p in list_checkpoints(parent)] == ["step-40", "step-90"]


def test_a_branch_survives_its_parent(parent, tmp_path):
    """Its checkpoint is its own: links to the same bytes, or copies where there are none."""
    new = branch(parent, 40, 10)
    manifest.remove(parent / "checkpoints" / "step-40")
    assert manifest.verify(list_checkpoints(new)[0]).step == 40


def test_without_links_it_copies(parent, monkeypatch):
    def no_link(*args):
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", no_link)
    assert manifest.verify(list_checkpoints(branch(parent, 40, 10))[0]).step == 40


def test_a_run_may_be_named_from_within(parent, monkeypatch):
    monkeypatch.chdir(parent)
    assert branch(".", 40, 10) == parent.with_name("base-decay-40")
    monkeypatch.chdir(parent / "checkpoints")
    assert extend("..", 300) == parent.with_name("base-extend-300")


@pytest.fixture
def meanwhile(monkeypatch):
    """``meanwhile(call)``: once, while a branch's folder is filled and has no name yet, ``call`` happens."""

    def arrange(call):
        fill = module._fill

        def call_and_fill(partial, *args):
            monkeypatch.setattr(module, "_fill", fill)
            fill(partial, *args)
            call()

        monkeypatch.setattr(module, "_fill", call_and_fill)

    return arrange


def test_of_two_that_branch_at_once_each_gets_its_own(parent, meanwhile):
    """A sweep of rates. Switched off: one is returned the other's run, or none."""
    made = []
    meanwhile(lambda: made.append(branch(parent, 40, 25, ["--optimizer.adamw_lr=2e-4"])))
    made.append(branch(parent, 40, 25, ["--optimizer.adamw_lr=1e-4"]))
    assert [run.name for run in made] == ["base-decay-40", "base-decay-40-2"]
    for run, rate in zip(made, (2e-4, 1e-4), strict=True):
        assert load_config(run / "config.yaml").optimizer.adamw_lr == rate
        assert read_branch(run).differences["optimizer.adamw_lr"][1] == rate
        assert manifest.verify(list_checkpoints(run)[0]).step == 40
    note = (parent / "checkpoints" / "step-40.pinned").read_text()
    assert sorted(note.splitlines()) == [f"decay in {run}" for run in made]
    assert sorted(path.name for path in parent.parent.iterdir()) == ["base", *(run.name for run in made)]


def test_of_two_that_ask_for_one_folder_one_is_refused(parent, meanwhile):
    wanted = parent.with_name("wanted")
    meanwhile(lambda: branch(parent, 80, 5, run_dir=wanted))
    with pytest.raises(HyMoError, match="wanted exists already"):
        branch(parent, 40, 25, run_dir=wanted)
    assert read_branch(wanted).step == 80
    assert sorted(path.name for path in parent.parent.iterdir()) == ["base", "wanted"]


def test_an_empty_folder_may_become_a_branch(parent):
    """What a killed command left, or the user made."""
    (empty := parent.with_name("empty")).mkdir()
    assert read_branch(branch(parent, 40, 25, run_dir=empty)).step == 40


def test_a_branch_that_cannot_be_filled_leaves_its_name_free(parent, meanwhile):
    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    meanwhile(full)
    with pytest.raises(OSError, match="No space left"):
        branch(parent, 40, 25)
    assert [path.name for path in parent.parent.iterdir()] == ["base"]
    assert branch(parent, 40, 25).name == "base-decay-40"


def test_names_that_are_taken_are_left_alone(parent):
    assert [branch(parent, 40, 10).name for _ in range(3)] == ["base-decay-40", "base-decay-40-2", "base-decay-40-3"]
    assert branch(parent, None, 10).name == "base-decay-80"
