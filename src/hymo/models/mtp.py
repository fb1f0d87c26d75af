"""Multi-token prediction: a chain of small blocks that each look one token further (arXiv 2412.19437, section 2.2).

    h^k_t = Block_k(W_k [norm(h^{k-1}_t); norm(emb(x_{t+k}))]),   h^0 the trunk's output;   h^k_t predicts x_{t+k+1}

Shape suffixes: B batch, T sequence, L = T + depth (the inputs with their look-ahead), C width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hymo.config import ModelConfig
from hymo.models.layers import CompilableBlock, DocLayout, RMSNorm
from hymo.models.mla import MLABlock


class MTPDepth(CompilableBlock):
    """One link of the chain: join the hidden state with the looked-ahead token, project, one block.

    ``use_compile`` is of the joining and the projection; the block has its own.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.hidden_norm = RMSNorm(config.dim, config.norm_eps)
        self.embed_norm = RMSNorm(config.dim, config.norm_eps)
        self.proj = nn.Linear(2 * config.dim, config.dim, bias=False)
        self.block = MLABlock(config, dense=True)

    def forward(self, hidden_BTC: Tensor, ahead_BTC: Tensor, layout: DocLayout, real_B: Tensor | None = None):
        """Hidden states and embeddings of the tokens ahead -> next hidden states, and the block's statistics."""
        return self.block(self._run(hidden_BTC, ahead_BTC), layout, real_B)

    def _compute(self, hidden_BTC: Tensor, ahead_BTC: Tensor) -> Tensor:  # type: ignore[override]
        return self.proj(torch.cat((self.hidden_norm(hidden_BTC), self.embed_norm(ahead_BTC)), dim=-1))


def look_ahead(embedded_BLC: Tensor, doc_ids_BL: Tensor | None, length: int, k: int) -> Tensor:
    """Embeddings of x_{t+k} for t < length; zero where that token is of another document."""
    ahead = embedded_BLC[:, k : k + length]
    if doc_ids_BL is None:
        return ahead
    same = doc_ids_BL[:, k : k + length] == doc_ids_BL[:, :length]
    return torch.where(same[..., None], ahead, 0)  # no product: inf or NaN there must not come through


class MultiTokenPrediction(nn.Module):
    """The chain of ``mtp_depth`` links; it owns no embedding and no head."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.depths = nn.ModuleList(MTPDepth(config) for _ in range(config.mtp_depth))

    def forward(
        self,
        hidden_BTC: Tensor,
        embedded_BLC: Tensor,
        doc_ids_BL: Tensor | None,
        layout: DocLayout,
        real_B: Tensor | None = None,
        depth: int | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Hidden states of the first ``depth`` links (None: all), and their largest attention logits if tracked."""
        hidden_list, logit_max = [], []
        for k, link in enumerate(self.depths[:depth], start=1):
            ahead = look_ahead(embedded_BLC, doc_ids_BL, hidden_BTC.shape[1], k)
            hidden_BTC, stats = link(hidden_BTC, ahead, layout, real_B)
            hidden_list.append(hidden_BTC)
            if stats.logit_max_H is not None:
                logit_max.append(stats.logit_max_H)
        return hidden_list, logit_max
