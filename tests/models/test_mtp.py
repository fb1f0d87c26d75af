"""Multi-token prediction: look-ahead, masks at document ends, the chain."""

import math

import pytest
import torch

from hymo.models.mtp import look_ahead

IGNORE = -100


def test_look_ahead_reads_k_further_and_stops_at_the_document():
    embedded = torch.arange(1.0, 7.0)[None, :, None]
    doc_ids = torch.tensor([[0, 0, 0, 1, 1, 1]], dtype=torch.int32)
    assert look_ahead(embedded, None, 4, 2)[0, :, 0].tolist() == [3, 4, 5, 6]
    assert look_ahead(embedded, doc_ids, 4, 1)[0, :, 0].tolist() == [2, 3, 0, 5]
    assert look_ahead(embedded, doc_ids, 4, 2)[0, :, 0].tolist() == [3, 0, 0, 6]


def test_an_embedding_of_another_document_gets_no_gradient():
    embedded = torch.ones(1, 6, 2, requires_grad=True)
    doc_ids = torch.tensor([[0, 0, 0, 1, 1, 1]], dtype=torch.int32)
    look_ahead(embedded, doc_ids, 4, 2).sum().backward()
    assert embedded.grad[0, :, 0].tolist() == [0, 0, 1, 0, 0, 1]


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_nothing_of_another_document_comes_through(value):
    """Position 3 begins a document: only it and those after it may see its value, or send it a gradient."""
    doc_ids = torch.tensor([[0, 0, 0, 1, 1, 1]], dtype=torch.int32)
    embedded = torch.arange(1.0, 7.0)[None, :, None]
    embedded[0, 3] = value
    embedded.requires_grad_()
    ahead = look_ahead(embedded, doc_ids, 4, 1)
    assert ahead[0, :, 0].tolist() == [2, 3, 0, 5]
    (ahead * torch.tensor([1.0, 2.0, math.inf, 3.0])[:, None]).sum().backward()
    assert embedded.grad[0, :, 0].tolist() == [0, 1, 2, 0, 3, 0]


def test_the_chain_gives_one_hidden_state_a_depth(small_model, packed_batch):
    model = small_model()
    tokens, doc_ids, _ = packed_batch()
    hidden = model.forward_with_hidden(tokens, doc_ids)
    assert [tuple(h.shape) for h in hidden] == [(3, 24, 32)] * 3


def test_depth_k_sees_exactly_k_tokens_ahead(small_model):
    """Changing token j changes depth k from position j - k on, and nothing before."""
    model = small_model()
    tokens = torch.randint(61, (1, 18), generator=torch.Generator().manual_seed(0))
    other = tokens.clone()
    other[0, 10] = (tokens[0, 10] + 1) % 61
    for k, (a, b) in enumerate(zip(model.forward_with_hidden(tokens), model.forward_with_hidden(other), strict=True)):
        first = 10 - k
        assert torch.equal(a[0, :first], b[0, :first])
        assert not torch.equal(a[0, first], b[0, first])


def test_all_masked_depths_give_zero_loss_and_zero_gradient(small_model, packed_batch):
    """modelscope/mcore-bridge#104: all labels shifted out gave 0/0 = NaN."""
    model = small_model().train()
    tokens, doc_ids, labels = packed_batch()
    labels = labels.clone()
    labels[1:] = IGNORE
    for weights in (None, torch.tensor([1.0, 0.3, 0.1])):
        model.zero_grad()
        out = model(tokens, doc_ids_BL=doc_ids, labels_KBT=labels, term_weights_K=weights)
        assert out.ce_sum_K[1:].tolist() == [0.0, 0.0]
        (out.ce_sum_K * torch.tensor([1.0, 0.3, 0.1])).sum().backward()
        grads = [p.grad for p in model.mtp.parameters()]
        assert all(g is not None and (g == 0).all() for g in grads)
        assert all(p.grad.isfinite().all() for p in model.parameters())


def test_gradient_of_a_mean_loss_does_not_grow_with_the_length(small_model):
    """NVIDIA/Megatron-LM#1532: an MTP loss that was summed, not averaged, exploded with the sequence length."""
    norms = []
    model = small_model().train()
    for length in (16, 128):
        g = torch.Generator().manual_seed(1)
        tokens = torch.randint(61, (4, length + 2), generator=g)
        labels = torch.randint(61, (3, 4, length), generator=g)
        model.zero_grad()
        out = model(tokens, labels_KBT=labels)
        (out.ce_sum_K[1:].sum() / labels[0].numel()).backward()
        norms.append(torch.cat([p.grad.flatten() for p in model.mtp.parameters()]).norm())
    assert norms[1] < 1.5 * norms[0]


def test_only_the_depths_of_the_labels_run(small_model, packed_batch):
    model = small_model()
    tokens, doc_ids, labels = packed_batch()
    with torch.no_grad():
        whole = model(tokens, doc_ids_BL=doc_ids, labels_KBT=labels)
        main = model(tokens[:, :24], doc_ids_BL=doc_ids[:, :24], labels_KBT=labels[:1])
    torch.testing.assert_close(main.ce_sum_K, whole.ce_sum_K[:1])
    assert torch.equal(main.expert_counts_NE, whole.expert_counts_NE)
