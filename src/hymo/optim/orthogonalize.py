"""Orthogonal polar factors of matrices by odd matrix polynomials.

Every step is X <- aX + bXX^T X + c(XX^T)^2 X, started from X0 = G / (safety * ||G||_F). A family of coefficients is
right only with the safety factor and the number of steps it was derived for, so the three live in one frozen record.

How close the result comes to the polar factor depends on the smallest singular value over the Frobenius norm, never on
the number of steps alone: a matrix of rank r has sigma_min / ||G||_F <= 1/sqrt(r). See docs/optimizers.md for the
table.

Sources: Keller Jordan's Muon (quintic); You Jiacheng's five tuned triples; Polar Express, arXiv 2505.16932; the
ten-step schedule of DeepSeek-V4; Gram Newton-Schulz by Dao-AILab. Shapes: [..., m, n], any number of leading
dimensions.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Triple = tuple[float, float, float]
# A matrix of a smaller Frobenius norm counts as zero. In float32 the squares of its elements underflow, the norm comes
# out too small, and a polynomial started above norm 1 diverges: the momentum of an expert that no token reaches any
# more gets there by decay alone. O(cG) = O(G) holds down to it.
NO_DIRECTION = 1e-15


@dataclass(frozen=True)
class Orthogonalizer:
    """How to compute an (approximate) polar factor.

    coefficients: one (a, b, c) a step; safety: the factor on the norm before the first step; dtype: of the products,
    `auto` is float32 on CPU (float64 for float64 input) and bfloat16 on CUDA; form: `plain`, `gram` (iterates on XX^T,
    restarts from X after the steps in `restarts`) or `exact` (singular value decomposition in float64).
    """

    name: str
    coefficients: tuple[Triple, ...] = ()
    safety: float = 1.0
    dtype: str = "auto"
    form: Literal["plain", "gram", "exact"] = "plain"
    restarts: tuple[int, ...] = ()

    @property
    def steps(self) -> int:
        return len(self.coefficients)


CUBIC: Triple = (1.5, -0.5, 0.0)
KELLER: Triple = (3.4445, -4.7750, 2.0315)
YOU: tuple[Triple, ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
# Five steps, generated for X0 = G / (1.02 ||G||_F).
POLAR_EXPRESS_5: tuple[Triple, ...] = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
# The paper's list; for X0 = G / (1.01 ||G||_F) and 1/1.01^k folded into all but the last triple in use.
POLAR_EXPRESS_LIST: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
_DEEPSEEK_TAIL: Triple = (2.0, -1.5, 0.5)


def _polar_express(steps: int) -> Orthogonalizer:
    if steps == 5:
        return Orthogonalizer("polar_express", POLAR_EXPRESS_5, safety=1.02)
    triples = (POLAR_EXPRESS_LIST + (POLAR_EXPRESS_LIST[-1],) * max(0, steps - 8))[:steps]
    folded = tuple((a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in triples[:-1])
    return Orthogonalizer("polar_express", (*folded, triples[-1]), safety=1.01)


def _you(steps: int) -> Orthogonalizer:
    return Orthogonalizer("you", (YOU + (YOU[-1],) * max(0, steps - 5))[:steps])


def _deepseek_v4(steps: int) -> Orthogonalizer:
    del steps  # the schedule is one piece: eight quintic steps, then two that converge
    return Orthogonalizer("deepseek_v4", (KELLER,) * 8 + (_DEEPSEEK_TAIL,) * 2)


REGISTRY = {
    "polar_express": _polar_express,
    "quintic": lambda steps: Orthogonalizer("quintic", (KELLER,) * steps),
    "you": _you,
    "cubic": lambda steps: Orthogonalizer("cubic", (CUBIC,) * steps),
    "deepseek_v4": _deepseek_v4,
    "gram": lambda steps: replace(_polar_express(steps), name="gram", form="gram", restarts=(2,)),
    "exact": lambda steps: Orthogonalizer("exact", form="exact"),
}


def get_orthogonalizer(spec: str | Orthogonalizer, steps: int = 5, dtype: str | None = None) -> Orthogonalizer:
    """The record of a name (`REGISTRY`) with `steps` iterations, or the record given; `dtype` replaces the record's."""
    if isinstance(spec, Orthogonalizer):
        record = spec
    elif spec in REGISTRY:
        if not isinstance(steps, int) or steps < 1:
            raise ValueError(f"ns_iterations: found {steps!r}, accepted: an integer from 1")
        record = REGISTRY[spec](steps)
    else:
        raise ValueError(f"orthogonalize: found {spec!r}, accepted: {', '.join(REGISTRY)} or an Orthogonalizer")
    return record if dtype is None else replace(record, dtype=dtype)


def compute_dtype(record: Orthogonalizer, x: Tensor) -> torch.dtype:
    """dtype of the matrix products for `x`."""
    if record.form == "exact":
        return torch.float64
    if record.dtype != "auto":
        return getattr(torch, record.dtype)
    if x.dtype == torch.float64:
        return torch.float64
    if x.device.type == "cpu":
        return torch.float32
    # Gram matrices lose definiteness in bfloat16; float16 has the mantissa, and X0 has norm 1, so the range is enough.
    return torch.float16 if record.form == "gram" else torch.bfloat16


def wire_dtype(record: Orthogonalizer, x: Tensor) -> torch.dtype:
    """dtype in which a matrix is rounded before it is orthogonalized (and sent, if it is sent at all).

    float16 cannot carry small gradients, so what computes in float16 travels in float32.
    """
    dtype = compute_dtype(record, x)
    if dtype == torch.bfloat16 or x.dtype == torch.float64:
        return dtype
    return torch.float32


def orthogonalize(g: Tensor, record: Orthogonalizer | str = "polar_express") -> Tensor:
    """Approximate polar factor U V^T of each matrix of g [..., m, n] = U S V^T; dtype and device of g, g unchanged.

    The result does not depend on the scale of g (norm in float32); a zero matrix, and one of norm below 1e-15, gives
    zeros.
    """
    if isinstance(record, str):
        record = get_orthogonalizer(record)
    if g.ndim < 2:
        raise ValueError(f"orthogonalize: found a tensor of shape {tuple(g.shape)}, accepted: [..., m, n]")
    if g.numel() == 0:
        return torch.zeros_like(g)
    x = g.flatten(0, -3) if g.ndim > 3 else g
    o = _exact(x) if record.form == "exact" else _by_polynomial(x, record)
    return o.to(g.dtype).reshape(g.shape)


def _exact(x: Tensor) -> Tensor:
    # A matrix that is not finite becomes NaN, as with the polynomials; LAPACK would raise, on its owner alone.
    broken = ~torch.isfinite(x).flatten(-2).all(-1)[..., None, None]
    u, s, vh = torch.linalg.svd(x.double().masked_fill(broken, 0.0), full_matrices=False)
    # Directions without signal have no polar factor; zero keeps O(0) = 0 and the result a function of the input.
    floor = s.amax(-1, keepdim=True) * max(x.shape[-2:]) * torch.finfo(x.dtype).eps * 0.1
    return ((u * (s > floor).unsqueeze(-2)) @ vh).masked_fill(broken, float("nan"))


def _by_polynomial(x: Tensor, record: Orthogonalizer) -> Tensor:
    dtype = compute_dtype(record, x)
    wide = x if x.dtype == torch.float64 else x.float()
    x = (wide * inverse_norm(torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True), record)).to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    flat = x if x.ndim == 3 else x.unsqueeze(0)
    flat = _gram(flat, record) if record.form == "gram" else polynomial(flat, record.coefficients)
    x = flat if x.ndim == 3 else flat.squeeze(0)
    return x.mT if tall else x


def inverse_norm(norm: Tensor, record: Orthogonalizer) -> Tensor:
    """1 / (safety * norm), and 0 for a norm below ``NO_DIRECTION``; ``norm`` is overwritten."""
    return torch.threshold_(norm, NO_DIRECTION, float("inf")).mul_(record.safety).reciprocal_()


def polynomial(x: Tensor, coefficients: tuple[Triple, ...]) -> Tensor:
    """The steps themselves on x [N, s, l], s <= l, already divided by its norm."""
    for a, b, c in coefficients:
        gram = torch.bmm(x, x.mT)
        mix = torch.baddbmm(gram, gram, gram, beta=b, alpha=c) if c else gram.mul_(b)
        x = torch.baddbmm(x, mix, x, beta=a)
    return x


def _gram(x: Tensor, record: Orthogonalizer) -> Tensor:
    """The same steps on R = XX^T [N, s, s], with the product of their factors kept in Q: X_end = Q X."""
    eye = torch.eye(x.shape[-2], dtype=x.dtype, device=x.device).expand(x.shape[0], -1, -1)
    r, q = torch.bmm(x, x.mT), eye
    for k, (a, b, c) in enumerate(record.coefficients):
        if k in record.restarts:  # rounding makes R indefinite; starting again from X repairs it
            x = torch.bmm(q, x)
            r, q = torch.bmm(x, x.mT), eye
        factor = torch.baddbmm(r, r, r, beta=b, alpha=c) + a * eye
        q = torch.bmm(q, factor)
        if k + 1 < record.steps and k + 1 not in record.restarts:
            r = torch.bmm(torch.bmm(factor, r), factor)
    return torch.bmm(q, x)


def _newton_schulz_orthogonalize(g: Tensor, iterations: int = 5) -> Tensor:
    """The cubic iteration X <- 1.5X - 0.5XX^T X of the original design notes, from G / ||G||_F; g is unchanged.

    Five steps do not converge for a matrix of rank 9 or more: on a Gaussian 896 x 224 matrix the singular values end in
    [0.25, 0.66] and the relative error is 0.55. It is kept by name; the default of the optimizers is `polar_express`.
    """
    return orthogonalize(g, get_orthogonalizer("cubic", iterations))
