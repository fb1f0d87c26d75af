"""The production run on real tokens: step time, MFU, memory and traffic beside the plan; one JSON and one table.

    python benchmarks/production.py --prepare DATA                    # tokenizer and tokens, once, no GPU needed
    python benchmarks/production.py --gpus 4 --data DATA --out DIR    # starts torchrun on this host
    torchrun --nproc-per-node 4 benchmarks/production.py --data DATA --out DIR                      # the same
    python benchmarks/production.py --table DIR/*.json                # runs side by side: scaling, losses

Text: the standard-library source of the Python that runs, in a byte-level BPE vocabulary trained on it (DATA), packed
documents with document masks, 524,288 tokens a step. All steps are the trainer's own. After the timed steps, two more
run under the profiler: what share of their time collectives were not hidden behind computation. Every option that names
a key of the configuration (--training.reshard layer) goes to it. The JSON is written after every step.

    --hsdp                              two copies of the model, each sharded over half of the GPUs
    --reduce-each-micro-batch on|off    gradients reduced after each micro-batch or once a step (with reshard: layer;
                                        reshard: step, which auto takes where it fits, reduces once in any case)
    --save / --resume CKPT              a checkpoint at the end, which any number of GPUs goes on from
    --one-document                      rows without document boundaries, so that attention sees the whole context
    --table JSON ... --picture PNG      the losses of runs over each other, drawn by matplotlib (extra `report`)
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from hymo.cli import split_overrides
from hymo.config_io import load_config
from hymo.data.dataset import TOKENIZER, build
from hymo.data.prepare import TokenData
from hymo.distributed import mesh, reduce
from hymo.errors import HyMoError
from hymo.models.model import build_hymo
from hymo.observe.collectives import communication_time, counted
from hymo.observe.log import Log
from hymo.observe.units import size
from hymo.planning.measure import MemoryProbe
from hymo.planning.memory import memory_of
from hymo.planning.traffic import traffic_of
from hymo.training.checks import prepare_data
from hymo.training.garbage import long_lived_objects
from hymo.training.trainer import Trainer

COUNTED = 2  # the step (from 0) whose bytes are counted: the first ones set things up
PROFILED = 2


def parse() -> tuple[argparse.Namespace, list[str]]:
    plain, overrides = split_overrides(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("production"), help="where the JSON goes")
    parser.add_argument("--config", default="hymo_750m")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--name", help="of the JSON file (default: from the number of GPUs and the options)")
    parser.add_argument("--gpus", type=int, help="start torchrun with so many processes on this host")
    parser.add_argument("--data", type=Path, help="a folder that --prepare or `hymo data build` made")
    parser.add_argument("--tokenizer", help="bytes, or a tokenizer file (without --data; default: bytes)")
    parser.add_argument("--prepare", type=Path, metavar="DATA", help="make the data set and stop")
    parser.add_argument("--vocab-size", type=int, default=65536, help="with --prepare (default: 65536)")
    parser.add_argument("--source", nargs="*", help="with --prepare: files and folders instead of the standard library")
    parser.add_argument("--hsdp", action="store_true")
    parser.add_argument("--reduce-each-micro-batch", choices=("on", "off"))
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--resume", type=Path, metavar="CKPT")
    parser.add_argument("--one-document", action="store_true")
    parser.add_argument("--table", nargs="+", type=Path, metavar="JSON")
    parser.add_argument("--picture", type=Path, metavar="PNG", help="with --table")
    return parser.parse_args(plain), overrides


def flags_of(args: argparse.Namespace, overrides: list[str]) -> list[str]:
    """The configuration's keys that the options stand for; what is given by name comes last and wins."""
    flags = ["--checkpoint.every=0", "--training.eval_every=0"]
    if args.data is not None:
        tokenizer = args.data / TOKENIZER
        flags += [f"--data.source={args.data}", f"--data.tokenizer={tokenizer if tokenizer.exists() else 'bytes'}"]
    elif args.tokenizer is not None:
        flags.append(f"--data.tokenizer={args.tokenizer}")
    if args.hsdp:
        flags.append("--training.replicas=2")
    if args.reduce_each_micro_batch:
        on = "true" if args.reduce_each_micro_batch == "on" else "false"
        flags += ["--training.reshard=layer", f"--training.reduce_each_micro_batch={on}"]
    return [*flags, *overrides]


def name_of(args: argparse.Namespace) -> str:
    if args.name:
        return args.name
    parts = [f"production-{reduce.world_size()}", "hsdp" if args.hsdp else ""]
    parts.append(f"reduce-{args.reduce_each_micro_batch}" if args.reduce_each_micro_batch else "")
    return "-".join(part for part in parts if part)


def one_document(data: TokenData) -> TokenData:
    """The same tokens, read as if all of them were one document."""
    inner = data.train.read

    def read(start: int, stop: int):
        tokens, documents = inner(start, stop)
        return tokens, np.zeros_like(documents)

    data.train.read = read  # type: ignore[method-assign]
    return data


class Run:
    """One measured run; ``report`` is what the JSON holds."""

    def __init__(self, args: argparse.Namespace, flags: list[str]):
        began = time.perf_counter()
        self.config = load_config(args.config, flags)
        name = name_of(args)
        self.path = args.out / f"{name}.json"
        data = one_document(prepare_data(self.config, Log())) if args.one_document else None
        run_dir = args.out / name if args.save or args.resume else None
        self.trainer = Trainer(self.config, data=data, run_dir=run_dir)
        if args.resume:
            self.trainer.resume(args.resume)
        self.device, self.ranks = self.trainer.device, reduce.world_size()
        self.probe = MemoryProbe(self.trainer)
        sharding = getattr(self.trainer.model, "sharding", None)
        self.reshard = "layer" if sharding is None else sharding.reshard
        self.report: dict = {
            "finished": False, "gpus": self.ranks, "config": args.config, "options": flags, "reshard": self.reshard,
            "one_document": args.one_document,
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            "torch": torch.__version__, "tokens_per_step": self.config.tokens_per_step,
            "ready_s": time.perf_counter() - began, "plan": self.plan(), "steps": [],
        }  # fmt: skip

    def plan(self) -> dict:
        """Memory and bytes of a rank by term, as `hymo plan` computes them."""
        kind = self.device.type
        if not self.trainer.sharded:
            return {"memory": {}, "traffic": {}}
        model = build_hymo(self.config, device="meta")
        memory = memory_of(self.config, model, self.ranks, self.reshard, device_type=kind)
        traffic = traffic_of(self.config, model, self.ranks, self.reshard, device_type=kind)
        return {
            "memory": memory.by_name() | {"peak": memory.peak},
            "traffic": {term.name: term.n_bytes for term in traffic.terms} | {"total": traffic.total},
            "collectives": {kind: traffic.calls_of_kind(kind) for kind in {term.kind for term in traffic.terms}},
        }

    def step(self) -> None:
        """One attempt, timed to the end of its last kernel; printed and written."""
        index, t = len(self.report["steps"]), self.trainer
        began = time.perf_counter()
        with counted() if index == COUNTED else nullcontext() as sent:
            result = t.train_step()
        self.synchronize()
        seconds = time.perf_counter() - began
        row = {
            "step": t.step, "seconds": seconds, "loss": result.loss, "grad_norm": result.grad_norm,
            "skipped": result.skipped, "data_wait_s": t.stream().wait_s, "optimizer_s": self.probe.optimizer_s(),
            "memory": self.probe.read(),
        }  # fmt: skip
        if sent is not None:
            self.report["counted"] = {kind: sent.of_kind(kind) for kind in {kind for kind, _ in sent.calls}}
            self.report["counted"]["total"] = sent.total
            self.report["counted_calls"] = {kind: sent.calls_of_kind(kind) for kind in {kind for kind, _ in sent.calls}}
        self.report["steps"].append(row)
        say(
            f"step {row['step']:3d} | {seconds:8.3f} s | {self.config.tokens_per_step / seconds:11,.0f} tokens/s | "
            f"loss {result.loss:.4f} | norm {result.grad_norm:7.3f} | optimizer {row['optimizer_s'] * 1e3:6.1f} ms | "
            f"data wait {row['data_wait_s'] * 1e3:5.1f} ms | peak {size(row['memory']['peak'])}"
        )
        self.write()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def profile(self) -> None:
        """Two more steps under the profiler, with the device's activity alone: its own cost is small."""
        if self.device.type != "cuda":
            self.report["collectives"] = None  # a CPU has no second queue to hide them in
            return
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            began = time.perf_counter()
            for _ in range(PROFILED):
                self.trainer.train_step()
            self.synchronize()
            wall = time.perf_counter() - began
        times = communication_time(recorded.profiler.kineto_results.events())
        if times is not None:
            self.report["collectives"] = {
                "profiled_step_s": wall / PROFILED, "collectives_s": times.collectives / PROFILED,
                "exposed_s": times.exposed / PROFILED, "exposed_share": times.exposed / wall,
                "kernels_s": times.other / PROFILED, "idle_s": times.idle / PROFILED,
            }  # fmt: skip

    def summary(self) -> None:
        """Medians of the later two thirds; over ranks the slowest and the fullest count."""
        rows = self.report["steps"]
        late = rows[len(rows) // 3 :]
        own = {
            "step_s": statistics.median(row["seconds"] for row in late),
            "optimizer_s": statistics.median(row["optimizer_s"] for row in late),
            "data_wait_s": statistics.median(row["data_wait_s"] for row in late),
            "first_step_s": rows[0]["seconds"],
            "memory": {key: max(row["memory"][key] for row in rows) for key in rows[0]["memory"]},
            "exposed_share": (self.report.get("collectives") or {}).get("exposed_share"),
            "sent": self.report.get("counted", {}).get("total"),
        }
        every = reduce.gather_objects(own)
        worst = {k: max(r[k] for r in every) for k in own if k != "memory" and own[k] is not None}
        worst["memory"] = {key: max(r["memory"][key] for r in every) for key in own["memory"]}
        tokens_per_s = self.config.tokens_per_step / worst["step_s"]
        peak = self.trainer.peak_flops
        self.report |= worst | {
            "optimizer_share": worst["optimizer_s"] / worst["step_s"],
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_gpu": tokens_per_s / self.ranks,
            "mfu": None if peak is None else tokens_per_s * self.trainer.flops_per_token / peak / self.ranks,
            "loss": rows[-1]["loss"],
            "by_rank": every,
        }

    def save(self) -> None:
        self.trainer.save()
        if self.trainer.saver is not None:
            self.trainer.saver.wait()
            self.report["checkpoint"] = [str(outcome) for outcome in self.trainer.saver.outcomes()] or str(
                self.trainer.last_checkpoint
            )

    def write(self, finished: bool = False) -> None:
        if not reduce.is_main():
            return
        self.report["finished"] = finished
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.report, indent=1))
        part.replace(self.path)


def say(*lines: str) -> None:
    if reduce.is_main():
        print(*lines, sep="\n", flush=True)


def show(report: dict) -> None:
    """One run: its figures, then memory and bytes beside the plan."""
    mfu = "n/a" if report["mfu"] is None else f"{report['mfu']:.1%}"
    exposed = report.get("exposed_share")
    say(
        f"\n{report['gpus']} x {report['device']}, torch {report['torch']}, reshard {report['reshard']}",
        f"step {report['step_s']:.3f} s (first {report['first_step_s']:.1f}) | {report['tokens_per_s']:,.0f} tokens/s, "
        f"{report['tokens_per_s_per_gpu']:,.0f} a GPU | MFU {mfu} | loss {report['loss']:.4f}",
        f"optimizer {report['optimizer_s'] * 1e3:.1f} ms ({report['optimizer_share']:.1%}) | data wait "
        f"{report['data_wait_s'] * 1e3:.1f} ms | collectives not overlapped "
        + ("n/a" if exposed is None else f"{exposed:.1%} (profiler)"),
        "",
        f"{'memory of a rank':36s} {'measured':>11s} {'plan':>11s}",
    )
    beside(report["memory"], report["plan"]["memory"], size)
    counted_bytes, plan = report.get("counted", {}), report["plan"]["traffic"]
    say("", f"{'sent by a rank in a step':36s} {'counted':>11s} {'plan':>11s}")
    for name, planned in plan.items():
        if name != "total":
            say(f"{name:36s} {'':>11s} {size(planned):>11s}")
    if counted_bytes:
        total = report.get("sent") or counted_bytes["total"]
        say(f"{'total':36s} {size(total):>11s} {size(plan.get('total', 0)):>11s}")


def beside(measured: dict, planned: dict, text) -> None:
    for name in dict.fromkeys([*planned, *measured]):
        cells = [text(side[name]) if side.get(name) is not None else "" for side in (measured, planned)]
        say(f"{name:36s} {cells[0]:>11s} {cells[1]:>11s}")


def table(paths: list[Path]) -> None:
    """Runs side by side; scaling efficiency and losses against the run with the fewest GPUs."""
    reports = sorted((json.loads(path.read_text()) | {"name": path.stem} for path in paths), key=lambda r: r["gpus"])
    done = [r for r in reports if "step_s" in r]
    for r in reports:
        if r not in done:
            print(f"{r['name']}: stopped after {len(r['steps'])} steps, left out")
    print(f"{'run':28s} GPUs   step s   tokens/s   MFU  scaling     peak  max|dloss|")
    for r in done:
        base = done[0]
        scaling = r["tokens_per_s_per_gpu"] / base["tokens_per_s_per_gpu"]
        apart = largest_difference(r, base)
        losses = "" if r is base else "none: bitwise" if apart == 0 else f"{apart:.4f}"
        mfu = "n/a" if r["mfu"] is None else f"{r['mfu']:.1%}"
        print(
            f"{r['name'][:28]:28s} {r['gpus']:4d} {r['step_s']:8.3f} {r['tokens_per_s']:10,.0f} {mfu:>5s} "
            f"{scaling:7.1%} {size(r['memory']['peak']):>9s}  {losses}"
        )


def largest_difference(report: dict, base: dict) -> float:
    """Of the losses at equal steps: a run that goes on from a checkpoint beside one that never stopped."""
    losses = {row["step"]: row["loss"] for row in base["steps"]}
    return max((abs(r["loss"] - losses[r["step"]]) for r in report["steps"] if r["step"] in losses), default=math.nan)


def picture(paths: list[Path], target: Path) -> None:
    """The losses of the runs over each other, and below them the difference of each to the first."""
    from curves import draw

    losses = {path.stem: [row["loss"] for row in json.loads(path.read_text())["steps"]] for path in paths}
    apart = draw(losses, target)
    print(f"largest difference to {paths[0].stem}: {apart:.4f}; picture: {target}")


def without_gpus(argv: list[str]) -> list[str]:
    """The command line for torchrun's processes."""
    kept = [word for word in argv if not word.startswith("--gpus=")]
    if "--gpus" in kept:
        at = kept.index("--gpus")
        del kept[at : at + 2]
    return kept


def main() -> None:
    args, overrides = parse()
    if args.table:
        table(args.table)
        return picture(args.table, args.picture) if args.picture else None
    if args.prepare:
        build(args.source, args.prepare, tokenizer=args.tokenizer or "bpe", vocab_size=args.vocab_size)
        return print(args.prepare)
    if args.gpus and "RANK" not in os.environ:
        here = without_gpus(sys.argv)
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.gpus), *here]
        os.execv(sys.executable, [sys.executable, *launch])
    mesh.init_distributed(load_config(args.config, overrides).training.device)
    run = Run(args, flags_of(args, overrides))
    say(f"ready after {run.report['ready_s']:.1f} s")
    try:
        with long_lived_objects() as keep_objects:  # as `hymo train` does
            for i in range(args.steps):
                run.step()
                if i == 0:
                    keep_objects()
        run.summary()
        run.write()  # what follows can be lost
        if not args.no_profile:
            run.profile()
            run.summary()
        if args.save:
            run.save()
    finally:
        run.write(finished="step_s" in run.report)
        run.trainer.stream().close()
    if reduce.is_main():
        show(run.report)
        print(f"\nwritten: {run.path}", flush=True)
    mesh.shutdown()


if __name__ == "__main__":
    try:
        main()
    except HyMoError as error:
        sys.exit(f"production: {error}")
