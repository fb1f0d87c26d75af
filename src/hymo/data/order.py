"""The order of samples, by arithmetic: no list is kept, so any process can ask for any position at any time.

The permutation of an epoch is a keyed bijection of [0, n): a Feistel network over a grid of a x b >= n cells (a, b near
sqrt(n)), whose few cells beyond n are walked over. It uses integers alone and is fixed by golden values in the tests:
the same (seed, epoch, fingerprint, n) gives the same order on every machine, for good.
"""

import hashlib
import math
import struct
from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

_ROUNDS = 8
_MASK = (1 << 64) - 1
_MOST_CELLS = 4096  # of a cycle of a mix: shares that need more are rounded to this many


class Order(Protocol):
    """What a stream of batches needs to know: which sample stands at a position (0, 1, 2, ... without end)."""

    n_samples: int

    def index(self, position: int) -> int: ...


class SampleOrder:
    """Sample ids by position: p is sample `index(p)`, in epoch p // n_samples; each epoch visits every sample once.

    seed: the run's random seed. fingerprint: of the token set's content (TokenSet.fingerprint), so that other data has
    another order, and the same data the same one wherever it lies.
    """

    def __init__(self, n_samples: int, seed: int, fingerprint: str):
        if n_samples < 1:
            raise ValueError(f"n_samples must be at least 1, found {n_samples}")
        self.n_samples = n_samples
        self._seed, self._fingerprint = seed, fingerprint
        self._keys = (0, self._keys_of(0))

    def epoch(self, position: int) -> int:
        """How many times the data was used up before `position`."""
        return position // self.n_samples

    def index(self, position: int) -> int:
        """The sample at `position`."""
        if position < 0:
            raise ValueError(f"position must be at least 0, found {position}")
        epoch, i = divmod(position, self.n_samples)
        cached, keys = self._keys
        if cached != epoch:
            keys = self._keys_of(epoch)
            self._keys = (epoch, keys)  # one assignment: several threads may ask
        return permute(i, self.n_samples, keys)

    def _keys_of(self, epoch: int) -> tuple[int, ...]:
        return _round_keys(f"hymo-order-1|{self._seed}|{epoch}|{self._fingerprint}|{self.n_samples}")


class MixOrder:
    """Samples of several sources, each with an order and epochs of its own, in fixed shares.

    Positions go round in cycles of M, the least common denominator of the shares: each cycle holds exactly share * M
    samples of each source, scattered in an order of its own. A source's samples come by its own order, all once in each
    of its own epochs. Sample ids count through the sources one after the other.
    """

    def __init__(self, orders: Sequence[SampleOrder], shares: Sequence[Fraction], seed: int):
        if len(orders) != len(shares) or sum(shares) != 1 or min(shares) <= 0:
            raise ValueError(f"shares must be positive and add up to 1, one an order; found {[str(s) for s in shares]}")
        self.orders = list(orders)
        self.cells = _cells(shares)  # of a cycle, by source
        self.n_samples = sum(order.n_samples for order in orders)
        self._first_ids = [sum(order.n_samples for order in orders[:s]) for s in range(len(orders))]
        self._seed = seed
        self._keys = (0, self._keys_of(0))

    def source(self, position: int) -> tuple[int, int]:
        """The source of the sample at `position`, and the position in that source's own order."""
        if position < 0:
            raise ValueError(f"position must be at least 0, found {position}")
        cycle, i = divmod(position, sum(self.cells))
        cached, keys = self._keys
        if cached != cycle:
            keys = self._keys_of(cycle)
            self._keys = (cycle, keys)
        cell = permute(i, sum(self.cells), keys)
        for source, width in enumerate(self.cells):
            if cell < width:
                return source, cycle * width + cell
            cell -= width
        raise AssertionError("a cell lies in the cycle")

    def _keys_of(self, cycle: int) -> tuple[int, ...]:
        return _round_keys(f"hymo-mix-1|{self._seed}|{cycle}|{self.cells}")

    def index(self, position: int) -> int:
        """The sample at `position`."""
        source, own_position = self.source(position)
        return self._first_ids[source] + self.orders[source].index(own_position)


def _cells(shares: Sequence[Fraction]) -> list[int]:
    """Whole cells by source, in the ratio of the shares; rounded by largest remainder where they need too many."""
    total = min(math.lcm(*(share.denominator for share in shares)), _MOST_CELLS)
    cells = [max(1, math.floor(share * total)) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda s: (cells[s] - shares[s] * total, s))
    for s in by_remainder[: max(0, total - sum(cells))]:
        cells[s] += 1
    return cells


def permute(i: int, n: int, keys: tuple[int, ...]) -> int:
    """A bijection of [0, n) fixed by `keys` (an even number of 64-bit integers)."""
    rows = math.isqrt(n - 1) + 1
    columns = -(-n // rows)
    while True:
        row, column = divmod(i, columns)
        for k in range(0, len(keys), 2):
            row = (row + _mix(column + keys[k])) % rows
            column = (column + _mix(row + keys[k + 1])) % columns
        i = row * columns + column
        if i < n:
            return i


def _round_keys(text: str) -> tuple[int, ...]:
    return struct.unpack(f"<{_ROUNDS}Q", hashlib.blake2b(text.encode(), digest_size=8 * _ROUNDS).digest())


def _mix(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), on 64-bit integers."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
