"""Norms, gated units, rotary angles and document positions."""

import pytest
import torch
import torch.nn.functional as F

from hymo.models.layers import document_positions, rms_norm, rotary_angles, rotate, swiglu


def test_rms_norm_is_that_of_torch_with_its_gradient():
    x = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)
    w = torch.randn(7, dtype=torch.float64, requires_grad=True)
    out, expected = rms_norm(x, w, 1e-6), F.rms_norm(x, (7,), w, 1e-6)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(x)
    for a, b in zip(torch.autograd.grad(out, [x, w], grad), torch.autograd.grad(expected, [x, w], grad), strict=True):
        torch.testing.assert_close(a, b)


def test_rms_norm_takes_inputs_and_gradients_in_any_layout():
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    weight = torch.randn(8, dtype=torch.float64)
    grads = []
    for layout in (x, x.transpose(1, 2).contiguous().transpose(1, 2)):
        leaf = layout.detach().requires_grad_()
        out = rms_norm(leaf, weight, 1e-6)
        grads.append(
            torch.autograd.grad(out, leaf, torch.ones_like(out).transpose(0, 3).contiguous().transpose(0, 3))[0]
        )
    torch.testing.assert_close(grads[1], grads[0])


def test_rms_norm_of_zeros_is_zero_with_finite_gradients():
    x = torch.zeros(2, 4, requires_grad=True)
    w = torch.ones(4, requires_grad=True)
    out = rms_norm(x, w, 1e-6)
    assert (out == 0).all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), [x, w]))


def test_rms_norm_computes_in_fp32_and_returns_the_input_dtype():
    """In bf16, 256 equal squares would sum to far less than 256."""
    x = torch.full((1, 4096), 3.0, dtype=torch.bfloat16)
    out = rms_norm(x, torch.ones(4096), 0.0)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, torch.ones_like(x))


def test_swiglu_and_its_gradient():
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(swiglu(x), F.silu(x[:, :3]) * x[:, 3:])
    assert torch.autograd.gradcheck(swiglu, [x])


def test_rotation_keeps_norms_and_depends_on_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def logit(query_at, key_at):
        angles = [rotary_angles(torch.tensor([[p]]), 8, 10000.0) for p in (query_at, key_at)]
        return (rotate(q, *angles[0]) * rotate(k, *angles[1])).sum()

    torch.testing.assert_close(logit(9, 4), logit(25, 20), rtol=1e-5, atol=1e-6)
    angles = rotary_angles(torch.tensor([[17]]), 8, 10000.0)
    torch.testing.assert_close(rotate(q, *angles).norm(), q.norm(), rtol=1e-6, atol=0)
    assert logit(9, 4) != pytest.approx(logit(9, 5).item())


def test_positions_restart_at_each_document():
    doc_ids = torch.tensor([[0, 0, 0, 1, 1, 4], [2, 3, 4, 4, 4, 4]], dtype=torch.int32)
    assert document_positions(doc_ids).tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3]]
