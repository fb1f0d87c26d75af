"""A run as a whole: rows, checkpoints, resume, stop, and what is refused. Real files, real processes."""

import errno
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from hymo.checkpoint import store
from hymo.cli import main
from hymo.config_io import build_config, load_config, merge, to_dict
from hymo.errors import HyMoError, NotFiniteError
from hymo.observe.metrics import read_metrics
from hymo.training import recovery
from hymo.training.loss import PretrainingLoss
from hymo.training.stop import StopRequest
from hymo.training.trainer import Trainer


def changed(config, **sections):
    return build_config(merge(to_dict(config), sections))


def rows(run_dir, kind="loss"):
    return [
        json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines() if kind in json.loads(line)
    ]


def losses(run_dir):
    return [row["loss"] for row in rows(run_dir)]


@pytest.fixture(scope="module")
def made_once(session_flags, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    return run_dir, Trainer(load_config("tiny", [*session_flags]), run_dir=run_dir).train()


@pytest.fixture
def finished(made_once, tmp_path):
    """A finished run, in a folder of the test's own, and what its training returned."""
    run_dir, result = made_once
    return shutil.copytree(run_dir, tmp_path / "run"), result


def test_a_run_writes_its_rows_checkpoints_and_evaluation(finished, small_config):
    run_dir, result = finished
    assert result.step == 6
    assert result.stopped is None
    table = rows(run_dir)
    assert [row["step"] for row in table] == [1, 2, 3, 4, 5, 6]
    assert [row["attempt"] for row in table] == [1, 2, 3, 4, 5, 6]
    wanted = {
        "step",
        "attempt",
        "loss",
        "total_loss",
        "grad_norm",
        "lr_muon",
        "lr_adamw",
        "tokens",
        "tokens_per_s",
        "skipped",
    }
    assert all(wanted <= row.keys() for row in table)
    assert table[-1]["tokens"] == 6 * small_config.tokens_per_step
    assert table[-1]["lr_muon"] == pytest.approx(0.02 * 0.05)
    evaluations = rows(run_dir, "val_bpb")
    assert [row["step"] for row in evaluations] == [3, 6]
    assert evaluations[-1]["val_bpb"] == pytest.approx(evaluations[-1]["val_loss"] / math.log(2), rel=0.05)
    # every 2 updates, where the decay starts (6 - floor(6 * .3) = 5), and at the end; the newest 3 stay
    assert [store.read_manifest(p).step for p in store.list_checkpoints(run_dir)] == [4, 5, 6]
    assert store.read_manifest(store.latest(run_dir)).step == 6


def test_the_checkpoint_where_the_decay_starts_is_never_removed(small_config, tmp_path):
    Trainer(changed(small_config, checkpoint={"keep": 1}), run_dir=tmp_path / "run").train()
    assert [store.read_manifest(p).step for p in store.list_checkpoints(tmp_path / "run")] == [5, 6]


def test_the_same_configuration_gives_the_same_bits(finished, small_config, tmp_path):
    run_dir, _ = finished
    Trainer(small_config, run_dir=tmp_path / "again").train()
    assert losses(tmp_path / "again") == losses(run_dir)


@pytest.mark.parametrize("at", [2, 4])
def test_resume_is_bitwise(finished, small_config, tmp_path, at):
    """torchtitan#809, Automodel#3882: losses, rates, weights and optimizer state go on as if nothing had happened."""
    run_dir, _ = finished
    half = Trainer(changed(small_config, checkpoint={"keep": 9}), run_dir=tmp_path / "half")
    half.train()
    checkpoint = tmp_path / "half" / "checkpoints" / f"step-{at}"
    resumed = Trainer(small_config, run_dir=tmp_path / "resumed")
    resumed.resume(checkpoint)
    resumed.train()
    assert losses(tmp_path / "resumed") == losses(run_dir)[at:]
    whole, again = (store.read_manifest(store.latest(d)) for d in (run_dir, tmp_path / "resumed"))
    assert whole.meta["position"] == again.meta["position"]
    state = recovery.tensors(resumed.model, resumed.optimizers)
    other = Trainer(small_config)
    other.resume(store.latest(run_dir))
    for name, tensor in store.flatten(recovery.tensors(other.model, other.optimizers)).items():
        assert torch.equal(tensor, store.flatten(state)[name]), name


def test_the_state_of_the_random_numbers_comes_back(small_config, tmp_path):
    """Nothing of ours draws while training; a loss of the user's may. Switched off: another number is drawn."""
    trainer = Trainer(small_config, run_dir=tmp_path / "run")
    trainer.train_step()
    torch.manual_seed(1234)
    trainer.save()
    wanted = torch.rand(3)
    torch.manual_seed(5)
    resumed = Trainer(small_config)
    resumed.resume(trainer.last_checkpoint)
    assert torch.equal(torch.rand(3), wanted)


def test_two_stops_are_as_good_as_one(finished, small_config, tmp_path):
    run_dir, _ = finished
    for stop in (2, 4, 6):
        trainer = Trainer(small_config, run_dir=tmp_path / "run2")
        if store.latest(tmp_path / "run2"):
            trainer.resume(store.latest(tmp_path / "run2"))
        while trainer.step < stop:
            trainer.train_step()
        trainer.save()
    assert store.read_manifest(store.latest(tmp_path / "run2")).meta["position"] == 24
    final = Trainer(small_config)
    final.resume(store.latest(run_dir))
    for name, tensor in store.flatten(recovery.tensors(final.model, final.optimizers)).items():
        assert torch.equal(tensor, store.flatten(recovery.tensors(trainer.model, trainer.optimizers))[name]), name


class Poison(PretrainingLoss):
    """Not finite in the attempts given."""

    def __init__(self, *attempts, mtp_weights=(0.3, 0.1)):
        super().__init__(mtp_weights)
        object.__setattr__(self, "attempts", set(attempts))
        object.__setattr__(self, "calls", [0])

    def __call__(self, output, valid_K):
        self.calls[0] += 1
        attempt = (self.calls[0] + 1) // 2  # two micro-batches an attempt
        total, means = super().__call__(output, valid_K)
        return (total * math.nan, means) if attempt in self.attempts else (total, means)


def test_a_skipped_attempt_is_a_row_of_its_own_and_the_run_still_makes_every_update(small_config, tmp_path):
    result = Trainer(small_config, loss=Poison(2, 3), run_dir=tmp_path / "run").train()
    assert result.step == 6
    table = rows(tmp_path / "run")
    assert [row["attempt"] for row in table] == list(range(1, 9))
    assert [row["step"] for row in table] == [1, 2, 2, 2, 3, 4, 5, 6]
    assert [row["skipped"] for row in table] == [False, True, True, False, False, False, False, False]
    assert table[1]["total_loss"] is None
    assert store.read_manifest(store.latest(tmp_path / "run")).meta["position"] == 8 * 4


def test_too_many_skips_stop_the_run_and_leave_the_last_good_checkpoint(small_config, tmp_path):
    """pocket-tts#262: no checkpoint is written or removed after a bad attempt."""
    trainer = Trainer(small_config, loss=Poison(*range(4, 99)), run_dir=tmp_path / "run")
    with pytest.raises(NotFiniteError, match="step-2"):
        trainer.train()
    assert NotFiniteError.exit_code == 3
    assert trainer.step == 3
    assert len([row for row in rows(tmp_path / "run") if row["skipped"]]) == 5
    assert [store.read_manifest(p).step for p in store.list_checkpoints(tmp_path / "run")] == [2]


def test_without_skipping_the_first_bad_attempt_stops(small_config, tmp_path):
    config = changed(small_config, training={"loss_nan_skip": False})
    with pytest.raises(NotFiniteError):
        Trainer(config, loss=Poison(1), run_dir=tmp_path / "run").train()


def test_max_hours_saves_and_stops(small_config, tmp_path):
    config = changed(small_config, training={"max_hours": 1e-9})
    result = Trainer(config, run_dir=tmp_path / "run").train()
    assert (result.step, result.stopped) == (1, "training.max_hours")
    assert store.read_manifest(result.checkpoint).step == 1


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"gradient_accumulation_steps": 3}, "accepted: 2 for 4 sequences"),
        ({"micro_batch_size": 3, "global_batch_size": 4}, "accepted: at most 25%, for example 2"),
    ],
)
def test_impossible_batches_are_refused_with_what_fits(small_config, training, message):
    with pytest.raises(HyMoError, match=message):
        Trainer(changed(small_config, training=training))


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused(small_config):
    with pytest.raises(HyMoError, match=r"model\.vocab_size: found 100; accepted: at least 260"):
        Trainer(changed(small_config, model={"vocab_size": 100}))


def test_tensorboard_file_holds_the_same_numbers(small_config, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = changed(small_config, logging={"trackers": ["tensorboard"]})
    Trainer(config, run_dir=tmp_path / "run").train()
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    written = {event.step: event.value for event in events.Scalars("loss")}
    assert written == {row["step"]: pytest.approx(row["loss"], rel=1e-6) for row in rows(tmp_path / "run")}
    assert {"val_bpb", "grad_norm", "lr_muon"} <= set(events.Tags()["scalars"])


@pytest.mark.parametrize("until", [1, 3])
def test_tensorboard_shows_no_update_twice_after_a_kill(until, small_config, tmp_path):
    """Killed before the first checkpoint, and after that of update 2. Switched off: what was made again is doubled."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    config = changed(small_config, logging={"trackers": ["tensorboard"]}, checkpoint={"every": 2})
    trainer = Trainer(config, run_dir=run)
    trainer.train(Until(trainer, until))
    again = Trainer(config, run_dir=run)
    if (newest := store.latest(run)) is not None:
        again.resume(newest)
    assert again.step == until - 1
    again.train()
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("stop", [4, 40])
def test_profile_writes_a_trace_also_where_the_run_ends_first(stop, small_config, tmp_path):
    Trainer(small_config, run_dir=tmp_path / "run", profile=(2, stop)).train()
    (trace,) = (tmp_path / "run" / "profile").glob(f"steps-2-{stop}*.json")
    assert json.loads(trace.read_text())["traceEvents"]


# ------------------------------------------------------------------------------ the command line
def hymo(*words, code=0, capsys):
    assert main(words) == code
    return capsys.readouterr()


def test_train_generate_eval_and_what_is_refused(small_flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    out = hymo("train", *small_flags, capsys=capsys).out.splitlines()
    assert out[-1] == "run: runs/tiny-1"
    assert "sample:" in out
    assert (tmp_path / "runs/tiny-1/config.yaml").is_file()
    assert load_config("runs/tiny-1/config.yaml", []) == load_config("tiny", small_flags)

    text = hymo("generate", "runs/tiny-1", "def f(", "--max-tokens", "6", capsys=capsys)
    assert text.out.startswith("def f(")
    assert "tokens/s" in text.err
    again = hymo("generate", "runs/tiny-1", "def f(", "--max-tokens", "6", capsys=capsys)
    assert again.out == text.out
    refused = hymo("generate", "runs/tiny-1", "x" * 40, code=2, capsys=capsys)
    assert "prompt: found 40 tokens; accepted: fewer than the model's context of 32" in refused.err

    evaluated = hymo("eval", "runs/tiny-1", capsys=capsys).out
    last = rows(tmp_path / "runs/tiny-1", "val_loss")[-1]
    assert f"val_loss {last['val_loss']:.4f} | val_bpb {last['val_bpb']:.4f}" in evaluated

    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("*") if p.is_file()}
    refused = hymo("train", *small_flags, "--run-dir", "runs/tiny-1", code=2, capsys=capsys)
    assert "runs/tiny-1 exists already; accepted: --resume to go on with it, or another name" in refused.err
    refused = hymo("train", *small_flags, "--resume", "--optimizer.muon_lr=0.5", code=2, capsys=capsys)
    assert "optimizer.muon_lr: the run has 0.02, found 0.5" in refused.err
    refused = hymo("train", *small_flags, "--resume", "--scheduler.total_steps=9", code=2, capsys=capsys)
    assert "scheduler.total_steps: the run has 6, found 9" in refused.err
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("*") if p.is_file()} == before

    again = hymo("train", *small_flags, capsys=capsys).out
    assert again.splitlines()[-1] == "run: runs/tiny-2"
    assert losses(tmp_path / "runs/tiny-2") == losses(tmp_path / "runs/tiny-1")

    weights = hymo("train", *small_flags, "--init-from", "runs/tiny-1", "--run-dir", "runs/warm", capsys=capsys).out
    assert "runs/tiny-1/checkpoints/step-6 (step 6)" in weights
    assert losses(tmp_path / "runs/warm")[0] < losses(tmp_path / "runs/tiny-1")[0]


def start(words, cwd):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "hymo", "train", *words], cwd=cwd, env=env, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def wait_for_step(process, step):
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(f"step {step:>4}/"):
            return
    raise AssertionError("".join(lines))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_stopped_run_goes_on_bit_for_bit(number, small_flags, tmp_path, capsys, monkeypatch):
    """Whether asked to stop or killed, --resume ends with the rows of a run that was never stopped."""
    flags = [*small_flags, "--scheduler.total_steps=1200", "--checkpoint.every=5", "--training.eval_every=0"]
    process = start([*flags, "--run-dir", "run"], tmp_path)
    wait_for_step(process, 12)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    if number == signal.SIGTERM:
        assert process.returncode == 0
        assert "stopped by SIGTERM after update" in output
    manifest = store.read_manifest(store.latest(tmp_path / "run"))
    assert manifest.step >= 10
    reached = rows(tmp_path / "run")[-1]["step"]
    if number == signal.SIGTERM:
        assert manifest.step == reached
    target = manifest.step + 4

    monkeypatch.chdir(tmp_path)
    config = load_config("run/config.yaml")
    resumed = Trainer(config)
    resumed.resume(store.latest(tmp_path / "run"))
    fresh = Trainer(config)
    fresh_losses = {}
    while fresh.step < target:
        result = fresh.train_step()
        fresh_losses[fresh.step] = result.loss
    if torch.get_num_threads() == 1:
        while resumed.step < target:
            assert resumed.train_step().loss == fresh_losses[resumed.step]
    before = {row["step"]: row["loss"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in row}
    assert all(before[s] == pytest.approx(fresh_losses[s], rel=1e-4) for s in before if s in fresh_losses)


def test_resume_starts_where_there_is_nothing_yet(small_flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    out = hymo("train", *small_flags, "--resume", "--run-dir", "new", capsys=capsys).out
    assert out.splitlines()[-1] == "run: new"
    began = time.perf_counter()
    out = hymo("train", "--resume", "--run-dir", "new", capsys=capsys).out
    assert "resumed from new/checkpoints/step-6: update 6" in out
    assert time.perf_counter() - began < 30
    assert len(rows(tmp_path / "new")) == 6


# ------------------------------------------------------------------------------------------- branches, spikes, saves
def test_a_branch_decays_from_the_stable_phase_and_says_what_differs(finished, small_flags, tmp_path, capsys):
    run_dir, _ = finished
    words = [
        "branch",
        str(run_dir),
        "--at",
        "4",
        "--decay",
        "2",
        "--optimizer.adamw_lr=1e-3",
        "--run-dir",
        str(tmp_path / "b"),
    ]
    out = hymo(*words, capsys=capsys).out
    assert "optimizer.adamw_lr: 0.003 -> 0.001" in out
    assert f"training it now; after a stop it goes on by: hymo train --run-dir {tmp_path / 'b'} --resume" in out
    (line,) = [line for line in out.splitlines() if line.startswith("resumed from")]
    assert line.endswith(f"branch: weights and optimizer state of {run_dir}, another schedule, optimizer.adamw_lr")
    table = rows(tmp_path / "b")
    assert [row["step"] for row in table] == [1, 2, 3, 4, 5, 6]
    parent = rows(run_dir)
    assert [row["loss"] for row in table[:5]] == [row["loss"] for row in parent[:5]]  # the same data, the same model
    assert table[-1]["lr_muon"] == pytest.approx(0.02 * 0.05)
    assert table[4]["lr_adamw"] == pytest.approx(1e-3 * (0.05 + 0.95 * 0.5))
    refused = hymo("branch", str(run_dir), "--at", "6", "--decay", "2", code=2, capsys=capsys)
    assert "accepted: a checkpoint of the stable phase" in refused.err
    refused = hymo("branch", str(run_dir), "--at", "4", code=2, capsys=capsys)
    assert "found neither --decay nor --extend" in refused.err


def test_a_branch_that_cannot_run_here_is_not_made(finished, tmp_path, capsys):
    run_dir, _ = finished
    words = ["branch", str(run_dir), "--at", "4", "--decay", "2", "--run-dir", str(tmp_path / "new")]
    for key in ("fused_gdn", "cuda_graphs"):
        refused = hymo(*words, f"--training.{key}=true", code=2, capsys=capsys)
        assert f"training.{key}: found true on cpu" in refused.err and not (tmp_path / "new").exists()


def test_a_branch_that_is_only_made_says_how_to_train_it(finished, tmp_path, capsys):
    run_dir, _ = finished
    new = tmp_path / "a new one"
    words = ["branch", str(run_dir), "--at", "4", "--decay", "2", "--create-only", "--run-dir", str(new)]
    last = hymo(*words, capsys=capsys).out.splitlines()[-1]
    assert last == f"next: hymo train --run-dir '{new}' --resume"
    hymo(*shlex.split(last)[2:], capsys=capsys)
    assert rows(new)[-1]["step"] == 6


def test_an_extended_run_repeats_the_rates_before_the_old_decay(finished, tmp_path, capsys):
    run_dir, _ = finished
    hymo("branch", str(run_dir), "--extend", "10", "--run-dir", str(tmp_path / "e"), capsys=capsys)
    table, parent = rows(tmp_path / "e"), rows(run_dir)
    assert table[-1]["step"] == 10
    assert [row["lr_muon"] for row in table[:5]] == [row["lr_muon"] for row in parent[:5]]
    assert table[5]["lr_muon"] == parent[4]["lr_muon"]
    words = ["--extend", "10", "--decay", "3", "--create-only", "--run-dir", str(tmp_path / "d")]
    assert "-> [0, 7, 3]" in hymo("branch", str(run_dir), *words, capsys=capsys).out  # its decay may be given


def test_a_branch_on_other_data_starts_at_its_beginning(finished, tmp_path, capsys):
    import email

    run_dir, _ = finished
    other = str(os.path.dirname(email.__file__))
    words = [
        "branch",
        str(run_dir),
        "--at",
        "4",
        "--decay",
        "2",
        f"--data.source={other}",
        "--run-dir",
        str(tmp_path / "b"),
    ]
    out = hymo(*words, capsys=capsys).out
    assert "data.source:" in out
    (line,) = [line for line in out.splitlines() if line.startswith("resumed from")]
    assert line.endswith("another schedule, other text, from its start")
    assert "bitwise" not in out
    assert store.read_manifest(store.latest(tmp_path / "b")).meta["position"] == 2 * 4


def test_background_saves_hold_what_foreground_saves_hold(finished, small_config, tmp_path):
    """torchtitan#930, pytorch#144657: a later step must not leak into the file."""
    run_dir, _ = finished
    config = changed(small_config, checkpoint={"asynchronous": True})
    Trainer(config, run_dir=tmp_path / "a").train()
    for step in (4, 5, 6):
        states = []
        for folder in (run_dir, tmp_path / "a"):
            trainer = Trainer(small_config)
            trainer.resume(folder / "checkpoints" / f"step-{step}")
            states.append(store.flatten(recovery.tensors(trainer.model, trainer.optimizers)))
        assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])


class Spike(PretrainingLoss):
    """A loss far too large, but finite, in one attempt."""

    def __init__(self, attempt):
        super().__init__((0.3, 0.1))
        object.__setattr__(self, "at", attempt)
        object.__setattr__(self, "calls", [0])

    def __call__(self, output, valid_K):
        self.calls[0] += 1
        total, means = super().__call__(output, valid_K)
        return (total + 50.0, means) if (self.calls[0] + 1) // 2 == self.at else (total, means)


@pytest.mark.parametrize("policy", ["off", "skip", "rewind"])
def test_spike_guard(policy, small_config, tmp_path, monkeypatch):
    monkeypatch.setattr(recovery, "SPIKE_WINDOW", 3)
    monkeypatch.setattr(recovery.Progress, "__init__", _short_window)
    config = changed(small_config, training={"spike_guard": policy})
    result = Trainer(config, loss=Spike(4), run_dir=tmp_path / "run").train()  # the last checkpoint is that of 2
    table = rows(tmp_path / "run")
    steps = [row["step"] for row in table]
    assert result.step == 6
    assert steps == {
        "off": [1, 2, 3, 4, 5, 6], "skip": [1, 2, 3, 4, 4, 5, 6], "rewind": [1, 2, 3, 4, 3, 4, 5, 6],
    }[policy]  # fmt: skip
    assert [row["skipped"] for row in table].count(True) == (policy != "off")


def test_rewind_waits_for_the_save_in_flight(small_config, tmp_path, monkeypatch):
    """All ranks go back to the same one. Switched off: this one has heard of none, others may have of another."""
    real, calls = store._write_tensors, []

    def slow_once(*args):
        calls.append(args)
        time.sleep(2.0 if len(calls) == 1 else 0.0)
        return real(*args)

    monkeypatch.setattr(store, "_write_tensors", slow_once)
    monkeypatch.setattr(recovery, "SPIKE_WINDOW", 3)
    monkeypatch.setattr(recovery.Progress, "__init__", _short_window)
    config = changed(small_config, training={"spike_guard": "rewind"}, checkpoint={"asynchronous": True})
    Trainer(config, loss=Spike(4), run_dir=tmp_path / "run").train()
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4, 3, 4, 5, 6]


def test_spikes_without_end_stop_the_run(small_config, tmp_path, monkeypatch):
    monkeypatch.setattr(recovery.Progress, "spike_limit", lambda self: 0.0)
    config = changed(small_config, training={"spike_guard": "skip", "consecutive_nan_limit": 2})
    with pytest.raises(NotFiniteError, match="2 loss spikes in a row"):
        Trainer(config, run_dir=tmp_path / "run").train()
    assert [row["skipped"] for row in rows(tmp_path / "run")] == [True, True]


def _short_window(self, step=0, attempt=0, position=0, tokens=0):
    from collections import deque

    self.step, self.attempt, self.position, self.tokens = step, attempt, position, tokens
    self.skips_in_a_row = self.spikes_in_a_row = 0
    self.losses = deque(maxlen=3)


def test_rewind_goes_back_to_the_checkpoint_and_past_the_data(small_config, tmp_path):
    config = changed(small_config, checkpoint={"every": 2})
    trainer = Trainer(config, run_dir=tmp_path / "run")
    for _ in range(2):
        trainer.train_step()
    trainer.save()
    kept = {k: v.clone() for k, v in store.flatten(recovery.tensors(trainer.model, trainer.optimizers)).items()}
    trainer.train_step()
    recovery.rewind(trainer.last_checkpoint, trainer.model, trainer.optimizers, trainer.progress)
    now = store.flatten(recovery.tensors(trainer.model, trainer.optimizers))
    assert all(torch.equal(kept[k], now[k]) for k in kept)
    assert (trainer.step, trainer.progress.attempt, trainer.progress.position) == (2, 3, 12)


@pytest.mark.parametrize("reshard", ["step", "layer", "never"])
def test_weights_gathered_for_an_evaluation_are_not_taken_for_those_of_a_checkpoint(small_config, tmp_path, reshard):
    config = changed(small_config, training={"fsdp": True, "reshard": reshard})
    trainer = Trainer(config, run_dir=tmp_path / "run")
    assert trainer.sharded
    trainer.train_step()
    trainer.save()
    expected = trainer.evaluate()["val"].val_loss
    trainer.train_step()
    assert trainer.evaluate()["val"].val_loss != expected
    trainer.resume(trainer.last_checkpoint)
    assert trainer.evaluate()["val"].val_loss == expected


# --------------------------------------------------------------------------------------------------- where things lie
def test_a_run_can_be_used_from_another_folder_with_its_own_tokenizer(small_flags, tmp_path, monkeypatch, capsys):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=258, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["some text of no matter"], trainer)
    (tmp_path / "here" / "text").mkdir(parents=True)
    (tmp_path / "here" / "text" / "a.txt").write_text("x = 1\n" * 2000)
    (tmp_path / "here" / "text" / "b.txt").write_text("y = 2\n" * 2000)
    tokenizer.save(str(tmp_path / "here" / "t.json"))
    monkeypatch.chdir(tmp_path / "here")
    flags = [*small_flags[:-1], "--data.source=text", "--data.tokenizer=t.json", "--run-dir", "run"]
    hymo("train", *flags, capsys=capsys)
    monkeypatch.chdir(tmp_path)
    hymo("eval", "here/run", capsys=capsys)
    (tmp_path / "here" / "t.json").unlink()
    out = hymo("generate", "here/run", "x", "--max-tokens", "3", "--training.device=cpu", capsys=capsys).out
    assert out.startswith("x")
    monkeypatch.chdir(tmp_path / "here/run/checkpoints/step-6")  # the copy is found from within, too
    for place in (".", "../step-6"):
        assert hymo("generate", place, "x", "--max-tokens", "3", "--training.device=cpu", capsys=capsys).out == out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--run-dir", "s3://bucket/run"], "found s3://bucket/run; accepted: a folder of this machine"),
        (["--run-dir", "/proc/no/run", "--data.source=/no/such/folder"], "/proc/no/run cannot be made"),
        (["--profile", "50:60"], "--profile: found 50:60; accepted: updates up to 6"),
        (["--config", "tiny"], "--config: found tiny beside tiny"),
        (["--model.gdn_erase=beta"], "model.gdn_erase: found beta; accepted: none"),
        (["--data.source=/no/such/folder"], "/no/such/folder"),
        (["--training.replicas=2"], "training.replicas: found 2 for a model that is not sharded"),
    ],
)
def test_more_that_is_refused_in_one_line(words, message, small_flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = ["tiny"] if words[0] == "--config" else []
    captured = hymo("train", *config, *small_flags, *words, code=2, capsys=capsys)
    assert message in captured.err
    assert len(captured.err.strip().splitlines()) == 1
    assert not list(tmp_path.rglob("*")) or [p.name for p in tmp_path.rglob("*")] == ["runs"]


def test_two_runs_that_start_at_once_get_a_folder_each(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    from hymo.runs import reserve_run_dir

    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: reserve_run_dir("tiny", tmp_path), range(8)))
    assert len(set(folders)) == 8


def test_a_restart_by_torchrun_goes_on(finished, small_flags, tmp_path, monkeypatch, capsys):
    run_dir, _ = finished
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    out = hymo("train", "--run-dir", str(run_dir), capsys=capsys).out
    assert "resumed from" in out
    assert "step-6: update 6, attempt 6; resume: bitwise" in out


def test_a_branch_that_torchrun_starts_again_goes_on(finished, tmp_path, monkeypatch, capsys):
    run_dir, _ = finished
    words = ["branch", str(run_dir), "--at", "4", "--decay", "2"]
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    assert "--run-dir: found none under torchrun" in hymo(*words, code=2, capsys=capsys).err
    words += ["--run-dir", str(tmp_path / "new")]
    hymo(*words, "--create-only", capsys=capsys)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert "resumed from" in hymo(*words, capsys=capsys).out
    assert rows(tmp_path / "new")[-1]["step"] == 6


def test_a_changed_free_key_is_said_and_spoils_the_bits(finished, capsys):
    run_dir, _ = finished
    words = ["train", "--run-dir", str(run_dir), "--resume", "--training.micro_batch_size=4", "--logging.every=2"]
    out = hymo(*words, capsys=capsys).out
    assert "changed for this part of the run: training.micro_batch_size: 2 -> 4" in out
    assert "resume: not bitwise (training.micro_batch_size)" in out


def test_wandb_offline_has_the_rows_and_goes_on_under_its_name(small_config, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = changed(small_config, logging={"trackers": ["wandb"]})
    Trainer(config, run_dir=tmp_path / "run").train()
    name = json.loads((tmp_path / "run" / "wandb.json").read_text())["id"]
    resumed = Trainer(config, run_dir=tmp_path / "run")
    resumed.resume(tmp_path / "run" / "checkpoints" / "step-4")
    resumed.train()
    files = list((tmp_path / "run" / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb"))
    assert files
    assert any(b"val_bpb" in file.read_bytes() for file in files)


@pytest.mark.parametrize("phase", ["start", "data", "evaluation"])
def test_sigterm_in_any_phase_ends_well(phase, small_flags, tmp_path, monkeypatch, capsys):
    """Before the first step nothing is saved and the shards are whole or absent; later the step is in a checkpoint."""
    import hymo.training.trainer as module

    def terminate_then(function):
        def wrapped(*args, **kwargs):
            os.kill(os.getpid(), signal.SIGTERM)
            return function(*args, **kwargs)

        return wrapped

    target = {"start": "build_hymo", "data": "prepare_data", "evaluation": "evaluate"}[phase]
    monkeypatch.setattr(module, target, terminate_then(getattr(module, target)))
    monkeypatch.chdir(tmp_path)
    out = hymo("train", *small_flags, "--run-dir", "run", capsys=capsys).out
    if phase == "evaluation":
        assert "stopped by SIGTERM after update 3" in out or "stopped by SIGTERM after update 4" in out
        assert store.read_manifest(store.latest(tmp_path / "run")).step >= 3
    else:
        assert "stopped by SIGTERM before the first step" in out
        assert not (tmp_path / "run" / "checkpoints").exists()
    monkeypatch.undo()


@pytest.mark.timeout(600)
def test_a_long_record_with_skips_two_resumes_and_a_branch_is_one(small_flags, tmp_path, capsys):
    """1,000 updates, read back with pandas and with TensorBoard's own reader: no attempt is missing or doubled.

    Of the smallest model that trains: the record is long, not the updates.
    """
    import pandas
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tiny_steps = ["--training.global_batch_size=1", "--training.micro_batch_size=1", "--training.seq_len=16"]
    tiny_steps += ["--model.n_layers=1", "--model.mtp_depth=0", "--model.mtp_weights=[]"]
    rare = ["--scheduler.total_steps=900", "--training.eval_every=300", "--checkpoint.every=200"]
    config = load_config("tiny", [*small_flags, *tiny_steps, *rare, "--logging.trackers=[tensorboard]"])

    def part(until, loss=None):
        trainer = Trainer(config, run_dir=tmp_path / "run", loss=loss)
        if store.latest(tmp_path / "run") is not None:
            trainer.resume(store.latest(tmp_path / "run"))
        return trainer.train(Until(trainer, until))

    part(230, Poison(60, mtp_weights=()))  # it counts in pairs of micro-batches: attempts 119 and 120 are skipped
    part(430)  # goes on from 200 and makes 201 to 230 again
    part(630)  # goes on from 400
    words = ["--at", "600", "--decay", "400", "--run-dir", str(tmp_path / "b")]
    hymo("branch", str(tmp_path / "run"), *words, capsys=capsys)
    frame = pandas.read_json(tmp_path / "b" / "metrics.jsonl", lines=True)
    steps = frame[frame.loss.notna()]
    assert list(steps.attempt) == list(range(1, 1003))
    done = steps[~steps.skipped.astype(bool)]
    assert list(done.step) == list(range(1, 1001))
    events = EventAccumulator(str(tmp_path / "b" / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    assert [e.step for e in events.Scalars("loss")] == list(range(601, 1001))


class Until(StopRequest):
    """Stops after an update, without saving before: like a kill between two saves."""

    def __init__(self, trainer, update):
        super().__init__(None)
        self.trainer, self.update = trainer, update
        trainer._save_before_stop = lambda stop: None

    def reason(self, clock=True):
        return "a test" if self.trainer.step >= self.update else None


def test_a_save_that_fails_is_said_and_tried_again(small_config, tmp_path, monkeypatch, capsys):
    """A full disk stops nothing and tears nothing."""
    from hymo.checkpoint import saver

    real, calls = saver.store.save, []

    def full_once(*args, **kwargs):
        calls.append(args[1])
        if len(calls) == 1:
            raise store.CheckpointError("step 2 could not be saved: No space left on device")
        return real(*args, **kwargs)

    monkeypatch.setattr(saver.store, "save", full_once)
    trainer = Trainer(small_config, run_dir=tmp_path / "run")
    for _ in range(2):
        trainer.train_step()
    trainer.save()
    assert trainer.last_checkpoint is None
    assert "No space left on device" in capsys.readouterr().out
    trainer.save()
    assert store.read_manifest(trainer.last_checkpoint).step == 2


def test_a_background_save_that_fails_late_is_not_the_one_after_it(small_config, tmp_path, monkeypatch, capsys):
    """It is heard of when the next one begins. Switched off: a whole last state is said to be lost."""
    real = store._write_tensors

    def slow_and_full(folder, *args):
        if "step-5-" in folder.name:
            time.sleep(1.0)
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(folder, *args)

    monkeypatch.setattr(store, "_write_tensors", slow_and_full)
    trainer = Trainer(changed(small_config, checkpoint={"asynchronous": True}), run_dir=tmp_path / "run")
    result = trainer.train()
    assert "warning: step 5 could not be saved" in capsys.readouterr().out
    assert result.checkpoint.name == "step-6"
    assert trainer.last_state_saved


def test_damaged_checkpoints_are_said_and_never_begun_over(finished, capsys):
    run_dir, _ = finished
    newest, *others = sorted(store.list_checkpoints(run_dir), reverse=True)
    for path in (newest, *others):
        (file,) = path.glob("*.distcp")
        file.write_bytes(file.read_bytes()[:-9])
        if path == newest:
            out = hymo("train", "--run-dir", str(run_dir), "--resume", capsys=capsys).out
            assert f"warning: {newest} is damaged and left out" in out
            newest_again = store.latest(run_dir)
            (again,) = newest_again.glob("*.distcp")
            again.write_bytes(again.read_bytes()[:-9])
    before = (run_dir / "metrics.jsonl").read_bytes()
    refused = hymo("train", "--run-dir", str(run_dir), "--resume", code=2, capsys=capsys)
    assert "all damaged" in refused.err
    assert (run_dir / "metrics.jsonl").read_bytes() == before


def test_inspect_ends_with_2_where_a_checkpoint_is_damaged(finished, capsys):
    run_dir, _ = finished
    hymo("inspect", str(run_dir), capsys=capsys)
    older, newest = sorted(store.list_checkpoints(run_dir), key=lambda path: store.read_manifest(path).step)[-2:]
    (file,) = older.glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)  # of the same size
    said = hymo("inspect", str(older), code=2, capsys=capsys)
    assert "whole       NO: __0_0.distcp has another SHA-256" in said.out
    assert f"hymo: {older} is damaged: __0_0.distcp has another SHA-256" in said.err
    hymo("inspect", str(newest), capsys=capsys)
    file.write_bytes(content[:-9])
    said = hymo("inspect", str(run_dir), code=2, capsys=capsys)
    assert "whole       yes" in said.out
    assert f"hymo: damaged: {older}; accepted: {newest}, the newest whole one" in said.err


def test_a_checkpoint_of_a_newer_version_is_refused_by_name(finished, capsys):
    """Going on from the one before would leave what the newer version made. Switched off: it counts as damaged."""
    run_dir, _ = finished
    newest = store.latest(run_dir)
    body = json.loads((newest / "manifest.json").read_text()) | {"format": 2, "new": 1, "versions": {"hymo": "0.9.0"}}
    (newest / "manifest.json").write_text(json.dumps(body))
    before = (run_dir / "metrics.jsonl").read_bytes()
    for words in (["train", "--run-dir", str(run_dir), "--resume"], ["eval", str(run_dir)]):
        refused = hymo(*words, code=2, capsys=capsys)
        assert f"{newest}: written in format 2 by hymo 0.9.0; accepted here: up to format 1" in refused.err
    assert (run_dir / "metrics.jsonl").read_bytes() == before


def test_an_evaluation_that_was_not_ended_is_owed(finished, small_config, tmp_path):
    """The run was killed in the evaluation after its last update: --resume makes that one, and only that one.

    Switched off: a run that has made all its updates never gets its last losses.
    """
    run_dir, _ = finished
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert "val_bpb" in lines[-1]
    (run_dir / "metrics.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    for _ in range(2):
        trainer = Trainer(small_config, run_dir=run_dir)
        trainer.resume(store.latest(run_dir))
        trainer.train()
        assert (run_dir / "metrics.jsonl").read_text().splitlines() == lines


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "RUN", "x", "--temperature", "1e-40"], "--temperature: found 1e-40"),
        (["generate", "RUN", "x", "--top-p", "0"], "--top-p: found 0.0"),
        (["generate", "RUN", "x", "--seed", "99999999999999999999999"], "--seed: found 99999999999999999999999"),
        (["generate", "RUN", ""], "prompt: found no tokens"),
        (["train", "--init-from", "nowhere"], "nowhere: no such run or checkpoint"),
        (["bench", "train", "--steps", "0"], "--steps: found 0"),
        (["data", "build", "x", "--out", "y", "--val-fraction", "7"], "--val-fraction: found 7.0"),
        (["data", "build", "x", "--out", "y", "--workers", "-3"], "--workers: found -3"),
    ],
)
def test_nonsense_is_one_line(words, message, finished, tmp_path, monkeypatch, capsys):
    run_dir, _ = finished
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    captured = hymo(*[str(run_dir) if word == "RUN" else word for word in words], code=2, capsys=capsys)
    assert message in captured.err
    assert len(captured.err.strip().splitlines()) == 1
    assert not captured.out


def test_resume_never_starts_among_other_files(small_flags, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    refused = hymo("train", *small_flags, "--resume", "--run-dir", str(tmp_path / "mine"), code=2, capsys=capsys)
    assert "holds files and no run" in refused.err


def test_a_prompt_of_odd_bytes_is_shown_as_far_as_it_can_be(finished, capsys):
    run_dir, _ = finished
    capsys.readouterr()
    out = hymo("generate", str(run_dir), "a\udcff", "--max-tokens", "2", capsys=capsys).out
    assert out.startswith("a?")


def test_a_last_save_that_fails_is_the_exit_code(small_flags, tmp_path, monkeypatch, capsys):
    """Switched off (0 in any case), a job queue would take a run for done whose end is lost."""
    save = store.save

    def fails_at_the_end(run_dir, step, *args, **kwargs):
        if step == 6:
            raise store.CheckpointError("step 6 could not be saved: No space left on device")
        return save(run_dir, step, *args, **kwargs)

    monkeypatch.setattr(store, "save", fails_at_the_end)
    arguments = ["train", "tiny", *small_flags, "--run-dir", str(tmp_path / "run")]
    assert main(arguments) == 1
    assert "the last state could not be saved" in capsys.readouterr().out
    monkeypatch.setattr(store, "save", save)
    assert main([*arguments, "--resume"]) == 0  # the last two updates again
    assert store.latest(tmp_path / "run").name == "step-6"


def test_one_job_a_run_folder(small_flags, tmp_path, capsys):
    """Two jobs in one folder removed each other's half-written checkpoints. A lock that is left by a kill is free."""
    run_dir = tmp_path / "run"
    arguments = ["train", "tiny", *small_flags, "--run-dir", str(run_dir)]
    assert main(arguments) == 0
    holds = "lock = filelock.FileLock(sys.argv[1]); lock.acquire()"
    code = f"import sys, filelock; {holds}; print('held', flush=True); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(run_dir / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        capsys.readouterr()
        assert main([*arguments, "--resume"]) == 2
        assert "another job is training in it" in capsys.readouterr().err
        assert read_metrics(run_dir / "metrics.jsonl")  # nothing was touched
    finally:
        other.kill()
        other.wait()
    assert main([*arguments, "--resume"]) == 0


def test_a_vocabulary_that_does_not_fit_is_said_before_any_text_is_encoded(small_config, tmp_path, monkeypatch):
    """Encoding a large source takes hours."""
    text = tmp_path / "text.txt"
    text.write_text("some words to learn from, and some more words. " * 200)
    assert main(["data", "build", str(text), "--out", str(tmp_path / "set"), "--vocab-size", "280"]) == 0
    config = changed(
        small_config,
        data={"tokenizer": str(tmp_path / "set" / "tokenizer.json"), "source": [str(text)]},
        model={"vocab_size": 270},
    )
    monkeypatch.setattr("hymo.training.checks.prepare", lambda *args: pytest.fail("text was read"))
    with pytest.raises(HyMoError, match=r"model\.vocab_size: found 270; accepted: at least 280"):
        Trainer(config)
