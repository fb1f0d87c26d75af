"""Polynomials, records and their errors against the float64 singular value decomposition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hymo.optim.orthogonalize import (
    POLAR_EXPRESS_LIST,
    REGISTRY,
    _newton_schulz_orthogonalize,
    get_orthogonalizer,
    orthogonalize,
)

SIGMAS = (1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3, 0.3445, 0.5, 0.7, 1.0)
# The scalar polynomial after all steps, computed by hand in float64.
GOLDEN = {
    ("cubic", 5): (0.00076, 0.00759, 0.07582, 0.22475, 0.65872, 0.99577, 0.99900, 1.0, 1.0, 1.0),
    ("cubic", 10): (0.00577, 0.05761, 0.52945, 0.96761, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0),
    ("quintic", 5): (0.04847, 0.47054, 0.69892, 1.12233, 0.71212, 1.07959, 1.08827, 0.76544, 1.12032, 0.69644),
    ("you", 5): (0.04926, 0.47498, 1.01803, 0.98569, 1.01905, 0.99622, 0.97924, 0.98587, 1.01369, 0.97835),
    ("polar_express", 5): (0.09881, 0.85887, 1.02711, 1.06051, 1.05916, 0.98314, 1.06833, 0.91061, 0.93563, 0.85913),
    ("deepseek_v4", 10): (1.00201, 1.0, 1.00002, 1.00049, 1.00006, 1.00013, 1.00017, 1.00016, 1.00047, 1.00001),
}
APPROXIMATE = [name for name in REGISTRY if name != "exact"]


def matrix(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def polar(g: torch.Tensor) -> torch.Tensor:
    u, _, vh = torch.linalg.svd(g.double(), full_matrices=False)
    return u @ vh


@pytest.mark.parametrize(("name", "steps"), list(GOLDEN))
def test_golden_values_of_the_scalar_polynomial(name, steps):
    record = get_orthogonalizer(name, steps)
    assert record.steps == steps
    for sigma, expected in zip(SIGMAS, GOLDEN[name, steps], strict=True):
        x = sigma
        for a, b, c in record.coefficients:
            x = a * x + b * x**3 + c * x**5
        assert x == pytest.approx(expected, abs=6e-6)


@pytest.mark.parametrize("name", APPROXIMATE)
@pytest.mark.parametrize("shape", [(7, 7), (5, 12), (12, 5), (1, 6), (6, 1), (3, 9, 4), (2, 3, 4, 6)])
def test_singular_values_follow_the_polynomial(name, shape):
    g = matrix(*shape)
    record = get_orthogonalizer(name)
    u, s, vh = torch.linalg.svd(g, full_matrices=False)
    x = s / (record.safety * torch.linalg.vector_norm(g, dim=(-2, -1))[..., None])
    for a, b, c in record.coefficients:
        x = a * x + b * x**3 + c * x**5
    torch.testing.assert_close(orthogonalize(g, record), (u * x.unsqueeze(-2)) @ vh, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", list(REGISTRY))
def test_the_scale_of_the_input_does_not_matter_and_zero_gives_zero(name):
    g = matrix(8, 5, dtype=torch.float32)
    expected = orthogonalize(g, name)
    for exponent in range(-12, 13, 4):
        torch.testing.assert_close(orthogonalize(g * 10.0**exponent, name), expected, rtol=2e-4, atol=2e-4)
    assert torch.equal(orthogonalize(torch.zeros(4, 3), name), torch.zeros(4, 3))
    mixed = torch.stack([torch.zeros(4, 3), g[:4, :3]])
    assert torch.equal(orthogonalize(mixed, name)[0], torch.zeros(4, 3))
    assert torch.isfinite(orthogonalize(mixed, name)).all()


@pytest.mark.parametrize("name", [name for name in REGISTRY if name != "exact"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matrices_too_small_for_float32_give_zeros_not_nan(name, dtype):
    """The squares of 1e-22 underflow: a norm that comes out too small starts the polynomial where it diverges."""
    record, g = get_orthogonalizer(name, dtype=dtype), matrix(48, 64, dtype=torch.float32)
    largest = torch.linalg.matrix_norm(orthogonalize(g, record))
    for exponent in range(-44, -10):
        found = torch.linalg.matrix_norm(orthogonalize(g * 10.0**exponent, record))
        assert (found == 0) if exponent < -16 else abs(found / largest - 1) < 2e-2


@pytest.mark.parametrize("name", list(REGISTRY))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_input_is_never_changed(name, dtype):
    g = matrix(6, 9, dtype=dtype)
    before = g.clone()
    out = orthogonalize(g, name)
    assert torch.equal(g, before)
    assert out.dtype == dtype
    assert out.data_ptr() != g.data_ptr()


@pytest.mark.parametrize("name", list(REGISTRY))
def test_a_batch_equals_its_matrices(name):
    g = matrix(4, 6, 5, dtype=torch.float32)
    each = torch.stack([orthogonalize(x, name) for x in g])
    torch.testing.assert_close(orthogonalize(g, name), each, rtol=1e-5, atol=1e-5)
    # The expert axis must not enter the norm: a slab of E matrices is not one matrix.
    s = torch.linalg.svdvals(orthogonalize(g * torch.tensor([1.0, 10.0, 1e3, 1e-3])[:, None, None], "deepseek_v4"))
    assert float((s - 1).abs().max()) < 0.01


def test_exact_is_the_polar_factor():
    for shape in ((6, 9), (9, 6), (5, 5)):
        torch.testing.assert_close(
            orthogonalize(matrix(*shape), "exact"), polar(matrix(*shape)), rtol=1e-12, atol=1e-12
        )


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 24), st.integers(1, 24), st.integers(0, 2**16))
def test_the_default_is_close_to_the_polar_factor(m, n, seed):
    """Polar Express ends within 0.15 of 1 for every singular value above 1e-3 of the norm."""
    g = matrix(m, n, seed=seed)
    s = torch.linalg.svdvals(g)
    out = torch.linalg.svdvals(orthogonalize(g))
    kept = s > 2e-3 * float(torch.linalg.vector_norm(s))
    assert float((out.sort().values - 1).abs()[kept.flip(0)].max()) < 0.16


def test_five_cubic_steps_do_not_orthogonalize_a_gaussian():
    """Singular values end in [0.25, 0.66]: far from the 1e-3 once claimed; five steps of the default end near 1."""
    g = matrix(896, 224, dtype=torch.float32)
    s = torch.linalg.svdvals(_newton_schulz_orthogonalize(g, 5))
    assert 0.24 < float(s.min()) < 0.27
    assert 0.64 < float(s.max()) < 0.67
    error = torch.linalg.vector_norm(_newton_schulz_orthogonalize(g) - polar(g)) / 224**0.5
    assert float(error) == pytest.approx(0.554, abs=0.01)
    assert float((torch.linalg.svdvals(orthogonalize(g)) - 1).abs().max()) < 0.15


def test_polar_express_carries_its_safety_factor():
    """Five steps belong to 1.02; other counts to the paper's list with 1.01 folded into all but the last triple."""
    assert get_orthogonalizer("polar_express", 5).safety == 1.02
    eight = get_orthogonalizer("polar_express", 8)
    assert eight.safety == 1.01
    assert eight.coefficients[-1] == POLAR_EXPRESS_LIST[-1]
    assert eight.coefficients[0][1] == pytest.approx(POLAR_EXPRESS_LIST[0][1] / 1.01**3)
    assert get_orthogonalizer("polar_express", 10).steps == 10
    s = torch.linalg.svdvals(orthogonalize(matrix(64, 32), get_orthogonalizer("polar_express", 8)))
    assert float((s - 1).abs().max()) < 1e-4


def test_the_gram_form_equals_the_plain_form():
    g = matrix(16, 40)
    torch.testing.assert_close(orthogonalize(g, "gram"), orthogonalize(g, "polar_express"), rtol=1e-8, atol=1e-8)


def test_large_values_do_not_overflow_the_norm():
    """A norm taken after a cast to half precision would be infinite."""
    g = matrix(8, 8, dtype=torch.float32) * 1e6
    for dtype in ("float16", "bfloat16"):
        out = orthogonalize(g, get_orthogonalizer("polar_express", dtype=dtype))
        assert torch.isfinite(out).all()
        assert 0.5 < float(torch.linalg.vector_norm(out)) / 8**0.5 < 1.2


def test_an_empty_matrix_and_bad_arguments():
    assert orthogonalize(torch.zeros(0, 5)).shape == (0, 5)
    with pytest.raises(ValueError, match=r"orthogonalize: found 'newton', accepted: polar_express, quintic"):
        get_orthogonalizer("newton")
    with pytest.raises(ValueError, match="ns_iterations: found 0"):
        get_orthogonalizer("cubic", 0)
    with pytest.raises(ValueError, match=r"shape \(5,\)"):
        orthogonalize(torch.zeros(5))


@pytest.mark.parametrize("name", ["exact", "polar_express", "cubic", "gram"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_matrix_that_is_not_finite_gives_nan_and_leaves_the_others_alone(name, value):
    g = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    expected = orthogonalize(g, name)
    g[1, 2, 3] = value
    found = orthogonalize(g, name)
    assert found[1].isnan().all()
    torch.testing.assert_close(found[[0, 2]], expected[[0, 2]])
    assert orthogonalize(g[1], name).isnan().all()
