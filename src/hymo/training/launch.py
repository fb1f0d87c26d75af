"""``hymo train``: from a configuration file to a finished run folder."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from hymo.checkpoint import branch as branching
from hymo.checkpoint import store
from hymo.checkpoint.manifest import damaged
from hymo.checkpoint.weights import open_weights, refuse_other_shapes
from hymo.config import HyMoConfig, refuse_without_effect
from hymo.config_io import build_config, load_config, merge, parse_overrides, to_dict
from hymo.distributed import mesh, reduce
from hymo.distributed.fsdp import gather_model
from hymo.errors import HyMoError
from hymo.generate import TextStream, generate
from hymo.models.model import build_hymo
from hymo.observe.profile import parse_range
from hymo.observe.units import count
from hymo.observe.watchdog import Watchdog
from hymo.plan import parameter_counts
from hymo.runs import (
    CONFIG,
    SAMPLES,
    absolute_path,
    check_run_dir,
    forget_if_empty,
    keep_tokenizer,
    make_run_dir,
    newest_run_dir,
    refuse_absent_text,
    refuse_existing,
    refuse_foreign,
    reserve_run_dir,
    with_absolute_paths,
)
from hymo.training.flags import refuse_flags, thread_optimization_flags
from hymo.training.recovery import MOVABLE, resumed_config
from hymo.training.stop import Stopped, StopRequest
from hymo.training.trainer import Trainer


def train(
    path: Path,
    overrides: Sequence[str],
    *,
    run_dir: str | None,
    resume: bool,
    init_from: str | None,
    profile: str | None,
    config_given: bool,
) -> int:
    """Run ``hymo train``; returns the exit code."""
    steps = None if profile is None else parse_range(profile)
    if init_from is not None:
        overrides = [*overrides, f"--training.init_from={json.dumps(absolute_path(init_from))}"]
    refuse_no_run_dir(run_dir)
    resume = resume or mesh.restarted_by_torchrun()
    folder = check_run_dir(run_dir) if run_dir else newest_run_dir(path.stem) if resume else None
    goes_on = resume and folder is not None and (folder / CONFIG).is_file()
    if goes_on:
        assert folder is not None
        config, freely_changed = resumed_config(folder, path if config_given else None, overrides)
    else:
        config, freely_changed = with_absolute_paths(load_config(path, overrides)), {}
        refuse_without_effect(config)
        if config.training.init_from is not None:  # before any text is read
            weights = open_weights(config.training.init_from, hashes=False)
            refuse_other_shapes(build_hymo(config, device="meta"), weights)
    if steps is not None and steps[0] > (config.scheduler.total_steps or 0):
        raise HyMoError(f"--profile: found {profile}; accepted: updates up to {config.scheduler.total_steps}")
    with StopRequest(config.training.max_hours) as stop:
        try:
            folder, saved = start_and_train(
                config, path.stem, folder, stop, resume=resume, goes_on=goes_on, changed=freely_changed, profile=steps
            )  # fmt: skip
        except Stopped as stopped:
            return say_stopped(str(stopped))
        except RuntimeError as error:
            # Another rank has stopped already, and with it the collective that this one waited in; or the signal came
            # while a library made a class, and Python 3.11 wraps what is raised there.
            if stop.heard is None or (reduce.world_size() == 1 and not isinstance(error.__cause__, Stopped)):
                raise
            return say_stopped(stop.heard)
    if reduce.is_main():
        print(f"run: {folder}")
        if not saved:
            print("the last state could not be saved: --resume makes what came after the last checkpoint again")
    mesh.shutdown()
    return 0 if saved else 1


def refuse_no_run_dir(run_dir: str | None) -> None:
    """A job that torchrun may start again names its folder: the newest run of a name may be another job's."""
    if run_dir is None and mesh.may_be_restarted():
        raise HyMoError(
            "--run-dir: found none under torchrun --max-restarts; accepted: the folder that a restart takes"
        )


def say_stopped(why: str) -> int:
    """Tell of a stop with nothing to save; the exit code."""
    if reduce.is_main():
        print(f"stopped by {why} before the first step or after the last: nothing more was written")
    return 0


def start_and_train(
    config: HyMoConfig,
    name: str,
    folder: Path | None,
    stop: StopRequest,
    *,
    resume: bool,
    goes_on: bool,
    changed: Mapping[str, tuple[Any, Any]],
    profile: tuple[int, int] | None,
) -> tuple[Path, bool]:
    """Make or find the run's folder, build the trainer, take up a checkpoint, train, and show a sample.

    Returns the folder, and whether the last state is in a checkpoint.
    """
    mesh.init_distributed(config.training.device, max(mesh.FIRST_TIMEOUT_S, config.training.timeout_s))
    fresh = folder is None
    folder = Path(reduce.broadcast_object(str(folder or (reserve_run_dir(name) if reduce.is_main() else ""))))
    if not fresh:
        (refuse_foreign if resume else refuse_existing)(folder)
        make_run_dir(folder)  # before the text is read: that it cannot be made is said at once
    with Watchdog(folder, patience_s=config.training.patience_s) as watchdog:
        try:
            trainer = Trainer(config, run_dir=folder, profile=profile)
        except BaseException:
            forget_if_empty(folder)
            raise
        watchdog.tick()
        with only_job(folder):
            print_header(trainer, config, folder)
            store.prove_shared(folder)
            newest = newest_checkpoint(folder, trainer) if goes_on else None
            if resume and not goes_on:
                trainer.log.line(f"--resume: {folder} holds no run yet: a new one")
            if goes_on and newest is None:
                trainer.log.line(f"{folder} holds no checkpoint yet: from the start")
            moved = {key: new for key, (_, new) in changed.items() if key in MOVABLE}
            for key, (old, new) in changed.items():
                if key not in moved:
                    trainer.log.line(f"changed for this part of the run: {key}: {old} -> {new}")
            if newest is not None:
                trainer.resume(newest, moved=bool(moved))
                for key, new in moved.items():
                    trainer.log.line(f"{key}: from now on {new}, where the same text and tokenizer are (fingerprint)")
            elif config.training.init_from is not None:
                trainer.init_from(config.training.init_from)
            keep_tokenizer(folder, config)
            if trainer.step >= trainer.total_steps:
                made = f"this run has made all of its {trainer.total_steps} updates"
                trainer.log.line(f"{made}; hymo branch makes a longer one")
            result = trainer.train(stop, watchdog)
            if result.stopped is None:
                print_sample(trainer, config, folder)
    return folder, trainer.last_state_saved


@contextmanager
def only_job(folder: Path) -> Iterator[None]:
    """Keep other jobs out of a run's folder, where they would remove each other's checkpoints.

    Raises HyMoError on all ranks where one is in it.

    The lock is the operating system's: it goes with its process, also after a kill. A file system without locks has
    none.
    """
    lock, problem = FileLock(folder / ".lock", timeout=0), None
    if reduce.is_main():
        try:
            lock.acquire()
        except Timeout:
            problem = f"{folder}: another job is training in it; accepted: one job a run folder (--run-dir OTHER)"
        except (OSError, NotImplementedError):
            pass
    problem = reduce.broadcast_object(problem)
    if problem is not None:
        raise HyMoError(problem)
    try:
        yield
    finally:
        lock.release()


def branch(
    run: str,
    overrides: Sequence[str],
    *,
    at: int | None,
    decay: int | None,
    total: int | None,
    run_dir: str | None,
    create_only: bool,
) -> int:
    """Run ``hymo branch``: make the new run, say what differs from its parent, and train it."""
    refuse_no_run_dir(run_dir)
    mesh.init_distributed()
    if mesh.restarted_by_torchrun() and run_dir is not None and branching.read_branch(run_dir) is not None:
        return train(
            Path(run_dir) / CONFIG, [], run_dir=run_dir, resume=True, init_from=None, profile=None, config_given=False
        )
    made, problem = None, None
    if reduce.is_main():
        try:
            if not create_only and (Path(run) / CONFIG).is_file():
                parent = to_dict(load_config(Path(run) / CONFIG))
                config = with_absolute_paths(build_config(merge(parent, parse_overrides(overrides))))
                refuse_absent_text(config)
                refuse_flags(config, mesh.pick_device(config.training.device))
            made = (
                branching.branch(run, at, decay or 0, overrides, run_dir)
                if total is None
                else branching.extend(run, total, at, decay, overrides, run_dir)
            )
        except (HyMoError, ValueError, OSError) as error:  # told to every rank, none waits
            problem = HyMoError(str(error))
    made, problem = reduce.broadcast_object((made, problem))
    if problem is not None:
        raise problem
    assert made is not None
    about = branching.read_branch(made)
    assert about is not None
    if reduce.is_main():
        print(f"{about.kind}: {made} from {about.parent} at update {about.step}")
        print(f"warm-up, stable, decay: {about.before} -> {about.after}")
        for key, (old, new) in about.differences.items():
            print(f"{key}: {old} -> {new}")
    goes_on = f"hymo train --run-dir {shlex.quote(str(made))} --resume"
    if reduce.is_main():
        print(f"next: {goes_on}" if create_only else f"training it now; after a stop it goes on by: {goes_on}")
    if create_only:
        return 0
    path = made / CONFIG
    return train(path, [], run_dir=str(made), resume=True, init_from=None, profile=None, config_given=False)


def newest_checkpoint(folder: Path, trainer: Trainer) -> Path | None:
    """The newest whole checkpoint; damaged ones are said. If all are, the run is not begun anew over them.

    One that a newer version wrote is refused: going on from an older one would leave what came after.
    """
    bad, newest = damaged(folder), store.latest_on_all_ranks(folder)
    for path, why in bad.items():
        trainer.log.warn(f"{path} is damaged and left out ({why})")
    if newest is None and bad:
        raise HyMoError(
            f"--resume: found checkpoints in {folder} ({len(bad)}), all damaged (hymo inspect says how); accepted: "
            "a run with a whole one, or another --run-dir to start again"
        )
    return newest


def print_header(trainer: Trainer, config: HyMoConfig, folder: Path) -> None:
    counts, s = parameter_counts(config.model), config.scheduler
    trainer.log.line(
        f"model: {count(counts.total)} parameters, {count(counts.active)} active | run: {folder} | "
        f"{s.total_steps:,} updates of {config.tokens_per_step:,} tokens: {s.warmup_steps} warm-up, "
        f"{s.stable_steps} stable, {s.decay_steps} decay"
    )


def print_sample(trainer: Trainer, config: HyMoConfig, folder: Path) -> None:
    """A sample of text, so that the last lines of a run show what it learnt; kept in RUN/samples.jsonl."""
    n = config.logging.sample_tokens
    if n == 0:
        return
    model = gather_model(trainer.model).eval()
    if not reduce.is_main():
        return
    thread_optimization_flags(model, config.training, trainer.device)
    tokenizer = trainer.data.tokenizer
    prompt = [int(i) for i in tokenizer.encode(config.logging.sample_prompt)]
    stream = TextStream(tokenizer, prompt)
    tokens = generate(
        model, prompt, max_tokens=n, context=config.training.seq_len, seed=config.training.seed, end_id=tokenizer.end_id
    )
    text = "".join(stream.push(token) for token in tokens) + stream.rest()
    trainer.log.line("sample:")
    trainer.log.line(config.logging.sample_prompt + text)
    with (folder / SAMPLES).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": trainer.step, "prompt": config.logging.sample_prompt, "text": text}) + "\n")
