"""The whole model: embedding, trunk of recurrence and attention blocks, multi-token prediction, head.

Shape suffixes: B batch, T sequence, L = T + look-ahead of the multi-token prediction, C width, V vocabulary, K terms of
the loss (1 + depth), N expert layers or attention layers, E experts, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hymo.config import HyMoConfig, ModelConfig
from hymo.kernels.cross_entropy import linear_cross_entropy
from hymo.models.gdn import GatedDeltaNetBlock, GDNState
from hymo.models.init import initialize_
from hymo.models.layers import CompilableBlock, DocLayout, RMSNorm, document_layout, rotary_angles
from hymo.models.mla import LatentAttention, MLABlock, MLACache
from hymo.models.moe import DeepSeekMoE
from hymo.models.mtp import MultiTokenPrediction


class ModelOutput(NamedTuple):
    """Sums and statistics of one micro-batch; only ``ce_sum_K`` (and ``z_sum`` where it has a weight) carry gradients.

    ce_sum_K: fp32, sums of cross entropy in nats over the valid labels of each term (main, depth 1, ...).
    z_sum: fp32, sum of logsumexp(logits)^2 over the main term's valid labels.
    expert_counts_NE: int64, assignments by expert of each expert layer, as routed, filler rows excluded.
    dropped_N: int64, how many of these were over capacity. router_entropy_N: fp32, nats.
    logit_max_NH: fp32, largest attention logit of each head, trunk layers first, then MTP; None unless tracked.
    """

    ce_sum_K: Tensor
    z_sum: Tensor
    expert_counts_NE: Tensor
    dropped_N: Tensor
    router_entropy_N: Tensor
    logit_max_NH: Tensor | None


class LMHead(CompilableBlock):
    """Final norm and output matrix: the only reader of the head's weight, called once a micro-batch.

    ``use_compile`` is of the norm.
    """

    def __init__(self, dim: int, vocab_size: int, eps: float):
        super().__init__()
        self.norm = RMSNorm(dim, eps)
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))

    def forward(
        self,
        hidden_list: list[Tensor],
        labels_list: list[Tensor] | None = None,
        term_weights_K: Tensor | None = None,
        z_weight: Tensor | float | None = None,
    ) -> tuple[Tensor, Tensor] | Tensor:
        """Hidden states [B, T, dim] and labels [B, T] (-100 = none) of each term -> ce_sum_K, z_sum.

        Without labels: the logits of the first hidden states. ``term_weights_K`` and ``z_weight``: see
        ``kernels.cross_entropy.linear_cross_entropy``.
        """
        if labels_list is None:
            return self.logits(hidden_list[0])
        normed = [self._run(hidden) for hidden in hidden_list]
        labels = [labels_BT.flatten() for labels_BT in labels_list]
        return linear_cross_entropy(normed, self.weight, labels, term_weights_K=term_weights_K, z_weight=z_weight)

    def _compute(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        return self.norm(hidden).flatten(0, -2)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits in fp32, [..., V]."""
        return F.linear(self.norm(hidden), self.weight).float()


@dataclass
class Cache:
    """State of a generation: ``length`` tokens have been read, at most ``max_len`` fit."""

    max_len: int
    layers: list[GDNState | MLACache]
    length: int = field(default=0)


class HyMo(nn.Module):
    """The hybrid language model of ``config``."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(
            MLABlock(config) if (i + 1) % config.mla_every == 0 else GatedDeltaNetBlock(config)
            for i in range(config.n_layers)
        )
        self.mtp = MultiTokenPrediction(config)
        self.head = LMHead(config.dim, config.vocab_size, config.norm_eps)
        self.tie_weights()

    def tie_weights(self) -> None:
        """With ``tie_embeddings``: one parameter for embedding and head (``to_empty`` silently makes two of it)."""
        if self.config.tie_embeddings:
            self.head.weight = self.embedding.weight  # type: ignore[assignment]

    def blocks(self) -> list[GatedDeltaNetBlock | MLABlock]:
        """The trunk, typed."""
        return list(self.layers)  # type: ignore[arg-type]

    def expert_layers(self) -> list[DeepSeekMoE]:
        """In the order of ``ModelOutput.expert_counts_NE``."""
        return [module for module in self.modules() if isinstance(module, DeepSeekMoE)]

    def track_logit_max(self, on: bool) -> None:
        """Whether the forward pass also returns each head's largest attention logit (one more product a layer)."""
        for module in self.modules():
            if isinstance(module, LatentAttention):
                module.track_logit_max = on

    def update_gate_biases(self, counts_NE: Tensor) -> None:
        """After an update: ``DeepSeekMoE.update_gate_bias`` of every expert layer, by the counts of the whole step."""
        for moe, counts_E in zip(self.expert_layers(), counts_NE, strict=True):
            moe.update_gate_bias(counts_E, speed=self.config.gate_bias_speed)

    def forward(
        self,
        tokens_BL: Tensor,
        *,
        doc_ids_BL: Tensor | None = None,
        labels_KBT: Tensor | None = None,
        real_B: Tensor | None = None,
        term_weights_K: Tensor | None = None,
        z_weight: Tensor | float | None = None,
    ) -> Tensor | ModelOutput:
        """Logits without labels, sums of the loss with them.

        Args:
            tokens_BL: int64 [B, L].
            doc_ids_BL: int32 [B, L], non-decreasing along a row; None = each row is one document.
            labels_KBT: int64 [K, B, T], -100 = none; K = 1 + the depths to run, and L = T + K - 1 look-ahead inputs.
            real_B: bool [B], False marks filler rows, which are counted in no statistic (mask their labels).
            term_weights_K: fp32 [K], the weights of the sums in the loss, if known beforehand: one gradient of the head
                instead of one a term. The loss must then be (ce_sum_K * term_weights_K).sum() + z_weight * z_sum, or
                a multiple of it; any other gets NaN gradients.
            z_weight: None = config.z_loss * term_weights_K[0].

        Returns:
            logits_BTV fp32 with T = L, or a ModelOutput.
        """
        if labels_KBT is None:
            return self.head(self._hidden(tokens_BL, doc_ids_BL, real_B, 0).hidden_list)
        terms, _, length = labels_KBT.shape
        if terms > 1 + self.config.mtp_depth or tokens_BL.shape[1] != length + terms - 1:
            raise ValueError(
                f"labels_KBT, tokens_BL: found shapes {list(labels_KBT.shape)}, {list(tokens_BL.shape)}; accepted: K "
                f"at most 1 + mtp_depth = {1 + self.config.mtp_depth}, and tokens of length T + K - 1"
            )
        trunk = self._hidden(tokens_BL, doc_ids_BL, real_B, terms - 1)
        if z_weight is None:
            z_weight = self.config.z_loss * (1.0 if term_weights_K is None else term_weights_K[0])
        ce_sum_K, z_sum = self.head(trunk.hidden_list, list(labels_KBT), term_weights_K, z_weight)
        return ModelOutput(ce_sum_K, z_sum, *trunk.stats)

    def forward_with_hidden(
        self, tokens_BL: Tensor, doc_ids_BL: Tensor | None = None, depth: int | None = None
    ) -> list[Tensor]:
        """Hidden states [B, T, dim] before the head's norm: main, depth 1, ... ``depth`` (None: all); T = L - depth."""
        depth = self.config.mtp_depth if depth is None else depth
        return self._hidden(tokens_BL, doc_ids_BL, None, depth).hidden_list

    def _hidden(self, tokens_BL: Tensor, doc_ids_BL: Tensor | None, real_B: Tensor | None, depth: int) -> _Hidden:
        length = tokens_BL.shape[1] - depth
        if length < 1:
            found = tokens_BL.shape[1]
            raise ValueError(f"tokens_BL: found length {found}; accepted: more than the {depth} of look-ahead")
        layout = self._layout(None if doc_ids_BL is None else doc_ids_BL[:, :length], length, tokens_BL.device)
        embedded_BLC = self.embedding(tokens_BL)
        x_BTC = embedded_BLC
        if depth:  # copied: a first block with strides of its own would be one more graph
            x_BTC = embedded_BLC[:, :length].clone(memory_format=torch.contiguous_format)
        moe_stats, logit_max = [], []
        for layer in self.blocks():
            if isinstance(layer, GatedDeltaNetBlock):
                x_BTC = layer(x_BTC, layout)
                continue
            x_BTC, stats = layer(x_BTC, layout, real_B)
            if stats.moe is not None:
                moe_stats.append(stats.moe)
            if stats.logit_max_H is not None:
                logit_max.append(stats.logit_max_H)
        ahead, ahead_max = self.mtp(x_BTC, embedded_BLC, doc_ids_BL, layout, real_B, depth)
        logit_max += ahead_max
        return _Hidden([x_BTC, *ahead], self._stack(moe_stats, logit_max))

    def _stack(self, moe_stats: list, logit_max: list[Tensor]) -> tuple:
        device = self.head.weight.device
        counts = torch.zeros(0, self.config.n_routed, dtype=torch.int64, device=device)
        dropped, entropy = counts.new_zeros(0), torch.zeros(0, device=device)
        if moe_stats:
            counts, dropped, entropy = (torch.stack(parts) for parts in zip(*moe_stats, strict=True))
        return counts, dropped, entropy, torch.stack(logit_max) if logit_max else None

    def _layout(self, doc_ids_BT: Tensor | None, length: int, device: torch.device) -> DocLayout:
        return document_layout(doc_ids_BT, length, self.config.qk_rope_dim, self.config.rope_theta, device)

    def init_cache(self, batch_size: int, max_len: int) -> Cache:
        """An empty cache for ``batch_size`` texts of at most ``max_len`` tokens."""
        return Cache(
            max_len,
            [
                layer.init_state(batch_size)
                if isinstance(layer, GatedDeltaNetBlock)
                else layer.attn.init_cache(batch_size, max_len)
                for layer in self.blocks()
            ],
        )

    @torch.no_grad()
    def prefill(self, tokens_BT: Tensor, cache: Cache) -> Tensor:
        """Read a prompt into an empty cache; logits of the next token, fp32 [B, V]."""
        return self.head.logits(self.read_prompt(tokens_BT, cache)[:, -1])

    @torch.no_grad()
    def read_prompt(self, tokens_BT: Tensor, cache: Cache) -> Tensor:
        """Read a prompt into an empty cache; hidden states [B, T, dim] before the head's norm."""
        length = tokens_BT.shape[1]
        if cache.length or not 1 <= length <= cache.max_len:
            raise ValueError(
                f"tokens_BT, cache: found {length} tokens for a cache that holds {cache.length} of {cache.max_len}; "
                "accepted: an empty cache with room for at least one token"
            )
        layout = self._layout(None, length, tokens_BT.device)
        x_BTC = self.embedding(tokens_BT)
        for i, layer in enumerate(self.blocks()):
            state = cache.layers[i]
            if isinstance(layer, GatedDeltaNetBlock):
                x_BTC, cache.layers[i] = layer.prefill(x_BTC)
            elif isinstance(state, MLACache):
                x_BTC = layer.prefill(x_BTC, layout, state)
        cache.length = length
        return x_BTC

    @torch.no_grad()
    def decode(self, tokens_B: Tensor, cache: Cache) -> Tensor:
        """Read one more token of each text; logits of the next one, fp32 [B, V]."""
        if cache.length >= cache.max_len:
            raise ValueError(f"cache: found full, {cache.length} tokens; accepted: at most max_len = {cache.max_len}")
        position = torch.tensor([[cache.length]], device=tokens_B.device)
        angles = rotary_angles(position, self.config.qk_rope_dim, self.config.rope_theta)
        x_BC = self.embedding(tokens_B)
        for i, layer in enumerate(self.blocks()):
            state = cache.layers[i]
            if isinstance(layer, GatedDeltaNetBlock) and isinstance(state, GDNState):
                x_BC, cache.layers[i] = layer.step(x_BC, state)
            elif isinstance(layer, MLABlock) and isinstance(state, MLACache):
                x_BC = layer.step(x_BC, cache.length, angles, state)
        cache.length += 1
        return self.head.logits(x_BC)


class _Hidden(NamedTuple):
    hidden_list: list[Tensor]
    stats: tuple


def build_hymo(
    config: HyMoConfig | ModelConfig,
    device: torch.device | str | None = None,
    seed: int | None = None,
    *,
    initialise: bool = True,
) -> HyMo:
    """The model with fp32 parameters, built on the meta device, materialised on ``device`` (None: cpu), initialised.

    ``seed`` None takes ``training.seed`` of a HyMoConfig, or 0. Device "meta" leaves it without storage. ``initialise``
    False leaves the parameters as the memory was, for those who write all of them; the buffers are zero all the same.
    """
    model_config = config.model if isinstance(config, HyMoConfig) else config
    if seed is None:
        seed = config.training.seed if isinstance(config, HyMoConfig) else 0
    with torch.device("meta"):
        model = HyMo(model_config)
    if str(device) == "meta":
        return model
    model.to_empty(device=device or "cpu")
    model.tie_weights()
    if initialise:
        initialize_(model, seed)
    for buffer in model.buffers():
        buffer.zero_()
    return model
