"""What recurrence and experts cost or win, by length of context: the hybrid, a dense one, and attention alone.

    python benchmarks/ablations.py --data DATA --out DIR [--gpus 0,1] [--n-layers 8] [--warm 4]
    python benchmarks/ablations.py --out DIR --table

    hybrid      the configuration as it is
    dense       its experts (top_k routed ones and the shared ones) as one dense layer of their width for every token:
                the same active parameters but for the routers
    attention   every block latent attention with experts (mla_every 1), and so many blocks that its active parameters
                come nearest to the hybrid's

Each at --contexts with the same tokens in a micro-batch, and --micro-batches of them in a step. Text is read as one
document: attention sees the whole context, and masks cut nothing off. --n-layers shortens the model. A run that fails
or takes longer than --limit is reported, and the others go on; DIR/ablations.json is written after each.
"""

import json
from argparse import Namespace
from typing import Any

import variants
from variants import Job, cell

from hymo.config import ModelConfig
from hymo.config_io import load_config
from hymo.plan import flops_per_token, parameter_counts


def shapes(model: ModelConfig) -> dict[str, dict[str, int]]:
    """Keys of the model that each ablation changes."""
    dense = {"n_routed": 0, "top_k": 0, "n_shared": model.n_shared + model.top_k}
    alone = {"mla_every": 1}

    def apart(n_layers: int) -> int:
        changed = model.model_copy(update=alone | {"n_layers": n_layers})
        return abs(parameter_counts(changed).active - parameter_counts(model).active)

    return {
        "hybrid": {},
        "dense": dense,
        "attention": alone | {"n_layers": min(range(1, model.n_layers + 1), key=apart)},
    }


def jobs_of(args: Namespace, model: ModelConfig) -> list[Job]:
    """Every ablation at every context: the shortest contexts first."""
    jobs = []
    for context in args.contexts:
        rows = args.tokens // context
        batch = {"seq_len": context, "micro_batch_size": rows, "global_batch_size": rows * args.micro_batches}
        for name, changes in shapes(model).items():
            keys = {"model": {"n_layers": model.n_layers} | changes, "training": batch}
            flags = tuple(f"--{section}.{key}={n}" for section, own in keys.items() for key, n in own.items())
            jobs.append(Job(f"{name}-{context}", flags))
    return jobs


def run(args: Namespace, overrides: list[str]) -> None:
    """All runs; the JSON after each."""
    short = [f"--model.n_layers={args.n_layers}"] if args.n_layers else []
    model = load_config(args.config, [*overrides, *short]).model

    def one_of_each_kind(job: Job) -> int:
        return 1 if job.name.startswith("attention") else model.mla_every

    jobs = variants.picked(jobs_of(args, model), args.variants)
    variants.warm(args, jobs, overrides, one_of_each_kind, args.warm)
    found: dict[str, Any] = {}
    for done in variants.deal(jobs, lambda j: variants.command(args, j, overrides, "--one-document"), args):
        config = load_config(args.config, [*overrides, *done.job.flags])
        counts = parameter_counts(config.model)
        found[done.job.name] = variants.figures(variants.read(args.out, done.job.name), done.state) | {
            "ablation": done.job.name.rpartition("-")[0],
            "context": config.training.seq_len,
            "n_layers": config.model.n_layers,
            "parameters": counts.total,
            "active": counts.active,
            "gflop_per_token": flops_per_token(config.model, config.training.seq_len) / 1e9,
        }
        variants.write(args.out / "ablations.json", found)
        print(line(found[done.job.name], found), flush=True)


HEAD = (
    f"{'context':>8s} {'ablation':10s} {'layers':>6s} {'parameters':>14s} {'active':>13s} {'GFLOP/token':>11s} "
    f"{'tokens/s':>10s} {'of hybrid':>9s} {'peak GiB':>9s}"
)


def line(r: dict[str, Any], found: dict[str, Any]) -> str:
    base = found.get(f"hybrid-{r['context']}", {}).get("tokens_per_s")
    share = r["tokens_per_s"] / base if base and r["tokens_per_s"] else None
    peak = None if r["peak"] is None else r["peak"] / variants.GIB
    return (
        f"{r['context']:8,d} {r['ablation']:10s} {r['n_layers']:6d} {r['parameters']:14,d} {r['active']:13,d} "
        f"{r['gflop_per_token']:11.2f} {cell(r['tokens_per_s']):>10s} {cell(share, '.2f'):>9s} "
        f"{cell(peak, '.2f'):>9s}  {'' if r['state'] == 'done' else r['state']}"
    )


def main() -> None:
    p = variants.parser(__doc__, steps=5, limit=240)
    p.add_argument("--contexts", type=int, nargs="+", default=[4096, 16384, 65536])
    p.add_argument("--tokens", type=int, default=65_536, help="of a micro-batch (default: 65,536)")
    p.add_argument("--micro-batches", type=int, default=2, help="of a step (default: 2)")
    p.add_argument("--n-layers", type=int, help="of the hybrid (default: the configuration's)")
    p.add_argument("--warm", type=int, default=0, metavar="N", help="compile ahead, N at once on a GPU (default: 0)")
    args, overrides = variants.parse(p)
    if not args.table:
        run(args, overrides)
    found = json.loads((args.out / "ablations.json").read_text())
    print(f"\nevery row one document\n{HEAD}")
    for r in sorted(found.values(), key=lambda r: r["context"]):
        print(line(r, found))


if __name__ == "__main__":
    main()
