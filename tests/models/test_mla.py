"""Latent attention: its definition, its cache with absorbed projections, logit tracking."""

import pytest
import torch
import torch.nn.functional as F

from hymo.models.layers import document_layout, rotary_angles, rotate
from hymo.models.mla import LatentAttention, MLABlock
from hymo.models.model import build_hymo
from hymo.models.moe import DeepSeekMoE


def make_attention(config, seed=0):
    attn = LatentAttention(config)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in attn.named_parameters():
            param.copy_(1 + 0.3 * torch.randn(param.shape, generator=g) if "norm" in name else
                        torch.randn(param.shape, generator=g) * 0.4)  # fmt: skip
    return attn


def by_definition(attn, x, config, positions):
    """Heads written out; returns the output and the logits [B, H, T, T] before the mask."""
    attn = attn.double()
    heads, nope, rope, v_dim = config.mla_heads, config.qk_nope_dim, config.qk_rope_dim, config.v_head_dim
    eps = config.norm_eps

    def norm(t, weight):
        return F.rms_norm(t, weight.shape, weight, eps)

    cos, sin = rotary_angles(positions, rope, config.rope_theta)
    q = (norm(x @ attn.q_a.weight.t(), attn.q_norm.weight) @ attn.q_b.weight.t()).unflatten(-1, (heads, nope + rope))
    latent, k_rope = (x @ attn.kv_a.weight.t()).split((config.kv_lora_rank, rope), -1)
    kv = (norm(latent, attn.kv_norm.weight) @ attn.kv_b.weight.t()).unflatten(-1, (heads, nope + v_dim))
    k = torch.cat((kv[..., :nope], k_rope[:, :, None].expand(-1, -1, heads, -1)), -1)
    if config.qk_norm:
        q, k = norm(q, attn.q_head_norm.weight), norm(k, attn.k_head_norm.weight)
    q, k = (torch.cat((t[..., :nope], rotate(t[..., nope:], cos, sin)), -1) for t in (q, k))
    logits = torch.einsum("bthk,bshk->bhts", q, k) / (nope + rope) ** 0.5
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    out = torch.einsum("bhts,bshv->bthv", logits.masked_fill(~mask, -torch.inf).softmax(-1), kv[..., nope:])
    return out.flatten(-2) @ attn.o.weight.t(), logits.masked_fill(~mask, -torch.inf)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("v_head_dim", [12, 7, 16])
def test_equals_its_definition(small_config, qk_norm, v_head_dim):
    config = small_config(qk_norm=qk_norm, v_head_dim=v_head_dim)
    attn = make_attention(config)
    attn.track_logit_max = True
    x = torch.randn(2, 13, config.dim, generator=torch.Generator().manual_seed(1))
    out, logit_max = attn(x, document_layout(None, 13, config.qk_rope_dim, config.rope_theta, "cpu"))
    expected, logits = by_definition(attn, x.double(), config, torch.arange(13)[None])
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logit_max.double(), logits.amax((0, 2, 3)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("prompt", [1, 6])
def test_cache_with_absorbed_projections_equals_the_forward_pass(small_config, qk_norm, prompt):
    config = small_config(qk_norm=qk_norm)
    attn = make_attention(config)
    rope, theta = config.qk_rope_dim, config.rope_theta
    x = torch.randn(2, 11, config.dim, generator=torch.Generator().manual_seed(2))
    whole, _ = attn(x, document_layout(None, 11, rope, theta, "cpu"))
    cache = attn.init_cache(2, 16)
    outs = [attn.prefill(x[:, :prompt], document_layout(None, prompt, rope, theta, "cpu"), cache)]
    for t in range(prompt, 11):
        angles = rotary_angles(torch.tensor([[t]]), rope, theta)
        outs.append(attn.step(x[:, t], t, angles, cache)[:, None])
    torch.testing.assert_close(torch.cat(outs, 1), whole, rtol=1e-5, atol=1e-5)


def test_the_cache_holds_the_latent_and_the_rotary_key_alone(small_config):
    config = small_config()
    cache = LatentAttention(config).init_cache(1, 10)
    assert sum(t.numel() for t in cache) == 10 * (config.kv_lora_rank + config.qk_rope_dim)


def test_production_scale_is_one_over_root_96():
    from hymo.config import ModelConfig

    with torch.device("meta"):
        attn = LatentAttention(ModelConfig())
    assert attn.scale == pytest.approx(96**-0.5)


def test_a_block_is_attention_then_experts_or_a_dense_layer(small_config):
    config = small_config()
    block, dense = MLABlock(config), MLABlock(config, dense=True)
    assert isinstance(block.ffn, DeepSeekMoE)
    assert set(dict(dense.ffn.named_parameters())) == {"w_in.weight", "w_out.weight"}
    layout = document_layout(None, 5, config.qk_rope_dim, config.rope_theta, "cpu")
    with torch.no_grad():
        for param in dense.parameters():
            param.fill_(0.01)
    x, stats = dense(torch.randn(1, 5, config.dim), layout)
    assert stats.moe is None
    assert stats.logit_max_H is None
    assert x.shape == (1, 5, config.dim)


def test_without_routed_experts_a_block_is_dense_and_computes_what_its_shared_experts_would(small_config):
    """d_ff x n_shared wide: the inner units of the shared experts side by side, for every token."""
    config = small_config(n_routed=0, top_k=0, n_shared=3)
    x = torch.randn(2, 7, config.dim, generator=torch.Generator().manual_seed(2))
    experts = build_hymo(small_config(n_shared=3), seed=4).expert_layers()[0]
    dense = build_hymo(config, seed=4).layers[1].ffn
    with torch.no_grad():
        gates, ups = experts.shared_in.unflatten(1, (2, config.d_ff)).unbind(1)
        dense.w_in.weight.copy_(torch.cat((gates.flatten(0, 1), ups.flatten(0, 1))))
        dense.w_out.weight.copy_(torch.cat(list(experts.shared_out), dim=1))
        torch.testing.assert_close(dense(x), experts._shared(x.flatten(0, 1)).view_as(x), rtol=1e-5, atol=1e-6)
