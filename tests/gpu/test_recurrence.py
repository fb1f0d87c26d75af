"""The Triton recurrence on a GPU, in bfloat16, against float64: the error bounds, causality, documents, determinism."""

import math

import pytest
import torch

from hymo.bench.recurrence_cases import document_ids, make_inputs, outputs_and_gradients
from hymo.kernels.recurrence import gated_recurrence, last_backend

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BOUNDS = {"dg": 5e-3, "dA_log": 5e-3}  # all others 4e-3


def make(B, T, H, S, D, *, max_decay=3.0, dtype=torch.bfloat16, h0=True):
    inputs = {name: x.cuda() for name, x in make_inputs(B, T, H, S, D, max_decay=max_decay).items()}
    if not h0:
        inputs.pop("h0")
    return {name: x.to(dtype) if name in ("v", "b", "c") else x.float() for name, x in inputs.items()}


def check(inputs, *, doc_ids=None, max_log_decay=None, scale=1.0):
    """Every result within its bound, over all heads together and for each head that is not negligible."""
    exact = {name: x.double() for name, x in inputs.items()}
    reference = outputs_and_gradients(gated_recurrence, exact, doc_ids=doc_ids, backend="torch")
    got = outputs_and_gradients(gated_recurrence, inputs, doc_ids=doc_ids, max_log_decay=max_log_decay)
    assert last_backend() == "triton"
    for name, x in got.items():
        expected = reference[name]
        assert torch.isfinite(x).all(), name
        error = (x.double() - expected).norm() / expected.norm()
        assert error <= scale * BOUNDS.get(name, 4e-3), (name, error.item())


@pytest.mark.parametrize("rate", [1e-3, 0.2, 1.0, 4.0, 20.0, 40.0, 1e4])
def test_errors_over_the_decay_grid(rate):
    inputs = make(2, 500, 3, 32, 32)
    inputs["A_log"] = torch.full((3, 32), math.log(rate), device="cuda")
    exact = {name: x.double() for name, x in inputs.items()}
    reference = outputs_and_gradients(gated_recurrence, exact, backend="torch")
    for bound in [None] + [5.0] * (rate <= 5):
        got = outputs_and_gradients(gated_recurrence, inputs, max_log_decay=bound)
        for name, x in got.items():
            assert torch.isfinite(x).all(), name
            size = reference[name].norm()
            error = (x.double() - reference[name]).norm() / (size + 1e-30)
            assert error <= BOUNDS.get(name, 4e-3) or size < 1e-6, (bound, name, error.item())


def test_gates_that_are_all_held_get_gradients_of_their_true_decay():
    """Between neighbours exp(-10): far below what bfloat16 resolves beside v, yet all that there is for a gate."""
    inputs = make(2, 500, 3, 32, 32)
    inputs |= {"g": torch.full_like(inputs["g"], 0.5), "A_log": torch.full_like(inputs["A_log"], math.log(20.0))}
    check(inputs)


@pytest.mark.parametrize(("weak", "strong"), [(0.01, 8.1), (1e-3, 12.0), (0.0, 20.0)])
def test_a_held_gate_among_weak_ones(weak, strong):
    """All rates are 1. The sum for the rates weighs the strong gates, whose own gradients are small."""
    inputs = make(2, 500, 3, 32, 32)
    g = torch.full_like(inputs["g"], weak)
    g[:, 5::16] = strong
    check(inputs | {"g": g, "A_log": torch.zeros_like(inputs["A_log"])})


@pytest.mark.parametrize("bound", [None, 5.0], ids=["held", "leaf"])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 4, 4), (2, 63, 3, 16, 24), (1, 1000, 2, 32, 32), (2, 129, 2, 40, 128)], ids=str
)
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_shapes_and_documents(shape, bound, packed):
    if shape[1] == 1:
        packed = False
    doc_ids = document_ids(*shape[:2]).cuda() if packed else None
    # a handful of numbers: their roundings do not average out
    check(make(*shape), doc_ids=doc_ids, max_log_decay=bound, scale=2.5 if shape[1] < 16 else 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_dtypes(dtype):
    check(make(1, 200, 2, 32, 32, dtype=dtype), scale=1e-2 if dtype == torch.float32 else 1.0)


@pytest.mark.parametrize("bound", [None, 5.0], ids=["held", "leaf"])
def test_bitwise_causality_documents_and_determinism(bound):
    inputs = make(1, 700, 4, 32, 32, h0=False)
    sequence = [inputs[name] for name in ("v", "b", "c", "g", "A_log")]
    options = {"max_log_decay": bound}
    before = gated_recurrence(*sequence, **options)
    for cut in (1, 15, 16, 300, 512, 699):
        changed = [x.clone() for x in sequence]
        for x in changed[:4]:
            x[:, cut:] = torch.rand_like(x[:, cut:])
        assert torch.equal(gated_recurrence(*changed, **options)[:, :cut], before[:, :cut])
    doc_ids = torch.tensor([[0] * 100 + [1] * 450 + [2] * 150], device="cuda", dtype=torch.int32)
    inside = doc_ids[0] == 1
    changed = [x.clone() for x in sequence]
    for x in changed[:4]:
        x[:, ~inside] = torch.rand_like(x[:, ~inside])
    a, b = (gated_recurrence(*xs, doc_ids=doc_ids, **options) for xs in (sequence, changed))
    assert torch.equal(a[:, inside], b[:, inside])
    first = outputs_and_gradients(gated_recurrence, inputs, **options)
    for _ in range(50):
        for name, x in outputs_and_gradients(gated_recurrence, inputs, **options).items():
            assert torch.equal(x, first[name]), name


def test_fullgraph_compilation():
    inputs = make(1, 256, 2, 32, 32)
    eager = outputs_and_gradients(gated_recurrence, inputs, max_log_decay=5.0)
    compiled = torch.compile(gated_recurrence, fullgraph=True)
    for name, x in outputs_and_gradients(compiled, inputs, max_log_decay=5.0).items():
        assert torch.allclose(x.float(), eager[name].float(), rtol=1e-2, atol=1e-2), name


def test_one_binary_for_all_lengths():
    from hymo.kernels.triton_forward import forward_kernel

    inputs = make(1, 2048, 2, 32, 32, h0=False)
    counts = []
    for T in (2048, 64, 128, 576, 1024, 1984):
        gated_recurrence(*(inputs[name][:, :T].contiguous() for name in "vbcg"), inputs["A_log"], max_log_decay=5.0)
        counts.append(sum(len(cache[0]) for cache in forward_kernel.device_caches.values()))
    assert len(set(counts)) == 1, counts
