"""Inputs, gradients and the error measure that the recurrence benchmark and the tests share."""

import torch
from torch import Tensor

NAMES = ("v", "b", "c", "g", "A_log", "D", "h0")


def relative_error(x: Tensor, reference: Tensor) -> float:
    """RMS error over RMS of the reference, in float64."""
    x, reference = x.detach().double(), reference.detach().double()
    return ((x - reference).norm() / (reference.norm() + 1e-300)).item()


def make_inputs(
    B: int, T: int, H: int, S: int, D: int, *, seed: int = 0, dtype: torch.dtype = torch.float64, max_decay: float = 3.0
) -> dict[str, Tensor]:
    """Random arguments of the op: rates log-uniform up to ``max_decay``, gates in (0, 1)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    rates = max_decay * torch.exp(-4 * torch.rand(H, S, dtype=torch.float64, generator=generator))
    values = (normal(B, T, H, D), normal(B, T, H, S) / S**0.5, normal(B, T, H, S), normal(B, T, H).sigmoid())
    inputs = dict(zip(NAMES, (*values, rates.log(), normal(H), normal(B, H, S, D)), strict=True))
    return {name: x.to(dtype) for name, x in inputs.items()}


def document_ids(B: int, T: int, *, seed: int = 0, n: int = 6) -> Tensor:
    """Up to n documents a row at random places, some of length 0 (absent) or 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, n, (B, T), generator=generator).sort(1).values.int()


def outputs_and_gradients(op, inputs: dict[str, Tensor], *, seed: int = 1, state_loss: bool = True, **options):
    """{o, state, dv, db, ..} of ``op(v, b, c, g, A_log, D=, h0=, return_state=True)`` for a fixed random loss."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    sequence = [leaves[name] for name in ("v", "b", "c", "g", "A_log")]
    rest = {name: leaves[name] for name in ("D", "h0") if name in leaves}
    o, state = op(*sequence, **rest, return_state=True, **options)
    generator = torch.Generator().manual_seed(seed)
    do, dstate = (torch.randn(x.shape, dtype=torch.float64, generator=generator).to(x) for x in (o, state))
    loss = (o * do).sum() + ((state * dstate).sum() if state_loss else 0)
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {"o": o, "state": state} | {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}
