"""The whole model: sizes, forward forms, generation, ties, statistics."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from hymo.config import HyMoConfig, ModelConfig
from hymo.models.gdn import GatedDeltaNetBlock
from hymo.models.mla import MLABlock
from hymo.models.model import HyMo, build_hymo


def size(*modules):
    return sum(p.numel() for m in modules for p in m.parameters())


def test_parameters_of_the_production_shape():
    """Each part to 0.1 %, in millions."""
    model = build_hymo(ModelConfig(), device="meta")
    gdn = [b for b in model.layers if isinstance(b, GatedDeltaNetBlock)]
    mla = [b for b in model.layers if isinstance(b, MLABlock)]
    experts = [b.ffn for b in mla]
    assert (len(gdn), len(mla)) == (24, 8)
    parts = {
        "gdn": (size(*gdn), 138.9),
        "mla": (size(*mla) - size(*experts), 15.5),
        "moe": (size(*experts), 842.4),
        "embedding and head": (size(model.embedding, model.head), 117.4),
        "mtp": (size(model.mtp), 19.5),
        "all": (size(model), 1133.7),
        "active": (size(model) - sum((m.w_in.numel() + m.w_out.numel()) * 14 // 16 for m in experts), 440.1),
    }
    for name, (found, millions) in parts.items():
        assert found / 1e6 == pytest.approx(millions, rel=1e-3, abs=0.05), name  # the figures have one decimal


def test_the_kinds_of_layers(small_config):
    model = HyMo(small_config(n_layers=6, mla_every=3))
    assert [isinstance(b, MLABlock) for b in model.layers] == [False, False, True, False, False, True]


def test_names_of_the_parameters(small_config):
    names = {n for n, _ in HyMo(small_config(qk_norm=True)).named_parameters()}
    expected = {
        "embedding.weight", "head.norm.weight", "head.weight",
        "layers.0.norm.weight", "layers.0.in_proj.weight", "layers.0.dt_proj.weight", "layers.0.dt_bias",
        "layers.0.A_log", "layers.0.D", "layers.0.conv_weight", "layers.0.out_norm.weight", "layers.0.out_proj.weight",
        "layers.1.attn_norm.weight",
        "layers.1.attn.q_a.weight", "layers.1.attn.q_b.weight", "layers.1.attn.kv_a.weight",
        "layers.1.attn.kv_b.weight", "layers.1.attn.o.weight", "layers.1.attn.q_norm.weight",
        "layers.1.attn.kv_norm.weight", "layers.1.attn.q_head_norm.weight", "layers.1.attn.k_head_norm.weight",
        "layers.1.ffn_norm.weight", "layers.1.ffn.router.weight", "layers.1.ffn.w_in", "layers.1.ffn.w_out",
        "layers.1.ffn.shared_in", "layers.1.ffn.shared_out",
        "mtp.depths.0.hidden_norm.weight", "mtp.depths.0.embed_norm.weight", "mtp.depths.0.proj.weight",
        "mtp.depths.0.block.ffn.w_in.weight", "mtp.depths.1.block.ffn.w_out.weight",
    }  # fmt: skip
    assert expected <= names
    buffers = {n for n, _ in HyMo(small_config()).named_buffers()}
    assert buffers == {f"layers.{i}.ffn.{b}" for i in (1, 3) for b in ("gate_bias", "ema_expert_counts")}


def test_row_blocks_cover_their_parameters(small_config):
    model = HyMo(small_config())
    fused = [(m, n, b) for m in model.modules() for n, b in getattr(m, "row_blocks", {}).items()]
    assert len(fused) == 2 + 2 * 2 + 2  # in_proj, w_in and shared_in, the MTP blocks' w_in
    for module, name, blocks in fused:
        assert module.get_parameter(name).shape[-2] == sum(blocks)


def test_logits_are_causal_and_fp32(small_model):
    model = small_model()
    tokens = torch.randint(61, (2, 15))
    other = tokens.clone()
    other[:, 9] += 1
    other %= 61
    with torch.no_grad():
        a, b = model(tokens), model(other)
    assert a.dtype == torch.float32
    assert a.shape == (2, 15, 61)
    torch.testing.assert_close(a[:, :9], b[:, :9], rtol=1e-5, atol=1e-5)
    assert (a[:, 9] - b[:, 9]).abs().max() > 1e-2


def test_sums_of_the_loss_are_those_of_the_logits(small_model, packed_batch):
    model = small_model()
    tokens, doc_ids, labels = packed_batch()
    with torch.no_grad():
        out = model(tokens, doc_ids_BL=doc_ids, labels_KBT=labels)
        logits = model(tokens[:, :24], doc_ids_BL=doc_ids[:, :24])
        hidden = model.forward_with_hidden(tokens, doc_ids)
        terms = [model.head.logits(h) for h in hidden]
    torch.testing.assert_close(terms[0], logits)
    for k in range(3):
        expected = F.cross_entropy(terms[k].flatten(0, 1), labels[k].flatten(), reduction="sum")
        torch.testing.assert_close(out.ce_sum_K[k], expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_announced_weights_change_no_gradient(small_model, packed_batch, z_loss):
    model = small_model(z_loss=z_loss).train()
    tokens, doc_ids, labels = packed_batch()
    weights = torch.tensor([0.02, 0.006, 0.001])

    def gradient(announced):
        model.zero_grad()
        out = model(tokens, doc_ids_BL=doc_ids, labels_KBT=labels, term_weights_K=weights if announced else None)
        ((out.ce_sum_K * weights).sum() + z_loss * weights[0] * out.z_sum).backward()
        return [p.grad.clone() for p in model.parameters()]

    for a, b in zip(gradient(True), gradient(False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


def test_every_parameter_learns(small_model, packed_batch):
    model = small_model(qk_norm=True).train()
    tokens, doc_ids, labels = packed_batch()
    model(tokens, doc_ids_BL=doc_ids, labels_KBT=labels).ce_sum_K.sum().backward()
    for name, param in model.named_parameters():
        assert param.grad is not None, name
        assert param.grad.isfinite().all(), name
        assert (param.grad != 0).any(), name


@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}, {"tie_embeddings": True, "conv_size": 0, "n_shared": 0}])
@pytest.mark.parametrize("prompt", [1, 3, 10])
def test_prefill_and_decode_equal_the_forward_pass(small_model, changes, prompt):
    """vllm#43301: the scan and the step form drifted apart."""
    model = small_model(**changes)
    tokens = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        whole = model(tokens)
    cache = model.init_cache(2, 16)
    outs = [model.prefill(tokens[:, :prompt], cache)]
    outs += [model.decode(tokens[:, t], cache) for t in range(prompt, 16)]
    assert (torch.stack(outs, 1) - whole[:, prompt - 1 :]).abs().max() <= 1e-5 * whole.abs().max()
    assert cache.length == 16


def test_a_full_cache_and_a_used_cache_are_refused(small_model):
    model = small_model()
    cache = model.init_cache(1, 4)
    with pytest.raises(ValueError, match="found 5 tokens for a cache that holds 0 of 4"):
        model.prefill(torch.zeros(1, 5, dtype=torch.int64), cache)
    model.prefill(torch.zeros(1, 4, dtype=torch.int64), cache)
    with pytest.raises(ValueError, match="cache: found full, 4 tokens"):
        model.decode(torch.zeros(1, dtype=torch.int64), cache)
    with pytest.raises(ValueError, match="accepted: an empty cache"):
        model.prefill(torch.zeros(1, 1, dtype=torch.int64), cache)


def test_labels_that_do_not_fit_are_named(small_model, packed_batch):
    model = small_model()
    tokens, _, labels = packed_batch()
    with pytest.raises(ValueError, match=r"labels_KBT, tokens_BL: found shapes \[3, 3, 24\], \[3, 24\]"):
        model(tokens[:, :24], labels_KBT=labels)


def test_tied_embeddings_are_one_storage(small_config, tmp_path):
    """verl#7834: to_empty unties silently; torchtitan#3764: tied heads came back corrupt."""
    model = build_hymo(small_config(tie_embeddings=True), seed=3)
    assert model.head.weight is model.embedding.weight
    assert size(build_hymo(small_config())) - size(model) == 61 * 32
    torch.save(model.state_dict(), tmp_path / "w.pt")
    other = build_hymo(small_config(tie_embeddings=True), seed=4)
    other.load_state_dict(torch.load(tmp_path / "w.pt"))
    assert other.head.weight is other.embedding.weight
    tokens = torch.randint(61, (1, 9))
    assert torch.equal(other(tokens), model(tokens))


def test_statistics_of_the_forward_pass(small_model, packed_batch):
    model = small_model().train()
    tokens, doc_ids, labels = packed_batch()
    real = torch.tensor([True, True, False])
    labels[:, 2] = -100
    out = model(tokens, doc_ids_BL=doc_ids, labels_KBT=labels, real_B=real)
    alone = model(tokens[:2], doc_ids_BL=doc_ids[:2], labels_KBT=labels[:, :2])
    assert out.expert_counts_NE.sum(1).tolist() == [2 * 24 * 2] * 2
    assert torch.equal(out.expert_counts_NE, alone.expert_counts_NE)
    torch.testing.assert_close(out.router_entropy_N, alone.router_entropy_N)
    torch.testing.assert_close(out.ce_sum_K, alone.ce_sum_K)
    assert out.dropped_N.tolist() == [0, 0]
    assert out.logit_max_NH is None
    assert not any(t.requires_grad for t in out[2:5])


def test_largest_attention_logits_on_request(small_model, packed_batch):
    model = small_model()
    tokens, doc_ids, labels = packed_batch()
    model.track_logit_max(True)
    out = model(tokens, doc_ids_BL=doc_ids, labels_KBT=labels)
    assert out.logit_max_NH.shape == (4, 2)  # two trunk layers, two MTP blocks
    assert out.logit_max_NH.isfinite().all()


def test_the_embedding_and_the_head_are_called_once(small_model, packed_batch):
    model = small_model()
    calls = {"embedding": 0, "head": 0}
    for name in calls:
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.__setitem__(name, calls[name] + 1))
    tokens, doc_ids, labels = packed_batch()
    model(tokens, doc_ids_BL=doc_ids, labels_KBT=labels)
    assert calls == {"embedding": 1, "head": 1}


def test_a_model_without_experts_or_depths(small_config):
    model = build_hymo(small_config(mla_every=9, mtp_depth=0, mtp_weights=()))
    out = model(torch.randint(61, (2, 7)), labels_KBT=torch.randint(61, (1, 2, 7)))
    assert out.expert_counts_NE.shape == (0, 4)
    out.ce_sum_K.sum().backward()


def test_build_takes_the_seed_of_the_training_section(small_config):
    config = HyMoConfig(model=small_config(), training={"seed": 5})
    a, b, c = build_hymo(config), build_hymo(small_config(), seed=5), build_hymo(small_config())
    assert torch.equal(a.embedding.weight, b.embedding.weight)
    assert not torch.equal(a.embedding.weight, c.embedding.weight)


def test_the_example_of_the_documentation_runs():
    page = (Path(__file__).parents[2] / "docs" / "model.md").read_text(encoding="utf-8")
    names: dict = {}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL).group(1), names)
    assert names["loss"].isfinite()
    assert names["next_logits"].shape == (2, 260)
