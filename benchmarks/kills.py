"""Kill a training run again and again (SIGKILL, at random moments) and see what is left of it.

    OMP_NUM_THREADS=1 python benchmarks/kills.py --kills 200

A small model trains on the json package's source and saves every 3 updates. Each life of the run is a process of its
own that goes on with --resume until it is killed; it is forked from this one, which has imported torch, so that a life
starts in a second. After every kill: the newest checkpoint is whole by its SHA-256s and not older than the newest
before. At the end: metrics.jsonl read back has every attempt once, and its losses are those of a run that nobody
killed, bit for bit.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch

from hymo.checkpoint import manifest, store
from hymo.cli import main as hymo
from hymo.observe.metrics import read_metrics

SMALL = [
    "--model.dim=32", "--model.n_layers=2", "--model.mla_every=2", "--model.gdn_heads=2", "--model.gdn_head_dim=8",
    "--model.gdn_state_dim=8", "--model.mla_heads=2", "--model.d_ff=16", "--training.seq_len=32",
    "--training.device=cpu",
    "--training.global_batch_size=2", "--training.micro_batch_size=2", "--scheduler.total_steps=100000",
    "--training.eval_every=0", "--checkpoint.every=3", "--checkpoint.keep=4", "--logging.sample_tokens=0",
    f"--data.source={Path(json.__file__).parent}",
]  # fmt: skip


def start(run: Path, *more: str) -> int:
    """A life of the run; returns its process id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            quiet = os.open(run.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            code = hymo(["train", "tiny", *SMALL, "--run-dir", str(run), "--resume", *more])
        finally:
            os._exit(code)
    return pid


def newest(run: Path) -> int:
    """The step of the newest checkpoint, which must be whole by its contents; 0 if there is none."""
    path = store.latest(run)
    return 0 if path is None else manifest.verify(path).step


def kill_again_and_again(run: Path, kills: int, seed: int) -> list[int]:
    """The newest step after each kill."""
    generator, steps = random.Random(seed), [0]
    for number in range(kills):
        pid = start(run)
        time.sleep(generator.uniform(0.2, 6.0))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            raise SystemExit(f"life {number + 1} ended by itself: see {run.with_suffix('.log')}")
        step = newest(run)
        if step < steps[-1]:
            raise SystemExit(f"kill {number + 1} lost checkpoint {steps[-1]}: the newest is {step}")
        steps.append(step)
        if (number + 1) % 20 == 0:
            print(f"{number + 1:4} kills, newest checkpoint at update {step}", flush=True)
    return steps


def losses(run: Path, until: int) -> dict[int, float]:
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "loss" in row and row["attempt"] <= until]
    attempts = [row["attempt"] for row in rows]
    if attempts != list(range(1, until + 1)):
        raise SystemExit(f"{run}: attempts are missing or doubled among the first {until}")
    return {row["attempt"]: row["loss"] for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    os.environ["HYMO_CACHE"] = str(folder / "cache")
    began = time.monotonic()
    steps = kill_again_and_again(folder / "killed", arguments.kills, arguments.seed)
    useful = sum(b > a for a, b in pairwise(steps))
    last = steps[-1]
    pid = start(folder / "whole")  # nobody kills this one until it is as far
    while newest(folder / "whole") < last:
        time.sleep(0.5)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    equal = losses(folder / "killed", last) == losses(folder / "whole", last)
    print(
        f"{arguments.kills} kills in {time.monotonic() - began:.0f} s: {last} updates, {useful} lives that saved "
        "something, no checkpoint lost, no attempt missing or doubled; losses "
        f"{'bitwise equal to' if equal else 'DIFFER from'} those of a run that nobody killed"
    )
    shutil.rmtree(folder, ignore_errors=True)
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
