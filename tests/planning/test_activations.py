"""The plan's bytes a token beside what the blocks themselves keep, counted without running them (no storage).

Two ways: eagerly, by hooks on what autograd saves; compiled, by the partitioner that inductor uses. The sizes are
others than those that the formulas were written for.
"""

import contextlib

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import BlockMask

from hymo.config import ModelConfig
from hymo.distributed.fsdp import replicated_parameters
from hymo.kernels import attention, recurrence
from hymo.models.layers import DocLayout, rotary_angles
from hymo.models.model import HyMo
from hymo.planning.activations import Setting, attention_terms, dense_terms, gdn_terms, moe_terms

pytest.importorskip("triton")

SMALL = ModelConfig(
    dim=64, n_layers=2, vocab_size=257, mla_every=2, gdn_heads=4, gdn_head_dim=16, gdn_state_dim=32, mla_heads=2,
    q_lora_rank=24, kv_lora_rank=40, qk_nope_dim=16, qk_rope_dim=8, v_head_dim=32, n_routed=4, n_shared=1, top_k=2,
    d_ff=96, mtp_depth=1, mtp_weights=(0.3,),
)  # fmt: skip
KINDS = ("gdn", "moe", "dense")


@contextlib.contextmanager
def as_on_a_gpu(monkeypatch):
    """The blocks take the GPU's ways: Triton operators (they know their shapes without running) and FlexAttention."""
    monkeypatch.setattr(recurrence, "_runs_triton", lambda device: True)
    monkeypatch.setattr(attention, "choose_backend", lambda *_: "flex")
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(attention, "_compiled_flex", lambda: flex_attention.flex_attention)
    with FakeTensorMode() as mode:
        yield mode


def model_of(config, dtype):
    """Parameters in the dtype of the computation, the small ones in fp32; build it inside of ``as_on_a_gpu``."""
    with torch.device("meta"):
        model = HyMo(config)
    wide = {id(p) for p in replicated_parameters(model).values()}
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                kind = torch.float32 if id(p) in wide else dtype
                module._parameters[name] = torch.nn.Parameter(torch.empty(p.shape, dtype=kind))
        for name, b in list(module._buffers.items()):
            module._buffers[name] = torch.empty(b.shape)
    return model


def layout_of(config, batch, length):
    doc_ids = torch.empty(batch, length, dtype=torch.int32)
    n = -(-length // 128)
    ints = {"dtype": torch.int32}
    counts, indices = (lambda: torch.empty(batch, 1, n, **ints)), (lambda: torch.empty(batch, 1, n, n, **ints))
    mask = BlockMask(
        (length, length), counts(), indices(), counts(), indices(), counts(), indices(), counts(), indices(),
        (128, 128), lambda b, h, q, k: (q >= k) & (doc_ids[b, q] == doc_ids[b, k]),
    )  # fmt: skip
    positions = torch.empty(batch, length, dtype=torch.int64)
    return DocLayout(doc_ids, *rotary_angles(positions, config.qk_rope_dim, config.rope_theta), mask)


def shared_storages(block, layout):
    """What is no activation of the block: weights, and what all layers share."""
    mask = layout.mask
    common = [layout.doc_ids_BT, layout.cos_BTR, layout.sin_BTR]
    common += [t for t in vars(mask).values() if isinstance(t, torch.Tensor)]
    return {t.untyped_storage()._cdata for t in [*block.parameters(), *block.buffers(), *common]}


def saved_eagerly(block, x, arguments, layout):
    """Bytes of the storages that autograd keeps of one forward pass, the input included, by hooks."""
    apart, found = shared_storages(block, layout), {}

    def note(t):
        storage = t.untyped_storage()
        if storage._cdata not in apart:
            found[storage._cdata] = (storage.nbytes(), t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        out = block(x, *arguments)
    del out
    return sum(size for size, _ in found.values())


def saved_compiled(block, x, arguments):
    """The same of the compiled block: what the partitioner hands from the forward to the backward graph."""
    found = {}

    def partition(joint, inputs, **settings):
        settings["compiler"] = "inductor"
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **settings)
        outputs = forward.graph.output_node().args[0][settings["num_fwd_outputs"] :]
        inputs = {id(node) for node in forward.graph.nodes if node.op == "placeholder"}
        for node in outputs:
            value = getattr(node, "meta", {}).get("val")
            if isinstance(value, torch.Tensor) and id(node) not in inputs:
                storage = value.untyped_storage()
                found[storage._cdata] = (storage.nbytes(), value)
        return forward, backward

    def leave(graph, _):
        return graph

    block.compile_compute(
        aot_autograd(fw_compiler=leave, bw_compiler=leave, partition_fn=partition, decompositions=select_decomp_table)
    )
    try:
        block(x, *arguments)
    finally:
        block.use_compile = None
    return x.untyped_storage().nbytes() + sum(size for size, _ in found.values())


def planned(config, setting, kind):
    if kind == "gdn":
        return sum(gdn_terms(config, setting).values())
    feed = moe_terms if kind == "moe" else dense_terms
    return sum(attention_terms(config, setting).values()) + sum(feed(config, setting).values())


def counted(monkeypatch, config, setting, kind, batch, length):
    dtype = torch.bfloat16 if setting.width == 2 else torch.float32
    with as_on_a_gpu(monkeypatch):
        model = model_of(config, dtype)
        block = {"gdn": model.layers[0], "moe": model.layers[1], "dense": model.mtp.depths[0].block}[kind]
        block.checkpointing = setting.checkpointing
        block.use_triton = True
        layout = layout_of(config, batch, length)
        x = torch.empty(batch, length, config.dim, dtype=dtype, requires_grad=True)
        arguments = (layout,) if kind == "gdn" else (layout, torch.ones(batch, dtype=torch.bool))
        if setting.compiled:
            return saved_compiled(block, x, arguments) / (batch * length)
        return saved_eagerly(block, x, arguments, layout) / (batch * length)


EAGER = [(kind, "none", *shape) for kind in KINDS for shape in ((1, 512), (2, 256), (4, 128))]
EAGER += [(kind, "block", 2, 256) for kind in KINDS]


@pytest.mark.parametrize("kind, checkpointing, batch, length", EAGER)
def test_eager_blocks_keep_what_the_plan_says(monkeypatch, kind, checkpointing, batch, length):
    setting = Setting(2, checkpointing, compiled=False)
    found = counted(monkeypatch, SMALL, setting, kind, batch, length)
    if (kind, checkpointing) == (
        "moe",
        "block",
    ):
        found += 8 * SMALL.top_k  # the chosen experts: kept by checkpointing, out of sight of the hooks
    assert planned(SMALL, setting, kind) == pytest.approx(found, rel=0.02)


COMPILED = [(kind, mode) for kind in ("gdn", "moe") for mode in ("none", "block", "selective")] + [("dense", "none")]


@pytest.mark.parametrize("kind, checkpointing", COMPILED)
def test_compiled_blocks_keep_what_the_plan_says(monkeypatch, kind, checkpointing):
    torch.compiler.reset()
    setting = Setting(2, checkpointing, compiled=True)
    found = counted(monkeypatch, SMALL, setting, kind, 2, 256)
    assert planned(SMALL, setting, kind) == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize("changes", [{"qk_norm": True, "n_shared": 2}, {"gdn_head_dim": 64, "conv_size": 0}])
def test_other_shapes_of_blocks_and_float32(monkeypatch, changes):
    config = SMALL.model_copy(update=changes)
    for kind in ("gdn", "moe"):
        setting = Setting(4, "none", compiled=False)
        assert planned(config, setting, kind) == pytest.approx(
            counted(monkeypatch, config, setting, kind, 2, 256), rel=0.02
        )
