"""Batches of packed documents.

Shapes: B sequences, T = seq_len, L = T + depth (inputs that MTP looks ahead to), K = 1 + depth (main label and one a
depth).

The rule of windows: sample i is the inputs [i*T, (i+1)*T) of the token stream; its labels read K tokens past its end.
So a set has (n_tokens - K) // T samples, and what follows the last is left over. Label k at t is x[t+1+k] if it belongs
to the document of x[t], else IGNORED: no label crosses a document, the end token belongs to the document it ends (so it
is predicted), and the first token of a document is never predicted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hymo.data.order import MixOrder, Order, SampleOrder
from hymo.data.readers import DataError
from hymo.data.shards import MixedSource, TokenSet

IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """One micro-batch. Filler rows (real_B False) have token 0, document 0 and labels IGNORED throughout."""

    tokens_BL: Tensor  # int64 [B, T + depth]
    doc_ids_BL: Tensor  # int32 [B, T + depth], from 0 in each row
    labels_KBT: Tensor  # int64 [1 + depth, B, T]
    real_B: Tensor  # bool [B]

    def to(self, device: torch.device | str) -> "Batch":
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in self._tensors()))

    def clone(self) -> "Batch":
        return Batch(*(tensor.clone() for tensor in self._tensors()))

    def copy_(self, other: "Batch") -> None:
        """Take over the numbers of a batch of the same shapes; ValueError for another (``copy_`` would repeat rows)."""
        for tensor, values in zip(self._tensors(), other._tensors(), strict=True):
            if tensor.shape != values.shape:
                raise ValueError(f"batch: found a tensor of {tuple(values.shape)}, accepted: {tuple(tensor.shape)}")
            tensor.copy_(values)

    def pin_memory(self) -> "Batch":
        return Batch(*(tensor.pin_memory() for tensor in self._tensors()))

    def _tensors(self) -> tuple[Tensor, ...]:
        return self.tokens_BL, self.doc_ids_BL, self.labels_KBT, self.real_B


def count_samples(token_set: TokenSet, seq_len: int, mtp_depth: int) -> int:
    """Samples in one epoch (in a mix: of all sources). Raises DataError if a source has not even one."""
    return sum(_samples_of(source, seq_len, mtp_depth) for source in token_set.sources)


def _samples_of(source: MixedSource, seq_len: int, mtp_depth: int) -> int:
    n_samples = (source.n_tokens - 1 - mtp_depth) // seq_len
    if n_samples < 1:
        where = "" if source.share == 1 else f"{source.name!r}: "
        raise DataError(
            f"data.source: {where}{source.n_tokens} tokens of training text are less than one sample of"
            f" training.seq_len {seq_len} + {1 + mtp_depth} labels; give more text or a smaller seq_len"
        )
    return n_samples


def left_over_tokens(token_set: TokenSet, seq_len: int, mtp_depth: int) -> int:
    """Tokens at the end of each source that are no sample's input (seq_len + mtp_depth at most)."""
    return token_set.n_tokens - count_samples(token_set, seq_len, mtp_depth) * seq_len


def sample_order(token_set: TokenSet, seq_len: int, mtp_depth: int, seed: int) -> SampleOrder | MixOrder:
    """The order of a set's samples: of the whole set, or of a mix by its shares."""
    orders = [SampleOrder(_samples_of(s, seq_len, mtp_depth), seed, s.fingerprint) for s in token_set.sources]
    return orders[0] if len(orders) == 1 else MixOrder(orders, [s.share for s in token_set.sources], seed)


def sample_start(token_set: TokenSet, sample: int, seq_len: int, mtp_depth: int) -> int:
    """The first token of a sample; samples count through the sources one after the other."""
    for source in token_set.sources:
        n_samples = _samples_of(source, seq_len, mtp_depth)
        if sample < n_samples:
            return source.first_token + sample * seq_len
        sample -= n_samples
    raise IndexError(f"sample {sample} past the end of the set")


def make_batch(
    token_set: TokenSet, order: Order, positions: Sequence[int | None], seq_len: int, mtp_depth: int
) -> Batch:
    """The samples at `positions` of the order, one a row; None makes a filler row."""
    starts = [None if p is None else sample_start(token_set, order.index(p), seq_len, mtp_depth) for p in positions]
    return windows(token_set, starts, seq_len, mtp_depth)


def windows(token_set: TokenSet, starts: Sequence[int | None], seq_len: int, mtp_depth: int) -> Batch:
    """Rows of inputs [start, start + seq_len) with their labels; past the set's end stand token 0 and no label."""
    n_rows, n_read = len(starts), seq_len + mtp_depth + 1
    tokens = np.zeros((n_rows, n_read), dtype=np.int64)
    documents = np.zeros((n_rows, n_read), dtype=np.int64)
    known = np.zeros((n_rows, n_read), dtype=bool)
    for row, start in enumerate(starts):
        if start is not None:
            _fill_row(token_set, start, tokens[row], documents[row], known[row])
    labels = np.full((1 + mtp_depth, n_rows, seq_len), IGNORED, dtype=np.int64)
    for k in range(1 + mtp_depth):
        ahead = slice(1 + k, 1 + k + seq_len)
        same = known[:, ahead] & (documents[:, ahead] == documents[:, :seq_len])
        labels[k] = np.where(same, tokens[:, ahead], IGNORED)
    return Batch(
        torch.from_numpy(tokens[:, :-1].copy()),
        torch.from_numpy(documents[:, :-1].astype(np.int32)),
        torch.from_numpy(labels),
        torch.tensor([start is not None for start in starts], dtype=torch.bool),
    )


def _fill_row(
    token_set: TokenSet,
    start: int,
    tokens_L: npt.NDArray[np.int64],
    documents_L: npt.NDArray[np.int64],
    known_L: npt.NDArray[np.bool_],
) -> None:
    stop = min(start + len(tokens_L), token_set.n_tokens)
    n = stop - start
    tokens_L[:n], numbers = token_set.read(start, stop)
    documents_L[:n] = numbers - numbers[0]
    documents_L[n:] = documents_L[n - 1] + 1  # what lies past the end is a document of its own
    known_L[:n] = True
