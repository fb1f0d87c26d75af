"""Causal attention inside documents: softmax(scale q k^T) v, where a token sees earlier tokens of its own document.

Back ends, chosen by the rule of ``choose_backend``:
- ``sdpa``: torch's scaled_dot_product_attention. On a CPU always, with one mask a batch when documents are packed; on
  CUDA when a row is one document, or when Triton is missing.
- ``flex``: compiled FlexAttention with a block mask; on CUDA when documents are packed, since it skips the blocks that
  the mask forbids.

A token of another document has weight exactly 0, so finite values there never change a bit of the result.

Shape suffixes: B batch, T sequence, H heads, K query/key size, V value size.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

AttentionMask = Tensor | BlockMask | None
"""None: plain causal. Tensor: [B, 1, T, T], 0 where a query may look and -inf elsewhere (SDPA would turn a boolean mask
into this in every layer). BlockMask: the same for FlexAttention."""

MASK_BLOCK = 128
"""Queries and keys of a block of a BlockMask."""

CUDA_ORDER = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@functools.cache
def choose_backend(device_type: str, packed: bool) -> str:
    """``sdpa`` or ``flex`` by the rule above, for a device and rows that are ``packed`` with documents or not."""
    has_triton = importlib.util.find_spec("triton") is not None
    return "flex" if device_type == "cuda" and packed and has_triton else "sdpa"


def build_mask(doc_ids_BT: Tensor | None) -> AttentionMask:
    """The mask of one batch, to be shared by its layers; None where each row is one document."""
    if doc_ids_BT is None:
        return None
    if choose_backend(doc_ids_BT.device.type, True) == "flex":
        return _block_mask(doc_ids_BT)
    length = doc_ids_BT.shape[1]
    same = doc_ids_BT[:, :, None] == doc_ids_BT[:, None, :]
    allowed = same & torch.ones(length, length, dtype=torch.bool, device=same.device).tril()
    return torch.zeros(allowed.shape, device=same.device).masked_fill_(~allowed, -torch.inf)[:, None]


def _block_mask(doc_ids_BT: Tensor) -> BlockMask:
    """What FlexAttention's ``create_block_mask`` makes of the rule, from the first and the last token of each block.

    Ids never decrease along a row, so two blocks share a document iff the earlier one's last token and the later one's
    first token are of it, and hold nothing else iff the outer two are. No [T, T] tensor is built; compiled, that
    function's sorting of blocks took longer to compile than all blocks of the model.
    """

    def may_look(b, h, query, key):
        return (query >= key) & (doc_ids_BT[b, query] == doc_ids_BT[b, key])

    length = doc_ids_BT.shape[1]
    starts = torch.arange(0, length, MASK_BLOCK, device=doc_ids_BT.device)
    first, last = doc_ids_BT[:, starts], doc_ids_BT[:, (starts + MASK_BLOCK - 1).clamp(max=length - 1)]
    earlier, itself = starts[:, None] > starts[None, :], starts[:, None] == starts[None, :]
    some = (earlier & (first[:, :, None] == last[:, None, :])) | itself
    in_whole_rows = (starts + MASK_BLOCK <= length)[:, None]  # a block with rows past the end is never full
    full = earlier & (last[:, :, None] == first[:, None, :]) & in_whole_rows
    partly = some & ~full
    by_query = (*_listed(partly), *_listed(full))
    by_key = (*_listed(partly.mT), *_listed(full.mT))
    return BlockMask((length, length), *by_query, *by_key, (MASK_BLOCK, MASK_BLOCK), may_look)


def _listed(dense_Bij: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of a row are set, int32 [B, 1, n]; their numbers, ascending, then the others' [B, 1, n, n]."""
    dense = dense_Bij[:, None].to(torch.int32, memory_format=torch.contiguous_format)
    numbers = torch.argsort(dense, dim=-1, descending=True, stable=True)
    return dense.sum(-1, dtype=torch.int32), numbers.to(torch.int32)


@functools.cache
def _compiled_flex():
    return torch.compile(flex_attention, dynamic=False)


HOPPER_TILES = {
    "fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3,
    "bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64,
    "bwd_num_warps": 4, "bwd_num_stages": 3,
}  # fmt: skip
"""FlexAttention's tiles on an H200 for queries of 96 and values of 64: 10 % less time forward, 5 % backward."""


def _tiles(q: Tensor) -> dict[str, int] | None:
    """Tiles that were measured to be better than FlexAttention's own choice; None: its choice."""
    if q.element_size() == 2 and 64 < q.shape[-1] <= 128 and _is_hopper(q.device):
        return HOPPER_TILES
    return None


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def attention(q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, mask: AttentionMask, scale: float) -> Tensor:
    """Causal attention inside documents.

    Args:
        q_BTHK, k_BTHK, v_BTHV: queries, keys, values; K and V may differ.
        mask: from ``build_mask``.
        scale: factor of the logits.

    Returns:
        [B, T, H, V] in v's dtype.
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTHK, v_BTHV))
    v_dim, size = v.shape[-1], max(v.shape[-1], q.shape[-1])
    if isinstance(mask, BlockMask):
        flex = flex_attention if torch.compiler.is_compiling() else _compiled_flex()
        q, k, v = (_padded(x, max(x.shape[-1], 16)) for x in (q, k, v))  # its smallest head size
        out = flex(q, k, v, block_mask=mask, scale=scale, kernel_options=_tiles(q))
        return out[..., :v_dim].transpose(1, 2)
    if mask is not None:
        mask = mask.to(q.dtype)
    if q.is_cuda:
        with sdpa_kernel(CUDA_ORDER, set_priority=True):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
        return out.transpose(1, 2)
    # Equal head sizes take the fused CPU kernel; unequal ones would build [B, H, T, T] twice over.
    q, k, v = (_padded(x, size) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    return out[..., :v_dim].transpose(1, 2)


def _padded(x: Tensor, size: int) -> Tensor:
    return x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))


@torch.no_grad()
def max_logit(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    doc_ids_BT: Tensor | None,
    scale: float,
    real_B: Tensor | None = None,
    rows: int = 256,
    stride: int = 1,
) -> Tensor:
    """Largest logit that each head's softmax sees, fp32 [H]; masked pairs and filler rows (``real_B`` False) excluded.

    Works through ``rows`` queries at a time, so that no [T, T] tensor of a whole batch is held. ``stride``: the queries
    given are those at positions 0, stride, 2 stride ... of the keys.
    """
    position = torch.arange(k_BTHK.shape[1], device=q_BTHK.device)
    asked = position[::stride]
    best = torch.full((q_BTHK.shape[2],), -torch.inf, device=q_BTHK.device)
    for start in range(0, len(asked), rows):
        at, q = asked[start : start + rows], q_BTHK[:, start : start + rows].float()
        stop = min((start + rows - 1) * stride + 1, len(position))
        logits = torch.einsum("bthk,bshk->bhts", q, k_BTHK[:, :stop].float()) * scale
        allowed = (at[:, None] >= position[None, :stop])[None]
        if doc_ids_BT is not None:
            allowed = allowed & (doc_ids_BT[:, at, None] == doc_ids_BT[:, None, :stop])
        if real_B is not None:
            allowed = allowed & real_B[:, None, None]
        best = torch.maximum(best, logits.masked_fill(~allowed[:, None], -torch.inf).amax(dim=(0, 2, 3)))
    return best
