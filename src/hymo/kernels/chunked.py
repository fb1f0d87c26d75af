"""The gated linear recurrence in chunks, in plain PyTorch, with an explicit backward pass.

Inside a chunk the outputs are O = P V + (C . L) H with P_ij = sum_s c_is b_js exp(a_s sum_{j<u<=i} g_u), i >= j, and H
the state at the chunk's start; between chunks H' = L_C . H + (B . Lt)^T V. L and Lt are the decays from the chunk's
start and to its end. Two forms of P (``chunked_scores``) never divide a large number by a large one:

- dyadic, for any decay: a pair is treated at the one level where j and i lie in the left and right half of a block;
  both factors are then decays (at most 1) towards the boundary between the halves.
- leaf, where the caller bounds the log-decay of a step: one reference, the start of a 16-token chunk.

The decay gradient collects, for every factor f = exp(a e) in use, y = f df: the gradient towards log f. No quantity
is formed as the small difference of two large ones (but for float32 sums inside a leaf, whose diagonal is left out).

Shape letters: B batch, T tokens, H heads, D value size, S state size, N chunks, C (and K) tokens of a chunk, M blocks.
Chunked tensors are [N,B,H,C,.]: a step from chunk to chunk then reads and writes one contiguous piece.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hymo.kernels.chunked_scores import (
    DocMasks,
    Scores,
    dyadic_backward,
    dyadic_scores,
    leaf_backward,
    leaf_scores,
)
from hymo.kernels.operators import register_operator
from hymo.kernels.reference import document_starts

LEAF_CHUNK = 16
DYADIC_CHUNK = 32
MAX_LEAF_EXPONENT = 80.0  # exp(80) = 5.5e34 leaves float32 a factor 6e3 for the data


def leaf_fits(max_log_decay: float | None, leaf: int = LEAF_CHUNK) -> bool:
    """Whether a bound on the log-decay of a step lets ``leaf`` tokens share one reference point."""
    return max_log_decay is not None and (leaf - 1) * max_log_decay <= MAX_LEAF_EXPONENT


def chunked_recurrence(
    v_BTHD: Tensor,
    b_BTHS: Tensor,
    c_BTHS: Tensor,
    g_BTH: Tensor,
    A_log_HS: Tensor,
    D_H: Tensor | None = None,
    h0_BHSD: Tensor | None = None,
    doc_ids_BT: Tensor | None = None,
    max_log_decay: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs [B,T,H,D] and the final state [B,H,S,D]; one dtype (float32 or float64) for all floating arguments."""
    leaf = leaf_fits(max_log_decay)
    return ChunkedRecurrence.apply(v_BTHD, b_BTHS, c_BTHS, g_BTH, A_log_HS, D_H, h0_BHSD, doc_ids_BT, leaf)


class ChunkedRecurrence(torch.autograd.Function):
    """The op of ``chunked_recurrence``. Keeps the chunked inputs, P and the states for the backward pass."""

    @staticmethod
    def forward(ctx: Any, v, b, c, g, A_log, D, h0, doc_ids, leaf: bool) -> tuple[Tensor, Tensor]:
        T, C = v.shape[1], LEAF_CHUNK if leaf else DYADIC_CHUNK
        a_HS = -A_log.exp()
        V, Bc, Cc, g_NBHC = (to_chunks(x, C) for x in (v, b, c, g[..., None]))
        V, g_NBHC = V.contiguous(), g_NBHC.squeeze(-1).contiguous()
        if not leaf:  # the leaf form reads b and c once, and that can be in any layout
            Bc, Cc = Bc.contiguous(), Cc.contiguous()
        docs = None if doc_ids is None else document_masks(doc_ids, C, v.dtype)
        scores = (leaf_scores if leaf else dyadic_scores)(Bc, Cc, g_NBHC, a_HS, docs)
        if D is not None:
            scores.P.diagonal(dim1=-2, dim2=-1).add_(D[:, None])  # o += D v, as one more diagonal of P
        states = chunk_states(scores.B_out, V, scores.through, h0, False)
        O = add_products(scores.P, V, scores.C_in, states[:-1])
        ctx.leaf, ctx.docs, ctx.T, ctx.has_D, ctx.has_h0 = leaf, docs, T, D is not None, h0 is not None
        ctx.save_for_backward(V, Bc, Cc, g_NBHC, a_HS, states, *scores)
        return from_chunks(O, T), states[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dhT: Tensor) -> tuple[Tensor | None, ...]:
        V, Bc, Cc, g_NBHC, a_HS, states, *saved = ctx.saved_tensors
        scores = Scores(*saved)
        dO = to_chunks(do, V.shape[-2]).contiguous()
        dstates = chunk_states(scores.C_in, dO, scores.through, dhT, True)
        dV = add_products(scores.P.mT, dO, scores.B_out, dstates[1:])
        dP = dO @ V.mT
        diagonal_NBHC = dP.diagonal(dim1=-2, dim2=-1).clone()
        dC_in, dB_out = dO @ states[:-1].mT, V @ dstates[1:].mT
        dthrough = (states[:-1] * dstates[1:]).sum(-1)
        back = leaf_backward if ctx.leaf else dyadic_backward
        dC, dB, dg, da_HS = back(scores, Bc, Cc, g_NBHC, a_HS, ctx.docs, dP, dC_in, dB_out, dthrough)
        dC.addcmul_(diagonal_NBHC[..., None], Bc)
        dB.addcmul_(diagonal_NBHC[..., None], Cc)
        dv, db, dc = (from_chunks(x, ctx.T) for x in (dV, dB, dC))
        dg_BTH = from_chunks(dg[..., None], ctx.T).squeeze(-1)
        dD = diagonal_NBHC.sum((0, 1, 3)) if ctx.has_D else None
        return dv, db, dc, dg_BTH, da_HS * a_HS, dD, dstates[0].clone() if ctx.has_h0 else None, None, None


def to_chunks(x_BTHX: Tensor, C: int) -> Tensor:
    """[B,T,H,X] -> [N,B,H,C,X], a view if C divides T; zeros after the last token (in b, v, g they change nothing)."""
    B, T, H, X = x_BTHX.shape
    pad = -T % C
    if pad:
        x_BTHX = torch.nn.functional.pad(x_BTHX, (0, 0, 0, 0, 0, pad))
    return x_BTHX.reshape(B, -1, C, H, X).permute(1, 0, 3, 2, 4)


def from_chunks(x_NBHCX: Tensor, T: int) -> Tensor:
    """The inverse of ``to_chunks``: contiguous [B,T,H,X]."""
    N, B, H, C, X = x_NBHCX.shape
    x_BTHX = x_NBHCX.permute(1, 0, 3, 2, 4).reshape(B, N * C, H, X)
    # No `contiguous`: with one row it copies nothing, and torch 2.11 compiles a wrong gradient of what it returns
    return x_BTHX if N * C == T else x_BTHX[:, :T].clone()


def document_masks(doc_ids_BT: Tensor, C: int, dtype: torch.dtype) -> DocMasks:
    """The masks for documents that may start anywhere; shapes do not depend on where, and nothing waits for a value."""
    B, T = doc_ids_BT.shape
    start = torch.nn.functional.pad(document_starts(doc_ids_BT), (0, -T % C))
    ids = torch.cat([doc_ids_BT, doc_ids_BT[:, -1:].expand(-1, -T % C)], 1)
    start, ids = (x.reshape(B, -1, 1, C).transpose(0, 1) for x in (start, ids))
    before = torch.cat([ids[:1, ..., :1], ids[:-1, ..., -1:]], 0)
    last = ids[..., -1:]
    same = ids[..., :, None] == ids[..., None, :]
    sums = (same & ~start[..., None, :]).squeeze(2).to(dtype).tril_()
    return DocMasks(start, same, sums, ids == before, ids == last, last == before)


def add_products(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> Tensor:
    """x y + z w, batched over the leading dimensions."""
    out = x @ y
    return out.flatten(0, 2).baddbmm_(z.flatten(0, 2), w.flatten(0, 2)).view_as(out)


def states_at_chunks(
    x_NBHCS: Tensor, y_NBHCD: Tensor, decay_NBHS: Tensor, edge_BHSD: Tensor | None, reverse: bool
) -> Tensor:
    """All states [N+1,B,H,S,D] of h' = decay . h + x^T y from chunk to chunk, the first of them ``edge`` (None: zero).

    ``reverse`` walks from the last chunk to the first, as the states' gradients do.
    """
    N = len(x_NBHCS)
    states = _new_states(x_NBHCS, y_NBHCD, decay_NBHS, edge_BHSD, reverse)
    states[N if reverse else 0] = 0.0 if edge_BHSD is None else edge_BHSD
    sums = states[:N] if reverse else states[1:]
    torch.bmm(x_NBHCS.mT.flatten(0, 2), y_NBHCD.flatten(0, 2), out=sums.flatten(0, 2))
    decay = torch.nn.functional.pad(decay_NBHS, (0,) * 6 + ((0, 1) if reverse else (1, 0)))[..., None]
    (scan_by_pairs_ if states.is_cuda else scan_in_order_)(states, decay, reverse)
    return states


def _new_states(x: Tensor, y: Tensor, decay: Tensor, edge: Tensor | None, reverse: bool) -> Tensor:
    N, B, H, _, D = y.shape
    return y.new_empty(N + 1, B, H, x.shape[-1], D)


# One node for torch.compile, which would unroll the scan: minutes for inductor, and slower code than eager's.
chunk_states = register_operator("chunk_states", states_at_chunks, _new_states)


def scan_in_order_(x: Tensor, decay: Tensor, reverse: bool) -> None:
    """x_k += decay_k x_{k-1} along the first dimension (``reverse``: x_{k+1}). A CPU has x_{k-1} in its cache still."""
    xs, decays = x.unbind(), decay.unbind()
    if reverse:
        xs, decays = xs[::-1], decays[::-1]
    for k in range(1, len(xs)):
        xs[k].addcmul_(decays[k], xs[k - 1])


def scan_by_pairs_(x: Tensor, decay: Tensor, reverse: bool) -> None:
    """The same in 2 log2(K) steps, each over many k at once (Brent and Kung 1982): fewer launches on a GPU.

    The later of each pair takes in the earlier; they are scanned with the pairs' decays; the others follow from them.
    """
    K, odd = len(x), len(x) % 2
    if K == 1:
        return
    later, others, step = slice(1, K, 2), slice(2, K, 2), -1
    if reverse:
        later, others, step = slice(odd, K, 2), slice(1 - odd, K - 2, 2), 1

    def before(at: slice) -> slice:
        return slice(at.start + step, at.stop + step, 2)

    x[later].addcmul_(decay[later], x[before(later)])
    scan_by_pairs_(x[later], decay[later] * decay[before(later)], reverse)
    x[others].addcmul_(decay[others], x[before(others)])
