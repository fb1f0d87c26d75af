"""Peak memory as measured beside what `hymo plan` says, over micro-batches, lengths and activation checkpointing.

    python benchmarks/memory_grid.py --data DATA --out DIR [--gpus 0,1] [--at-once 4] [--accumulation 2]
    python benchmarks/memory_grid.py --out DIR --table

Every cell is a process of 3 steps. Memory is what PyTorch's allocator of that process counts, so several share a GPU:
at most --at-once, and only as many as fit into --budget GiB by the plan's own prediction. One that fails or takes
longer than --limit is reported, and the others go on; DIR/memory_grid.json is written after each.
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
        plan = report["plan"]["memory"].get("peak") if report else None
        found[done.job.name] = variants.figures(report, done.state) | {"plan": plan}
        variants.write(args.out / "memory_grid.json", found)
        print(f"{line(done.job.name, found[done.job.name])}  {done.seconds:.0f} s", flush=True)


def ratio(r: dict[str, Any]) -> float | None:
    return r["plan"] / r["peak"] if r["plan"] and r["peak"] else None


def line(name: str, r: dict[str, Any]) -> str:
    checkpointing, length, rows = name.split("-")
    measured, plan = (None if n is None else n / GIB for n in (r["peak"], r["plan"]))
    return (
        f"{checkpointing:13s} {int(length):7,d} {int(rows):11d} {cell(measured, '.2f'):>9s} {cell(plan, '.2f'):>9s} "
        f"{cell(ratio(r), '.3f'):>8s}  {'' if r['state'] == 'done' else r['state']}"
    )


def table(found: dict[str, Any]) -> None:
    print(
        f"\n{'checkpointing':13s} {'tokens':>7s} {'micro-batch':>11s} {'peak GiB':>9s} {'plan':>9s} {'plan/peak':>9s}"
    )
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
    p.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step (default: 1)")
    p.add_argument("--at-once", type=int, default=4, help="runs on one GPU (default: 4)")
    p.add_argument("--budget", type=float, default=130.0, help="GiB of a GPU (default: 130)")
    args, overrides = variants.parse(p)
    if not args.table:
        run(args, overrides)
    table(json.loads((args.out / "memory_grid.json").read_text()))


if __name__ == "__main__":
    main()
