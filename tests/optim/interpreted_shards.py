"""Run by test_triton_form.py on two processes in Triton's interpreter: the kernels' form on shards and replicas."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hymo.optim import matrix_step
from hymo.optim.normuon import NorMuon

SHAPES = [(9, 5), (5, 9), (1, 9), (3, 12, 5), (2, 4, 6)]


def whole(t):
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()


def run(fused, mesh, cuts):
    matrix_step.runs_triton = lambda device: fused
    generator = torch.Generator().manual_seed(0)

    def draw(shape, plain=False):
        values = torch.randn(shape, generator=generator)
        return values if plain else distribute_tensor(values, mesh, cuts)

    ps = [nn.Parameter(draw(s)) for s in SHAPES] + [nn.Parameter(draw((6, 4), plain=True))]
    optimizer = NorMuon([{"params": ps[:3]}, {"params": ps[3:4], "row_blocks": (7, 5)}, {"params": ps[4:]}])
    optimizer.bucket_bytes = 1 << 10
    for _ in range(2):
        for p in ps:
            p.grad = draw(p.shape, plain=p is ps[-1])
        optimizer.step()
    assert all((step.tables is not None) == fused for steps in optimizer.prepared.values() for step in steps)
    return [whole(t) for p in ps for t in (p, *optimizer.state[p].values())]


dist.init_process_group("gloo")
size = dist.get_world_size()
for shape, cuts in (((size,), [Shard(0)]), ((size, 1), [Replicate(), Shard(0)])):
    mesh = init_device_mesh("cpu", shape)
    for a, b in zip(run(True, mesh, cuts), run(False, mesh, cuts), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
if dist.get_rank() == 0:
    print("same")
dist.destroy_process_group()
