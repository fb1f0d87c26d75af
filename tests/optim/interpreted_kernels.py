"""Run by test_triton_form.py in Triton's interpreter: the kernels' form of a step against plain tensor operations."""

import torch
from torch import nn

from hymo.optim import cautious_adamw, matrix_step
from hymo.optim.cautious_adamw import CautiousAdamW
from hymo.optim.normuon import NorMuon
from hymo.optim.triton_kernels import symmetric

SHAPES = [(12, 5), (5, 12), (5, 12), (2, 12, 5), (1, 7)]


def groups(ps):
    return [{"params": ps[:3]}, {"params": ps[3:4], "row_blocks": (7, 5)}, {"params": ps[4:]}]


def run(make, settings, dtype, fused):
    for module in (matrix_step, cautious_adamw):
        module.runs_triton = lambda device: fused
    generator = torch.Generator().manual_seed(0)
    ps = [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]
    optimizer = make(groups(ps) if make is NorMuon else ps, **settings)
    for seed in range(2):
        generator = torch.Generator().manual_seed(10 + seed)
        for p in ps:
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
        if seed == 1:
            ps[1].grad = None
        optimizer.step()
    used = [s for steps in optimizer.prepared.values() for s in steps]
    assert not fused or (used and all(getattr(s, "tables", s) is not None for s in used))
    return [t.detach().float() for p in ps for t in (p, *optimizer.state[p].values())]


def check(make, settings, dtype=torch.float32):
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for a, b in zip(run(make, settings, dtype, True), run(make, settings, dtype, False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=tolerance)


check(NorMuon, {})
check(NorMuon, {"mask": "grad", "normalize": False, "nesterov": False}, torch.bfloat16)
check(NorMuon, {"preset": "paper", "lr": 0.01})
check(NorMuon, {"mask": "momentum", "decay": "lr_squared"})
check(CautiousAdamW, {"mask": "grad"})
check(CautiousAdamW, {"mask": "momentum"})
check(CautiousAdamW, {}, torch.bfloat16)

x = torch.randn(2, 40, 24)
for view in (x, x.mT.contiguous().mT):
    scale = torch.tensor([0.5, 2.0])
    gram = symmetric(view, None, alpha=1.0, scale=scale, power=2, block=16, depth_block=16)
    torch.testing.assert_close(gram, x @ x.mT * scale[:, None, None] ** 2, rtol=1e-2, atol=1e-2)
    bracket = symmetric(gram, gram, alpha=0.3, beta=0.7, diagonal=2.0, scale=scale, power=1, block=16, depth_block=16)
    expected = scale[:, None, None] * (0.3 * gram @ gram + 0.7 * gram + 2 * torch.eye(40))
    torch.testing.assert_close(bracket, expected, rtol=1e-3, atol=1e-2)
print("same")
