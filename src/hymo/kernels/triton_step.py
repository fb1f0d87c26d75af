"""One token of the recurrence for every sequence and head, as one Triton kernel: what generation runs on a GPU.

States [B,H,S,D] in float32, v and o [B,H,D], b and c [B,H,S], g [B,H], A_log [H,S], D [H].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hymo.kernels.operators import register_operator
from hymo.kernels.triton_common import load_rates

LARGEST_HEAD = 128


@triton.jit
def step_kernel(
    v_ptr, b_ptr, c_ptr, g_ptr, A_log_ptr, D_ptr, state_ptr, o_ptr, new_state_ptr, H,
    D: tl.constexpr, S: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, HAS_D: tl.constexpr,
):  # fmt: skip
    """A program is one head of one sequence."""
    bh = tl.program_id(0).to(tl.int64)
    h = bh % H
    s, d = tl.arange(0, BS), tl.arange(0, BD)
    a = load_rates(A_log_ptr, h, s, S)
    v = tl.load(v_ptr + bh * D + d, mask=d < D, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + bh * S + s, mask=s < S, other=0.0).to(tl.float32)
    c = tl.load(c_ptr + bh * S + s, mask=s < S, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + bh)
    at = bh * (S * D) + s[:, None] * D + d[None, :]
    inside = (s[:, None] < S) & (d[None, :] < D)
    state = tl.load(state_ptr + at, mask=inside, other=0.0)
    state = state * tl.exp2(a * g)[:, None] + b[:, None] * v[None, :]
    o = tl.sum(c[:, None] * state, 0)
    if HAS_D:
        o += tl.load(D_ptr + h) * v
    tl.store(new_state_ptr + at, state, mask=inside)
    tl.store(o_ptr + bh * D + d, o.to(o_ptr.dtype.element_ty), mask=d < D)


def _step(
    v: Tensor, b: Tensor, c: Tensor, g: Tensor, A_log: Tensor, state: Tensor, D: Tensor | None
) -> tuple[Tensor, Tensor]:
    """o [B,H,D] in v's dtype and the new state; g, A_log, D and state are float32. Not differentiable."""
    B, H, D_head = v.shape
    S = b.shape[-1]
    v, b, c, g, A_log, state = (x.contiguous() for x in (v, b, c, g, A_log, state))
    o, new_state = torch.empty_like(v), torch.empty_like(state)
    step_kernel[(B * H,)](
        v, b, c, g, A_log, g if D is None else D.contiguous(), state, o, new_state, H,
        D=D_head, S=S, BD=triton.next_power_of_2(D_head), BS=triton.next_power_of_2(S), HAS_D=D is not None,
        num_warps=4 if D_head * S > 2048 else 1,
    )  # fmt: skip
    return o, new_state


def _shapes(v, b, c, g, A_log, state, D):
    return torch.empty(v.shape, dtype=v.dtype, device=v.device), torch.empty(
        state.shape, dtype=state.dtype, device=v.device
    )


recurrence_step = register_operator("recurrence_step", _step, _shapes)
