"""Blocks under torch.compile (no graph break, one graph a block type) and under activation checkpointing."""

import functools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from hymo.models.layers import CompilableBlock, document_layout, kept_operators
from hymo.models.mla import MLABlock
from hymo.models.moe import DeepSeekMoE


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def batch(model, packed_batch, seed=0):
    _, doc_ids, _ = packed_batch(seed=seed)
    layout = document_layout(doc_ids[:, :24], 24, model.config.qk_rope_dim, model.config.rope_theta, "cpu")
    x = torch.randn(3, 24, model.config.dim, generator=torch.Generator().manual_seed(0))
    return x, layout


def results(block, function, x, layout):
    """Output and every gradient."""
    inputs = x.clone().requires_grad_()
    out = function(inputs, layout)
    out = out[0] if isinstance(out, tuple) else out
    block.zero_grad()
    out.square().sum().backward()
    return [out.detach(), inputs.grad, *(p.grad.clone() for p in block.parameters())]


def test_recurrence_blocks_share_one_graph_and_equal_eager(small_model, packed_batch):
    model = small_model(n_layers=2, mla_every=3).train()
    x, layout = batch(model, packed_batch)
    eager = [results(block, block, x, layout) for block in model.layers]
    counter = CompileCounterWithBackend("aot_eager")
    for block, expected in zip(model.layers, eager, strict=True):
        block.compile_compute(backend=counter)
        assert block.use_compile
        for a, b in zip(results(block, block, x, layout), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


def test_an_attention_block_is_one_graph_and_equals_eager(small_model, packed_batch):
    """One graph, however many documents: fla#52, transformers#41803 recompiled for each new packing."""
    model = small_model().train()
    block = model.layers[1]
    counter = CompileCounterWithBackend("aot_eager")
    for seed in range(3):
        x, layout = batch(model, packed_batch, seed)
        block.use_compile = False
        eager = results(block, block, x, layout)
        block.compile_compute(backend=counter)
        for a, b in zip(results(block, block, x, layout), eager, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


@pytest.mark.parametrize("rows", [1, 2])
def test_a_model_has_one_graph_for_each_kind_of_block(small_model, packed_batch, rows):
    """Not one for the first block of the trunk, nor for a depth of MTP; and none more for a second batch."""
    model = small_model(n_layers=4, mla_every=2, mtp_depth=2, mtp_weights=(0.3, 0.1)).train()
    counter = CompileCounterWithBackend("aot_eager")
    for module in model.modules():
        if isinstance(module, CompilableBlock) and not isinstance(module, DeepSeekMoE):
            module.compile_compute(backend=counter)
    for seed in range(2):
        tokens, doc_ids, labels = packed_batch(depth=2, seed=seed)
        model(tokens[:rows], doc_ids_BL=doc_ids[:rows], labels_KBT=labels[:, :rows]).ce_sum_K.sum().backward()
    kinds = ["recurrence", "attention with experts", "joining of MTP", "attention of MTP", "norm of the head"]
    assert counter.frame_count == len(kinds)


def test_switching_compile_off_again(small_config):
    from hymo.models.gdn import GatedDeltaNetBlock

    block = GatedDeltaNetBlock(small_config())
    block.use_compile = True
    assert block._compiled is not None
    block.use_compile = False
    assert block._compiled is None
    assert block.use_compile is False


def test_checkpointing_changes_no_count_and_no_gradient(small_model, packed_batch):
    """torchtitan#1593, NVIDIA-NeMo/Automodel#3247: recomputation counted experts twice.

    NVIDIA-NeMo/Automodel#2635, #3140: recomputation routed a tied token elsewhere; here every score is tied.
    """
    model = small_model().train()
    block = model.layers[1]
    assert isinstance(block, MLABlock)
    torch.nn.init.zeros_(block.ffn.router.weight)
    x, layout = batch(model, packed_batch)

    def run(function):
        inputs = x.clone().requires_grad_()
        out, stats = function(inputs)
        block.zero_grad()
        out.square().sum().backward()
        return stats.moe.counts_E, [inputs.grad, *(p.grad.clone() for p in block.parameters())]

    counts, grads = run(lambda inputs: block(inputs, layout))
    counts_again, grads_again = run(lambda inputs: checkpoint(block, inputs, layout, use_reentrant=False))
    assert counts.tolist() == counts_again.tolist() == [3 * 24, 3 * 24, 0, 0]
    for a, b in zip(grads, grads_again, strict=True):
        assert torch.equal(a, b)


def test_a_checkpointed_block_reuses_the_chosen_experts(small_model, packed_batch):
    """Recomputed scores that round otherwise must not re-route: the second forward pass never chooses again."""
    model = small_model().train()
    block = model.layers[1]
    x, layout = batch(model, packed_batch)
    calls = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.extend([1] if func in kept_operators("block") else [])
            return func(*args, **(kwargs or {}))

    contexts = functools.partial(create_selective_checkpoint_contexts, kept_operators("block"))
    with Count():
        out, _ = checkpoint(block, x.requires_grad_(), layout, use_reentrant=False, context_fn=contexts)
        out.sum().backward()
    assert len(calls) == 1
