"""What each flag of the training step brings: the production model with it on and off, each run a process of its own.

    python benchmarks/flags.py --data DATA --out DIR [--gpus 0,1] [--warm 4] [--steps 8] [--micro-batch 4]
    python benchmarks/flags.py --data DATA --out DIR --curves 100        # loss of all on and all off
    python benchmarks/flags.py --out DIR --table [--curves 100 --picture docs/images/flags.png]

The four of fused_gdn x torch_compile_gdn, moe_mixed_precision on and off, deterministic on (twice: bitwise the same?)
and off, and all off: the chunked recurrence in plain PyTorch, nothing compiled, experts in float32, the rest in
bfloat16 as ever. Tokens a second, peak memory, first step, and how many times faster it is with the flag, beside what
the original design notes say; the largest difference of a step's loss to the run with all flags on. `auto` is on where
there is a GPU.

A run that fails or takes longer than --limit is reported, and the others go on; DIR/flags.json is written after each.
--warm N first compiles ahead, N runs at once on a GPU, so that first steps are those of a warm cache.
"""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import variants
from curves import draw, largest_difference
from variants import Job, cell

CHUNKED, EAGER = "--training.fused_gdn=false", "--training.torch_compile_gdn=false"
FLOAT32, DETERMINISTIC = "--training.moe_mixed_precision=false", "--training.deterministic=true"
JOBS = [
    Job("all-on"),
    Job("chunked", (CHUNKED,)),
    Job("eager", (EAGER,)),
    Job("chunked-eager", (CHUNKED, EAGER)),
    Job("float32-experts", (FLOAT32,)),
    Job("deterministic", (DETERMINISTIC,)),
    Job("deterministic-again", (DETERMINISTIC,)),
    Job("all-off", (CHUNKED, EAGER, FLOAT32)),
]
EFFECTS = [  # flag, run with it, run without it, what the original design notes say
    ("fused_gdn", "all-on", "chunked", "3 to 5"),
    ("fused_gdn, nothing compiled", "eager", "chunked-eager", "3 to 5"),
    ("torch_compile_gdn", "all-on", "eager", "1.2"),
    ("torch_compile_gdn, chunked recurrence", "chunked", "chunked-eager", "1.2"),
    ("moe_mixed_precision", "all-on", "float32-experts", "1.3"),
    ("deterministic off", "all-on", "deterministic", ""),
    ("the three together", "all-on", "all-off", ""),
]
CURVES = ("all-on", "all-off")


def options() -> ArgumentParser:
    p = variants.parser(__doc__, steps=8, limit=240)
    p.add_argument("--tokens", type=int, default=131_072, help="of a step (default: 131,072)")
    p.add_argument("--micro-batch", type=int, default=4, help="sequences (default: 4)")
    p.add_argument("--warm", type=int, default=0, metavar="N", help="compile ahead, N at once on a GPU (default: 0)")
    p.add_argument("--warm-layers", type=int, default=4, help="of the model that is compiled ahead: one of each kind")
    p.add_argument(
        "--curves", type=int, metavar="N", help="instead: N updates with all flags on and off, --curve-tokens each"
    )
    p.add_argument("--curve-tokens", type=int, default=65_536)
    p.add_argument("--picture", type=Path, metavar="PNG", help="draw the curves")
    return p


def batch(tokens: int, args: Namespace, overrides: list[str]) -> list[str]:
    """The keys of a step of so many tokens."""
    from hymo.config_io import load_config

    length = load_config(args.config, overrides).training.seq_len
    return [f"--training.global_batch_size={tokens // length}", f"--training.micro_batch_size={args.micro_batch}"]


def run(args: Namespace, jobs: list[Job], overrides: list[str], at: str, at_once: int = 1) -> dict[str, Any]:
    """All jobs; the file ``at`` in DIR holds the figures after each."""
    found: dict[str, Any] = {}
    for done in variants.deal(jobs, lambda job: variants.command(args, job, overrides), args, at_once=at_once):
        found[done.job.name] = variants.figures(variants.read(args.out, done.job.name), done.state)
        variants.write(args.out / at, found)
        print(line(done.job.name, found), flush=True)
    return found


def line(name: str, found: dict[str, Any]) -> str:
    r, base = found[name], found.get("all-on")
    apart = largest_difference({"all-on": base["losses"], name: r["losses"]}) if base and r["losses"] else None
    peak = None if r["peak"] is None else r["peak"] / variants.GIB
    return (
        f"{name:22s} {cell(r['tokens_per_s']):>11s} {cell(peak, '.2f'):>9s} {cell(r['first_step_s'], '.1f'):>9s} "
        f"{cell(apart, '.5f'):>11s}  {r['state']}"
    )


def table(found: dict[str, Any]) -> None:
    print(f"\n{'run':22s} {'tokens/s':>11s} {'peak GiB':>9s} {'first s':>9s} {'max|dloss|':>11s}")
    for job in JOBS:
        if job.name in found:
            print(line(job.name, found))
    print(f"\n{'times faster with':40s} {'measured':>9s} {'notes':>8s}")
    for flag, on, off, claimed in EFFECTS:
        fast, slow = (found.get(name, {}).get("tokens_per_s") for name in (on, off))
        print(f"{flag:40s} {cell(fast / slow if fast and slow else None, '.2f'):>9s} {claimed:>8s}")
    twice = [found[name]["losses"] for name in ("deterministic", "deterministic-again") if name in found]
    if len(twice) == 2 and all(twice):
        n = min(map(len, twice))
        print(
            f"\ndeterministic, losses of {n} steps bitwise the same: {'yes' if twice[0][:n] == twice[1][:n] else 'NO'}"
        )


def curves(args: Namespace, overrides: list[str]) -> None:
    """Loss over the updates with all flags on and off: two runs, one JSON, and one picture where it is asked for."""
    jobs = [Job(f"curve-{name}", job.flags) for name in CURVES for job in variants.picked(JOBS, [name])]
    schedule = [f"--scheduler.total_steps={args.curves}", "--scheduler.warmup_frac=0.1"]
    if not args.table:
        given = Namespace(**vars(args) | {"steps": args.curves})
        keys = [*batch(args.curve_tokens, args, overrides), *schedule, *overrides]
        run(given, jobs, keys, "curves.json", at_once=2)  # nothing is timed
    found = json.loads((args.out / "curves.json").read_text())
    losses = {job.name.removeprefix("curve-"): found[job.name]["losses"] for job in jobs if job.name in found}
    made = ", ".join(f"{name} {len(values)}" for name, values in losses.items())
    print(f"updates: {made}; largest difference of losses {largest_difference(losses):.4f}")
    if args.picture:
        draw(losses, args.picture)
        print(f"picture: {args.picture}")


def main() -> None:
    args, overrides = variants.parse(options())
    if args.curves:
        return curves(args, overrides)
    at = "flags.json"
    if not args.table:
        keys = [*batch(args.tokens, args, overrides), *overrides]
        jobs = variants.picked(JOBS, args.variants)
        compiled = {job.flags: job for job in jobs if EAGER not in job.flags}
        variants.warm(args, list(compiled.values()), keys, lambda job: args.warm_layers, args.warm)
        run(args, jobs, keys, at)
    table(json.loads((args.out / at).read_text()))


if __name__ == "__main__":
    main()
