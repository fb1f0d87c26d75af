"""The chunked form against the loop's autograd in float64, and its behaviour in float32 at the extremes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from hymo.bench.recurrence_cases import document_ids, make_inputs, outputs_and_gradients, relative_error
from hymo.kernels import chunked
from hymo.kernels.chunked import chunked_recurrence, leaf_fits, scan_by_pairs_, scan_in_order_, states_at_chunks
from hymo.kernels.recurrence import gated_recurrence

FORMS = {"dyadic": None, "leaf": 5.0}
SHAPES = [(2, 1, 3, 4, 5), (1, 15, 2, 5, 4), (2, 16, 1, 3, 8), (1, 17, 2, 8, 8), (2, 63, 3, 8, 5), (1, 100, 2, 16, 24)]


def compare(inputs, *, doc_ids=None, max_log_decay=None, tolerance=1e-12, **options):
    reference = outputs_and_gradients(gated_recurrence, inputs, doc_ids=doc_ids, backend="loop", **options)
    got = outputs_and_gradients(
        gated_recurrence, inputs, doc_ids=doc_ids, max_log_decay=max_log_decay, backend="torch", **options
    )
    for name, x in got.items():
        assert torch.isfinite(x).all(), name
        assert relative_error(x, reference[name]) < tolerance, name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_equals_the_loop_in_float64(shape, form, packed):
    doc_ids = document_ids(*shape[:2]) if packed else None
    compare(make_inputs(*shape), doc_ids=doc_ids, max_log_decay=FORMS[form])


@settings(max_examples=25, deadline=None)
@given(
    T=st.integers(1, 70), S=st.integers(1, 9), D=st.integers(1, 9), n_docs=st.integers(1, 40), seed=st.integers(0, 999)
)
def test_any_length_size_and_packing(T, S, D, n_docs, seed):
    for bound in FORMS.values():
        compare(
            make_inputs(1, T, 2, S, D, seed=seed), doc_ids=document_ids(1, T, seed=seed, n=n_docs), max_log_decay=bound
        )


@pytest.mark.parametrize("C", [16, 32, 64])
def test_chunk_size_changes_nothing(C, monkeypatch):
    monkeypatch.setattr(chunked, "DYADIC_CHUNK", C)
    compare(make_inputs(1, 70, 2, 4, 6))


def test_without_skip_and_state_and_for_a_loss_on_the_state_alone():
    inputs = make_inputs(2, 40, 2, 4, 6)
    compare({name: x for name, x in inputs.items() if name not in ("D", "h0")})
    leaves = [inputs[name].clone().requires_grad_() for name in ("v", "b", "g", "A_log")]
    v, b, g, A_log = leaves
    gradients = []
    for backend in ("loop", "torch"):
        state = gated_recurrence(v, b, inputs["c"], g, A_log, return_state=True, backend=backend)[1]
        gradients.append(torch.autograd.grad(state.square().sum(), leaves))
    for got, reference in zip(*reversed(gradients), strict=True):
        assert relative_error(got, reference) < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_gradcheck(form):
    inputs = make_inputs(1, 19, 2, 3, 2)
    leaves = [x.requires_grad_() for x in inputs.values()]
    op = lambda *xs: chunked_recurrence(*xs, max_log_decay=FORMS[form])  # noqa: E731
    assert torch.autograd.gradcheck(op, leaves, fast_mode=True)


@pytest.mark.parametrize("rate", [0.0, 1e-3, 1.0, 5.0, 20.0, 40.0, 1e4])
@pytest.mark.parametrize("gate", ["zero", "tiny", "random", "one"])
def test_float32_is_exact_at_any_decay(rate, gate):
    """No overflow and no lost digits, forward and backward, from no decay to states that forget at once."""
    inputs = make_inputs(1, 70, 2, 8, 8)
    inputs["A_log"] = torch.full((2, 8), math.log(rate) if rate else -math.inf, dtype=torch.float64)
    gates = {"zero": 0 * inputs["g"], "tiny": 1e-6 * inputs["g"], "random": inputs["g"], "one": 0 * inputs["g"] + 1}
    inputs["g"] = gates[gate]
    single = {name: x.float() for name, x in inputs.items()}
    inputs = {name: x.double() for name, x in single.items()}
    reference = outputs_and_gradients(gated_recurrence, inputs, backend="loop")
    for bound in [None] + [5.0] * (rate <= 5):
        got = outputs_and_gradients(gated_recurrence, single, max_log_decay=bound, backend="torch")
        for name, x in got.items():
            assert torch.isfinite(x).all(), name
            error = relative_error(x, reference[name])
            vanishes = reference[name].abs().max() < 1e-30  # a decay so strong that no gradient reaches the gate
            # exp(-40) itself is known to 2e-6; the leaf form rounds exponents of up to 75 and their inverses
            allowed = 1e-5 if name in ("dg", "dA_log", "dh0") or bound else 1e-6
            assert error < allowed or (vanishes and x.abs().max() < 1e-30), (name, error)


@pytest.mark.parametrize("form", FORMS)
def test_the_past_does_not_see_the_future_by_one_bit(form):
    inputs = make_inputs(2, 70, 2, 8, 8, dtype=torch.float32)
    sequence = [inputs[name] for name in ("v", "b", "c", "g", "A_log")]
    before = gated_recurrence(*sequence, max_log_decay=FORMS[form])
    for cut in (1, 15, 16, 37, 64):
        changed = [x.clone() for x in sequence]
        for x in changed[:4]:
            x[:, cut:] = torch.rand_like(x[:, cut:])
        after = gated_recurrence(*changed, max_log_decay=FORMS[form])
        assert torch.equal(before[:, :cut], after[:, :cut])


@pytest.mark.parametrize("form", FORMS)
def test_a_document_does_not_see_its_neighbours_by_one_bit(form):
    inputs = make_inputs(1, 70, 2, 8, 8, dtype=torch.float32)
    sequence = [inputs[name] for name in ("v", "b", "c", "g", "A_log")]
    doc_ids = torch.tensor([[0] * 5 + [1] * 1 + [2] * 34 + [3] * 30])
    inside = doc_ids[0] == 2
    options = {"doc_ids": doc_ids, "max_log_decay": FORMS[form]}
    changed = [x.clone() for x in sequence]
    for x in changed[:4]:
        x[:, ~inside] = torch.rand_like(x[:, ~inside])
    before, after = gated_recurrence(*sequence, **options), gated_recurrence(*changed, **options)
    assert torch.equal(before[:, inside], after[:, inside])
    assert not torch.equal(before[:, ~inside], after[:, ~inside])


def test_packed_equals_each_document_alone():
    inputs = make_inputs(1, 96, 2, 8, 6)
    lengths = [5, 1, 30, 2, 26, 32]
    doc_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    sequence = [inputs[name] for name in ("v", "b", "c", "g")]
    for bound in FORMS.values():
        packed = gated_recurrence(*sequence, inputs["A_log"], doc_ids=doc_ids, max_log_decay=bound)
        alone = [
            gated_recurrence(*parts, inputs["A_log"], max_log_decay=bound)
            for parts in zip(*(x.split(lengths, 1) for x in sequence), strict=True)
        ]
        assert relative_error(packed, torch.cat(alone, 1)) < 1e-13


def test_known_special_cases():
    """g = 0 is causal linear attention; one rate a head is the scalar-gate form, written as masked attention."""
    inputs = make_inputs(1, 50, 2, 8, 6)
    v, b, c, g = (inputs[name].movedim(1, 2) for name in ("v", "b", "c", "g"))
    A_log = inputs["A_log"][:, :1].expand(2, 8)
    for gate in (torch.zeros_like(g), g):
        total = gate.cumsum(-1)
        weights = ((total[..., None, :] - total[..., None]) * A_log[:, :1, None].exp()).exp().tril()
        expected = ((c @ b.mT) * weights) @ v
        got = gated_recurrence(*(x.movedim(2, 1) for x in (v, b, c, gate)), A_log)
        assert relative_error(got, expected.movedim(2, 1)) < 1e-13


def test_compiles_as_one_graph():
    inputs = make_inputs(1, 40, 2, 4, 4, dtype=torch.float32)
    doc_ids = document_ids(1, 40)

    def op(*args, **kwargs):
        return gated_recurrence(*args, **kwargs, doc_ids=doc_ids, max_log_decay=5.0, backend="torch")

    eager = outputs_and_gradients(op, inputs)
    torch._dynamo.reset()
    compiled = outputs_and_gradients(torch.compile(op, fullgraph=True, backend="aot_eager"), inputs)
    for name, x in compiled.items():
        assert relative_error(x, eager[name]) < 1e-5, name


@settings(max_examples=60, deadline=None)
@given(N=st.integers(1, 140), reverse=st.booleans(), edge=st.booleans(), cut=st.floats(0, 1), seed=st.integers(0, 999))
def test_both_scans_equal_a_plain_loop(N, reverse, edge, cut, seed):
    """Any number of chunks, with decays of zero where documents start: from exactly the state that is there."""
    draw = torch.Generator().manual_seed(seed)
    x_NS, decay_NS = (torch.rand(N, 3, generator=draw, dtype=torch.float64) for _ in range(2))
    decay_NS[torch.rand(N, generator=draw) < cut] = 0.0
    y_N = torch.randn(N, generator=draw, dtype=torch.float64)
    h_S = torch.randn(3, generator=draw, dtype=torch.float64) if edge else torch.zeros(3, dtype=torch.float64)
    expected = [h_S]
    for n in reversed(range(N)) if reverse else range(N):
        expected.append(decay_NS[n] * expected[-1] + x_NS[n] * y_N[n])
    expected = torch.stack(expected[::-1] if reverse else expected)

    x, y, decay = x_NS[:, None, None, None], y_N[:, None, None, None, None], decay_NS[:, None, None]
    got = states_at_chunks(x, y, decay, h_S[None, None, :, None] if edge else None, reverse)
    torch.testing.assert_close(got[:, 0, 0, :, 0], expected, rtol=1e-13, atol=1e-13)

    unused = torch.full((1, 3), 7.0, dtype=torch.float64)
    decay = torch.cat([decay_NS, unused] if reverse else [unused, decay_NS])
    start = torch.cat([x_NS * y_N[:, None], h_S[None]] if reverse else [h_S[None], x_NS * y_N[:, None]])
    for scan in (scan_in_order_, scan_by_pairs_):
        states = start.clone()
        scan(states, decay, reverse)
        torch.testing.assert_close(states, expected, rtol=1e-13, atol=1e-13)
        alone = torch.arange(N + 1) != (N if reverse else 0)
        alone[alone.clone()] = decay_NS[:, 0] == 0
        assert torch.equal(states[alone], start[alone])  # by no bit of what was before


def test_the_scan_is_an_operator_that_holds_its_promises():
    x, y, decay = torch.rand(3, 2, 2, 4, 5), torch.rand(3, 2, 2, 4, 6), torch.rand(3, 2, 2, 5)
    for edge, reverse in ((None, False), (torch.rand(2, 2, 5, 6), True)):
        checks = torch.library.opcheck(chunked.chunk_states, (x, y, decay, edge, reverse))
        assert set(checks.values()) == {"SUCCESS"}


def test_the_compiled_graphs_do_not_grow_with_the_sequence():
    """The walk over chunks once made 545 operations at 1,024 tokens, 1,505 at 4,096: minutes of inductor."""

    def sizes(T):
        counts = []

        def count(graph, _):
            counts.append(len(graph.graph.nodes))
            return make_boxed_func(graph.forward)

        def op(*args):
            return gated_recurrence(*args, max_log_decay=5.0, backend="torch")

        inputs = make_inputs(1, T, 1, 2, 2, dtype=torch.float32)
        leaves = [inputs[name].requires_grad_() for name in ("v", "b", "c", "g", "A_log")]
        torch._dynamo.reset()
        backend = aot_autograd(fw_compiler=count, bw_compiler=count)
        torch.compile(op, fullgraph=True, dynamic=False, backend=backend)(*leaves).sum().backward()
        return counts

    short, long = sizes(256), sizes(1024)
    assert len(short) == 2
    assert short == long


def test_the_bound_that_selects_the_leaf_form():
    assert leaf_fits(5.0)
    assert leaf_fits(80 / 15)
    assert not leaf_fits(5.4)
    assert not leaf_fits(None)
