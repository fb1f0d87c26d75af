"""Stop a training run by SIGTERM again and again, move it between numbers of processes, and compare it with one that
nobody stopped.

    OMP_NUM_THREADS=1 python benchmarks/stops.py --stops 20
    OMP_NUM_THREADS=1 python benchmarks/stops.py --late 60      # a rank late by a minute, and one that is frozen

tiny.yaml whole, as `hymo train` processes of their own, and under torchrun. First part: a run of 40 updates is stopped
at random moments, each life with another number of loader threads; it must end with 0 each time, and its losses must be
bitwise those of an uninterrupted run. Second: 14 updates on 2 processes, 13 on 3, 13 on 1; losses within 1e-6 at first
and 1e-5 over 20 updates. With --late: two ranks, one of which sleeps so long in a step (the run must go on), then one
that is stopped by SIGSTOP (the job must be over within 60 s, with stacks of the other).
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hymo.observe.metrics import read_metrics

UPDATES = 40
FLAGS = [
    f"--data.source={Path(json.__file__).parent}", "--training.device=cpu", "--training.fsdp_mixed_precision=float32",
    "--training.eval_every=0", "--checkpoint.every=0", "--logging.every=1", "--logging.sample_tokens=0",
]  # fmt: skip
LATE = """
import os, signal, sys, time
from hymo.cli import main
from hymo.training.trainer import Trainer
real = Trainer.train_step
def step(self):
    if os.environ["RANK"] == "1" and self.progress.attempt == 3:
        print("here", flush=True)
        if sys.argv[1] == "frozen":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(float(sys.argv[1]))
    return real(self)
Trainer.train_step = step
sys.exit(main(["train", *sys.argv[2:]]))
"""


def words(run: Path, *more: str) -> list[str]:
    return ["tiny", *FLAGS, "--run-dir", str(run), "--resume", *more]


def train(run: Path, *more: str, stop_after: int | None = None, ranks: int = 1, delay: float = 0.0) -> int:
    """A life of the run; SIGTERM once update ``stop_after`` is printed and ``delay`` seconds later. Its exit code."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*(start if ranks > 1 else [sys.executable]), "-m", "hymo", "train", *words(run, *more)]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    for line in process.stdout or ():
        if stop_after is not None and line.startswith("step") and int(line.split()[1].split("/")[0]) >= stop_after:
            time.sleep(delay)
            process.send_signal(signal.SIGTERM)
            stop_after = None
    return process.wait()


def losses(run: Path) -> list[float]:
    table = [row for row in read_metrics(run / "metrics.jsonl") if "loss" in row][:UPDATES]
    if [row["attempt"] for row in table] != list(range(1, len(table) + 1)):
        raise SystemExit(f"{run}: attempts are missing or doubled")
    return [row["loss"] for row in table]


def stop_again_and_again(folder: Path, stops: int, whole: list[float], generator: random.Random) -> None:
    """Each life gets through an update or two before its SIGTERM."""
    at, run = 0, folder / "stopped"
    for number in range(stops):
        workers = f"--data.workers={(0, 1, 3)[number % 3]}"
        code = train(run, workers, stop_after=at + 1, delay=generator.uniform(0.0, 0.5))
        if code != 0:
            raise SystemExit(f"life {number + 1} ended with {code}")
        at = len(losses(run))
        if at >= UPDATES:
            break
    if at < UPDATES:
        train(run, stop_after=UPDATES)
    equal = losses(run) == whole
    print(f"{number + 1} stops, each with exit code 0; losses {'bitwise equal' if equal else 'DIFFER'}", flush=True)
    if not equal:
        raise SystemExit(1)


def move(folder: Path, whole: list[float]) -> None:
    run = folder / "moved"
    for ranks, until, micro_batch in ((2, 14, 8), (3, 27, 6), (1, UPDATES, 16)):
        sharded = ["--training.fsdp=true", f"--training.micro_batch_size={micro_batch}"]
        code = train(run, *sharded, stop_after=until, ranks=ranks)
        print(f"{ranks} processes to update {len(losses(run))}: exit code {code} (torchrun's own is 1)", flush=True)
    off = [abs(a / b - 1) for a, b in zip(losses(run), whole, strict=True)]
    print(f"on 2, 3 and 1 processes: first loss off by {off[0]:.1e}, 20 by {max(off[:20]):.1e}, all by {max(off):.1e}")
    if off[0] > 1e-6 or max(off[:20]) > 1e-5:
        raise SystemExit(1)


def late(folder: Path, seconds: str) -> None:
    """Two ranks of which one is late, or frozen; how long the job took from then on, and how it ended."""
    run = folder / f"late-{seconds}"
    script = folder / "late.py"
    script.write_text(LATE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    options = [seconds, *words(run, "--scheduler.total_steps=6", "--training.micro_batch_size=8")]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    began = time.monotonic()
    for line in process.stdout or ():
        if line.strip() == "here":
            began = time.monotonic()
    code = process.wait()
    stacks = sorted(p.name for p in run.glob("stacks/*"))
    print(f"{seconds}: over {time.monotonic() - began:.0f} s later, exit code {code}, stacks {stacks}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--late", type=float, help="seconds; only this part")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="stops-"))
    os.environ["HYMO_CACHE"] = str(folder / "cache")
    try:
        if arguments.late is not None:
            late(folder, str(arguments.late))
            late(folder, "frozen")
            return
        train(folder / "whole", stop_after=UPDATES)
        whole = losses(folder / "whole")
        stop_again_and_again(folder, arguments.stops, whole, random.Random(arguments.seed))
        move(folder, whole)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
