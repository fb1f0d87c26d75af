"""The order of samples, by arithmetic: no list is kept, so any process can ask for any position at any time.

The permutation of an epoch is a keyed bijection of [0, n): a Feistel network over a grid of a x b >= n cells (a, b near
sqrt(n)), whose few cells beyond n are walked over. It uses integers alone and is fixed by golden values in the tests:
the same (seed, epoch, fingerprint, n) gives the same order on every machine, for good.
"""

import hashlib
import math
import struct

_ROUNDS = 8
_MASK = (1 << 64) - 1


class SampleOrder:
    """Sample ids by position: p is sample `index(p)`, in epoch p // n_samples; each epoch visits every sample once.

    seed: the run's random seed. fingerprint: of the token set's content (TokenSet.fingerprint), so that other data has
    another order, and the same data the same one wherever it lies.
    """

    def __init__(self, n_samples: int, seed: int, fingerprint: str):
        if n_samples < 1:
            raise ValueError(f"n_samples must be at least 1, found {n_samples}")
        self.n_samples = n_samples
        self.seed = seed
        self.fingerprint = fingerprint
        self._keys: tuple[int, tuple[int, ...]] = (0, self._round_keys(0))

    def epoch(self, position: int) -> int:
        """How many times the data was used up before `position`."""
        return position // self.n_samples

    def index(self, position: int) -> int:
        """The sample at `position` (0, 1, 2, ... without end)."""
        if position < 0:
            raise ValueError(f"position must be at least 0, found {position}")
        epoch, i = divmod(position, self.n_samples)
        cached, keys = self._keys
        if cached != epoch:
            keys = self._round_keys(epoch)
            self._keys = (epoch, keys)  # one assignment: several threads may ask
        return permute(i, self.n_samples, keys)

    def _round_keys(self, epoch: int) -> tuple[int, ...]:
        text = f"hymo-order-1|{self.seed}|{epoch}|{self.fingerprint}|{self.n_samples}"
        return struct.unpack(f"<{_ROUNDS}Q", hashlib.blake2b(text.encode(), digest_size=8 * _ROUNDS).digest())


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


def _mix(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), on 64-bit integers."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
