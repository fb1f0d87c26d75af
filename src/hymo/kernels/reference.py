"""The gated linear recurrence, one token at a time: the definition that every other implementation is tested against.

    h_t = exp(g_t A) h_{t-1} + b_t (x) v_t        A = -exp(A_log)
    o_t = c_t . h_t (+ D v_t)

Shape letters: B batch, T tokens, H heads, D value size of a head, S state size of a head.
"""

import torch
from torch import Tensor


def document_starts(doc_ids_BT: Tensor) -> Tensor:
    """True at the first token of every document but a row's first one, which goes on from the initial state."""
    starts_BT = torch.zeros_like(doc_ids_BT, dtype=torch.bool)
    starts_BT[:, 1:] = doc_ids_BT[:, 1:] != doc_ids_BT[:, :-1]
    return starts_BT


def loop_recurrence(
    v_BTHD: Tensor,
    b_BTHS: Tensor,
    c_BTHS: Tensor,
    g_BTH: Tensor,
    A_log_HS: Tensor,
    D_H: Tensor | None = None,
    h0_BHSD: Tensor | None = None,
    doc_ids_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs [B,T,H,D] and the final state [B,H,S,D], in the dtype of the inputs (one floating dtype for all).

    Plain differentiable PyTorch. The tokens are taken apart by ``unbind``: with ``x[:, t]`` the backward pass would
    build one full-size tensor of zeros for every token.
    """
    B, _, H, D = v_BTHD.shape
    decay_BTHS = torch.exp(-g_BTH[..., None] * A_log_HS.exp())
    if doc_ids_BT is not None:
        decay_BTHS = decay_BTHS * (~document_starts(doc_ids_BT))[..., None, None]
    h_BHSD = v_BTHD.new_zeros(B, H, b_BTHS.shape[-1], D) if h0_BHSD is None else h0_BHSD
    outputs = []
    for v, b, c, decay in zip(*(x.unbind(1) for x in (v_BTHD, b_BTHS, c_BTHS, decay_BTHS)), strict=True):
        h_BHSD = decay[..., None] * h_BHSD + b[..., None] * v[..., None, :]
        outputs.append((c[..., None, :] @ h_BHSD).squeeze(-2))
    o_BTHD = torch.stack(outputs, 1)
    if D_H is not None:
        o_BTHD = o_BTHD + D_H[:, None] * v_BTHD
    return o_BTHD, h_BHSD


def step_recurrence(
    v_BHD: Tensor,
    b_BHS: Tensor,
    c_BHS: Tensor,
    g_BH: Tensor,
    A_log_HS: Tensor,
    h_BHSD: Tensor,
    D_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One token of the loop: its output [B,H,D] and the new state [B,H,S,D]."""
    decay_BHS = torch.exp(-g_BH[..., None] * A_log_HS.exp())
    h_BHSD = torch.addcmul(decay_BHS[..., None] * h_BHSD, b_BHS[..., None], v_BHD[..., None, :])
    o_BHD = (c_BHS[..., None, :] @ h_BHSD).squeeze(-2)
    if D_H is not None:
        o_BHD = o_BHD + D_H[:, None] * v_BHD
    return o_BHD, h_BHSD
