"""What a block keeps for its backward pass, in bytes a token: counted from what autograd saves, term by term.

These are the tensors of the default way on a GPU (Triton recurrence, FlexAttention, blocks compiled, bf16 or fp32); the
tests count the same by tracing the blocks themselves. Views keep the whole tensor that they are views of. Documents'
masks and rotary angles are shared by all layers and left out; so are weights, which FSDP2 frees and gathers again.

Letters: C width, H heads, D value size, S state size of a recurrence head, Q query/key size, N its part without
position, V value size of an attention head, F inner width, K experts of a token, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from hymo.config import HyMoConfig, ModelConfig
from hymo.kernels.cross_entropy import chunk_rows

STATE_EVERY = 64  # tokens between the states that the recurrence keeps
HEAD_TILE = 32  # larger heads are cut into tiles of this size
FUSED_TAPS = 4  # convolutions of up to so many taps are part of the fused mixer, where heads need no cutting
INT64, FP32 = 8, 4

Terms = dict[str, float]


@dataclass(frozen=True)
class Setting:
    """How blocks compute: bytes of an element, ``activation_checkpointing``, and whether they are compiled."""

    width: int
    checkpointing: str
    compiled: bool


def setting_of(config: HyMoConfig) -> Setting:
    """The setting of a configuration on CUDA."""
    t = config.training
    width = 2 if t.fsdp_mixed_precision == "bfloat16" else 4
    compiled = t.torch_compile_gdn == "auto" or bool(t.torch_compile_gdn)
    return Setting(width, t.activation_checkpointing, compiled)


def _tile(n: int) -> int:
    """Sizes of a state are padded to a power of two, at least 16."""
    return max(16, 1 << (n - 1).bit_length())


def gdn_terms(m: ModelConfig, s: Setting) -> Terms:
    """A gated-recurrence block."""
    w, values, keys = s.width, m.gdn_heads * m.gdn_head_dim, m.gdn_heads * m.gdn_state_dim
    terms: Terms = {"input": w * m.dim}
    if s.checkpointing == "block":
        return terms
    across, down = -(-m.gdn_head_dim // HEAD_TILE), -(-m.gdn_state_dim // HEAD_TILE)
    cut = across * down > 1  # tiles share v, b and c, and each has its own copy of what it reads
    tile = HEAD_TILE * HEAD_TILE if cut else _tile(m.gdn_head_dim) * _tile(m.gdn_state_dim)
    tiles = m.gdn_heads * across * down
    states = w * tiles * tile / STATE_EVERY
    fused = 0 < m.conv_size <= FUSED_TAPS and not cut
    if s.checkpointing == "selective":
        output = FP32 * tiles * HEAD_TILE if cut else w * values
        terms |= {"projections": w * (2 * values + 2 * keys + m.gdn_heads), "output": output, "states": states}
        if fused:  # the results of the mixer, all of them
            terms |= {"v, b, c": w * (values + 2 * keys), "gated output": w * values}
        return terms | ({} if s.compiled else {"projected output": w * m.dim})
    convolved = values + 2 * keys if not cut else 3 * tiles * HEAD_TILE
    terms |= {
        "normed input": w * m.dim,
        "projections": w * (2 * values + 2 * keys),
        "v, b, c": w * convolved if m.conv_size or cut else 0,
        "gates": FP32 * (tiles if cut else m.gdn_heads),
        "states": states,
        "output": w * values,
        "gated output": w * values,
        "norms": FP32 * (1 if fused else 1 + m.gdn_heads),
    }
    if not s.compiled and not fused:
        terms |= {"normed output": w * values, "silu(z)": w * values}
    return terms


def attention_terms(m: ModelConfig, s: Setting) -> Terms:
    """Latent attention with its norms and residuals, up to the norm before the feed-forward layer."""
    w, heads = s.width, m.mla_heads
    query = m.qk_nope_dim + m.qk_rope_dim
    terms: Terms = {"input": w * m.dim}
    if s.checkpointing == "block":
        return terms
    terms |= {
        "latents": w * (m.q_lora_rank + m.kv_lora_rank + m.qk_rope_dim),
        "keys and values": w * heads * (m.qk_nope_dim + m.v_head_dim),
        "mixed values": w * heads * m.v_head_dim + FP32 * heads,
        "attention output": w * m.dim,
    }
    if s.checkpointing == "selective":
        return terms | {"queries": w * heads * query}
    terms |= {
        "normed input": 2 * w * m.dim,  # before attention, before the feed-forward layer
        "normed latents": w * (m.q_lora_rank + m.kv_lora_rank),
        "queries": w * heads * query,
        "keys with position": w * heads * query,
        "norms": FP32 * 4,
    }
    if m.qk_norm:
        terms |= {"queries, keys before their norm": 2 * (w * heads * query + FP32 * heads)}
    return terms


def moe_terms(m: ModelConfig, s: Setting) -> Terms:
    """Router, routed experts and shared experts."""
    w, k, f, shared = s.width, m.top_k, m.d_ff, m.n_shared
    chosen: Terms = {"chosen experts": float(INT64 * k)}
    if s.checkpointing == "block":
        return chosen
    if s.checkpointing == "selective":
        terms: Terms = chosen | {
            "router": FP32 * m.n_routed,
            "routed gate, up": w * k * 2 * f,
            "routed results": w * k * m.dim,
            "shared experts": w * shared * 2 * f,
        }
        return terms | ({} if s.compiled else {"shared results": w * shared * m.dim})
    return {
        "router": (FP32 * m.dim if w < FP32 else 0) + FP32 * k,
        "routing": INT64 * 3 * k,
        "routed rows": w * k * m.dim,
        "routed gate, up": w * k * 2 * f,
        "routed hidden": w * k * f,
        "routed results": w * k * m.dim,
        "shared experts": w * shared * 3 * f,
    }


def feed_forward_terms(m: ModelConfig, s: Setting) -> Terms:
    """The feed-forward layer of a block of the trunk: experts, or dense without routed ones."""
    return moe_terms(m, s) if m.n_routed else dense_terms(m, s, m.n_shared * m.d_ff)


def dense_terms(m: ModelConfig, s: Setting, width: int | None = None) -> Terms:
    """A dense feed-forward layer of this inner width; None: that of an MTP block."""
    kept = {"none": 3, "selective": 2, "block": 0}[s.checkpointing] * (m.d_ff if width is None else width)
    kept += m.dim if s.checkpointing == "selective" and not s.compiled else 0
    return {"feed-forward": float(s.width * kept)}


def mtp_terms(m: ModelConfig, s: Setting) -> Terms:
    """What joins hidden states and looked-ahead embeddings, outside of the block: never recomputed."""
    terms: Terms = {"looked-ahead embedding": s.width * m.dim, "joined": s.width * 2 * m.dim}
    return terms | {"norms of the join": FP32 * 2}


def head_terms(m: ModelConfig, s: Setting) -> Terms:
    """Last hidden states and their gradients, which the cross entropy makes in its forward pass."""
    terms = 1 + m.mtp_depth
    return {"last hidden states": terms * (s.width * m.dim + FP32), "their gradients": terms * s.width * m.dim}


@dataclass(frozen=True)
class Activations:
    """Bytes a token kept from forward to backward, by kind of layer: of one layer, and how many there are."""

    layers: dict[str, tuple[int, Terms]]

    def of_layer(self, name: str) -> float:
        return sum(self.layers[name][1].values())

    def of_all(self, name: str) -> float:
        return self.layers[name][0] * self.of_layer(name)

    @property
    def per_token(self) -> float:
        return sum(self.of_all(name) for name in self.layers)


def activations_of(m: ModelConfig, s: Setting) -> Activations:
    """Of the whole model."""
    n_mla = m.n_layers // m.mla_every
    layers = {
        "GDN blocks": (m.n_layers - n_mla, gdn_terms(m, s)),
        "MLA": (n_mla, attention_terms(m, s)),
        "MoE" if m.n_routed else "dense": (n_mla, feed_forward_terms(m, s)),
        "MTP": (m.mtp_depth, attention_terms(m, s) | dense_terms(m, s) | mtp_terms(m, s)),
        "head": (1, head_terms(m, s)),
    }
    return Activations({name: layer for name, layer in layers.items() if layer[0]})


def head_workspace(m: ModelConfig, s: Setting, tokens: int) -> float:
    """Bytes while the head computes: its weight's gradient and one product in fp32, a chunk's logits and gradient."""
    rows = min(tokens, chunk_rows(m.vocab_size, "cuda"))
    return 2 * FP32 * m.vocab_size * m.dim + 2 * s.width * rows * m.vocab_size
