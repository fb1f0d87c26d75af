"""Orthogonalization of whole batches on a GPU: the same polynomial with fewer passes and half of two products.

Each step is X <- (aI + bA + cA^2) X with A = XX^T. Both A and the bracket are symmetric, so only half of their tiles
are computed (Triton); the term aX rides on the diagonal of the bracket instead of a pass over X; the normalisation is a
factor per matrix in the first products. The result differs from the plain form's by less than bfloat16's own error.
"""

import torch
from torch import Tensor

from hymo.optim.orthogonalize import Orthogonalizer, inverse_norm, orthogonalize, polynomial

try:
    from hymo.optim.triton_kernels import symmetric
except ImportError:  # no Triton here: full products by the library
    symmetric = None  # type: ignore[assignment]

SMALLEST = 256  # shorter sides: full products, whose launch is cheaper than the saving


def orthogonalize_batch(x_Nmn: Tensor, record: Orthogonalizer, out: Tensor) -> None:
    """Write the orthogonal factors of x into out [N, m, n] (same dtype); x may be overwritten."""
    half_on_gpu = x_Nmn.is_cuda and x_Nmn.dtype == torch.bfloat16 and record.dtype in ("auto", "bfloat16")
    if not half_on_gpu or record.form != "plain":
        out.copy_(orthogonalize(x_Nmn, record))
    elif min(x_Nmn.shape[1:]) < SMALLEST:
        fewest_launches(x_Nmn, record, out)
    else:
        folded(x_Nmn, record, out)


def start_scale(x_Nmn: Tensor, record: Orthogonalizer) -> Tensor:
    """1 / (safety * Frobenius norm) of each matrix, float32 [N]."""
    return inverse_norm(torch.linalg.vector_norm(x_Nmn, dim=(1, 2), dtype=torch.float32), record)


def fewest_launches(x_Nmn: Tensor, record: Orthogonalizer, out: Tensor) -> None:
    """For small matrices, where launching costs more than computing: three products a step and nothing else."""
    x_Nmn.mul_(start_scale(x_Nmn, record)[:, None, None])
    tall = x_Nmn.shape[1] > x_Nmn.shape[2]
    result = polynomial(x_Nmn.mT if tall else x_Nmn, record.coefficients)
    out.copy_(result.mT if tall else result)


def folded(x: Tensor, record: Orthogonalizer, out: Tensor) -> None:
    """The steps of `record` from x to out, with x and out as the two buffers."""
    tall = x.shape[1] > x.shape[2]
    scale = start_scale(x, record)
    if record.steps % 2 == 0:
        x, spare = x, torch.empty_like(x)
    else:
        spare = x
    for k, (a, b, c) in enumerate(record.coefficients):
        first = scale if k == 0 else None
        gram = _gram(x.mT if tall else x, first)
        bracket = _bracket(gram, a, b, c, first)
        destination = out if (record.steps - k) % 2 else spare
        if tall:
            torch.bmm(x, bracket, out=destination)
        else:
            torch.bmm(bracket, x, out=destination)
        x = destination


def _gram(x_Nsl: Tensor, scale: Tensor | None) -> Tensor:
    """scale^2 x x^T [N, s, s]."""
    if symmetric is not None and x_Nsl.shape[1] >= SMALLEST:
        return symmetric(x_Nsl, None, alpha=1.0, scale=scale, power=2 if scale is not None else 0)
    gram = torch.bmm(x_Nsl, x_Nsl.mT)
    return gram if scale is None else gram.mul_(scale[:, None, None]).mul_(scale[:, None, None])


def _bracket(gram: Tensor, a: float, b: float, c: float, scale: Tensor | None) -> Tensor:
    """scale (aI + b gram + c gram^2)."""
    if symmetric is not None and c and gram.shape[1] >= SMALLEST:
        power = 1 if scale is not None else 0
        return symmetric(gram, gram, alpha=c, beta=b, diagonal=a, scale=scale, power=power)
    bracket = torch.baddbmm(gram, gram, gram, beta=b, alpha=c) if c else gram * b
    bracket.diagonal(dim1=-2, dim2=-1).add_(a)
    return bracket if scale is None else bracket.mul_(scale[:, None, None])
