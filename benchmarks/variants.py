"""Runs of `production.py` as processes of their own, dealt over the GPUs of this host.

What `flags.py`, `ablations.py` and `memory_grid.py` share: their common options, the dealing, and the figures of a run
that may not have come to its end.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hymo.cli import split_overrides

PRODUCTION = Path(__file__).with_name("production.py")
GIB = 2**30


@dataclass(frozen=True)
class Job:
    """One run: its name, the configuration's keys that it sets, and bytes of GPU memory that it is expected to take."""

    name: str
    flags: tuple[str, ...] = ()
    n_bytes: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """How a run ended: ``state`` is ``done``, or why it is not."""

    job: Job
    device: str
    seconds: float
    state: str


@dataclass
class _Running:
    job: Job
    device: str
    process: subprocess.Popen
    began: float


def parser(description: str | None, *, steps: int, limit: int) -> argparse.ArgumentParser:
    """The options that the scripts share; every key of the configuration (--training.seq_len 64) is one more."""
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, required=True, help="where the JSON of each run goes")
    p.add_argument("--data", type=Path, help="a folder that `production.py --prepare` made")
    p.add_argument("--config", default="hymo_750m")
    p.add_argument("--steps", type=int, default=steps)
    p.add_argument("--gpus", default="0", help="CUDA devices to deal the runs over: 0,1")
    p.add_argument("--limit", type=float, default=limit, help="seconds after which a run is stopped and reported")
    p.add_argument("--variants", nargs="+", metavar="NAME", help="these alone")
    p.add_argument("--table", action="store_true", help="run nothing: the table of what lies in --out")
    return p


def parse(p: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[str]]:
    """Options, and the configuration's keys."""
    plain, overrides = split_overrides(sys.argv[1:])
    return p.parse_args(plain), overrides


def picked(jobs: Sequence[Job], names: Sequence[str] | None) -> list[Job]:
    """Those of these names, in their order; all without names."""
    known = {job.name: job for job in jobs}
    unknown = [name for name in names or () if name not in known]
    if unknown:
        sys.exit(f"--variants: found {', '.join(unknown)}; accepted: {', '.join(known)}")
    return [known[name] for name in names] if names else list(jobs)


def command(args: argparse.Namespace, job: Job, overrides: Sequence[str], *extra: str) -> list[str]:
    """`production.py` for one job; its own keys win over those given for all."""
    words = ["--config", args.config, "--out", str(args.out), "--name", job.name, "--steps", str(args.steps)]
    words += ["--data", str(args.data)] if args.data else []
    return [sys.executable, str(PRODUCTION), *words, "--no-profile", *extra, *overrides, *job.flags]


def deal(
    jobs: Sequence[Job],
    command_of: Callable[[Job], list[str]],
    args: argparse.Namespace,
    *,
    at_once: int = 1,
    budget: float = float("inf"),
) -> Iterator[Outcome]:
    """Run all jobs, at most ``at_once`` a device and together within ``budget`` bytes; outcomes as they come.

    What a run prints goes to NAME.log beside its JSON. A job over the budget has its device to itself. Leaving this
    generator early ends what still runs.
    """
    devices = visible_gpus(args.gpus)
    args.out.mkdir(parents=True, exist_ok=True)
    waiting, running = list(jobs), list[_Running]()
    try:
        while waiting or running:
            for device in devices:
                here = [r for r in running if r.device == device]
                room = budget - sum(r.job.n_bytes for r in here)
                job = next((j for j in waiting if not here or (len(here) < at_once and j.n_bytes <= room)), None)
                if job is not None:
                    waiting.remove(job)
                    running.append(_start(job, command_of(job), device, args.out))
            for r in list(running):
                outcome = _ended(r, args.limit, args.out)
                if outcome is not None:
                    running.remove(r)
                    yield outcome
            time.sleep(0.1)
    finally:
        for r in running:
            _kill(r.process)


def visible_gpus(numbers: str) -> list[str]:
    """The GPUs of these numbers among those that CUDA_VISIBLE_DEVICES shows, by the names they have there."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = None if shown is None else [name.strip() for name in shown.split(",") if name.strip()]
    found = []
    for number in map(str.strip, numbers.split(",")):
        if not number.isdigit() or (names is not None and int(number) >= len(names)):
            accepted = "numbers of GPUs, as in 0,1"
            if names is not None:
                accepted += f", below {len(names)} with CUDA_VISIBLE_DEVICES={shown}"
            sys.exit(f"--gpus: found {numbers!r}; accepted: {accepted}")
        found.append(number if names is None else names[int(number)])
    return found


def _start(job: Job, words: list[str], device: str, out: Path) -> _Running:
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"CUDA_VISIBLE_DEVICES": device}
    with (out / f"{job.name}.log").open("w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
    return _Running(job, device, process, time.perf_counter())


def _ended(r: _Running, limit_s: float, out: Path) -> Outcome | None:
    code, seconds = r.process.poll(), time.perf_counter() - r.began
    if code is None and seconds < limit_s:
        return None
    if code is None:
        _kill(r.process)
        return Outcome(r.job, r.device, seconds, f"stopped after {seconds:.0f} s")
    if code:
        lines = (out / f"{r.job.name}.log").read_text(errors="replace").strip().splitlines()
        return Outcome(r.job, r.device, seconds, f"failed ({code}): {lines[-1] if lines else 'without a word'}")
    return Outcome(r.job, r.device, seconds, "done")


def _kill(process: subprocess.Popen) -> None:
    """The run and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def warm(
    args: argparse.Namespace,
    jobs: Sequence[Job],
    overrides: Sequence[str],
    layers: Callable[[Job], int],
    at_once: int,
) -> None:
    """Compile ahead: one step of every job, several at once, of so few layers that they fit side by side.

    Compiled graphs are one a kind of block and shape, and are kept on disk; the measured runs then find them there.
    """
    if not at_once:
        return
    small = argparse.Namespace(**vars(args) | {"out": args.out / "warm", "steps": 1})
    began = time.perf_counter()
    for done in deal(
        [replace(job, flags=(*job.flags, f"--model.n_layers={layers(job)}")) for job in jobs],
        lambda job: command(small, job, overrides),
        small,
        at_once=at_once,
    ):
        print(f"compiled ahead: {done.job.name}, {done.seconds:.0f} s, {done.state}", flush=True)
    print(f"compiled ahead in {time.perf_counter() - began:.0f} s", flush=True)


def read(out: Path, name: str) -> dict[str, Any] | None:
    """The JSON of a run, whole or not; None where it wrote none."""
    path = out / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=1))
    part.replace(path)


def figures(report: dict[str, Any] | None, state: str) -> dict[str, Any]:
    """What the tables show of a run; of one that was stopped, by the steps that it made.

    Tokens a second by the median of the later two thirds of its steps, never of the first one.
    """
    rows = [] if report is None else report["steps"]
    late = [row["seconds"] for row in rows[max(1, len(rows) // 3) :]]
    return {
        "state": state,
        "steps": len(rows),
        "tokens_per_s": report["tokens_per_step"] / statistics.median(late) if report and late else None,
        "first_step_s": rows[0]["seconds"] if rows else None,
        "peak": max((row["memory"]["peak"] for row in rows), default=None),
        "losses": [row["loss"] for row in rows],
    }


def cell(value: float | None, form: str = ",.0f") -> str:
    return "-" if value is None else format(value, form)
