"""The folded polynomial of the GPU path, here on the CPU, against the plain form."""

import pytest
import torch

from hymo.optim import batched
from hymo.optim.orthogonalize import REGISTRY, get_orthogonalizer, orthogonalize


@pytest.mark.parametrize("name", [n for n in REGISTRY if n not in ("exact", "gram")])
@pytest.mark.parametrize("shape", [(3, 6, 10), (3, 10, 6), (2, 5, 5), (1, 1, 4)])
def test_folded_equals_plain(name, shape, monkeypatch):
    monkeypatch.setattr(batched, "symmetric", None)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x[0] *= 1e-9
    record = get_orthogonalizer(name, 4 if name == "cubic" else 5)
    expected, out = orthogonalize(x, record), torch.full(shape, torch.nan)
    batched.folded(x.clone(), record, out)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    out.fill_(torch.nan)
    batched.fewest_launches(x.clone(), record, out)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_zero_matrices_stay_zero(monkeypatch):
    monkeypatch.setattr(batched, "symmetric", None)
    for form in (batched.folded, batched.fewest_launches):
        out = torch.full((2, 3, 4), torch.nan)
        form(torch.zeros(2, 3, 4), get_orthogonalizer("polar_express"), out)
        assert torch.equal(out, torch.zeros(2, 3, 4))
