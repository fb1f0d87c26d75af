"""The grouped product against one product a group, with empty groups, and its back ends against one another."""

import pytest
import torch

from hymo.kernels.grouped import choose_backend, grouped_linear

COUNTS = [3, 0, 5, 0, 1]


def example(dtype=torch.float32, k=8, n=16):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(sum(COUNTS), k, generator=g).to(dtype).requires_grad_()
    w = torch.randn(len(COUNTS), n, k, generator=g).to(dtype).requires_grad_()
    return x, w, torch.tensor(COUNTS)


def by_definition(x, w):
    return torch.cat([rows @ w[e].t() for e, rows in enumerate(x.split(COUNTS))])


@pytest.mark.parametrize("backend", ["loop", "torch", "auto"])
def test_equals_one_product_a_group(backend):
    x, w, counts = example()
    grad = torch.randn(sum(COUNTS), 16, generator=torch.Generator().manual_seed(2))
    out = grouped_linear(x, w, counts, backend)
    expected = by_definition(x.double(), w.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    got = torch.autograd.grad(out, [x, w], grad)
    want = torch.autograd.grad(expected, [x, w], grad.double())
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["loop", "torch"])
def test_an_empty_group_has_gradient_exactly_zero(backend):
    """pytorch/pytorch#152668, #172439, #193633: empty groups hung, or got the gradient of another."""
    x, w, counts = example()
    (grad,) = torch.autograd.grad(grouped_linear(x, w, counts, backend).square().sum(), [w])
    for e, rows in enumerate(COUNTS):
        assert (grad[e] == 0).all() == (rows == 0)


def test_gradients_by_finite_differences():
    x, w, counts = example(torch.float64, k=3, n=2)
    assert torch.autograd.gradcheck(lambda x, w: grouped_linear(x, w, counts, "loop"), [x, w])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keeps_the_dtype(dtype):
    x, w, counts = example(dtype)
    assert grouped_linear(x, w, counts).dtype == dtype


def test_the_rule_on_a_cpu_is_the_loop():
    assert choose_backend(torch.zeros(4, 8)) == "loop"
    assert choose_backend(torch.zeros(4, 8, dtype=torch.float64)) == "loop"


def test_an_unknown_backend_is_named():
    x, w, counts = example()
    with pytest.raises(ValueError, match="backend: found 'triton'"):
        grouped_linear(x, w, counts, "triton")
