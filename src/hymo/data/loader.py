"""Streams of batches: training attempts at any position, and evaluation over a whole validation set.

Nothing here has state but a position: the batches of an attempt are a function of (token set, order, position, rank).
"""

import math
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from hymo.data.batch import IGNORED, Batch, make_batch, windows
from hymo.data.order import Order
from hymo.data.shards import TokenSet


@dataclass(frozen=True)
class Deal:
    """How the samples of one attempt are dealt: contiguous runs to ranks, then rows to micro-batches.

    Every rank has `n_micro_batches` = ceil(ceil(samples / ranks) / micro_batch_size); the rows it has no sample for are
    filler, at its end.
    """

    samples: int
    world_size: int
    micro_batch_size: int

    @property
    def n_micro_batches(self) -> int:
        return math.ceil(math.ceil(self.samples / self.world_size) / self.micro_batch_size)

    @property
    def padded_share(self) -> float:
        """The share of rows over all ranks that are filler."""
        return 1 - self.samples / (self.world_size * self.n_micro_batches * self.micro_batch_size)

    def run_of(self, rank: int) -> range:
        """The samples of a rank, counted from the attempt's first."""
        return range(rank * self.samples // self.world_size, (rank + 1) * self.samples // self.world_size)

    def rows(self, rank: int, position: int) -> list[list[int | None]]:
        """Positions by micro-batch for a rank of the attempt that starts at `position`; None is a filler row."""
        run: list[int | None] = [position + i for i in self.run_of(rank)]
        run += [None] * (self.n_micro_batches * self.micro_batch_size - len(run))
        return [run[i : i + self.micro_batch_size] for i in range(0, len(run), self.micro_batch_size)]


class BatchStream:
    """The attempts of one rank from a position on, without end: each is the list of its micro-batches.

    Background threads make the next attempts (`prefetch` of them) while this one is computed; the order does not depend
    on `threads`, and 0 threads makes each when asked. `position` is that of the next attempt: keep it to resume.
    `wait_s` is the time the last `next` waited for data.
    """

    def __init__(
        self,
        token_set: TokenSet,
        order: Order,
        start_position: int,
        samples_per_attempt: int,
        *,
        seq_len: int,
        mtp_depth: int,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        threads: int = 1,
        prefetch: int = 2,
        pin_memory: bool = False,
    ):
        self.deal = Deal(samples_per_attempt, world_size, micro_batch_size)
        self.position = start_position
        self.wait_s = 0.0
        self._token_set, self._order, self._rank = token_set, order, rank
        self._seq_len, self._mtp_depth, self._pin_memory = seq_len, mtp_depth, pin_memory
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="hymo-data") if threads else None
        self._ahead: deque[Future[list[Batch]]] = deque()
        self._prefetch = max(prefetch, threads)

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        began = time.monotonic()
        if self._pool is None:
            batches = self._make(self.position)
        else:
            while len(self._ahead) <= self._prefetch:
                self._ahead.append(self._pool.submit(self._make, self.position + len(self._ahead) * self.deal.samples))
            batches = self._ahead.popleft().result()
        self.position += self.deal.samples
        self.wait_s = time.monotonic() - began
        return batches

    def _make(self, position: int) -> list[Batch]:
        rows = self.deal.rows(self._rank, position)
        batches = [make_batch(self._token_set, self._order, row, self._seq_len, self._mtp_depth) for row in rows]
        return [batch.pin_memory() for batch in batches] if self._pin_memory else batches

    def close(self) -> None:
        """Stop the background threads; the stream can be asked no more."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "BatchStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_COUNTS: WeakKeyDictionary[TokenSet, dict[tuple[int, int], tuple[int, float]]] = WeakKeyDictionary()
"""Labels and bytes of evaluations by (seq_len, windows)."""


class EvalBatches:
    """A whole validation set, or `max_tokens` evenly spread over it, for one rank; can be gone through again and again.

    Windows lie end to end, so that each token but a document's first is predicted once; the last is filled up. Every
    rank gets `n_batches` batches, the short ones filler rows. Nats summed over ranks / `n_labels` are the loss, and
    `bits_per_byte(nats, evaluation.n_bytes)` the other measure; both counts are over all ranks.
    """

    def __init__(
        self,
        token_set: TokenSet,
        token_bytes: npt.NDArray[np.int64],
        *,
        seq_len: int,
        mtp_depth: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        max_tokens: int | None = None,
    ):
        self._n_all = self.n_windows = math.ceil(max(1, token_set.n_tokens - 1) / seq_len)
        if max_tokens is not None:
            self.n_windows = min(self._n_all, math.ceil(max_tokens / seq_len))
        self._deal = Deal(self.n_windows, world_size, batch_size)
        self.n_batches = self._deal.n_micro_batches
        self._token_set, self._token_bytes, self._rank = token_set, token_bytes, rank
        self._seq_len, self._mtp_depth = seq_len, mtp_depth

    def __len__(self) -> int:
        return self.n_batches

    def __iter__(self) -> Iterator[Batch]:
        for starts in self.starts():
            yield windows(self._token_set, starts, self._seq_len, self._mtp_depth)

    def starts(self) -> Iterator[list[int | None]]:
        """Batch by batch, where in the token set each row begins; None for filler rows."""
        for row in self._deal.rows(self._rank, 0):
            yield [None if window is None else self._start(window) for window in row]

    def _start(self, window: int) -> int:
        return window * self._n_all // self.n_windows * self._seq_len

    @property
    def n_labels(self) -> int:
        """Main labels over all ranks: the tokens that are predicted."""
        return self._counts[0]

    @property
    def n_bytes(self) -> float:
        """UTF-8 bytes of the text that those labels spell, over all ranks (an end token spells none)."""
        return self._counts[1]

    @property
    def _counts(self) -> tuple[int, float]:
        """Counted once for a token set, not at each evaluation."""
        known = _COUNTS.setdefault(self._token_set, {})
        key = self._seq_len, self.n_windows
        if key not in known:
            known[key] = self._count()
        return known[key]

    def _count(self) -> tuple[int, float]:
        n_labels = n_bytes = 0
        for window in range(self.n_windows):
            labels = windows(self._token_set, [self._start(window)], self._seq_len, 0).labels_KBT.numpy()
            valid = labels[labels != IGNORED]
            n_labels += len(valid)
            n_bytes += int(self._token_bytes[valid].sum())
        return n_labels, n_bytes * self._token_set.token_bytes_scale


def bits_per_byte(nats: float, n_bytes: float) -> float:
    """Nats summed over all predicted tokens, end tokens included, as bits a byte of the text they spell."""
    return nats / (math.log(2) * n_bytes) if n_bytes else math.nan
