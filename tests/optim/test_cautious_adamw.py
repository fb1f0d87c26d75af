"""Cautious AdamW against its formula and against torch's AdamW where the two agree."""

import pytest
import torch
from torch import nn

from hymo.optim.cautious_adamw import CautiousAdamW


def pair(*shape, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)
    return nn.Parameter(w.clone()), nn.Parameter(w.clone())


def grads(shape, n, seed=1):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=g, dtype=torch.float64) for _ in range(n)]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_without_the_mask_it_is_adamw(weight_decay):
    ours, theirs = pair(7, 5)
    a = CautiousAdamW([ours], lr=1e-2, weight_decay=weight_decay, cautious_wd=False)
    b = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay)
    for g in grads((7, 5), 6):
        ours.grad, theirs.grad = g.clone(), g.clone()
        a.step()
        b.step()
    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("mask", ["update", "momentum", "grad"])
def test_the_mask_by_its_formula(mask):
    w, _ = pair(9, 4)
    optimizer = CautiousAdamW([w], lr=1e-2, weight_decay=0.5, mask=mask)
    expected, m, v = w.detach().clone(), 0.0, 0.0
    for t, g in enumerate(grads((9, 4), 5), 1):
        w.grad = g.clone()
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        u = (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
        source = {"update": u, "momentum": m, "grad": g}[mask]
        expected = expected - 1e-2 * (u + 0.5 * ((source * expected) >= 0) * expected)
        optimizer.step()
    torch.testing.assert_close(w.detach(), expected, rtol=1e-12, atol=1e-13)


def test_zero_gradient_gives_no_update_but_decays_fully():
    w, start = pair(3, 3)
    w.grad = torch.zeros_like(w)
    CautiousAdamW([w], lr=0.1, weight_decay=0.5).step()
    torch.testing.assert_close(w.detach(), start.detach() * (1 - 0.05))


def test_the_sign_test_survives_values_whose_product_underflows():
    """1e-30 * 1e-30 is zero in float32 and would pass the test >= 0."""
    u_opposes = nn.Parameter(torch.full((4,), -1e-30))
    u_opposes.grad = torch.full((4,), 1e-30)
    optimizer = CautiousAdamW([u_opposes], lr=1e-3, weight_decay=900.0, eps=1.0)
    optimizer.step()
    assert float(u_opposes.detach()[0]) == pytest.approx(-1e-30, rel=1e-2)  # a decay would have taken 90 % of it


def test_embeddings_decay_by_their_own_number():
    a, b = pair(4, 3)
    optimizer = CautiousAdamW([{"params": [a], "embedding": True}, {"params": [b]}], lr=0.1, embed_weight_decay=0.3)
    a.grad, b.grad = torch.zeros_like(a), torch.zeros_like(b)
    start = a.detach().clone()
    optimizer.step()
    torch.testing.assert_close(a.detach(), start * (1 - 0.03))
    torch.testing.assert_close(b.detach(), start * (1 - 0.01))
    assert float(CautiousAdamW([a]).param_groups[0]["embed_weight_decay"]) == 0.0


def test_scalars_vectors_and_any_rank_are_taken():
    params = [nn.Parameter(torch.ones(s)) for s in ((), (5,), (2, 3), (2, 3, 4))]
    for p in params:
        p.grad = torch.ones_like(p)
    CautiousAdamW(params).step()
    assert all(float(p.detach().max()) < 1 for p in params)


def test_each_parameter_counts_its_own_steps():
    a, b = pair(4, 3)
    a.grad = torch.ones_like(a)
    optimizer = CautiousAdamW([a, b])
    optimizer.step()
    b.grad = torch.ones_like(b)
    optimizer.step()
    assert (float(optimizer.state[a]["step"]), float(optimizer.state[b]["step"])) == (2.0, 1.0)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [({"betas": (0.9,)}, "betas"), ({"eps": -1.0}, "eps: found -1"), ({"mask": "weights"}, "mask: found 'weights'")],
)
def test_bad_settings_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        CautiousAdamW([pair(2, 2)[0]], **kwargs)
