"""The causal depthwise convolution against F.conv1d, inside documents, and its step form."""

import pytest
import torch
import torch.nn.functional as F

from hymo.kernels.conv import causal_conv, causal_conv_step


def example(batch=2, length=11, channels=5, taps=4, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(batch, length, channels, generator=g, dtype=dtype).requires_grad_()
    w = torch.randn(channels, taps, generator=g, dtype=dtype).requires_grad_()
    return x, w


def by_conv1d(x, w):
    padded = F.pad(x.transpose(1, 2), (w.shape[1] - 1, 0))
    return F.silu(F.conv1d(padded, w[:, None], groups=w.shape[0])).transpose(1, 2)


DOC_IDS = torch.tensor([[0, 0, 1, 2, 2, 2, 2, 2, 2, 3, 3], [4] * 11], dtype=torch.int32)


@pytest.mark.parametrize(("length", "taps"), [(11, 4), (11, 1), (2, 4), (1, 4), (4, 4)])
def test_equals_conv1d(length, taps):
    x, w = example(length=length, taps=taps)
    grad = torch.randn_like(x)
    out, expected = causal_conv(x, w), by_conv1d(x, w)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    for a, b in zip(torch.autograd.grad(out, [x, w], grad), torch.autograd.grad(expected, [x, w], grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_gradients_by_finite_differences():
    x, w = example()
    assert torch.autograd.gradcheck(lambda x, w: causal_conv(x, w, DOC_IDS), [x, w])


def test_packed_equals_each_document_alone():
    x, w = (t.detach() for t in example())
    packed = causal_conv(x, w, DOC_IDS)
    for row in range(2):
        for doc in DOC_IDS[row].unique():
            where = DOC_IDS[row] == doc
            torch.testing.assert_close(packed[row, where], causal_conv(x[row, where][None], w)[0], rtol=1e-12, atol=0)


def test_another_document_never_changes_a_bit():
    """Forward and backward."""
    x, w = (t.detach().float() for t in example())
    other = x.clone()
    other[0, DOC_IDS[0] < 2] += 1e6
    mine = DOC_IDS[0] >= 2
    grad = torch.randn_like(x)
    results = []
    for inputs in (x, other):
        inputs = inputs.clone().requires_grad_()
        out = causal_conv(inputs, w, DOC_IDS)
        (grad_x,) = torch.autograd.grad(out, inputs, grad)
        results.append((out[0, mine].detach(), grad_x[0, mine]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_steps_equal_the_whole(taps):
    x, w = (t.detach() for t in example(taps=taps))
    window = x.new_zeros(x.shape[0], taps - 1, x.shape[2])
    steps = []
    for t in range(x.shape[1]):
        y, window = causal_conv_step(x[:, t], w, window)
        steps.append(y)
    torch.testing.assert_close(torch.stack(steps, 1), causal_conv(x, w), rtol=1e-12, atol=1e-12)
