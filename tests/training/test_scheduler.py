import math
import subprocess
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hymo.training.scheduler import (
    DECAY_KINDS,
    JointWSDScheduler,
    Phases,
    branch_phases,
    extend_phases,
    resolve_phases,
    steps_for_tokens,
)


def schedule(N, W, D, low=0.05, decay="linear"):
    return JointWSDScheduler(
        SimpleNamespace(total_steps=N, warmup_steps=W, decay_steps=D, min_lr_ratio=low, decay=decay)
    )


@st.composite
def phases(draw, largest=3000, decay_from=0):
    N = draw(st.integers(max(decay_from, 1), largest))
    D = draw(st.integers(decay_from, N))
    return Phases(W := draw(st.integers(0, N - D)), N - D - W, D)


# --- phases: whole updates out of fractions ---


def test_the_production_run_has_every_one_of_its_57220_updates():
    assert resolve_phases(57_220, 0.02, 0.83, 0.15) == (1144, 47_493, 8583)
    assert resolve_phases(57_220) == (1144, 47_493, 8583)
    assert sum(resolve_phases(57_220)) == 57_220


@pytest.mark.parametrize("tokens, N, W", [(30_000_000_000, 57_220, 1144), (7_500_000_000, 14_305, 286)])
def test_token_budgets(tokens, N, W):
    assert steps_for_tokens(tokens, 524_288) == N
    assert resolve_phases(N).W == W


def test_a_fraction_means_the_decimal_that_was_written():
    # in binary, 100 * 0.29 = 28.999999999999996, whose floor would be 28
    assert math.floor(100 * 0.29) == 28
    assert resolve_phases(100, 0.0, None, 0.29).D == 29
    assert resolve_phases(10, "0.1", None, "0.7") == (1, 2, 7)


@settings(deadline=None)
@given(st.integers(1, 10**7), st.integers(0, 1000), st.integers(0, 1000))
def test_phases_always_add_up(N, warm, dec):
    if warm + dec > 1000:
        warm, dec = 1000 - warm, 1000 - dec
    W, S, D = resolve_phases(N, warm / 1000, None, dec / 1000)
    assert W + S + D == N
    assert (N * warm // 1000, N * dec // 1000) == (W, D)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"total_steps": 0}, "total_steps: found 0"),
        ({"total_steps": 10.0}, "total_steps: found 10.0"),
        ({"total_steps": 100, "warmup_frac": -0.1}, "warmup_frac: found -0.1"),
        ({"total_steps": 100, "decay_frac": float("nan")}, "decay_frac: found nan"),
        ({"total_steps": 100, "decay_frac": "much"}, "decay_frac: found 'much'"),
        ({"total_steps": 100, "stable_frac": 0.8}, "accepted: a sum of exactly 1"),
        (
            {"total_steps": 100, "warmup_steps": 60, "decay_steps": 41},
            "found 60 [+] 41 = 101, accepted: at most total_steps",
        ),
        ({"total_steps": 100, "warmup_steps": -1}, "warmup_steps: found -1"),
    ],
)
def test_refusals_name_the_key(arguments, message):
    with pytest.raises(ValueError, match=message):
        resolve_phases(**arguments)


# --- the factor ---

# N=20, W=4, D=5, min 0.1: the first update already learns, the fourth is at the peak, the last is at the minimum
GOLDEN = {
    "linear": {0: 0.0, 1: 0.25, 2: 0.5, 4: 1.0, 5: 1.0, 15: 1.0, 16: 0.82, 17: 0.64, 19: 0.28, 20: 0.1, 21: 0.1},
    "cosine": {15: 1.0, 16: 0.9140576474687263, 17: 0.6890576474687263, 19: 0.18594235253127373, 20: 0.1},
    "sqrt": {15: 1.0, 16: 0.9049844718999243, 17: 0.7971370023173351, 19: 0.5024922359499621, 20: 0.1},
    "one_minus_sqrt": {15: 1.0, 16: 0.5975077640500379, 17: 0.4307900211696917, 19: 0.19501552810007574, 20: 0.1},
}


@pytest.mark.parametrize("kind", DECAY_KINDS)
def test_golden_table(kind):
    s = schedule(20, 4, 5, 0.1, kind)
    for step, value in GOLDEN[kind].items():
        assert s.get_factor(step) == pytest.approx(value, abs=1e-15), step


def test_production_values():
    s = schedule(57_220, 1144, 8583)
    assert s.get_factor(572) == 0.5
    assert s.get_factor(48_637) == 1.0
    assert s.get_factor(48_638) < 1.0
    assert s.get_factor(52_884) == pytest.approx(0.05 + 0.95 * (1 - 4247 / 8583), abs=1e-15)
    assert s.get_factor(57_219) > 0.05
    assert s.get_factor(57_220) == 0.05


@settings(deadline=None)
@given(phases(), st.sampled_from(DECAY_KINDS), st.floats(0, 1))
def test_the_ends_are_exact_and_the_shape_is_one_hill(p, kind, low):
    s = schedule(p.total, p.W, p.D, low, kind)
    factors = [s.get_factor(u) for u in range(p.total + 1)]
    assert factors[p.W] == 1.0 if p.S or p.D == 0 or p.W else True
    assert s.get_factor(p.decay_start) == (1.0 if p.decay_start or not p.W else 0.0)
    assert factors[0] == (0.0 if p.W else 1.0)
    if p.D:
        assert factors[p.total] == low
    assert s.get_factor(p.total + 1) == s.get_factor(10 * p.total) == low
    assert all(0.0 <= f <= 1.0 for f in factors)
    assert all(a < b for a, b in pairwise(factors[: p.W + 1]))
    assert all(f == 1.0 for f in factors[p.W : p.decay_start + 1])
    assert all(a >= b for a, b in pairwise(factors[p.decay_start :]))
    assert all(f >= low for f in factors[p.decay_start :])


@pytest.mark.parametrize("W, D", [(0, 0), (0, 10), (10, 0), (0, 3), (4, 6)])
def test_phases_of_no_length_are_legal(W, D):
    """A decay of no steps was a division by zero elsewhere (pytorch/torchtitan#1010)."""
    s = schedule(10, W, D)
    assert [s.get_factor(u) for u in range(12)][10] == (0.05 if D else 1.0)


@pytest.mark.parametrize("kind", DECAY_KINDS)
def test_decay_shapes_end_exactly(kind):
    assert JointWSDScheduler._decay_factor(0.0, kind) == 1.0
    assert JointWSDScheduler._decay_factor(1.0, kind) == 0.0
    for outside in (-1e-9, 1.0 + 1e-9, 1.000117, math.nan):
        with pytest.raises(ValueError, match="progress"):
            JointWSDScheduler._decay_factor(outside, kind)


def test_get_factor_is_pure():
    s = schedule(100, 10, 20)
    forwards = [s.get_factor(u) for u in range(101)]
    assert [s.get_factor(u) for u in reversed(range(101))] == forwards[::-1]


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match="decay: found 'exponential', accepted: linear, cosine"):
        schedule(10, 1, 1, decay="exponential")
    with pytest.raises(ValueError, match="min_lr_ratio: found 2"):
        schedule(10, 1, 1, low=2)
    with pytest.raises(ValueError, match="step: found -1"):
        schedule(10, 1, 1).get_factor(-1)


# --- a saved schedule, a longer one, a branch ---


def test_a_changed_schedule_is_refused_with_old_and_new():
    """Else the rate rises again after a resume (Nerogar/OneTrainer#1604)."""
    saved = schedule(100, 10, 20).state_dict()
    schedule(100, 10, 20).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"total_steps: 100 -> 200; stable_steps: 70 -> 170.*hymo branch"):
        schedule(200, 10, 20).load_state_dict(saved)
    with pytest.raises(ValueError, match="decay: 'linear' -> 'sqrt'"):
        schedule(100, 10, 20, decay="sqrt").load_state_dict(saved)


@settings(deadline=None)
@given(phases(), st.integers(0, 5000), st.sampled_from(DECAY_KINDS))
def test_an_extension_repeats_every_factor_before_the_old_decay(p, more, kind):
    total = p.total + more
    try:
        longer = extend_phases(p, total)
    except ValueError:
        assert total - total * 15 // 100 < p.decay_start
        return
    assert longer.W == p.W
    assert longer.total == total
    old, new = (schedule(x.total, x.W, x.D, 0.05, kind) for x in (p, longer))
    assert all(old.get_factor(u) == new.get_factor(u) for u in range(p.decay_start + 1))


def test_extension_of_the_production_run():
    longer = extend_phases(resolve_phases(57_220), 95_367)
    assert longer == (1144, 95_367 - 1144 - 14_305, 14_305)
    assert extend_phases(resolve_phases(57_220), 95_367, decay_steps=8583).D == 8583
    with pytest.raises(ValueError, match=r"would begin at update 34000.*update 48637 or later"):
        extend_phases(resolve_phases(57_220), 40_000)


@settings(deadline=None)
@given(phases(decay_from=1), st.data())
def test_a_branch_decays_from_the_peak_to_the_minimum_in_exactly_its_steps(p, data):
    at = data.draw(st.integers(p.W, p.decay_start))
    D = data.draw(st.integers(1, 500))
    b = branch_phases(p, at, D)
    assert b.total == at + D
    parent, branch = schedule(p.total, p.W, p.D), schedule(b.total, b.W, b.D)
    assert [branch.get_factor(u) for u in range(at + 1)] == [parent.get_factor(u) for u in range(at + 1)]
    assert branch.get_factor(at + 1) < 1.0
    assert branch.get_factor(at + D) == 0.05


@pytest.mark.parametrize("at", [9, 81])
def test_a_branch_starts_only_in_the_stable_phase(at):
    with pytest.raises(ValueError, match=f"step {at} cannot be branched from.*accepted: 10 to 80"):
        branch_phases(Phases(10, 70, 20), at, 5)


# --- for people ---


def test_landmarks_and_picture():
    s = schedule(57_220, 1144, 8583)
    assert s.landmarks()[0] == (1, "first update")
    assert (1144, "peak reached") in s.landmarks()
    assert (48_638, "decay begins") in s.landmarks()
    assert s.landmarks()[-1] == (57_220, "last update")
    lines = s.picture(width=40, height=5).splitlines()
    assert len(lines) == 7
    assert lines[0].startswith(" 1.00 ┤ █")
    assert lines[-1].endswith("57,220")
    assert schedule(1, 0, 0).picture(width=1)


def test_importable_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None; from hymo.training.scheduler import *; print(resolve_phases(57220))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "Phases(W=1144, S=47493, D=8583)"
