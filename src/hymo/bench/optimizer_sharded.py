"""The sharded optimizer step on the processes of torchrun: equal to one process? how long, and how much is waiting?

    torchrun --nproc-per-node 2 -m hymo.bench.optimizer_sharded [--repeats 10]

Rank 0 prints the plan, the difference from the same two steps on one process, the time of a step on one process and
on all, and the share of the latter that sending adds: one minus the time with the collectives left out over the whole.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hymo.bench.optimizer import bench_shapes, small_shapes, synchronize
from hymo.distributed.exchange import Exchange
from hymo.distributed.mesh import init_distributed
from hymo.optim.normuon import NorMuon

STEPS = 2


def draw(shapes: list[tuple[int, int]], seed: int, scale: float, device: torch.device) -> list[Tensor]:
    """The same values on every process."""
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.randn(shape, device=device, generator=generator) * scale for shape in shapes]


def optimizer_of(shapes: list[tuple[int, int]], device: torch.device, place: Callable[[Tensor], Tensor]) -> NorMuon:
    optimizer = NorMuon([nn.Parameter(place(x)) for x in draw(shapes, 0, 0.02, device)])
    optimizer.share_replicas = False
    return optimizer


def parameters(optimizer: NorMuon) -> list[Any]:
    return optimizer.param_groups[0]["params"]


def train(optimizer: NorMuon, shapes: list[tuple[int, int]], device: torch.device, place: Any) -> None:
    for step in range(1, STEPS + 1):
        for p, g in zip(parameters(optimizer), draw(shapes, step, 1e-3, device), strict=True):
            p.grad = place(g)
        optimizer.step()


def median_ms(optimizer: NorMuon, device: torch.device, repeats: int) -> float:
    """Milliseconds of a step, the slowest process's."""
    times = []
    for _ in range(repeats + 3):
        synchronize(device.type)
        dist.barrier()
        start = time.perf_counter()
        optimizer.step()
        synchronize(device.type)
        times.append(time.perf_counter() - start)
    found = torch.tensor([sorted(times[3:])[repeats // 2] * 1e3], device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def without_sending(optimizer: NorMuon, device: torch.device, repeats: int) -> float:
    """The same step with made-up arrivals: what computing alone takes."""

    def pretend(self: Exchange, buffer: Tensor, send: tuple[int, ...], receive: tuple[int, ...]) -> tuple[Tensor, None]:
        return torch.ones(sum(receive), dtype=self.dtype, device=self.device), None

    real = Exchange._all_to_all
    Exchange._all_to_all = pretend  # type: ignore[method-assign]
    try:
        return median_ms(optimizer, device, repeats)
    finally:
        Exchange._all_to_all = real  # type: ignore[method-assign]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=10)
    repeats = parser.parse_args().repeats
    device = init_distributed()
    shapes = bench_shapes() if device.type == "cuda" else small_shapes()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    def shard(x: Tensor) -> Tensor:
        return distribute_tensor(x, mesh, [Shard(0)])

    together, alone = optimizer_of(shapes, device, shard), optimizer_of(shapes, device, lambda x: x)
    train(together, shapes, device, shard)
    train(alone, shapes, device, lambda x: x)
    moved = [p.detach() - x for p, x in zip(parameters(alone), draw(shapes, 0, 0.02, device), strict=True)]
    pairs = zip(parameters(together), parameters(alone), moved, strict=True)
    error = max(float((a.detach().full_tensor() - b.detach()).norm() / m.norm()) for a, b, m in pairs)
    one, all_of_them = median_ms(alone, device, repeats), median_ms(together, device, repeats)
    computing = without_sending(together, device, repeats)
    if dist.get_rank() == 0:
        (plan,) = [step.plan for steps in together.prepared.values() for step in steps]
        print(plan)
        print(f"largest difference from one process after {STEPS} steps, over the way moved: {error:.1e}")
        print(f"step: one process {one:.2f} ms, {dist.get_world_size()} processes {all_of_them:.2f} ms", end=", ")
        print(f"of which waiting for others {max(0.0, 1 - computing / all_of_them):.0%}")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
