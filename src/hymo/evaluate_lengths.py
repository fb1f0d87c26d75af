"""Loss by the length of the document that a token belongs to.

Shape suffixes: B batch, T sequence, C width, N predicted tokens, V vocabulary, K buckets of lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hymo.data.batch import IGNORED
from hymo.data.loader import EvalBatches, bits_per_byte
from hymo.data.shards import TokenSet
from hymo.distributed import reduce
from hymo.evaluate import EvalResult
from hymo.models.model import HyMo

BUCKETS = 40
MOST_LOGITS = 1 << 25
"""Numbers of a piece of the logits."""


@dataclass(frozen=True)
class LengthResult:
    """Of the documents with ``shortest`` to ``longest`` tokens, end token included: how many the set has, and what was
    predicted of them."""

    shortest: int
    longest: int
    documents: int
    result: EvalResult


@torch.no_grad()
def evaluate_by_length(
    model: HyMo, batches: EvalBatches, token_set: TokenSet, token_bytes: np.ndarray, device: torch.device
) -> tuple[EvalResult, list[LengthResult]]:
    """One pass over ``batches`` (of ``token_set``): the result of all tokens, and by powers of two of the length.

    Every token counts alike (token-weighted), in the bucket of its whole document, wherever windows cut it. Collective.
    """
    lengths = token_set.document_lengths()
    bucket_of = torch.from_numpy(np.frexp(lengths)[1] - 1)  # floor(log2(length))
    bytes_of = torch.from_numpy(token_bytes).double()
    sums_3K = torch.zeros(3, BUCKETS, dtype=torch.float64)  # nats, predicted tokens, bytes
    for starts, batch in zip(batches.starts(), batches, strict=True):
        documents_BT = batch.doc_ids_BL[:, : batch.labels_KBT.shape[-1]] + _first_documents(token_set, starts)
        labels_BT = batch.labels_KBT[0]
        valid_BT = labels_BT != IGNORED
        nats_N = token_nats(model, batch.tokens_BL.to(device), batch.doc_ids_BL.to(device), labels_BT.to(device)).cpu()
        bucket_N = bucket_of[documents_BT[valid_BT]]
        for row, values_N in enumerate((nats_N, torch.ones_like(nats_N), bytes_of[labels_BT[valid_BT]])):
            sums_3K[row].index_add_(0, bucket_N, values_N)
    sums_3K = reduce.sum_across(sums_3K.to(device)).cpu()
    counts = np.bincount(bucket_of, minlength=BUCKETS)
    rows = [
        LengthResult(2**k, 2 ** (k + 1) - 1, int(counts[k]), _result(sums_3K[:, k], token_set))
        for k in range(BUCKETS)
        if sums_3K[1, k]
    ]
    return _result(sums_3K.sum(1), token_set), rows


def _first_documents(token_set: TokenSet, starts: list[int | None]) -> Tensor:
    """The document that each row begins with, int64 [B, 1]; 0 for filler rows."""
    return torch.tensor([[0 if start is None else int(token_set.read(start, start + 1)[1][0])] for start in starts])


@torch.no_grad()
def token_nats(model: HyMo, tokens_BL: Tensor, doc_ids_BL: Tensor | None, labels_BT: Tensor) -> Tensor:
    """-log p of every label that is not IGNORED, in nats, float64 [N], row by row; in evaluation mode, main head."""
    length = labels_BT.shape[1]
    doc_ids_BT = None if doc_ids_BL is None else doc_ids_BL[:, :length]
    hidden_BTC = model.eval().forward_with_hidden(tokens_BL[:, :length], doc_ids_BT, depth=0)[0]
    valid_BT = labels_BT != IGNORED
    return torch.cat([nats.double() for nats, _ in label_scores(model, hidden_BTC[valid_BT], labels_BT[valid_BT])])


def label_scores(model: HyMo, hidden_NC: Tensor, labels_N: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(-log p in nats, whether the label is the likeliest token) of pieces of the labels, never all logits at once."""
    piece = max(1, MOST_LOGITS // model.config.vocab_size)
    for hidden, labels in zip(hidden_NC.split(piece), labels_N.split(piece), strict=True):
        logits_NV = model.head.logits(hidden)
        yield F.cross_entropy(logits_NV, labels, reduction="none"), logits_NV.argmax(-1) == labels


def _result(sums_3: Tensor, token_set: TokenSet) -> EvalResult:
    nats, tokens, n_bytes = sums_3.tolist()
    n_bytes *= token_set.token_bytes_scale
    return EvalResult(nats / max(tokens, 1), bits_per_byte(nats, n_bytes), int(tokens), n_bytes)


def table(rows: list[LengthResult]) -> str:
    """The rows for a terminal."""
    lines = ["  document length    documents       tokens     loss      bpb  perplexity"]
    for row in rows:
        r = row.result
        bpb = "-" if math.isnan(r.val_bpb) else f"{r.val_bpb:.4f}"
        lines.append(
            f"  {f'{row.shortest:,}-{row.longest:,}':<16} {row.documents:>11,} {r.tokens:>12,} {r.val_loss:>8.4f} "
            f"{bpb:>8} {r.perplexity:>11.2f}"
        )
    return "\n".join(lines)
