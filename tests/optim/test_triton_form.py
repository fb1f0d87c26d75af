"""The GPU form of the step in Triton's interpreter against plain tensor operations. Real GPUs: tests/gpu."""

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

SCRIPT = """
import torch
from torch import nn
from hymo.optim import batched, matrix_step
from hymo.optim.cautious_adamw import CautiousAdamW
from hymo.optim.normuon import NorMuon
from hymo.optim.orthogonalize import get_orthogonalizer, orthogonalize
from hymo.optim.triton_kernels import symmetric

def params(dtype):
    g = torch.Generator().manual_seed(0)
    shapes = [(24, 10), (10, 24), (10, 24), (3, 12, 5), (1, 7)]
    return [nn.Parameter(torch.randn(s, generator=g).to(dtype)) for s in shapes]

def run(make, dtype, fused):
    matrix_step.runs_triton = lambda device: fused
    import hymo.optim.cautious_adamw as adamw
    adamw.runs_triton = lambda device: fused
    ps = params(dtype)
    optimizer = make(ps)
    for seed in range(3):
        g = torch.Generator().manual_seed(10 + seed)
        for p in ps:
            p.grad = torch.randn(p.shape, generator=g).to(dtype)
        if seed == 2:
            ps[1].grad = None
        optimizer.step()
    used = [s for steps in optimizer.prepared.values() for s in steps]
    if fused:
        assert used and all(getattr(s, "tables", s) is not None for s in used)
    return [t.detach().float() for p in ps for t in (p, *optimizer.state[p].values())]

def groups(ps):
    return [{"params": ps[:3]}, {"params": ps[3:4], "row_blocks": (7, 5)}, {"params": ps[4:]}]

makers = [lambda ps, s=s: NorMuon(groups(ps), **s) for s in (
    {}, {"normalize": False, "nesterov": False}, {"preset": "paper", "lr": 0.01}, {"mask": "grad"},
    {"mask": "momentum", "decay": "lr_squared"}, {"cautious_wd": False})]
makers += [lambda ps, m=m: CautiousAdamW(ps, mask=m) for m in ("update", "momentum", "grad")]
for dtype in (torch.float32, torch.bfloat16):
    for make in makers[:: 1 if dtype == torch.float32 else 6]:
        for a, b in zip(run(make, dtype, True), run(make, dtype, False), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 if dtype == torch.float32 else 1e-2)

x = torch.randn(2, 40, 24)
for view in (x, x.mT.contiguous().mT):
    scale = torch.tensor([0.5, 2.0])
    gram = symmetric(view, None, alpha=1.0, scale=scale, power=2, block=16, depth_block=16)
    torch.testing.assert_close(gram, x @ x.mT * scale[:, None, None] ** 2, rtol=1e-2, atol=1e-2)
    bracket = symmetric(gram, gram, alpha=0.3, beta=0.7, diagonal=2.0, scale=scale, power=1, block=16, depth_block=16)
    expected = scale[:, None, None] * (0.3 * gram @ gram + 0.7 * gram + 2 * torch.eye(40))
    torch.testing.assert_close(bracket, expected, rtol=1e-3, atol=1e-2)
print("same")
"""


def test_the_interpreted_kernels_equal_plain_operations():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.stdout.strip() == "same", done.stderr[-3000:]
