"""The Triton kernels behind ``gated_recurrence(backend="triton")``, registered with ``torch.library``.

``hymo::recurrence`` and ``hymo::recurrence_backward`` are one node each for ``torch.compile``, know their outputs'
shapes without running, and differentiate by ``register_autograd``; so fullgraph compilation and activation
checkpointing work as for any operator. Nothing is autotuned: ``LAUNCHES`` is a table. Two runs are bit-equal.
"""

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad

from hymo.kernels.chunked import leaf_fits
from hymo.kernels.operators import register_operator
from hymo.kernels.triton_backward import backward_kernel, finish_kernel
from hymo.kernels.triton_common import LAUNCHES
from hymo.kernels.triton_forward import forward_kernel, segment_kernel
from hymo.kernels.triton_launch import INTERPRETED, launch

CHUNK = 16
BLOCK = 64  # the forward pass keeps the state before every 64th token
MAX_SEGMENTS = 16  # a program adds up the segments before its own
HEAD = 32  # the kernels' largest head; larger ones are cut into blocks of this size


def triton_recurrence(
    v: Tensor,
    b: Tensor,
    c: Tensor,
    g: Tensor,
    A_log: Tensor,
    D: Tensor | None,
    h0: Tensor | None,
    doc_ids: Tensor | None,
    max_log_decay: float | None,
) -> tuple[Tensor, Tensor]:
    """Outputs [B,T,H,D] in v's dtype and the final state [B,H,S,D] in float32.

    A head larger than 32 x 32 is cut into value blocks (which share b, c and g) and state blocks (whose outputs add
    up); each pair of blocks runs as a head of its own, so the kernels are built for one size only.
    """
    if v.dtype == torch.float64:
        raise TypeError("v: found dtype torch.float64, accepted by backend='triton' are float32, bfloat16 and float16")
    form = form_of(v.dtype, max_log_decay)
    doc_ids = None if doc_ids is None else doc_ids.to(torch.int32)
    inputs = [x for x in (v, b, c, g, A_log, D, h0) if x is not None]
    save = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if v.shape[-1] <= HEAD and b.shape[-1] <= HEAD:
        o, hT, _ = recurrence(v, b, c, g, A_log, D, h0, doc_ids, form, save, False)
        return o, hT
    return _in_blocks(v, b, c, g, A_log, D, h0, doc_ids, form, save)


def form_of(dtype: torch.dtype, max_log_decay: float | None) -> str:
    """How pairs inside a chunk are computed: leaf, held or dyadic (``hymo.kernels.triton_common``)."""
    if leaf_fits(max_log_decay) and dtype != torch.float16:  # exp(80) is too large for float16
        return "leaf"
    return "held" if dtype == torch.bfloat16 else "dyadic"


def _in_blocks(
    v: Tensor,
    b: Tensor,
    c: Tensor,
    g: Tensor,
    A_log: Tensor,
    D: Tensor | None,
    h0: Tensor | None,
    doc_ids: Tensor | None,
    form: str,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """Heads of R value blocks and Q state blocks as R * Q heads of 32 x 32."""
    B, T, H, D_head = v.shape
    S = b.shape[-1]
    R, Q = triton.cdiv(D_head, HEAD), triton.cdiv(S, HEAD)

    def cut_state(x: Tensor) -> Tensor:
        """[..,H,S] -> [..,H*R*Q,32]."""
        x = pad(x, (0, Q * HEAD - S)).unflatten(-1, (1, Q, HEAD))
        return x.expand(*x.shape[:-3], R, Q, HEAD).flatten(-4, -2)

    values = pad(v, (0, R * HEAD - D_head)).view(B, T, H, R, 1, HEAD).expand(B, T, H, R, Q, HEAD).flatten(2, 4)
    gates = g[..., None].expand(B, T, H, R * Q).flatten(2)
    if D is not None:  # the skip counts once, not for every state block
        D = pad(D[:, None], (0, Q - 1))[:, None].expand(H, R, Q).reshape(-1)
    if h0 is not None:
        h0 = pad(h0, (0, R * HEAD - D_head, 0, Q * HEAD - S)).view(B, H, Q, HEAD, R, HEAD)
        h0 = h0.permute(0, 1, 4, 2, 3, 5).flatten(1, 3)
    o, hT, _ = recurrence(values, cut_state(b), cut_state(c), gates, cut_state(A_log), D, h0, doc_ids, form, save, True)
    o = o.view(B, T, H, R, Q, HEAD).sum(4).flatten(3)[..., :D_head].to(v.dtype)
    hT = hT.view(B, H, R, Q, HEAD, HEAD).permute(0, 1, 3, 4, 2, 5).reshape(B, H, Q * HEAD, R * HEAD)
    return o, hT[:, :, :S, :D_head]


def run_forward(
    v: Tensor,
    b: Tensor,
    c: Tensor,
    g: Tensor,
    A_log: Tensor,
    D: Tensor | None,
    h0: Tensor | None,
    doc_ids: Tensor | None,
    form: str,
    save: bool,
    float_output: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """o (v's dtype or float32), the final state, and the states for the backward pass (empty without ``save``)."""
    v, b, c = _rows(v), _rows(b), _rows(c)
    g, A_log = g.contiguous(), A_log.contiguous()
    B, T, H, _ = v.shape
    o, hT, saved = _forward_shapes(v, b, c, g, A_log, D, h0, doc_ids, form, save, float_output)
    how = LAUNCHES[f"forward {form}"]
    segment = segment_length(T, B * H, how.programs, v.device)
    carry, kept = _segments(v, b, g, A_log, doc_ids, segment, reverse=False)
    n = -(-T // segment)
    constants = _constants(v.dtype, v.shape[-1], b.shape[-1], T % BLOCK != 0, doc_ids is not None)
    flags = {"FORM": form, "HAS_D": D is not None, "HAS_H0": h0 is not None, "SAVE": save, **_strides(v, b, c)}
    args = (v, b, c, g, A_log, _or(D, g), _or(h0, g), _or(doc_ids, g), carry, kept, o, hT, saved)
    sizes = (T, n, segment)
    launch(forward_kernel, (B * H, n), (*args, *sizes), constants | flags, how.options)
    return o, hT, saved


def _forward_shapes(v, b, c, g, A_log, D, h0, doc_ids, form, save, float_output):
    B, _, H, D_head = v.shape
    o = torch.empty(v.shape, dtype=torch.float32 if float_output else v.dtype, device=v.device)
    hT = torch.empty(B, H, b.shape[-1], D_head, dtype=torch.float32, device=v.device)
    return o, hT, saved_states(v, b, save)


def run_backward(
    do: Tensor,
    dhT: Tensor | None,
    v: Tensor,
    b: Tensor,
    c: Tensor,
    g: Tensor,
    A_log: Tensor,
    D: Tensor | None,
    doc_ids: Tensor | None,
    saved: Tensor,
    form: str,
    has_h0: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of v, b, c, g, A_log, D [H] and h0 (empty without one)."""
    v, b, c = _rows(v), _rows(b), _rows(c)
    g, A_log = g.contiguous(), A_log.contiguous()
    do = do.to(v.dtype).contiguous()
    B, T, H, _ = v.shape
    S = b.shape[-1]
    how = LAUNCHES[f"backward {form}"]
    segment = segment_length(T, B * H, how.programs, v.device)
    n = -(-T // segment)
    carry, kept = _segments(do, c, g, A_log, doc_ids, segment, reverse=True)
    dv, db, dc, dg, dA_log, dD, dh0 = _gradients(v, b, c, has_h0)
    scratch = saved.new_empty(B * H * n, BLOCK // CHUNK, *saved.shape[1:])
    dA_parts, dD_parts = g.new_empty(B, H, n, S), g.new_empty(B, H, n)
    constants = _constants(v.dtype, v.shape[-1], S, T % BLOCK != 0, doc_ids is not None)
    flags = {"FORM": form, "HAS_DHT": dhT is not None, "HAS_H0": has_h0, **_strides(v, b, c)}
    D = g.new_zeros(H) if D is None else D.contiguous()  # compiled without it, it spills more
    args = (v, b, c, g, A_log, D, _or(doc_ids, g), saved, scratch, do, _or(dhT, g), carry, kept)
    results = (dv, db, dc, dg, dA_parts, dD_parts, dh0 if has_h0 else g)
    sizes = (T, n, segment)
    launch(backward_kernel, (B * H, n), (*args, *results, *sizes), constants | flags, how.options)
    finish = {"S": S, "BS": constants["BS"]}
    launch(finish_kernel, (H, 1), (A_log, dA_parts, dD_parts, dA_log, dD, B, H, n), finish, {"num_warps": 1})
    return dv, db, dc, dg, dA_log, dD, dh0


def _backward_shapes(do, dhT, v, b, c, g, A_log, D, doc_ids, saved, form, has_h0):
    return _gradients(v, b, c, has_h0)


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    v, b, c, g, A_log, D, h0, doc_ids, form, _, _ = inputs
    ctx.save_for_backward(v, b, c, g, A_log, D, doc_ids, output[2])
    ctx.form, ctx.has_h0 = form, h0 is not None
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, dhT: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    v, b, c, g, A_log, D, doc_ids, saved = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(v)
    dv, db, dc, dg, dA_log, dD, dh0 = recurrence_backward(
        do, dhT, v, b, c, g, A_log, D, doc_ids, saved, ctx.form, ctx.has_h0
    )
    return dv, db, dc, dg, dA_log, dD if D is not None else None, dh0 if ctx.has_h0 else None, None, None, None, None


recurrence_backward = register_operator("recurrence_backward", run_backward, _backward_shapes)
recurrence = register_operator(
    "recurrence", run_forward, _forward_shapes, setup_context=_setup_context, backward=_differentiate
)


def _segments(
    v: Tensor, b: Tensor, g: Tensor, A_log: Tensor, doc_ids: Tensor | None, segment: int, *, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Every segment's addition to the state (reverse: to the state's gradient) and the sum of its gates."""
    B, T, H, D = v.shape
    n, S = -(-T // segment), b.shape[-1]
    carry = g.new_empty(B * H, n, _tile(S), _tile(D))
    kept = g.new_empty(B * H, n)
    if n > 1:
        constants = _constants(v.dtype, D, S, T % BLOCK != 0, doc_ids is not None)
        args = (v, b, g, A_log, _or(doc_ids, g), carry, kept, T, n, segment)
        how = LAUNCHES["segment"]
        launch(segment_kernel, (B * H, n - 1), args, constants | {"REVERSE": reverse, **_strides(v, b)}, how.options)
    return carry, kept


@cache
def _constants(dtype: torch.dtype, D: int, S: int, masked: bool, has_docs: bool) -> dict[str, Any]:
    """The compile-time arguments that do not depend on which tensors are there."""
    wide = dtype == torch.float32
    sizes = {"D": D, "S": S, "BD": _tile(D), "BS": _tile(S), "BT": CHUNK}
    precision = {"SPLIT": not (wide or INTERPRETED), "PRECISION": "tf32x3" if wide else "tf32"}
    return sizes | precision | {"HAS_DOCS": has_docs, "MASK": masked}


def _strides(v: Tensor, b: Tensor, *c: Tensor) -> dict[str, int]:
    """Heads and token strides. They are a model's own, so compiled in: addresses then take fewer registers."""
    strides = zip(("v_stride", "b_stride", "c_stride"), (v, b, *c), strict=False)
    return {"H": v.shape[2]} | {name: x.stride(1) for name, x in strides}


@cache
def segment_length(T: int, n_rows: int, programs: int, device: torch.device) -> int:
    """Tokens a program walks: the multiple of 64 for which the GPU's last wave of programs ends first.

    ``n_rows``: sequences times heads. ``programs``: how many an SM holds at once.
    """
    slots = programs * _multiprocessors(device)
    shortest = -(-T // (BLOCK * MAX_SEGMENTS)) * BLOCK
    longest = max(-(-T // BLOCK) * BLOCK, shortest)
    best, best_cost = shortest, float("inf")
    for segment in range(shortest, min(longest, shortest + 16 * BLOCK) + 1, BLOCK):
        waves = -(-n_rows * -(-T // segment) // slots)
        cost = waves * (segment + BLOCK)  # a program also starts up and adds earlier segments: about one block's time
        if cost < best_cost:
            best, best_cost = segment, cost
    return best


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _tile(n: int) -> int:
    """The padded tile size: matrix instructions take at least 16."""
    return max(16, triton.next_power_of_2(n))


def _rows(x: Tensor) -> Tensor:
    """x as a tensor whose heads lie together and whose tokens lie one stride apart (a slice of a projection does)."""
    T, X = x.shape[1], x.shape[3]
    stride_B, stride_T, stride_H, stride_X = x.stride()
    fits = stride_X == 1 and stride_H == X and stride_B == T * stride_T and stride_T % 8 == 0
    return x if fits and x.data_ptr() % 16 == 0 else x.contiguous()


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    """A tensor to stand in for an absent argument; the kernel does not read it."""
    return other if x is None else x.contiguous()


def saved_states(v: Tensor, b: Tensor, save: bool) -> Tensor:
    """Room for the state before every 64th token; empty without ``save``."""
    B, T, H, D = v.shape
    n = B * H * (-(-T // BLOCK)) if save else 0
    return v.new_empty(n, _tile(b.shape[-1]), _tile(D))


def _gradients(v: Tensor, b: Tensor, c: Tensor, has_h0: bool) -> tuple[Tensor, ...]:
    """Empty tensors for the results of ``recurrence_backward``, all contiguous."""
    B, T, H, D = v.shape
    S = b.shape[-1]
    dv, db, dc = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (v, b, c))
    shapes = ((B, T, H), (H, S), (H,), (B, H, S, D) if has_h0 else (0,))
    return dv, db, dc, *(torch.empty(shape, dtype=torch.float32, device=v.device) for shape in shapes)
