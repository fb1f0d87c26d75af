"""Activation checkpointing: the same bits, fewer activations kept, counts not doubled."""

import subprocess
import sys
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from alive import Alive
from hymo.kernels import attention
from hymo.kernels.recurrence import HAS_TRITON
from hymo.models.gdn import GatedDeltaNetBlock
from hymo.models.layers import kept_operators
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


def test_eager_checkpointing_frees_memory_and_counts_once(small_model, packed_batch):
    """Loss, gradients and counts as without; what autograd saves, and all that lives to the backward pass, shrink.

    `selective` hands autograd no more than `block` does, and keeps more: the results that it does not compute again.
    """
    model = small_model().train()
    tokens, doc_ids, labels = packed_batch(batch=2, length=128)
    found = {}
    for mode in ("none", "selective", "block"):
        for module in model.modules():
            if isinstance(module, GatedDeltaNetBlock | MLABlock):
                module.checkpointing = mode
        model.zero_grad()
        saved = {}
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.update({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()}) or t,
            lambda t: t,
        )
        with Alive() as alive, hooks:
            out = model(tokens, doc_ids_BL=doc_ids, labels_KBT=labels)
        kept = alive.n_bytes()
        out.ce_sum_K.sum().backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        found[mode] = (out.ce_sum_K.detach(), grads, out.expert_counts_NE, sum(saved.values()), kept)
    loss, grads, counts, saved, kept = found["none"]
    assert counts.sum() == 2 * 2 * 128 * 2  # expert layers x rows x tokens x experts of a token
    for mode in ("selective", "block"):
        assert torch.equal(found[mode][0], loss)
        assert all(torch.equal(found[mode][1][name], grad) for name, grad in grads.items())
        assert torch.equal(found[mode][2], counts)
        assert found[mode][3] < 0.5 * saved
    assert found["block"][4] < 0.5 * found["selective"][4]
    assert found["selective"][4] < 0.75 * kept


def test_it_goes_with_compile(small_model, packed_batch):
    torch._dynamo.reset()
    model = small_model().train()
    plain, _, _ = grads(model, packed_batch, "none")
    compiled, _, _ = grads(model, packed_batch, "selective", backend="aot_eager")
    for name, expected in plain.items():
        torch.testing.assert_close(compiled[name], expected, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


class Calls(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self):
        super().__init__()
        self.counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counter[str(func)] += 1
        return func(*args, **(kwargs or {}))


def backward_calls(model, packed_batch, mode):
    for module in model.modules():
        if isinstance(module, GatedDeltaNetBlock | MLABlock):
            module.checkpointing = mode
    tokens, doc_ids, labels = packed_batch(seed=0)
    loss = model(tokens, doc_ids_BL=doc_ids, labels_KBT=labels).ce_sum_K.sum()
    with Calls() as calls:
        loss.backward()
    return calls.counter


def test_selective_runs_no_expert_again_and_block_all_of_them(small_model, packed_batch):
    """Two expert layers of two grouped products each; the choice of experts never runs again."""
    model = small_model().train()
    again = {mode: backward_calls(model, packed_batch, mode) for mode in ("none", "selective", "block")}
    product = "hymo.grouped_linear.default"
    assert [again[mode][product] for mode in ("none", "selective", "block")] == [0, 0, 4]
    assert not any(calls["hymo.choose_experts.default"] for calls in again.values())
    sdpa = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert again["selective"][sdpa] == 0 < again["block"][sdpa]


def test_selective_keeps_flex_attention_of_a_compiled_block(small_model, packed_batch, monkeypatch):
    """The joint graph of a compiled block: its backward has the gradient of FlexAttention and no forward of it."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    found = {}
    for mode in ("selective", "block"):
        names = []

        def look(graph, _, names=names):
            names.append(Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function"))
            return make_boxed_func(graph.forward)

        torch._dynamo.reset()
        model = small_model(n_layers=1, mla_every=1, mtp_depth=0, mtp_weights=()).train()
        (block,) = model.layers
        block.checkpointing = mode
        block.compile_compute(
            aot_autograd(fw_compiler=look, bw_compiler=look, partition_fn=min_cut_rematerialization_partition)
        )
        with monkeypatch.context() as patch:
            patch.setattr(attention, "choose_backend", lambda *_: "flex")
            # Nothing of it runs before the graphs are split, and the graph is the same on every device.
            patch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
            tokens, doc_ids, labels = packed_batch(depth=0)
            model(tokens, doc_ids_BL=doc_ids, labels_KBT=labels).ce_sum_K.sum().backward()
        found[mode] = names[-1]
    torch._dynamo.reset()
    assert all(calls["flex_attention_backward"] == 1 for calls in found.values())
    assert found["selective"]["flex_attention"] == 0
    assert found["block"]["flex_attention"] == 1


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_the_recurrence_operator_is_kept():
    kept = kept_operators("selective")
    assert torch.ops.hymo.recurrence.default in kept


def test_a_block_alone_can_be_checkpointed():
    """No other module of the package needs to be imported for it."""
    code = """
from hymo.config import ModelConfig
from hymo.models.gdn import GatedDeltaNetBlock
block = GatedDeltaNetBlock(ModelConfig(gdn_heads=2))
block.checkpointing = "block"
block.checkpointing = "selective"
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
