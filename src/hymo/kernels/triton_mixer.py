"""The mixer of a recurrence block between its two projections, as one operator on Triton kernels.

    y = norm(recurrence(silu(conv(v, b, c)), g) + D v) * silu(z),    [v | b | c | z] = the input projection's output

``hymo::gated_mixer`` runs the convolution, the recurrence and the output gate one after the other. Being one
operator, its backward pass writes the gradients of v, b, c and z where the projection's gradient wants them, with no
copy to join them, and the host has one call to make instead of three.

Letters: B batch, T tokens, P = 2HD + 2HS columns of the projection, H heads, D value size, S state size, K taps.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hymo.kernels import triton_conv, triton_op
from hymo.kernels.operators import register_operator
from hymo.kernels.recurrence import DEBUG, check_values
from hymo.kernels.triton_conv import sigmoid
from hymo.kernels.triton_launch import launch

ROWS = 64  # pairs of a token and a head that a program gates
OPTIONS = {"num_warps": 2}


@triton.jit
def load_gate_inputs(o_ptr, z_ptr, w_ptr, r, n_rows, z_stride, eps, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """For the rows r: o times its 1/rms, that factor, z, the weight, and what of the tile is there."""
    d = tl.arange(0, BD)
    inside = (r < n_rows)[:, None] & (d < D)[None, :]
    o = tl.load(o_ptr + r[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    at = (r // H)[:, None] * z_stride + (r % H)[:, None] * D + d[None, :]
    z = tl.load(z_ptr + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    factor = tl.rsqrt(tl.sum(o * o, 1) / D + eps)[:, None]
    return o * factor, factor, z, w, inside, at


@triton.jit(do_not_specialize=["n_rows"])
def gate_kernel(
    o_ptr, z_ptr, w_ptr, y_ptr, n_rows, z_stride, eps,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """y = o / rms(o) * w * silu(z), over rows of one token and one head."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n, _, z, w, inside, _ = load_gate_inputs(o_ptr, z_ptr, w_ptr, r, n_rows, z_stride, eps, H, D, BD)
    y = n * w * (z * sigmoid(z))
    at = r[:, None] * D + tl.arange(0, BD)[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n_rows"])
def gate_backward_kernel(
    o_ptr, z_ptr, w_ptr, dy_ptr, do_ptr, dz_ptr, dw_ptr, n_rows, z_stride, dz_stride, eps,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """do [B,T,H,D], dz (tokens ``dz_stride`` apart), and each program's sum for the weight, dw [N,D]."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BD)
    n, factor, z, w, inside, _ = load_gate_inputs(o_ptr, z_ptr, w_ptr, r, n_rows, z_stride, eps, H, D, BD)
    at = r[:, None] * D + d[None, :]
    dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
    s = sigmoid(z)
    dz = dy * n * w * (s + z * (s - s * s))
    at_z = (r // H)[:, None] * dz_stride + (r % H)[:, None] * D + d[None, :]
    tl.store(dz_ptr + at_z, dz.to(dz_ptr.dtype.element_ty), mask=inside)
    dnw = dy * (z * s)
    dn = dnw * w
    do = factor * (dn - n * (tl.sum(dn * n, 1) / D)[:, None])
    tl.store(do_ptr + at, do.to(do_ptr.dtype.element_ty), mask=inside)
    tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * D + d, tl.sum(dnw * n, 0), mask=d < D)


def gated_mixer(
    proj_BTP: Tensor,
    g_BTH: Tensor,
    A_log_HS: Tensor,
    D_H: Tensor,
    conv_weight_CK: Tensor,
    norm_weight_D: Tensor,
    doc_ids_BT: Tensor | None,
    max_log_decay: float | None,
    eps: float,
) -> Tensor:
    """y [B, T, H*D] in the projection's dtype.

    Args:
        proj_BTP: [v | b | c | z], bf16, fp16 or fp32. g_BTH, A_log_HS, D_H: fp32. conv_weight_CK: of v, b and c.
        norm_weight_D: of the RMSNorm over a head's values. doc_ids_BT: non-decreasing along a row, or None.
        max_log_decay, and all else: as of ``gated_recurrence``; ``supports`` says what the kernels take.
    """
    if DEBUG:
        check_values(g_BTH, A_log_HS, doc_ids_BT, max_log_decay)
    form = triton_op.form_of(proj_BTP.dtype, max_log_decay)
    inputs = (proj_BTP, g_BTH, A_log_HS, D_H, conv_weight_CK, norm_weight_D)
    save = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    return mixer(*inputs, doc_ids_BT, form, eps, save)[0]


def supports(proj: Tensor, conv_weight: Tensor, head_dim: int, state_dim: int) -> bool:
    """Whether the operator takes these sizes: heads of at most 32 x 32, and what the convolution takes."""
    return max(head_dim, state_dim) <= triton_op.HEAD and triton_conv.supports(proj, conv_weight)


def _forward(
    proj: Tensor,
    g: Tensor,
    A_log: Tensor,
    D: Tensor,
    conv_weight: Tensor,
    norm_weight: Tensor,
    doc_ids: Tensor | None,
    form: str,
    eps: float,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y; for the backward pass v, b, c after the convolution, o before the gate, and the states (or empty)."""
    (B, T, _), (H, S) = proj.shape, A_log.shape
    sizes = (H * norm_weight.shape[0], H * S, H * S)
    proj, doc_ids = triton_conv.rows(proj), triton_conv.as_int32(doc_ids)
    x, z = proj[..., : sum(sizes)], proj[..., sum(sizes) :]
    v, b, c = triton_conv.run_forward(x, conv_weight.contiguous(), doc_ids, sizes)
    v, b, c = v.view(B, T, H, -1), b.view(B, T, H, S), c.view(B, T, H, S)
    o, _, saved = triton_op.run_forward(v, b, c, g, A_log, D, None, doc_ids, form, save, False)
    y = torch.empty(B, T, sizes[0], dtype=proj.dtype, device=proj.device)
    constants, grid = _gate_constants(H, v.shape[-1]), (-(-B * T * H // ROWS), 1)
    launch(gate_kernel, grid, (o, z, norm_weight, y, B * T * H, z.stride(1), eps), constants, OPTIONS)
    if save:
        return y, v, b, c, o, saved
    return y, *_nothing(proj)


def _nothing(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """For a pass without a backward one; five tensors, since an operator's outputs must not share memory."""
    return x.new_empty(0), x.new_empty(0), x.new_empty(0), x.new_empty(0), x.new_empty(0)


def _gate_constants(H: int, D: int) -> dict[str, int]:
    return {"H": H, "D": D, "BD": triton.next_power_of_2(D), "ROWS": ROWS}


def _forward_shapes(proj, g, A_log, D, conv_weight, norm_weight, doc_ids, form, eps, save):
    (B, T, _), (H, S) = proj.shape, A_log.shape
    y = torch.empty(B, T, H * norm_weight.shape[0], dtype=proj.dtype, device=proj.device)
    if not save:
        return y, *_nothing(proj)
    v, b = (torch.empty(B, T, H, n, dtype=y.dtype, device=y.device) for n in (norm_weight.shape[0], S))
    return y, v, b, torch.empty_like(b), torch.empty_like(v), triton_op.saved_states(v, b, True)


def _backward(
    dy: Tensor,
    proj: Tensor,
    g: Tensor,
    A_log: Tensor,
    D: Tensor,
    conv_weight: Tensor,
    norm_weight: Tensor,
    doc_ids: Tensor | None,
    v: Tensor,
    b: Tensor,
    c: Tensor,
    o: Tensor,
    saved: Tensor,
    form: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of proj, g, A_log, D, conv_weight and norm_weight; all but the first are fp32."""
    B, T, H, _ = v.shape
    proj, doc_ids, dy = triton_conv.rows(proj), triton_conv.as_int32(doc_ids), dy.to(proj.dtype).contiguous()
    n_x = conv_weight.shape[0]
    x, z = proj[..., :n_x], proj[..., n_x:]
    dproj, do = torch.empty(proj.shape, dtype=proj.dtype, device=proj.device), torch.empty_like(o)
    programs = -(-B * T * H // ROWS)
    dw = torch.empty(programs, norm_weight.shape[0], dtype=torch.float32, device=o.device)
    dz = dproj[..., n_x:]
    args = (o, z, norm_weight, dy, do, dz, dw, B * T * H, z.stride(1), dz.stride(1), eps)
    launch(gate_backward_kernel, (programs, 1), args, _gate_constants(H, v.shape[-1]), OPTIONS)
    dv, db, dc, dg, dA_log, dD, _ = triton_op.run_backward(do, None, v, b, c, g, A_log, D, doc_ids, saved, form, False)
    parts = [x.flatten(2) for x in (dv, db, dc)]
    dconv = triton_conv.run_backward(parts, x, conv_weight.contiguous(), doc_ids, dproj[..., :n_x])
    return dproj, dg, dA_log, dD, dconv, dw.sum(0)


def _backward_shapes(dy, proj, g, A_log, D, conv_weight, norm_weight, doc_ids, v, b, c, o, saved, form, eps):
    dproj = torch.empty(proj.shape, dtype=proj.dtype, device=proj.device)
    weights = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (conv_weight, norm_weight))
    return dproj, *(torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (g, A_log, D)), *weights


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, form, eps, _ = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.form, ctx.eps = form, eps
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dy: Tensor, *unused: Any) -> tuple[Tensor | None, ...]:
    proj, g, A_log, D, conv_weight, norm_weight, *rest = ctx.saved_tensors
    grads = mixer_backward(dy, proj, g, A_log, D, conv_weight, norm_weight, *rest, ctx.form, ctx.eps)
    dproj, dg, dA_log, dD, dconv, dnorm = grads
    return dproj, dg, dA_log, dD, dconv.to(conv_weight.dtype), dnorm.to(norm_weight.dtype), None, None, None, None


mixer_backward = register_operator("gated_mixer_backward", _backward, _backward_shapes)
mixer = register_operator(
    "gated_mixer", _forward, _forward_shapes, setup_context=_setup_context, backward=_differentiate
)
