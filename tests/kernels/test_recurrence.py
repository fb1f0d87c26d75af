"""The public op: what it accepts, what it refuses and how, which backend it takes, and its one-token form."""

import pytest
import torch

from hymo.bench.recurrence_cases import document_ids, make_inputs, relative_error
from hymo.kernels import recurrence
from hymo.kernels.recurrence import gated_recurrence, gated_recurrence_step, last_backend, triton_gated_delta_rule

ORDER = ("v", "b", "c", "g", "A_log")


def call(inputs, **options):
    return gated_recurrence(*(inputs[name] for name in ORDER), **options)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 1e-3)], ids=str
)
def test_output_dtype_follows_v_and_the_state_is_float32(dtype, tolerance):
    inputs = make_inputs(2, 33, 2, 8, 6)
    low = {name: x.to(dtype) if name in ("v", "b", "c") else x.float() for name, x in inputs.items()}
    o, state = call(low, D=low["D"], h0=low["h0"], return_state=True)
    assert o.dtype == dtype
    assert state.dtype == torch.float32
    exact = {name: x.double() for name, x in low.items()}
    o_exact, state_exact = call(exact, D=exact["D"], h0=exact["h0"], return_state=True, backend="loop")
    assert o_exact.dtype == state_exact.dtype == torch.float64
    assert relative_error(o, o_exact) < tolerance
    assert relative_error(state, state_exact) < 1e-6


def test_a_low_precision_gate_is_computed_in_float32():
    inputs = make_inputs(1, 20, 2, 4, 4, dtype=torch.bfloat16)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    call(leaves).sum().backward()
    assert leaves["g"].grad.dtype == leaves["A_log"].grad.dtype == torch.bfloat16


@pytest.mark.parametrize("bound", [None, 5.0])
def test_a_sequence_in_two_parts_and_token_by_token(bound):
    inputs = make_inputs(2, 50, 2, 8, 6)
    o, state = call(inputs, D=inputs["D"], h0=inputs["h0"], return_state=True, max_log_decay=bound)
    first = [inputs[name][:, :23] for name in ORDER[:4]]
    rest = [inputs[name][:, 23:] for name in ORDER[:4]]
    o1, h = gated_recurrence(*first, inputs["A_log"], D=inputs["D"], h0=inputs["h0"], return_state=True)
    assert relative_error(o1, o[:, :23]) < 1e-13
    for t, token in enumerate(zip(*(x.unbind(1) for x in rest), strict=True)):
        kept = h.clone()
        o_t, h_next = gated_recurrence_step(*token, inputs["A_log"], h, D=inputs["D"])
        assert torch.equal(h, kept)
        assert relative_error(o_t, o[:, 23 + t]) < 1e-13
        h = h_next
    assert relative_error(h, state) < 1e-13


def test_padding_tokens_leave_the_state_as_it_is():
    inputs = make_inputs(1, 40, 2, 4, 4, dtype=torch.float32)
    padded = {name: x.clone() for name, x in inputs.items()}
    for name in ("v", "g"):
        padded[name][:, 30:] = 0
    short = {name: padded[name][:, :30] if name in ORDER[:4] else padded[name] for name in padded}
    assert torch.equal(call(padded, return_state=True)[1], call(short, return_state=True)[1])


def test_backends_say_which_ran():
    inputs = make_inputs(1, 8, 1, 4, 4, dtype=torch.float32)
    call(inputs)
    assert last_backend() == "torch"
    call(inputs, backend="loop")
    assert last_backend() == "loop"


def test_triton_never_falls_back(monkeypatch):
    inputs = make_inputs(1, 8, 1, 4, 4, dtype=torch.float32)
    arguments = [inputs[name] for name in ORDER]
    monkeypatch.setattr(recurrence, "HAS_TRITON", True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for attempt in (lambda: triton_gated_delta_rule(*arguments), lambda: call(inputs, backend="triton")):
        with pytest.raises(RuntimeError, match="CUDA"):
            attempt()
    monkeypatch.setattr(recurrence, "HAS_TRITON", False)
    with pytest.raises(ImportError, match="pip install triton"):
        triton_gated_delta_rule(*arguments)
    with pytest.raises(ImportError, match="backend='torch'"):
        recurrence.resolve_backend("auto", torch.device("cuda"))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"v": torch.zeros(2, 8, 6)}, ValueError, r"v: found shape \[2, 8, 6\], accepted is \[B,T,H,D\]"),
        ({"c": torch.zeros(2, 8, 3, 5)}, ValueError, r"c: found shape \[2, 8, 3, 5\], accepted is \[2, 8, 3, 4\]"),
        ({"g": torch.zeros(2, 8, 3, 1)}, ValueError, r"g: found shape \[2, 8, 3, 1\], accepted is \[2, 8, 3\]"),
        ({"A_log": torch.zeros(3)}, ValueError, r"A_log: found shape \[3\], accepted is \[3, 4\]"),
        ({"h0": torch.zeros(2, 3, 6, 4)}, ValueError, r"h0: found shape .*, accepted is \[2, 3, 4, 6\]"),
        ({"b": torch.zeros(2, 8, 3, 4).half()}, TypeError, r"b, c: found dtypes .*float16.*accepted is v's dtype"),
        ({"g": torch.zeros(2, 8, 3).long()}, TypeError, r"g: found dtype torch.int64, accepted are floating"),
        ({"doc_ids": torch.zeros(2, 8)}, TypeError, r"doc_ids: found dtype torch.float32, accepted are int32"),
        ({"doc_ids": torch.zeros(2, 7).int()}, ValueError, r"doc_ids: found shape \[2, 7\], accepted is \[2, 8\]"),
        ({"max_log_decay": -1.0}, ValueError, r"max_log_decay: found -1.0, accepted are None and positive"),
        ({"backend": "cuda"}, ValueError, r"backend: found 'cuda', accepted are auto, triton, torch, loop"),
        ({"beta": torch.zeros(2, 8, 3)}, NotImplementedError, "beta"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else None,
)
def test_refusals_name_what_was_found_and_what_is_accepted(changes, error, message):
    inputs = make_inputs(2, 8, 3, 4, 6, dtype=torch.float32)
    arguments = {name: changes.get(name, inputs[name]) for name in ORDER}
    options = {name: x for name, x in changes.items() if name not in ORDER}
    with pytest.raises(error, match=message):
        gated_recurrence(*arguments.values(), **options)


def test_debug_mode_checks_values_and_the_stated_bound(monkeypatch):
    inputs = make_inputs(1, 8, 1, 4, 4, dtype=torch.float32)
    monkeypatch.setattr(recurrence, "DEBUG", True)
    inputs["A_log"] = torch.full((1, 4), 5.0).log()
    inputs["g"] = torch.ones(1, 8, 1)
    call(inputs, max_log_decay=5.0)
    with pytest.raises(ValueError, match=r"max_log_decay: stated 4.9, but the largest log-decay of a step is 5"):
        call(inputs, max_log_decay=4.9)
    with pytest.raises(ValueError, match="doc_ids: found ids that decrease"):
        call(inputs, doc_ids=torch.tensor([[0, 0, 1, 1, 0, 0, 0, 0]]))
    inputs["g"] = -inputs["g"]
    with pytest.raises(ValueError, match=r"g: found -1\.0, accepted are gates >= 0"):
        call(inputs)


def test_document_ids_may_be_int32_or_int64():
    inputs = make_inputs(2, 24, 2, 4, 4)
    ids = document_ids(2, 24)
    assert torch.equal(call(inputs, doc_ids=ids), call(inputs, doc_ids=ids.long()))


def test_next_power_of_two():
    assert [recurrence._next_power_of_2(n) for n in (1, 2, 3, 31, 32, 33, 128)] == [1, 2, 4, 32, 32, 64, 128]
