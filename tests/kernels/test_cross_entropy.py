"""The chunked head loss against the plain form: values, gradients, masks, weights, memory."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

from hymo.kernels import cross_entropy
from hymo.kernels.cross_entropy import IGNORE, chunk_rows, linear_cross_entropy
from interpreter import run_interpreted


def example(terms=2, n=23, d=8, v=37, dtype=torch.float32, masked=0.2):
    g = torch.Generator().manual_seed(0)
    hidden = [torch.randn(n, d, generator=g).to(dtype).requires_grad_() for _ in range(terms)]
    weight = (torch.randn(v, d, generator=g) * 2).to(dtype).requires_grad_()
    labels = [torch.randint(v, (n,), generator=g) for _ in range(terms)]
    for row in labels:
        row[torch.rand(n, generator=g) < masked] = IGNORE
    return hidden, weight, labels


def plain(hidden, weight, labels):
    """The definition in float64: sums of cross entropy, and of logsumexp^2 of the first term."""
    logits = [h.double() @ weight.double().t() for h in hidden]
    ce = [F.cross_entropy(x, y, ignore_index=IGNORE, reduction="sum") for x, y in zip(logits, labels, strict=True)]
    z = torch.logsumexp(logits[0], -1).square()[labels[0] != IGNORE].sum()
    return torch.stack(ce), z


def grads(loss, leaves):
    return torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("rows", [1, 5, 23, 100])
def test_sums_are_those_of_the_plain_form(rows):
    hidden, weight, labels = example()
    ce, z = linear_cross_entropy(hidden, weight, labels, rows=rows)
    expected, expected_z = plain(hidden, weight, labels)
    torch.testing.assert_close(ce.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(z.double(), expected_z, rtol=1e-6, atol=0)


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("rows", [4, 64])
@pytest.mark.parametrize("z_weight", [0.0, 0.03])
def test_gradients_are_those_of_the_plain_form(announced, rows, z_weight):
    hidden, weight, labels = example()
    term_weights = torch.tensor([0.7, 0.2])
    ce, z = linear_cross_entropy(
        hidden, weight, labels, term_weights_K=term_weights if announced else None, z_weight=z_weight, rows=rows
    )
    loss = 3 * ((ce * term_weights).sum() + (z_weight * z if z_weight else 0))
    got = grads(loss, [*hidden, weight])
    expected_ce, expected_z = plain(hidden, weight, labels)
    expected = grads(3 * ((expected_ce * term_weights).sum() + z_weight * expected_z), [*hidden, weight])
    for a, b in zip(got, expected, strict=True):
        assert (a - b).norm() <= 1e-6 * b.norm()


def test_gradients_by_finite_differences():
    hidden, weight, labels = example(n=5, d=3, v=7, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda h0, h1, w: linear_cross_entropy([h0, h1], w, labels, z_weight=0.5, rows=2), [*hidden, weight]
    )


def test_z_sum_of_known_logits():
    """Two equal logits of 3: logsumexp = 3 + ln 2; the masked token counts for nothing."""
    hidden, weight = torch.tensor([[3.0], [5.0]]), torch.ones(2, 1)
    ce, z = linear_cross_entropy([hidden], weight, [torch.tensor([0, IGNORE])])
    assert ce.item() == pytest.approx(math.log(2), rel=1e-6)
    assert z.item() == pytest.approx((3 + math.log(2)) ** 2, rel=1e-6)


def test_a_loss_other_than_announced_is_loud():
    hidden, weight, labels = example()
    ce, _ = linear_cross_entropy(hidden, weight, labels, term_weights_K=torch.tensor([1.0, 0.3]))
    got = grads((ce * torch.tensor([1.0, 0.5])).sum(), [*hidden, weight])
    assert all(g.isnan().all() for g in got)


def test_a_z_loss_that_was_not_announced_is_loud():
    hidden, weight, labels = example(terms=1)
    ce, z = linear_cross_entropy(hidden, weight, labels, term_weights_K=torch.ones(1))
    (got,) = grads(ce.sum() + z, [weight])
    assert got.isnan().all()


@pytest.mark.parametrize("announced", [True, False])
def test_all_masked_is_zero_with_zero_gradients(announced):
    """modelscope/mcore-bridge#104: all labels shifted out gave 0/0."""
    hidden, weight, labels = example(masked=1.1)
    weights = torch.tensor([1.0, 0.3]) if announced else None
    ce, z = linear_cross_entropy(hidden, weight, labels, term_weights_K=weights)
    assert ce.tolist() == [0.0, 0.0]
    assert z.item() == 0.0
    got = grads((ce * torch.tensor([1.0, 0.3])).sum(), [*hidden, weight])
    assert all((g == 0).all() for g in got)


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_masked_token_changes_no_sum_and_no_gradient_whatever_it_is(announced, value):
    hidden, weight, labels = example()
    for row in labels:
        row[3] = IGNORE
    poisoned = [h.detach().clone().index_fill_(0, torch.tensor(3), value).requires_grad_() for h in hidden]
    term_weights = torch.tensor([0.7, 0.2])

    def run(hidden):
        ce, z = linear_cross_entropy(
            hidden, weight, labels, term_weights_K=term_weights if announced else None, z_weight=0.03, rows=5
        )
        return ce, z, *grads((ce * term_weights).sum() + 0.03 * z, [*hidden, weight])

    for a, b in zip(run(poisoned), run(hidden), strict=True):
        assert torch.equal(a, b)


def test_bf16_accumulates_the_head_gradient_in_fp32():
    """Many chunks of equal gradients: a bf16 running sum would stop growing after 256 of them."""
    n, v = 2048, 4
    hidden = torch.ones(n, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(v, 1, dtype=torch.bfloat16, requires_grad=True)
    ce, _ = linear_cross_entropy([hidden], weight, [torch.zeros(n, dtype=torch.int64)], rows=1)
    (grad,) = grads(ce.sum(), [weight])
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(grad[:, 0].float(), torch.tensor([-0.75, 0.25, 0.25, 0.25]) * n, rtol=5e-3, atol=0)


def test_no_gradient_is_computed_without_grad(monkeypatch):
    hidden, weight, labels = example()

    def forbidden(*args):
        raise AssertionError("a gradient was computed in evaluation")

    monkeypatch.setattr(cross_entropy, "_add_product", forbidden)
    with torch.no_grad():
        ce, _ = linear_cross_entropy(hidden, weight, labels)
    torch.testing.assert_close(ce.double(), plain(hidden, weight, labels)[0], rtol=1e-6, atol=0)


def test_the_full_logits_never_exist():
    """The largest tensor made is a chunk's, not [N, V]."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple) else (out,):
                if isinstance(x, torch.Tensor):
                    Largest.numel = max(Largest.numel, x.numel())
            return out

    hidden, weight, labels = example(terms=1, n=400, d=4, v=50)
    with Largest():
        linear_cross_entropy(hidden, weight, labels, rows=10)[0].sum().backward()
    assert Largest.numel <= 400 * 4


def test_chunks_hold_at_least_one_token():
    assert chunk_rows(10**9, "cpu") == 1
    assert chunk_rows(65536, "cuda") == 4096


INTERPRETED = """
import json, torch
from hymo.kernels.cross_entropy import _chunk_terms
from hymo.kernels.triton_cross_entropy import chunk_terms
g = torch.Generator().manual_seed(0)
worst = 0.0
for V, dtype in ((257, torch.float32), (5000, torch.float32), (64, torch.float16)):
    logits = (20 * torch.randn(7, V, generator=g)).to(dtype)
    labels = torch.randint(V, (7,), generator=g)
    labels[2] = labels[5] = -100
    weight, z_weight = torch.tensor(0.3), torch.tensor(1e-2)
    got = chunk_terms(logits.clone(), labels, weight, z_weight, True)
    want = _chunk_terms(logits.double(), labels, weight.double(), z_weight.double(), True)
    without = chunk_terms(logits.clone(), labels, weight, z_weight, False)
    assert torch.equal(without[0], got[0]) and torch.equal(without[2], logits)
    assert (got[2][2] == 0).all()
    scale = 1.0 if dtype == torch.float32 else 1e-3
    worst = max([worst, *(scale * (a - b).norm().item() / b.norm().item() for a, b in zip(got, want))])
print(json.dumps(worst))
"""


def test_the_triton_kernel_in_the_interpreter():
    pytest.importorskip("triton")
    assert json.loads(run_interpreted("-c", INTERPRETED)) < 2e-6
