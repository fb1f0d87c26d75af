import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hymo.data import MixOrder, SampleOrder


def test_golden_values():
    # These fix the order for good: runs that were stopped must go on with the same samples in every later version.
    order = SampleOrder(1000, seed=7, fingerprint="abc")
    assert [order.index(p) for p in range(8)] == [249, 250, 779, 95, 406, 268, 594, 829]
    assert [order.index(p) for p in range(1000, 1008)] == [534, 879, 53, 940, 757, 509, 161, 646]
    assert SampleOrder(10**12, seed=0, fingerprint="").index(10**12 + 5) == 970833227803
    assert [SampleOrder(5, 1, "x").index(p) for p in range(5)] == [0, 4, 2, 3, 1]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.integers(0, 2**63), st.text(max_size=8), st.integers(0, 3))
def test_each_epoch_visits_every_sample_once(n: int, seed: int, fingerprint: str, epoch: int):
    order = SampleOrder(n, seed, fingerprint)
    assert sorted(order.index(epoch * n + i) for i in range(n)) == list(range(n))


def test_epochs_seeds_and_contents_have_their_own_orders():
    def first(n, seed, fingerprint, epoch=0):
        order = SampleOrder(n, seed, fingerprint)
        return tuple(order.index(epoch * n + i) for i in range(n))

    orders = {first(50, *key) for key in itertools.product((0, 1), ("a", "b"), (0, 1))}
    assert len(orders) == 8


def test_any_position_in_any_sequence_of_asking():
    order = SampleOrder(37, 3, "f")
    straight = [order.index(p) for p in range(111)]
    assert [order.index(p) for p in reversed(range(111))] == straight[::-1]
    assert [SampleOrder(37, 3, "f").index(p) for p in (110, 0, 36, 37)] == [straight[p] for p in (110, 0, 36, 37)]


def test_the_order_looks_random():
    # Neighbours in the order are far apart: the mean distance of random neighbours is n / 3.
    n = 3000
    order = SampleOrder(n, 0, "content")
    ids = [order.index(p) for p in range(n)]
    mean = sum(abs(a - b) for a, b in itertools.pairwise(ids)) / (n - 1)
    assert abs(mean / (n / 3) - 1) < 0.05
    fixed = sum(i == p for p, i in enumerate(ids))
    assert fixed < 8  # a random permutation has one on average


@pytest.mark.parametrize("n", [1, 2, 3])
def test_tiny_sets(n: int):
    order = SampleOrder(n, 0, "")
    assert {order.index(p) for p in range(n)} == set(range(n))


def test_small_sets_reach_every_permutation():
    seen = {tuple(SampleOrder(4, seed, "").index(p) for p in range(4)) for seed in range(400)}
    assert len(seen) == 24


def test_bad_arguments():
    with pytest.raises(ValueError, match="n_samples must be at least 1, found 0"):
        SampleOrder(0, 0, "")
    with pytest.raises(ValueError, match="position must be at least 0, found -1"):
        SampleOrder(3, 0, "").index(-1)


def mix(shares: list[Fraction], sizes: list[int], seed: int = 5) -> MixOrder:
    return MixOrder([SampleOrder(n, seed, f"source {s}") for s, n in enumerate(sizes)], shares, seed)


def test_golden_values_of_a_mix():
    order = mix([Fraction(7, 10), Fraction(3, 10)], [50, 20])
    assert [order.index(p) for p in range(12)] == [25, 14, 66, 21, 40, 1, 13, 29, 53, 69, 50, 45]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=4), st.integers(0, 99))
def test_a_mix_has_exact_shares_and_visits_each_source_by_its_own_epochs(sources, seed):
    total = sum(weight for weight, _ in sources)
    shares, sizes = [Fraction(weight, total) for weight, _ in sources], [n for _, n in sources]
    order = mix(shares, sizes, seed)
    cycle = math.lcm(*(share.denominator for share in shares))
    n_cycles = 1 + 2 * max(sizes)
    dealt = [order.source(p) for p in range(cycle * n_cycles)]
    for c in range(n_cycles):
        drawn = [source for source, _ in dealt[c * cycle : (c + 1) * cycle]]
        assert [drawn.count(s) for s in range(len(sources))] == [share * cycle for share in shares]
    for s, n in enumerate(sizes):
        own = [position for source, position in dealt if source == s]
        assert sorted(own) == list(range(len(own)))  # each position of its own order once
        ids = sorted(order.index(p) for p, (source, position) in enumerate(dealt) if source == s and position < n)
        assert ids == list(range(sum(sizes[:s]), sum(sizes[: s + 1])))  # its first epoch: every sample once


def test_shares_that_need_too_many_cells_are_rounded():
    order = mix([Fraction(1, 10_007), Fraction(10_006, 10_007)], [10, 10])
    assert sum(order.cells) == 4096
    assert min(order.cells) == 1


def test_bad_shares():
    with pytest.raises(ValueError, match="add up to 1"):
        mix([Fraction(1, 2), Fraction(1, 3)], [5, 5])
