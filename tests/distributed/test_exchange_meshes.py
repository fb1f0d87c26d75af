"""The exchange on meshes whose ranks are in no rising order: a process group is sorted, a mesh is not."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hymo.optim.normuon import NorMuon

SHAPES = [(17, 6), (8, 8), (8, 8), (8, 8), (8, 8), (3, 5, 7)]
MESHES = {
    "shard": ([0, 2, 1, 3], [Shard(0)]),
    "shard, the first two swapped": ([1, 0, 2, 3], [Shard(0)]),
    "replicas of shards": ([[0, 2], [1, 3]], [Replicate(), Shard(0)]),
    "tiles": ([[0, 2], [1, 3]], [Shard(0), Shard(1)]),
}


def values(i: int, step: int) -> torch.Tensor:
    return torch.randn(SHAPES[i], generator=torch.Generator().manual_seed(100 * step + i), dtype=torch.float64)


def stepped(place, share_replicas: bool) -> list[torch.Tensor]:
    params = [nn.Parameter(place(values(i, 0))) for i in range(len(SHAPES))]
    optimizer = NorMuon([(f"w{i}", p) for i, p in enumerate(params)])
    optimizer.share_replicas = share_replicas
    for step in range(1, 4):
        for i, p in enumerate(params):
            p.grad = place(values(i, step))
        optimizer.step()
    return [p.detach() for p in params]


def worst(name: str) -> float:
    ranks, placements = MESHES[name]
    mesh = DeviceMesh("cpu", ranks)
    found = stepped(lambda x: distribute_tensor(x, mesh, placements), share_replicas=True)
    expected = stepped(lambda x: x, share_replicas=False)
    return max(float((f.full_tensor() - e).norm() / e.norm()) for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", MESHES)
def test_any_order_of_a_mesh_gives_the_update_of_one_process(pool, name):
    assert max(pool(4, worst, name)) < 1e-12
