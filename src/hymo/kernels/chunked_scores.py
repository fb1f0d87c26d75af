"""The two forms of a chunk's scores P and of their gradients: ``dyadic`` for any decay, ``leaf`` for a bounded one.

Shape letters and the meaning of P, L, Lt: see ``hymo.kernels.chunked``. ``a`` is -exp(A_log), [H,S].
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class DocMasks(NamedTuple):
    """What document boundaries cut, on a fixed chunk grid: bool [N,B,1,C(,K)], alike for all heads."""

    start: Tensor  # [..,C] first token of a document (but of a row's first)
    same: Tensor  # [..,C,K] pairs inside one document
    sums: Tensor  # [N,B,C,K] float: the tokens between a document's start (or the chunk's) and each token
    see: Tensor  # [..,C] tokens whose document owns the state at the chunk's start
    reach: Tensor  # [..,C] tokens whose document goes on to the chunk's end
    through: Tensor  # [..,1] the document of the chunk's start goes on to its end


class Scores(NamedTuple):
    """What a chunk needs of b, c and the decays."""

    P: Tensor  # [N,B,H,C,K] weights of the chunk's own values in its outputs, zero above the diagonal
    C_in: Tensor  # [N,B,H,C,S] c times the decay from the chunk's start
    B_out: Tensor  # [N,B,H,C,S] b times the decay to the chunk's end
    through: Tensor  # [N,B,H,S] decay over the whole chunk
    L: Tensor  # [N,B,H,C,S] leaf form: exp(a G) with G of ``decay_sums``; dyadic form: empty
    B_start: Tensor  # [N,B,H,C,S] leaf form: b over L; dyadic form: empty


def tail_sums(x_NBHC: Tensor) -> Tensor:
    """sum_{u>t} x_u inside a chunk, added up from the right: a difference of running sums would lose digits."""
    return pad(x_NBHC[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)


def head_sums(x_NBHC: Tensor) -> Tensor:
    """sum_{u<t} x_u inside a chunk."""
    return pad(x_NBHC[..., :-1], (1, 0)).cumsum(-1)


def decay_sums(g_NBHC: Tensor, docs: DocMasks | None) -> Tensor:
    """G_t = sum_{u<=t} g_u from the chunk's start or, inside a chunk, the own document's: no other's bits."""
    return g_NBHC.cumsum(-1) if docs is None else g_NBHC @ docs.sums.mT


def over_states(y_NBHCS: Tensor, a_HS: Tensor) -> Tensor:
    """sum_s a_s y_s, [N,B,H,C]."""
    return (y_NBHCS @ a_HS[..., None]).squeeze(-1)


def over_tokens(e_NBHC: Tensor, y_NBHCS: Tensor) -> Tensor:
    """sum_t e_t y_t over tokens, chunks and sequences, [H,S]."""
    return (e_NBHC[..., None, :] @ y_NBHCS).squeeze(-2).sum((0, 1))


# ---------------------------------------------------------------- leaf: one reference, the chunk's start


def leaf_scores(B: Tensor, C: Tensor, g_NBHC: Tensor, a_HS: Tensor, docs: DocMasks | None) -> Scores:
    """P = (C . L)(B / L)^T below the diagonal; the caller vouches that 1 / L is finite."""
    L = torch.mul(decay_sums(g_NBHC, docs)[..., None], a_HS[:, None]).exp_()
    C_in, B_start, through = L * C, L.reciprocal().mul_(B), L[..., -1, :]  # L first: its layout is the result's
    P = (C_in @ B_start.mT).tril_()
    B_out = B_start * through[..., None, :]
    if docs is not None:
        P.masked_fill_(~docs.same, 0.0)
        C_in, B_out = C_in * docs.see[..., None], B_out * docs.reach[..., None]
        through = through * docs.through
    return Scores(P, C_in, B_out, through.contiguous(), L, B_start)


def leaf_backward(
    scores: Scores,
    B: Tensor,
    C: Tensor,
    g_NBHC: Tensor,
    a_HS: Tensor,
    docs: DocMasks | None,
    dP: Tensor,
    dC_in: Tensor,
    dB_out: Tensor,
    dthrough_NBHS: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of C and B without P's diagonal, of g [N,B,H,C] and of a [H,S]. Overwrites dP, dC_in and dB_out."""
    _, C_leaf, B_out, through, L, B_start = scores
    dP.tril_(-1)  # the diagonal has no decay; inside x below it would cancel, but only to rounding
    if docs is not None:
        dP.masked_fill_(~docs.same, 0.0)
        dC_in, dB_out = dC_in.mul_(docs.see[..., None]), dB_out.mul_(docs.reach[..., None])
        C_leaf = L * C
    dC_leaf = dC_in.flatten(0, 2).baddbmm_(dP.flatten(0, 2), B_start.flatten(0, 2)).view_as(dC_in)
    dB_start = dP.mT @ C_leaf
    x = torch.mul(C_leaf, dC_leaf).addcmul_(B_start, dB_start, value=-1)  # factors exp(a G_t) and exp(-a G_t)
    y = B_out * dB_out  # factors exp(a tail_t)
    z_NBHS = through * dthrough_NBHS  # the factor exp(a G_C)
    G_NBHC = decay_sums(g_NBHC, docs)
    xa, ya, za = over_states(x, a_HS), over_states(y, a_HS), (z_NBHS * a_HS).sum(-1)
    dG_NBHC = tail_sums(xa) + xa if docs is None else xa @ docs.sums
    dg_NBHC = dG_NBHC + head_sums(ya) + za[..., None]
    da_HS = over_tokens(G_NBHC, x) + over_tokens(tail_sums(g_NBHC), y) + (G_NBHC[..., -1:] * z_NBHS).sum((0, 1))
    dB = dB_start.addcmul_(L[..., -1:, :], dB_out).div_(L)
    return dC_leaf.mul_(L), dB, dg_NBHC, da_HS


# ---------------------------------------------------------------- dyadic: one reference a pair of half blocks


def _blocks(x: Tensor, m: int) -> Tensor:
    """[N,B,H,C,X] as blocks of two halves of m tokens: a view [M,2,m,X]."""
    return x.view(-1, 2, m, x.shape[-1])


def _pairs(P: Tensor, m: int) -> Tensor:
    """The entries of P with i in the right and j in the left half of one block of 2m: a view [N*B*H,C/2m,m,m]."""
    C = P.shape[-1]
    n = C // (2 * m)
    return P.view(-1, n, 2, m, n, 2, m)[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3).movedim(-1, 1)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """x @ y; a batch of products with one 1 x 1 side is much faster by element."""
    if x.shape[-2] == 1 and y.shape[-1] == 1:
        return (x * y.mT).sum(-1, keepdim=True)
    return x * y if x.shape[-2:] == (1, 1) else x @ y


def _scaled(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor


def _dyadic_factors(
    g_NBHC: Tensor, a_HS: Tensor, docs: DocMasks | None
) -> tuple[list[tuple[Tensor, Tensor | None]], Tensor, Tensor]:
    """For m = 1, 2, 4 .. C/2 the factors [M,m,S] of (right halves, left halves; None: ones); the chunk's L and Lt.

    They are products of the steps' decays x: right-half token i takes the x of its half up to and with i, left-half
    token j those after j. A document's first token has x = 0, which cuts every pair, row and chunk across it.
    """
    x = torch.mul(g_NBHC[..., None], a_HS[:, None]).exp_()
    if docs is not None:
        x.masked_fill_(docs.start[..., None], 0.0)
    prefix, suffix = x, torch.ones_like(x)
    factors: list[tuple[Tensor, Tensor | None]] = []
    m = 1
    while m < x.shape[-2]:
        F, R = _blocks(prefix, m), _blocks(suffix, m)
        right = F[:, 1].clone()
        factors.append((right, None if m == 1 else R[:, 0].clone()))
        F[:, 1].mul_(F[:, 0, -1:])
        R[:, 0].mul_(right[:, -1:])
        m *= 2
    return factors, prefix, suffix


def dyadic_scores(B: Tensor, C: Tensor, g_NBHC: Tensor, a_HS: Tensor, docs: DocMasks | None) -> Scores:
    """P level by level; every factor is a decay, so nothing overflows and underflow to zero is the right value."""
    factors, L, Lt = _dyadic_factors(g_NBHC, a_HS, docs)
    P = torch.diag_embed((B * C).sum(-1))
    for level, (right, left) in enumerate(factors):
        m = 1 << level
        block = _product(_blocks(C, m)[:, 1] * right, _scaled(_blocks(B, m)[:, 0], left).mT)
        pairs = _pairs(P, m)
        pairs.copy_(block.view(pairs.shape))
    empty = B.new_empty(0)
    return Scores(P, C * L, B * Lt, L[..., -1, :].contiguous(), empty, empty)


def dyadic_backward(
    scores: Scores,
    B: Tensor,
    C: Tensor,
    g_NBHC: Tensor,
    a_HS: Tensor,
    docs: DocMasks | None,
    dP: Tensor,
    dC_in: Tensor,
    dB_out: Tensor,
    dthrough_NBHS: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``leaf_backward``. y_prefix, y_suffix: gradients towards the logarithms of the running products of x."""
    factors, L, Lt = _dyadic_factors(g_NBHC, a_HS, docs)
    y_prefix, y_suffix = scores.C_in * dC_in, scores.B_out * dB_out
    y_prefix[..., -1, :].addcmul_(scores.through, dthrough_NBHS)
    dC, dB = dC_in.mul_(L), dB_out.mul_(Lt)
    for level, (right, left) in reversed(list(enumerate(factors))):
        m = 1 << level
        Y, Z = _blocks(y_prefix, m), _blocks(y_suffix, m)
        # undo one doubling: the right half's products had taken in the left half's total, and the reverse
        Y[:, 0, -1] += Y[:, 1].sum(1)
        Y[:, 1, -1] += Z[:, 0].sum(1)
        dblock = _pairs(dP, m).reshape(-1, m, m)
        c_right, b_left = _blocks(C, m)[:, 1] * right, _scaled(_blocks(B, m)[:, 0], left)
        dc_right, db_left = _product(dblock, b_left), _product(dblock.mT, c_right)
        Y[:, 1].addcmul_(c_right, dc_right)
        Z[:, 0].addcmul_(b_left, db_left)
        _blocks(dC, m)[:, 1].addcmul_(right, dc_right)
        _blocks(dB, m)[:, 0].add_(_scaled(db_left, left))
    return dC, dB, over_states(y_prefix, a_HS), over_tokens(g_NBHC, y_prefix)
