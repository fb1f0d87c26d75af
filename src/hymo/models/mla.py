"""The latent-attention block: attention through low-rank latents (arXiv 2405.04434), then a feed-forward layer.

Queries, and keys with values, each pass through a latent with its own RMSNorm; position is carried by a rotary part,
whose key is shared by the heads. Generation caches the latent and the rotary key alone, and absorbs the projections of
keys and values into queries and outputs.

Shape suffixes: B batch, T sequence, C width, H heads, Q query/key head size (nope | rope), N its nope part, R its rope
part, V value head size, L key-value latent.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from hymo.config import ModelConfig
from hymo.kernels.attention import attention, max_logit
from hymo.models.layers import CompilableBlock, DocLayout, RMSNorm, SwiGLU, rotate
from hymo.models.moe import DeepSeekMoE, MoEStats


class MLACache(NamedTuple):
    """Of one layer, preallocated: latents [B, M, L], rotated keys [B, M, R], and with ``qk_norm`` 1/rms of each head's
    key, fp32 [B, M, H] (without it [B, M, 0])."""

    latent_BML: Tensor
    rope_BMR: Tensor
    rstd_BMH: Tensor


class BlockStats(NamedTuple):
    """Statistics of one block: of its experts (None for a dense layer), and each head's largest logit if tracked."""

    moe: MoEStats | None
    logit_max_H: Tensor | None


class LatentAttention(nn.Module):
    """Multi-head latent attention. ``track_logit_max`` makes the forward pass also return the largest logits."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads, self.nope, self.rope = config.mla_heads, config.qk_nope_dim, config.qk_rope_dim
        self.v_dim, self.kv_rank = config.v_head_dim, config.kv_lora_rank
        self.head_dim = self.nope + self.rope
        self.scale = self.head_dim**-0.5
        self.track_logit_max = False
        dim, eps = config.dim, config.norm_eps
        self.q_a = nn.Linear(dim, config.q_lora_rank, bias=False)
        self.q_b = nn.Linear(config.q_lora_rank, self.heads * self.head_dim, bias=False)
        self.kv_a = nn.Linear(dim, self.kv_rank + self.rope, bias=False)
        self.kv_b = nn.Linear(self.kv_rank, self.heads * (self.nope + self.v_dim), bias=False)
        self.o = nn.Linear(self.heads * self.v_dim, dim, bias=False)
        self.q_norm = RMSNorm(config.q_lora_rank, eps)
        self.kv_norm = RMSNorm(self.kv_rank, eps)
        self.q_head_norm = RMSNorm(self.head_dim, eps) if config.qk_norm else None
        self.k_head_norm = RMSNorm(self.head_dim, eps) if config.qk_norm else None

    def forward(self, x_BTC: Tensor, layout: DocLayout, real_B: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """[B, T, dim] -> [B, T, dim] (no residual), and each head's largest logit if tracked."""
        latent_BTL, rope_BTR = self._latents(x_BTC)
        return self._attend(self._queries(x_BTC, layout.cos_BTR, layout.sin_BTR), latent_BTL, rope_BTR, layout, real_B)

    def _latents(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Normed key-value latent [..., L] and the shared rope key before rotation [..., R]."""
        latent, rope = self.kv_a(x).split((self.kv_rank, self.rope), dim=-1)
        return self.kv_norm(latent), rope

    def _queries(self, x_BTC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = self.q_b(self.q_norm(self.q_a(x_BTC))).unflatten(-1, (self.heads, self.head_dim))
        if self.q_head_norm is not None:
            q = self.q_head_norm(q)
        return rotate(q, cos, sin)

    def sampled_logit_max(
        self, x_BTC: Tensor, layout: DocLayout, real_B: Tensor | None = None, queries: int = 256
    ) -> Tensor:
        """Largest logit of each head among evenly spaced queries (at most ``queries`` a row), fp32 [H].

        A lower bound of what ``track_logit_max`` gives, for a small part of its cost.
        """
        stride = -(-x_BTC.shape[1] // queries)
        cos, sin = (angles[:, ::stride] for angles in (layout.cos_BTR, layout.sin_BTR))
        k_BTHQ, _ = self._keys_and_values(*self._latents(x_BTC), layout)
        q_BTHQ = self._queries(x_BTC[:, ::stride], cos, sin)
        return max_logit(q_BTHQ, k_BTHQ, layout.doc_ids_BT, self.scale, real_B, rows=64, stride=stride)

    def _keys_and_values(self, latent_BTL: Tensor, rope_BTR: Tensor, layout: DocLayout) -> tuple[Tensor, Tensor]:
        kv = self.kv_b(latent_BTL).unflatten(-1, (self.heads, self.nope + self.v_dim))
        k_nope, v_BTHV = kv.split((self.nope, self.v_dim), dim=-1)
        cos, sin = layout.cos_BTR, layout.sin_BTR
        k_rope = rope_BTR[:, :, None]
        if self.k_head_norm is None:
            k_rope = rotate(k_rope, cos, sin)
        k_BTHQ = torch.cat((k_nope, k_rope.expand(-1, -1, self.heads, -1)), dim=-1)
        if self.k_head_norm is not None:
            k_BTHQ = rotate(self.k_head_norm(k_BTHQ), cos, sin)
        return k_BTHQ, v_BTHV

    def _attend(self, q_BTHQ, latent_BTL, rope_BTR, layout: DocLayout, real_B: Tensor | None):
        k_BTHQ, v_BTHV = self._keys_and_values(latent_BTL, rope_BTR, layout)
        best = max_logit(q_BTHQ, k_BTHQ, layout.doc_ids_BT, self.scale, real_B) if self.track_logit_max else None
        return self.o(attention(q_BTHQ, k_BTHQ, v_BTHV, layout.mask, self.scale).flatten(-2)), best

    def init_cache(self, batch_size: int, max_len: int) -> MLACache:
        weight = self.kv_a.weight
        sizes = (self.kv_rank, self.rope)
        latent, rope = (weight.new_zeros(batch_size, max_len, size) for size in sizes)
        heads = 0 if self.k_head_norm is None else self.heads
        return MLACache(latent, rope, weight.new_zeros(batch_size, max_len, heads, dtype=torch.float32))

    def prefill(self, x_BTC: Tensor, layout: DocLayout, cache: MLACache) -> Tensor:
        """The forward pass from position 0, filling the cache."""
        latent, rope = self._latents(x_BTC)
        self._store(cache, slice(0, x_BTC.shape[1]), latent, rope, layout.cos_BTR, layout.sin_BTR)
        return self._attend(self._queries(x_BTC, layout.cos_BTR, layout.sin_BTR), latent, rope, layout, None)[0]

    def _store(self, cache: MLACache, where: slice, latent, rope, cos, sin) -> None:
        if self.k_head_norm is not None:
            k_nope = torch.einsum("btl,hnl->bthn", latent.float(), self._kv_b_by_head()[:, : self.nope].float())
            squares = k_nope.square().sum(-1) + rope.float().square().sum(-1, keepdim=True)
            cache.rstd_BMH[:, where] = torch.rsqrt(squares / self.head_dim + self.k_head_norm.eps)
            rope = rope * self.k_head_norm.weight[self.nope :].to(rope.dtype)
        cache.latent_BML[:, where] = latent
        cache.rope_BMR[:, where] = rotate(rope[:, :, None], cos, sin)[:, :, 0]

    def _kv_b_by_head(self) -> Tensor:
        return self.kv_b.weight.unflatten(0, (self.heads, self.nope + self.v_dim))

    def step(self, x_BC: Tensor, position: int, angles: tuple[Tensor, Tensor], cache: MLACache) -> Tensor:
        """One token at ``position``: [B, dim] -> [B, dim]; reads and extends the cache.

        The key projection is absorbed into the query and the value projection into the output, so that the cached
        latents are never expanded to heads.
        """
        latent, rope = self._latents(x_BC[:, None])
        self._store(cache, slice(position, position + 1), latent, rope, *angles)
        q_BHQ = self._queries(x_BC[:, None], *angles)[:, 0].float()
        q_nope, q_rope = q_BHQ.split((self.nope, self.rope), dim=-1)
        if self.k_head_norm is not None:
            q_nope = q_nope * self.k_head_norm.weight[: self.nope].float()
        w_k, w_v = self._kv_b_by_head().float().split((self.nope, self.v_dim), dim=1)
        latents, ropes = (c[:, : position + 1].float() for c in (cache.latent_BML, cache.rope_BMR))
        q_latent = torch.einsum("bhn,hnl->bhl", q_nope, w_k)
        logits_BHM = torch.einsum("bhl,bml->bhm", q_latent, latents) + torch.einsum("bhr,bmr->bhm", q_rope, ropes)
        if self.k_head_norm is not None:
            logits_BHM = logits_BHM * cache.rstd_BMH[:, : position + 1].transpose(1, 2)
        weights = torch.softmax(logits_BHM * self.scale, dim=-1)
        mixed = torch.einsum("bhm,bml->bhl", weights, latents)
        return self.o(torch.einsum("bhl,hvl->bhv", mixed, w_v).flatten(-2).to(x_BC.dtype))


class MLABlock(CompilableBlock):
    """Norm, latent attention, residual; norm, feed-forward, residual.

    The feed-forward layer is a mixture of experts; a SwiGLU of n_shared x d_ff without routed experts; a SwiGLU of d_ff
    with ``dense`` (the blocks of MTP).

    ``use_compile``: see ``CompilableBlock``. ``experts_apart``: the experts are sharded as a unit of their own, whose
    hooks no graph may hold, so they run after the block's own computation instead of in it.
    """

    def __init__(self, config: ModelConfig, dense: bool = False):
        super().__init__()
        self.experts_apart = False
        self.attn_norm = RMSNorm(config.dim, config.norm_eps)
        self.attn = LatentAttention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn: DeepSeekMoE | SwiGLU
        if config.n_routed and not dense:
            self.ffn = DeepSeekMoE(config)
        else:
            self.ffn = SwiGLU(config.dim, config.d_ff * (1 if dense else config.n_shared))

    def forward(self, x_BTC: Tensor, layout: DocLayout, real_B: Tensor | None = None) -> tuple[Tensor, BlockStats]:
        """[B, T, dim] -> [B, T, dim] and the block's statistics."""
        x_BTC, stats = self._run(x_BTC, layout, real_B)
        if self.experts_apart:
            x_BTC, moe = self._feed_forward(x_BTC, real_B)
            stats = BlockStats(moe, stats.logit_max_H)
        return x_BTC, stats

    def _compute(self, x_BTC: Tensor, layout: DocLayout, real_B: Tensor | None):  # type: ignore[override]
        mixed, logit_max_H = self.attn(self.attn_norm(x_BTC), layout, real_B)
        x_BTC, moe = x_BTC + mixed, None
        if not self.experts_apart:
            x_BTC, moe = self._feed_forward(x_BTC, real_B)
        return x_BTC, BlockStats(moe, logit_max_H)

    def _feed_forward(self, x_BTC: Tensor, real_B: Tensor | None) -> tuple[Tensor, MoEStats | None]:
        n_BTC = self.ffn_norm(x_BTC)
        if isinstance(self.ffn, DeepSeekMoE):
            y_BTC, stats = self.ffn(n_BTC, real_B)
            return x_BTC + y_BTC, stats
        return x_BTC + self.ffn(n_BTC), None

    def prefill(self, x_BTC: Tensor, layout: DocLayout, cache: MLACache) -> Tensor:
        """The forward pass from position 0, filling the cache."""
        x_BTC = x_BTC + self.attn.prefill(self.attn_norm(x_BTC), layout, cache)
        return self._feed_forward(x_BTC, None)[0]

    def step(self, x_BC: Tensor, position: int, angles: tuple[Tensor, Tensor], cache: MLACache) -> Tensor:
        """One token at ``position``: [B, dim] -> [B, dim]."""
        x_BC = x_BC + self.attn.step(self.attn_norm(x_BC), position, angles, cache)
        return self._feed_forward(x_BC[:, None], None)[0][:, 0]
