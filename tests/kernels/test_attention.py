"""Document-masked attention against its definition, and no leak between documents."""

import importlib.util

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from hymo.kernels import attention as module
from hymo.kernels.attention import attention, build_mask, choose_backend, max_logit

DOC_IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2], [3] * 8], dtype=torch.int32)
SCALE = 0.3


def example(q_dim=6, v_dim=4, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    sizes = (q_dim, q_dim, v_dim)
    return [torch.randn(2, 8, 3, size, generator=g).to(dtype).requires_grad_() for size in sizes]


def by_definition(q, k, v, doc_ids):
    logits = torch.einsum("bthk,bshk->bhts", q, k) * SCALE
    allowed = torch.ones(8, 8, dtype=torch.bool).tril()[None]
    if doc_ids is not None:
        allowed = allowed & (doc_ids[:, :, None] == doc_ids[:, None, :])
    logits = logits.masked_fill(~allowed[:, None], -torch.inf)
    return torch.einsum("bhts,bshv->bthv", logits.softmax(-1), v), logits


@pytest.mark.parametrize("doc_ids", [None, DOC_IDS])
@pytest.mark.parametrize(("q_dim", "v_dim"), [(6, 4), (4, 6), (8, 8)])
def test_equals_the_definition(doc_ids, q_dim, v_dim):
    qkv = example(q_dim, v_dim)
    out = attention(*qkv, build_mask(doc_ids), SCALE)
    expected, _ = by_definition(*(x.double() for x in qkv), doc_ids)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    grad = torch.randn_like(out)
    got, want = torch.autograd.grad(out, qkv, grad), torch.autograd.grad(expected, qkv, grad.double())
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_another_document_never_changes_a_bit():
    """pytorch/torchtitan#3984 and slime#1686 isolated one mixer and not the other; here forward and backward."""
    results = []
    for shift in (0.0, 100.0):
        qkv = [x.detach().clone() for x in example()]
        for x in qkv:
            x[0, :3] += shift
            x[0, 7:] -= shift
            x.requires_grad_()
        out = attention(*qkv, build_mask(DOC_IDS), SCALE)
        grad = torch.ones_like(out) * torch.arange(8)[:, None, None]
        grads = torch.autograd.grad(out, qkv, grad)
        results.append([t[0, 3:7].detach() for t in (out, *grads)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("doc_ids", [None, DOC_IDS])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_max_logit_is_the_largest_that_the_softmax_sees(doc_ids, rows):
    q, k, v = example()
    _, logits = by_definition(q, k, v, doc_ids)
    torch.testing.assert_close(max_logit(q, k, doc_ids, SCALE, rows=rows), logits.amax((0, 2, 3)))


def test_max_logit_leaves_filler_rows_out():
    q, k, v = example()
    _, logits = by_definition(q, k, v, DOC_IDS)
    got = max_logit(q, k, DOC_IDS, SCALE, real_B=torch.tensor([True, False]))
    torch.testing.assert_close(got, logits[0].amax((1, 2)))


def test_the_rule():
    assert choose_backend("cpu", True) == "sdpa"
    assert choose_backend("cuda", False) == "sdpa"
    assert choose_backend("cuda", True) == ("flex" if importlib.util.find_spec("triton") else "sdpa")


@pytest.mark.parametrize("length", [1, 100, 128, 640, 700])
@pytest.mark.parametrize("rate", [0.0, 0.003, 0.02, 1.0])
def test_the_block_mask_is_what_flex_attention_makes_of_the_rule(length, rate):
    starts = torch.rand(3, length, generator=torch.Generator().manual_seed(length)) < rate
    doc_ids = starts.cumsum(1).to(torch.int32)

    def rule(b, h, query, key):
        return (query >= key) & (doc_ids[b, query] == doc_ids[b, key])

    got, expected = module._block_mask(doc_ids), create_block_mask(rule, 3, None, length, length, device="cpu")
    assert got.seq_lengths == expected.seq_lengths and got.BLOCK_SIZE == expected.BLOCK_SIZE
    for name in ("kv", "full_kv", "q", "full_q"):
        for part in ("num_blocks", "indices"):
            ours, theirs = getattr(got, f"{name}_{part}"), getattr(expected, f"{name}_{part}")
            assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype and ours.is_contiguous()
    # What the blocks that are partly allowed go by, token by token.
    mine, right = (create_mask(mod, 3, None, length, length, device="cpu") for mod in (got.mask_mod, rule))
    assert torch.equal(mine, right)


def test_the_block_mask_compiles_nothing():
    before = counters["stats"]["unique_graphs"]
    module._block_mask(DOC_IDS)
    assert counters["stats"]["unique_graphs"] == before
