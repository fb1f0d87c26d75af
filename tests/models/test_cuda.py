"""What only a GPU runs: FlexAttention with document masks, the grouped product in bfloat16, compiled blocks."""

import pytest
import torch

from hymo.kernels.attention import attention, build_mask, choose_backend
from hymo.kernels.cross_entropy import linear_cross_entropy
from hymo.kernels.grouped import choose_backend as choose_grouped
from hymo.kernels.grouped import grouped_linear
from hymo.models.model import build_hymo

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def qkv(batch=2, length=256, heads=3, q_dim=96, v_dim=64):
    g = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(batch, length, heads, d, generator=g, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for d in (q_dim, q_dim, v_dim)
    ]


def documents(batch=2, length=256):
    g = torch.Generator().manual_seed(1)
    return (torch.rand(batch, length, generator=g) < 0.03).cumsum(1).to(torch.int32).cuda()


@pytest.mark.parametrize("packed", [False, True])
def test_attention_equals_its_definition(packed):
    inputs, doc_ids = qkv(), documents() if packed else None
    assert choose_backend("cuda", packed) == ("flex" if packed else "sdpa")
    out = attention(*inputs, build_mask(doc_ids), 96**-0.5)
    q, k, v = (x.double() for x in inputs)
    logits = torch.einsum("bthk,bshk->bhts", q, k) * 96**-0.5
    allowed = torch.ones(256, 256, dtype=torch.bool, device="cuda").tril()[None]
    if doc_ids is not None:
        allowed = allowed & (doc_ids[:, :, None] == doc_ids[:, None, :])
    expected = torch.einsum("bhts,bshv->bthv", logits.masked_fill(~allowed[:, None], -torch.inf).softmax(-1), v)
    assert (out - expected).norm() <= 5e-3 * expected.norm()
    grad = torch.randn_like(out)
    got, want = torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad.double())
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= 1e-2 * b.norm()


def test_attention_never_changes_a_bit_for_another_document():
    doc_ids = documents()
    mine = doc_ids == 1
    results = []
    for shift in (0.0, 3.0):
        inputs = [(x.detach() + shift * ~mine[..., None, None]).requires_grad_() for x in qkv()]
        out = attention(*inputs, build_mask(doc_ids), 96**-0.5)
        grads = torch.autograd.grad(out[mine].float().square().sum(), inputs)
        results.append([t[mine].detach() for t in (out, *grads)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_grouped_product_in_bf16_equals_the_loop_and_leaves_empty_groups_zero():
    counts = torch.tensor([130, 0, 7, 63], device="cuda")
    x = torch.randn(200, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(4, 96, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    assert choose_grouped(x) == "torch"
    outs = [grouped_linear(x, w, counts, backend) for backend in ("torch", "loop")]
    grads = [torch.autograd.grad(out.float().square().sum(), [x, w]) for out in outs]
    for a, b in zip((outs[0], *grads[0]), (outs[1], *grads[1]), strict=True):
        assert (a - b).float().norm() <= 1e-2 * b.float().norm()
    assert (grads[0][1][1] == 0).all()


def test_head_loss_in_bf16_against_float64():
    hidden = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(1000, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(1000, (300,), device="cuda")
    ce, _ = linear_cross_entropy([hidden], weight, [labels], term_weights_K=torch.ones(1, device="cuda"), rows=64)
    expected = torch.nn.functional.cross_entropy(hidden.double() @ weight.double().t(), labels, reduction="sum")
    assert abs(ce.item() - expected.item()) <= 2e-3 * expected.item()
    got, want = torch.autograd.grad(ce.sum(), [hidden, weight]), torch.autograd.grad(expected, [hidden, weight])
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= 1e-2 * b.norm()


@pytest.mark.parametrize("compiled", [False, True])
def test_the_model_equals_the_cpu(small_config, packed_batch, compiled):
    config = small_config(gdn_state_dim=16)
    model, gpu = build_hymo(config, seed=0), build_hymo(config, device="cuda", seed=0)
    for block in gpu.layers:
        block.use_compile = compiled
        block.use_triton = False  # the kernels have their own tests
    tokens, doc_ids, labels = packed_batch(length=128)

    def run(model, device):
        out = model(tokens.to(device), doc_ids_BL=doc_ids.to(device), labels_KBT=labels.to(device))
        out.ce_sum_K.sum().backward()
        return out.ce_sum_K.cpu(), [p.grad.cpu() for p in model.parameters()]

    (ce, grads), (ce_gpu, grads_gpu) = run(model, "cpu"), run(gpu, "cuda")
    torch.testing.assert_close(ce_gpu, ce, rtol=2e-3, atol=0)
    for a, b in zip(grads_gpu, grads, strict=True):
        assert (a - b).norm() <= 3e-2 * b.norm() + 1e-4
