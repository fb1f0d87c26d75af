"""What generation through transformers carries from token to token, for texts of any lengths in one batch.

Texts of one length are a group with one cache of the model; a batch that was filled up on the left is several groups.
So no text ever sees what filled it up, in the recurrent state, the convolution or the attention.

Shape suffixes: B texts of the batch, G texts of a group, T tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hymo.models.gdn import GDNState
from hymo.models.mla import MLACache
from hymo.models.model import Cache, HyMo

FIRST_ROOM = 64


@dataclass
class Group:
    """Texts of one length: their rows in the batch, int64 [G], and the model's cache of them."""

    rows_G: Tensor
    cache: Cache


class HyMoCache:
    """The state after the tokens read so far. Grows as it must; beam search reorders it.

    ``columns``: tokens read, counting what filled texts up.
    """

    is_compileable = False

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.columns = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns read, as transformers counts them."""
        return self.columns

    def read_prompts(self, model: HyMo, tokens_BT: Tensor, starts_B: Tensor) -> Tensor:
        """Read whole prompts into the empty cache; hidden states before the head, zero where a row is filled up."""
        hidden_BTC = None
        for start in starts_B.unique().tolist():
            rows_G = (starts_B == start).nonzero()[:, 0]
            length = tokens_BT.shape[1] - start
            group = Group(rows_G, model.init_cache(len(rows_G), length + FIRST_ROOM))
            read_GTC = model.read_prompt(tokens_BT[rows_G, start:], group.cache)
            if hidden_BTC is None:
                hidden_BTC = read_GTC.new_zeros(*tokens_BT.shape, read_GTC.shape[-1])
            hidden_BTC[rows_G, start:] = read_GTC
            self.groups.append(group)
        self.columns = tokens_BT.shape[1]
        assert hidden_BTC is not None
        return hidden_BTC

    def read_one(self, model: HyMo, tokens_B: Tensor) -> Tensor:
        """Read one more token of each text; logits of the next, fp32 [B, V]."""
        parts = []
        for group in self.groups:
            if group.cache.length == group.cache.max_len:
                _grow(group.cache)
            parts.append(model.decode(tokens_B[group.rows_G], group.cache))
        self.columns += 1
        if len(parts) == 1:
            return parts[0]
        logits_BV = parts[0].new_empty(len(tokens_B), parts[0].shape[-1])
        for group, part_GV in zip(self.groups, parts, strict=True):
            logits_BV[group.rows_G] = part_GV
        return logits_BV

    def reorder_cache(self, beam_idx_B: Tensor) -> None:
        """Row r goes on from what row ``beam_idx_B[r]`` was."""
        groups, beam_idx_B = [], beam_idx_B.long()
        for group in self.groups:
            place_B = torch.full_like(beam_idx_B, -1)
            place_B[group.rows_G] = torch.arange(len(group.rows_G), device=beam_idx_B.device)
            chosen_B = place_B[beam_idx_B]
            rows_G = (chosen_B >= 0).nonzero()[:, 0]
            if len(rows_G):
                _select(group.cache, chosen_B[rows_G])
                groups.append(Group(rows_G, group.cache))
        self.groups = groups


def _grow(cache: Cache) -> None:
    """Twice the room. Only attention keeps something for every token."""
    room = cache.max_len
    for i, state in enumerate(cache.layers):
        if isinstance(state, MLACache):
            cache.layers[i] = MLACache(*(torch.cat((t, t.new_zeros(len(t), room, t.shape[2])), 1) for t in state))
    cache.max_len += room


def _select(cache: Cache, chosen_G: Tensor) -> None:
    for i, state in enumerate(cache.layers):
        kind: type[GDNState] | type[MLACache] = type(state)
        cache.layers[i] = kind(*(tensor.index_select(0, chosen_G) for tensor in state))
