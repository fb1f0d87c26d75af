"""Activation checkpointing: the same bits, fewer activations kept, counts not doubled."""

import pytest
import torch

from hymo.models.gdn import GatedDeltaNetBlock
from hymo.models.mla import MLABlock


def grads(model, packed_batch, mode, backend=None):
    for module in model.modules():
        if isinstance(module, GatedDeltaNetBlock | MLABlock):
            module.checkpointing = mode
            if backend:
                module.compile_compute(backend)
    tokens, doc_ids, labels = packed_batch(seed=0)
    model.zero_grad()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        out = model(tokens, doc_ids_BL=doc_ids, labels_KBT=labels)
    out.ce_sum_K.sum().backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return found, out.expert_counts_NE, sum(kept)


@pytest.mark.parametrize("mode", ["block", "selective"])
def test_gradients_and_counts_are_those_without(mode, small_model, packed_batch):
    """torchtitan#1593, Automodel#3247: recomputation must not count experts again."""
    model = small_model().train()
    plain, counts, kept = grads(model, packed_batch, "none")
    again, counts_again, kept_again = grads(model, packed_batch, mode)
    assert torch.equal(counts, counts_again)
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert kept_again < 0.7 * kept


def test_it_goes_with_compile(small_model, packed_batch):
    torch._dynamo.reset()
    model = small_model().train()
    plain, _, _ = grads(model, packed_batch, "none")
    compiled, _, _ = grads(model, packed_batch, "selective", backend="aot_eager")
    for name, expected in plain.items():
        torch.testing.assert_close(compiled[name], expected, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
