"""``hymo bench optimizer``: one optimizer step beside what else is installed, with the error of the update beside each.

    python -m hymo.bench.optimizer [--sets bench hymo experts] [--only NAME ...] [--repeats 10]

`bench` is a fixed set of 232 matrices (308 M float32 parameters); `hymo` and `experts` are hymo_750m as partitioned,
with the experts in AdamW and in NorMuon. Without CUDA a few small matrices stand in, so that the table can be seen.
Error: of the first update's direction from zero momentum, against the same rule with the polar factor by singular
value decomposition in float64 (relative, Frobenius, mean over the shapes). Peak: memory above parameters, gradients and
state.
"""

import argparse
import contextlib
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hymo.cli_tools import add_examples
from hymo.optim.cautious_adamw import CautiousAdamW
from hymo.optim.normuon import NorMuon

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Contestant:
    """An optimizer: how to make it, and the rule its update follows (`row`: rows of equal size; None: not compared)."""

    name: str
    make: Make
    rule: str | None


def bench_shapes() -> list[tuple[int, int]]:
    """24 layers of a recurrence with a feed-forward part and 8 of latent attention, at width 896."""
    recurrence = [(1280, 896)] * 4 + [(896, 1280)] + [(2432, 896)] * 2 + [(896, 2432)]
    return recurrence * 24 + [(224, 896), (1344, 224), (160, 896), (1792, 128), (896, 896)] * 8


def small_shapes() -> list[tuple[int, int]]:
    return [(128, 96)] * 4 + [(96, 128), (64, 64)]


def dion_normuon(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    import dion

    torch._dynamo.config.recompile_limit = 256  # as shipped it stops at the limit
    torch._dynamo.config.accumulated_recompile_limit = 4096
    return dion.NorMuon(params, lr=0.02, weight_decay=0.1, cautious_wd=True, nesterov=True, use_triton=True)


def emerging_muon(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    from emerging_optimizers.orthogonalized_optimizers import Muon

    return Muon(params, lr=0.02)


def contestants(fused: bool) -> list[Contestant]:
    return [
        Contestant("hymo NorMuon", lambda p: NorMuon(p), "row"),
        Contestant("hymo Muon (torch's form)", lambda p: NorMuon(p, preset="torch"), "polar"),
        Contestant("hymo CautiousAdamW", lambda p: CautiousAdamW(p), None),
        Contestant("torch AdamW fused", lambda p: torch.optim.AdamW(p, lr=3e-4, fused=fused), None),
        Contestant("torch Muon", lambda p: torch.optim.Muon(p, lr=0.02, weight_decay=0.1), "polar"),
        Contestant("emerging-optimizers Muon", emerging_muon, "polar"),
        Contestant("dion NorMuon", dion_normuon, "row"),
    ]


def parameters(shapes: Sequence[tuple[int, ...]], device: str) -> list[nn.Parameter]:
    generator = torch.Generator(device).manual_seed(0)
    found = []
    for shape in shapes:
        p = nn.Parameter(torch.randn(shape, device=device, generator=generator) * 0.02)
        p.grad = torch.randn(shape, device=device, generator=generator) * 1e-3
        found.append(p)
    return found


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Timing:
    """Milliseconds (median), seconds of the first step, bytes above the resident ones at the peak."""

    step_ms: float
    first_s: float
    peak: int


def measure(step: Callable[[], Any], device: str, repeats: int) -> Timing:
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    first = time.perf_counter() - start
    for _ in range(3):
        step()
    synchronize(device)
    resident = torch.cuda.memory_allocated() if device == "cuda" else 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        synchronize(device)
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() - resident if device == "cuda" else 0
    return Timing(sorted(times)[repeats // 2] * 1e3, first, peak)


def update_error(make: Make, rule: str, shapes: Sequence[tuple[int, ...]], device: str) -> float:
    """Mean over shapes of the relative distance between directions, the norm of each update taken out."""
    params = parameters(list(dict.fromkeys(shapes)), device)
    for p in params:
        p.data.zero_()
    make(params).step()
    errors = []
    for p in params:
        assert p.grad is not None
        u, _, vh = torch.linalg.svd(p.grad.double(), full_matrices=False)
        ideal = u @ vh
        if rule == "row":
            ideal = ideal / ideal.square().mean(1, keepdim=True).sqrt()
        found = -p.detach().double()
        errors.append(float((found / found.norm() - ideal / ideal.norm()).norm()))
    return sum(errors) / len(errors)


def bench_set(device: str, repeats: int, only: Sequence[str]) -> None:
    shapes = bench_shapes() if device == "cuda" else small_shapes()
    numel = sum(m * n for m, n in shapes)
    flops = sum(5 * (4 * min(s) ** 2 * max(s) + 2 * min(s) ** 3) for s in shapes)
    print(f"\n{len(shapes)} matrices, {numel / 1e6:.1f} M parameters, {flops / 1e12:.2f} TFLOP for five quintic steps")
    header()
    for contestant in contestants(fused=device == "cuda"):
        if only and not any(text.lower() in contestant.name.lower() for text in only):
            continue
        try:
            params = parameters(shapes, device)
            optimizer = contestant.make(params)
            timing = measure(optimizer.step, device, repeats)
            del optimizer, params
            error = update_error(contestant.make, contestant.rule, shapes, device) if contestant.rule else None
        except Exception as problem:
            print(
                f"| {contestant.name} | {type(problem).__name__}: {str(problem).splitlines()[0][:90]} | | | |",
                flush=True,
            )
            continue
        finally:
            release(device)
        row(contestant.name, timing, error)


def release(device: str) -> None:
    if device == "cuda":
        torch.cuda.empty_cache()


def header() -> None:
    print(
        "| step of | ms | first step, s | peak above state, MiB | error against float64 |\n|---|---|---|---|---|",
        flush=True,
    )


def row(name: str, timing: Timing, error: float | None) -> None:
    shown = "" if error is None else f"{error:.4f}"
    print(f"| {name} | {timing.step_ms:.2f} | {timing.first_s:.1f} | {timing.peak / 2**20:.0f} | {shown} |", flush=True)


def model_set(experts: str, device: str, repeats: int) -> None:
    """hymo_750m (without CUDA: the tiny model) by its own partition."""
    from hymo.config import HyMoConfig
    from hymo.config_io import load_config
    from hymo.models.model import build_hymo
    from hymo.optim.build import build_optimizers

    config = HyMoConfig() if device == "cuda" else load_config("tiny", [])
    model = build_hymo(config.model, device="meta").to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    for p in model.parameters():
        with torch.no_grad():
            p.normal_(0, 0.02, generator=generator)
        p.grad = torch.empty_like(p).normal_(0, 1e-3, generator=generator)
    optimizers = build_optimizers(model, config.optimizer.model_copy(update={"experts": experts}))
    print(f"\nthe model as partitioned, experts: {experts}\n{optimizers.partition.summary()}")
    header()
    row(f"hymo Optimizers, experts: {experts}", measure(optimizers.step, device, repeats), None)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="hymo bench optimizer", description=__doc__.split("\n")[0])
    sets = ("bench", "hymo", "experts")
    parser.add_argument(
        "--sets", nargs="+", choices=sets, default=list(sets), help="bench: a set of matrices, with peers"
    )
    parser.add_argument("--only", nargs="+", default=[], help="contestants whose name contains one of these")
    parser.add_argument("--repeats", type=int, default=10, help="steps that are timed (default: 10)")
    add_examples(parser, "bench optimizer")
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU: a few small matrices stand in for the set"
    print(f"torch {torch.__version__} on {where}")
    with warnings.catch_warnings(), contextlib.suppress(KeyboardInterrupt):
        warnings.simplefilter("ignore")
        if "bench" in args.sets:
            bench_set(device, args.repeats, args.only)
        if "hymo" in args.sets:
            model_set("adamw", device, args.repeats)
            release(device)
        if "experts" in args.sets:
            model_set("muon", device, args.repeats)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
