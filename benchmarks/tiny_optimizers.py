"""NorMuon + cautious AdamW against AdamW alone on the tiny model: same steps, same data, three random seeds.

    python benchmarks/tiny_optimizers.py --jobs 2                 # the whole table
    python benchmarks/tiny_optimizers.py --one adamw 0.004 0      # one run: algorithm, rate, seed

Each algorithm's rate is tuned on seed 0 over a grid (NorMuon's for the matrices, the rest at the shipped AdamW rate;
AdamW alone: one rate for all), then run with seeds 1 and 2 at the best. Prints validation bits per byte after the last
update of configs/tiny.yaml.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

GRID = {"normuon": (0.01, 0.02, 0.04), "adamw": (0.0015, 0.003, 0.006, 0.012)}


def one(algorithm: str, rate: float, seed: int, steps: int) -> float:
    """val_bpb of one run."""
    from hymo.config_io import load_config
    from hymo.optim.build import build_optimizers
    from hymo.training.trainer import Trainer

    key = "muon_lr" if algorithm == "normuon" else "adamw_lr"
    flags = [f"--optimizer.{key}={rate}", f"--training.seed={seed}", f"--scheduler.total_steps={steps}"]
    flags.append("--training.eval_every=0")
    trainer = Trainer(load_config("tiny", flags))
    if algorithm == "adamw":
        trainer.optimizers = build_optimizers(trainer.model, trainer.config.optimizer, overrides={"*": "adamw"})
    return trainer.train().evaluation["val"].val_bpb


def run(algorithm: str, rate: float, seed: int, steps: int) -> float:
    """`one` in a process of its own."""
    command = [sys.executable, __file__, "--one", algorithm, str(rate), str(seed), "--steps", str(steps)]
    done = subprocess.run(command, env=os.environ, stdout=subprocess.PIPE, text=True, check=True)
    bpb = json.loads(done.stdout.splitlines()[-1])["val_bpb"]
    print(f"{algorithm:8s} rate {rate:<7g} seed {seed}: val_bpb {bpb:.4f}", flush=True)
    return bpb


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--one", nargs=3, metavar=("ALGORITHM", "RATE", "SEED"))
    args = parser.parse_args()
    if args.one:
        algorithm, rate, seed = args.one
        print(json.dumps({"val_bpb": one(algorithm, float(rate), int(seed), args.steps)}))
        return
    with ThreadPoolExecutor(args.jobs) as pool:
        grid = [(algorithm, rate) for algorithm, rates in GRID.items() for rate in rates]
        tuned = dict(zip(grid, pool.map(lambda g: run(*g, 0, args.steps), grid), strict=True))
        best = {a: min(rates, key=lambda r, a=a: tuned[a, r]) for a, rates in GRID.items()}  # type: ignore[misc]
        more = [(a, best[a], seed) for a in GRID for seed in (1, 2)]
        rest = dict(zip(more, pool.map(lambda m: run(*m, args.steps), more), strict=True))
    for algorithm, rate in best.items():
        bpb = [tuned[algorithm, rate], *(rest[algorithm, rate, seed] for seed in (1, 2))]
        print(f"{algorithm}: best rate {rate:g}, val_bpb {[round(b, 4) for b in bpb]}, mean {statistics.mean(bpb):.4f}")


if __name__ == "__main__":
    main()
