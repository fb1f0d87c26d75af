"""Peak memory as measured beside what `hymo plan` says, over micro-batches, lengths and activation checkpointing.

    python benchmarks/memory_grid.py --data DATA --out DIR [--gpus 0,1] [--at-once 4]
    python benchmarks/memory_grid.py --out DIR --table

f+b: what forward and backward take over parameters, gradients and optimizer state; where that is little the peak is in
the optimizer's step. Every cell is a process of 3 steps. Memory is what PyTorch's allocator of that process counts, so
several share a GPU: at most --at-once, and only as many as fit into --budget GiB by the plan's own prediction. One that
fails or takes longer than --limit is reported, and the others go on; DIR/memory_grid.json is written after each.
"""

import json
from argparse import Namespace
from itertools import product
from typing import Any

import variants
from variants import GIB, Job, cell

from hymo.config import HyMoConfig
from hymo.config_io import load_config
from hymo.distributed.fsdp import resolve_reshard
from hymo.models.model import build_hymo
from hymo.planning.memory import memory_of

PASS = "forward and backward"
FRAGMENTS, CONTEXT = 1.08, 1.5 * GIB  # what a process takes beside the peak: cached blocks, and CUDA's context


def jobs_of(args: Namespace, overrides: list[str]) -> list[Job]:
    """The grid, heaviest first: what is large must not wait for a GPU to be empty at the end."""
    jobs = []
    for checkpointing, length, rows in product(args.checkpointing, args.lengths, args.micro_batches):
        keys = {
            "seq_len": length,
            "micro_batch_size": rows,
            "global_batch_size": rows * args.accumulation,
            "activation_checkpointing": checkpointing,
        }
        flags = tuple(f"--training.{key}={value}" for key, value in keys.items())
        peak = predicted_peak(load_config(args.config, [*overrides, *flags]), args.budget * GIB)
        jobs.append(Job(f"{checkpointing}-{length}-{rows}", flags, FRAGMENTS * peak + CONTEXT))
    return sorted(jobs, key=lambda job: -job.n_bytes)


def predicted_peak(config: HyMoConfig, device_bytes: float) -> float:
    """Bytes of the one rank, as `hymo plan` computes them for a GPU."""
    model = build_hymo(config, device="meta")
    reshard = resolve_reshard(config.training.reshard, model, "cuda", device_bytes)
    return memory_of(config, model, 1, reshard).peak


def run(args: Namespace, overrides: list[str]) -> None:
    jobs = variants.picked(jobs_of(args, overrides), args.variants)
    found: dict[str, Any] = {}
    for done in variants.deal(
        jobs, lambda j: variants.command(args, j, overrides), args, at_once=args.at_once, budget=args.budget * GIB
    ):
        report = variants.read(args.out, done.job.name)
        found[done.job.name] = variants.figures(report, done.state) | terms(report)
        variants.write(args.out / "memory_grid.json", found)
        print(f"{line(done.job.name, found[done.job.name])}  {done.seconds:.0f} s", flush=True)


def terms(report: dict[str, Any] | None) -> dict[str, Any]:
    """The plan's peak, and forward and backward over parameters, gradients and state: planned and measured."""
    if not report or not report["plan"]["memory"]:
        return {"plan": None, "pass": None, "pass_plan": None}
    planned, rows = report["plan"]["memory"], [row["memory"] for row in report["steps"]]
    measured = max((row[PASS] for row in rows if PASS in row), default=None)  # none on a CPU
    return {"plan": planned["peak"], "pass": measured, "pass_plan": planned[PASS]}


def ratio(r: dict[str, Any], plan: str = "plan", measured: str = "peak") -> float | None:
    return r[plan] / r[measured] if r[plan] and r[measured] else None


def line(name: str, r: dict[str, Any]) -> str:
    checkpointing, length, rows = name.split("-")
    peak, plan, within, within_plan = (
        cell(None if r[key] is None else r[key] / GIB, ".2f") for key in ("peak", "plan", "pass", "pass_plan")
    )
    return (
        f"{checkpointing:13s} {int(length):7,d} {int(rows):11d} {peak:>9s} {plan:>9s} {cell(ratio(r), '.3f'):>9s} "
        f"{within:>9s} {within_plan:>9s} {cell(ratio(r, 'pass_plan', 'pass'), '.3f'):>9s}  "
        f"{'' if r['state'] == 'done' else r['state']}"
    )


def table(found: dict[str, Any]) -> None:
    columns = f"{'peak GiB':>9s} {'plan':>9s} {'ratio':>9s} {'f+b GiB':>9s} {'plan':>9s} {'ratio':>9s}"
    print(f"\n{'checkpointing':13s} {'tokens':>7s} {'micro-batch':>11s} {columns}")
    for name in sorted(found, key=lambda name: (name.split("-")[0] != "none", *map(int, name.split("-")[1:]))):
        print(line(name, found[name]))
    ratios = {name: ratio(r) for name, r in found.items() if ratio(r) is not None}
    if ratios:
        worst = max(ratios, key=lambda name: abs(ratios[name] - 1))
        print(f"worst: {worst}, plan is {ratios[worst]:.3f} of the measured peak ({len(ratios)} of {len(found)} runs)")


def main() -> None:
    p = variants.parser(__doc__, steps=3, limit=400)
    p.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4])
    p.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    p.add_argument("--checkpointing", nargs="+", default=["none", "block"])
    p.add_argument("--accumulation", type=int, default=2, help="micro-batches of a step (default: 2)")
    p.add_argument("--at-once", type=int, default=4, help="runs on one GPU (default: 4)")
    p.add_argument("--budget", type=float, default=130.0, help="GiB of a GPU (default: 130)")
    args, overrides = variants.parse(p)
    if not args.table:
        run(args, overrides)
    table(json.loads((args.out / "memory_grid.json").read_text()))


if __name__ == "__main__":
    main()
