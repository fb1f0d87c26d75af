"""Errors of the fused mixer and its convolution in Triton's interpreter, as JSON; run by test_triton_mixer.py."""

import json

import torch

from hymo.config import ModelConfig
from hymo.kernels import triton_conv
from hymo.kernels.conv import causal_conv
from hymo.kernels.triton_mixer import mixer
from hymo.models.gdn import GatedDeltaNetBlock
from hymo.models.layers import document_layout

triton_conv.STRETCH = 8  # short stretches: the interpreter takes milliseconds for each token of a program


def relative(x, reference):
    return ((x.double() - reference.double()).norm() / (reference.double().norm() + 1e-30)).item()


def make_ids(B, T, g):
    return (torch.rand(B, T, generator=g) < 0.2).cumsum(1).to(torch.int32)


def convolution(B, T, sizes, taps, *, docs=False, dtype=torch.float32):
    """Errors of the three parts and of the gradients against float64; input and gradient are slices of wider rows."""
    g = torch.Generator().manual_seed(T + taps)
    C = sum(sizes)
    x, w = torch.randn(B, T, C + 8, generator=g).to(dtype)[..., :C], torch.randn(C, taps, generator=g)
    ids = make_ids(B, T, g) if docs else None
    dys = [torch.randn(B, T, n, generator=g).to(dtype) for n in sizes]
    parts = triton_conv.run_forward(x, w, ids, sizes)
    dx = torch.full((B, T, C + 8), torch.nan, dtype=dtype)[..., :C]
    dw = triton_conv.run_backward(dys, x, w, ids, dx)
    x64, w64 = x.double().requires_grad_(), w.double().requires_grad_()
    exact = causal_conv(x64, w64, ids)
    want = torch.autograd.grad(exact, [x64, w64], torch.cat(dys, -1).double())
    return {"y": relative(torch.cat(parts, -1), exact), "dx": relative(dx, want[0]), "dw": relative(dw, want[1])}


def another_document():
    """What stands in other documents, infinite or not, changes no bit, forward or backward."""
    g = torch.Generator().manual_seed(5)
    x, w = torch.randn(1, 18, 48, generator=g), torch.randn(48, 4, generator=g)
    ids = torch.tensor([[0] * 4 + [1] * 10 + [2] * 4], dtype=torch.int32)
    mine = ids[0] == 1
    dys = [torch.randn(1, 18, 16, generator=g) for _ in range(3)]
    results = []
    for other in (0.0, float("inf")):
        inputs = torch.where(mine[None, :, None], x, x + other)
        sent, dx = [torch.where(mine[None, :, None], dy, other) for dy in dys], torch.empty_like(inputs)
        triton_conv.run_backward(sent, inputs, w, ids, dx)
        results.append([t[:, mine] for t in (*triton_conv.run_forward(inputs, w, ids, (16, 16, 16)), dx)])
    return {"unchanged": all(torch.equal(a, b) for a, b in zip(*results, strict=True))}


def block(T, *, docs=False, max_decay=5.0, dtype=torch.float32, head_dim=8, state_dim=5, conv_size=4):
    """A block by the fused mixer against the same block in float64 by its parts: output and every gradient."""
    g = torch.Generator().manual_seed(T)
    config = ModelConfig(
        dim=24, n_layers=2, mla_every=2, vocab_size=32, gdn_heads=2, gdn_head_dim=head_dim, gdn_state_dim=state_dim,
        conv_size=conv_size, gdn_max_decay=max_decay,
    )  # fmt: skip
    fused, exact = GatedDeltaNetBlock(config), GatedDeltaNetBlock(config).double()
    with torch.no_grad():
        for p, q in zip(fused.parameters(), exact.parameters(), strict=True):
            p.copy_(0.5 * torch.randn(p.shape, generator=g))
            p.copy_(p.to(dtype))
            q.copy_(p)
    fused = fused.to(dtype)
    for name in ("A_log", "dt_bias", "D"):
        getattr(fused, name).data = getattr(fused, name).data.float()
    fused.use_triton, exact.use_triton = True, False
    x = torch.randn(1, T, 24, generator=g).to(dtype)
    dy = torch.randn(1, T, 24, generator=g).to(dtype)
    layout = document_layout(make_ids(1, T, g) if docs else None, T, 4, 1e4, "cpu")
    results = []
    for module, start in ((fused, x.clone().requires_grad_()), (exact, x.double().requires_grad_())):
        y = module(start, layout)
        leaves = [start, *module.parameters()]
        results.append([y - start, *torch.autograd.grad(y, leaves, dy.to(y.dtype))])
    names = ["y", "x", *(name for name, _ in fused.named_parameters())]
    return {name: relative(a, b) for name, a, b in zip(names, *results, strict=True)}


def swiglu():
    """The kernel of SwiGLU's gradient, on sizes that its tiles do not divide."""
    from hymo.kernels.triton_swiglu import swiglu_backward

    g = torch.Generator().manual_seed(1)
    x, dy = torch.randn(3, 5, 2 * 70, generator=g), torch.randn(3, 5, 70, generator=g)
    exact = x.double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    (want,) = torch.autograd.grad(torch.nn.functional.silu(gate) * up, exact, dy.double())
    return {"dx": relative(swiglu_backward(x, dy), want)}


def library():
    x = torch.randn(1, 3, 4 * 8).requires_grad_()
    g, A_log, D = torch.rand(1, 3, 1), torch.zeros(1, 8), torch.ones(1)
    args = (x, g, A_log, D, torch.randn(24, 4), torch.ones(8), None, "leaf", 1e-6, True)
    checks = torch.library.opcheck(mixer, args)
    return {"opcheck": all(result == "SUCCESS" for result in checks.values())}


CASES = {
    "whole": lambda: convolution(2, 10, (32, 32, 32), 4),
    "packed": lambda: convolution(1, 27, (40, 24, 24), 4, docs=True),
    "short": lambda: convolution(1, 2, (8, 16, 4), 4),
    "two taps": lambda: convolution(1, 17, (32, 16, 16), 2, docs=True),
    "one tap": lambda: convolution(1, 9, (16, 16, 16), 1),
    "float16": lambda: convolution(1, 16, (64, 64, 64), 3, docs=True, dtype=torch.float16),
    "documents": another_document,
    "block": lambda: block(9),
    "block, packed": lambda: block(18, docs=True, head_dim=5, state_dim=8),
    "block, any decay": lambda: block(11, docs=True, max_decay=None, conv_size=2),
    "block, float16": lambda: block(10, dtype=torch.float16),
    "swiglu": swiglu,
    "library": library,
}

if __name__ == "__main__":
    print(json.dumps({name: run() for name, run in CASES.items()}))
