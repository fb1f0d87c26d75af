"""The public recurrence: one op, several ways to compute it, one signature.

    h_t = exp(g_t A) h_{t-1} + b_t (x) v_t        A = -exp(A_log) < 0, one number a head and state row
    o_t = c_t . h_t (+ D v_t)

It is gated linear attention with a rank-1 log-decay (a scalar gate a token times a rate a channel): Yang et al. 2023,
arXiv 2312.06635; with one rate a head it is the state space dual of Dao and Gu 2024, arXiv 2405.21060.
Gates, decays and states are float32 whatever the inputs are (float64 inputs stay float64).

Shape letters: B batch, T tokens, H heads, D value size of a head, S state size of a head.
"""

import os
from typing import Any, Literal

import torch
from torch import Tensor

from hymo.kernels.chunked import chunked_recurrence
from hymo.kernels.reference import loop_recurrence, step_recurrence

Backend = Literal["auto", "triton", "torch", "loop"]
BACKENDS = ("auto", "triton", "torch", "loop")

try:
    import triton  # noqa: F401

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

DEBUG = os.environ.get("HYMODEBUG", "0") not in ("", "0")
_last_backend: str | None = None


def last_backend() -> str | None:
    """The backend that the latest call took (``triton``, ``torch`` or ``loop``); None before the first call."""
    return _last_backend


def gated_recurrence(
    v: Tensor,
    b: Tensor,
    c: Tensor,
    g: Tensor,
    A_log: Tensor,
    *,
    beta: Tensor | None = None,
    D: Tensor | None = None,
    h0: Tensor | None = None,
    doc_ids: Tensor | None = None,
    return_state: bool = False,
    max_log_decay: float | None = None,
    backend: Backend = "auto",
) -> Any:
    """The recurrence over whole sequences, differentiable in every floating argument.

    Args:
        v: values. float32, bfloat16, float16 or float64, as are b and c (one dtype for the three).
        b, c: input and output weights of the state.
        g: gates, >= 0; the log-decay of a step is ``-g exp(A_log)``.
        A_log: logarithm of the decay rates.
        beta: the delta rule's write strength; not built yet (NotImplementedError).
        D: [H], the skip weight: ``o += D v``.
        h0: [B,H,S,D], the initial state; zero if absent.
        doc_ids: integers [B,T], non-decreasing along a row: the state restarts where they change. Tokens of a row's
            first document see h0, and the final state is that of its last document.
        return_state: also return the final state [B,H,S,D] in float32 (float64 for float64 inputs).
        max_log_decay: a bound on ``g exp(A_log)`` that the caller vouches for; a small enough bound selects a cheaper
            form. None is right for any decay. HYMODEBUG=1 checks the bound and the values of g and doc_ids.
        backend: ``triton`` (a GPU), ``torch`` (chunked PyTorch, anywhere), ``loop`` (the definition), or ``auto``:
            triton on CUDA, torch elsewhere.

    Returns:
        o_BTHD in v's dtype, or (o_BTHD, h_BHSD) with ``return_state``.

    Raises:
        TypeError, ValueError: an argument of a wrong kind; the message names it, what was found and what is accepted.
        ImportError, RuntimeError: Triton is called for, and it or its GPU is missing.
    """
    global _last_backend
    if beta is not None:
        raise NotImplementedError("beta: the delta rule is not built yet; pass None")
    check_arguments(v, b, c, g, A_log, D, h0, doc_ids, max_log_decay)
    chosen = resolve_backend(backend, v.device)
    if DEBUG:
        check_values(g, A_log, doc_ids, max_log_decay)
    if not torch.compiler.is_compiling():  # torch 2.11 compiles no checkpointed block that sets a global
        _last_backend = chosen
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    g, A_log = g.to(dtype), A_log.to(dtype)
    D, h0 = (x if x is None else x.to(dtype) for x in (D, h0))
    if chosen == "triton":
        from hymo.kernels.triton_op import triton_recurrence

        o_BTHD, h_BHSD = triton_recurrence(v, b, c, g, A_log, D, h0, doc_ids, max_log_decay)
    else:
        v32, b32, c32 = v.to(dtype), b.to(dtype), c.to(dtype)
        if chosen == "loop":
            o_BTHD, h_BHSD = loop_recurrence(v32, b32, c32, g, A_log, D, h0, doc_ids)
        else:
            o_BTHD, h_BHSD = chunked_recurrence(v32, b32, c32, g, A_log, D, h0, doc_ids, max_log_decay)
        o_BTHD = o_BTHD.to(v.dtype)
    return (o_BTHD, h_BHSD) if return_state else o_BTHD


def gated_recurrence_step(
    v_BHD: Tensor,
    b_BHS: Tensor,
    c_BHS: Tensor,
    g_BH: Tensor,
    A_log_HS: Tensor,
    h_BHSD: Tensor,
    *,
    D: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """One token for every sequence, for generation: its output [B,H,D] in v's dtype and the new state.

    ``h_BHSD`` is not changed. The state is float32 (float64 for float64 inputs), as ``gated_recurrence`` returns it.
    On CUDA one Triton kernel does it, unless a gradient is wanted, a head is over 128, or ``backend`` says otherwise.
    """
    B, H, D_head = v_BHD.shape
    _check_shape("h_BHSD", h_BHSD, (B, H, b_BHS.shape[-1], D_head))
    dtype = torch.float64 if v_BHD.dtype == torch.float64 else torch.float32
    g, A_log, h = g_BH.to(dtype), A_log_HS.to(dtype), h_BHSD.to(dtype)
    D = D if D is None else D.to(dtype)
    inputs = [x for x in (v_BHD, b_BHS, c_BHS, g, A_log, h, D) if x is not None]
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if resolve_backend(backend, v_BHD.device) == "triton" and dtype == torch.float32 and not learns:
        from hymo.kernels import triton_step

        if max(D_head, b_BHS.shape[-1]) <= triton_step.LARGEST_HEAD:
            return triton_step.recurrence_step(v_BHD, b_BHS, c_BHS, g, A_log, h, D)
    o_BHD, h_BHSD = step_recurrence(v_BHD.to(dtype), b_BHS.to(dtype), c_BHS.to(dtype), g, A_log, h, D)
    return o_BHD.to(v_BHD.dtype), h_BHSD


def triton_gated_delta_rule(v_BTHD: Tensor, b_BTHS: Tensor, c_BTHS: Tensor, g_BTH: Tensor, A_log_HS: Tensor) -> Tensor:
    """The recurrence by the Triton kernels or not at all; ``g`` may be [B,T,H] or [B,T,H,1].

    The name is that of the original design notes; the recurrence has no erase term, so it is no delta rule.

    Raises:
        ImportError: Triton is not installed.
        RuntimeError: there is no GPU to run it on.
    """
    require_triton(v_BTHD.device)
    if g_BTH.dim() == 4 and g_BTH.shape[-1] == 1:
        g_BTH = g_BTH.squeeze(-1)
    return gated_recurrence(v_BTHD, b_BTHS, c_BTHS, g_BTH, A_log_HS, backend="triton")


class TritonGDNFunction(torch.autograd.Function):
    """``TritonGDNFunction.apply(v, b, c, g, A_log)``: the kernels as an autograd function."""

    @staticmethod
    def forward(v_BTHD: Tensor, b_BTHS: Tensor, c_BTHS: Tensor, g_BTH: Tensor, A_log_HS: Tensor) -> Tensor:
        return triton_gated_delta_rule(v_BTHD, b_BTHS, c_BTHS, g_BTH, A_log_HS)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, do_BTHD: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            o_BTHD = triton_gated_delta_rule(*leaves)
        return torch.autograd.grad(o_BTHD, leaves, do_BTHD)


def _next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n (1 for n <= 1)."""
    return 1 << max(n - 1, 0).bit_length()


def resolve_backend(backend: str, device: torch.device) -> str:
    """The backend to take on this device: ``auto`` is triton on CUDA and torch elsewhere, and never falls back."""
    if backend not in BACKENDS:
        raise ValueError(f"backend: found {backend!r}, accepted are {', '.join(BACKENDS)}")
    if backend == "auto":
        backend = "triton" if device.type == "cuda" else "torch"
    if backend == "triton":
        require_triton(device)
    return backend


def require_triton(device: torch.device) -> None:
    """Raise unless the Triton kernels can run on this device (or in Triton's interpreter, TRITON_INTERPRET=1)."""
    if not HAS_TRITON:
        raise ImportError(
            "the Triton recurrence needs the package triton, which is not installed: "
            "pip install triton, or take the chunked PyTorch form with backend='torch' (training.fused_gdn: false)"
        )
    if not _runs_triton(device):
        missing = "PyTorch sees no CUDA device" if not torch.cuda.is_available() else "move the tensors to CUDA"
        raise RuntimeError(
            f"the Triton recurrence runs on CUDA tensors only, found tensors on {device} ({missing}); "
            "backend='torch' (training.fused_gdn: false) runs on a CPU"
        )


def _runs_triton(device: torch.device) -> bool:
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def check_values(g_BTH: Tensor, A_log_HS: Tensor, doc_ids_BT: Tensor | None, max_log_decay: float | None) -> None:
    """What HYMODEBUG=1 checks, waiting for the device: signs, the order of documents, and the bound stated."""
    if (smallest := g_BTH.min().item()) < 0:
        raise ValueError(f"g: found {smallest}, accepted are gates >= 0")
    if doc_ids_BT is not None and (doc_ids_BT[:, 1:] < doc_ids_BT[:, :-1]).any().item():
        raise ValueError("doc_ids: found ids that decrease along a row, accepted are rows that never decrease")
    if max_log_decay is None:
        return
    largest = (g_BTH.detach().amax((0, 1))[:, None] * A_log_HS.detach().exp()).max().item()
    if largest > max_log_decay * (1 + 1e-6):
        raise ValueError(f"max_log_decay: stated {max_log_decay}, but the largest log-decay of a step is {largest}")


def check_arguments(
    v: Tensor,
    b: Tensor,
    c: Tensor,
    g: Tensor,
    A_log: Tensor,
    D: Tensor | None,
    h0: Tensor | None,
    doc_ids: Tensor | None,
    max_log_decay: float | None,
) -> None:
    """Shapes, dtypes and devices; every message names the argument, what was found and what is accepted."""
    for name, tensor, letters in (("v", v, "[B,T,H,D]"), ("b", b, "[B,T,H,S]")):
        if tensor.dim() != 4:
            raise ValueError(f"{name}: found shape {list(tensor.shape)}, accepted is {letters}")
    B, T, H, D_head = v.shape
    S = b.shape[-1]
    if min(B, T, H, D_head, S) < 1:
        raise ValueError(f"v, b: found shapes {list(v.shape)}, {list(b.shape)}, accepted are sizes of at least 1")
    shapes = {"b": (B, T, H, S), "c": (B, T, H, S), "g": (B, T, H), "A_log": (H, S), "D": (H,), "h0": (B, H, S, D_head)}
    named = {"b": b, "c": c, "g": g, "A_log": A_log, "D": D, "h0": h0, "doc_ids": doc_ids}
    for name, shape in (shapes | {"doc_ids": (B, T)}).items():
        if (x := named[name]) is None:
            continue
        _check_shape(name, x, shape)
        if x.device != v.device:
            raise ValueError(f"{name}: found on {x.device}, accepted is v's device {v.device}")
        if name != "doc_ids" and not x.is_floating_point():
            raise TypeError(f"{name}: found dtype {x.dtype}, accepted are floating dtypes")
    if v.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise TypeError(f"v: found dtype {v.dtype}, accepted are float32, bfloat16, float16 and float64")
    if b.dtype != v.dtype or c.dtype != v.dtype:
        raise TypeError(f"b, c: found dtypes {b.dtype}, {c.dtype}, accepted is v's dtype {v.dtype}")
    if doc_ids is not None and doc_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"doc_ids: found dtype {doc_ids.dtype}, accepted are int32 and int64")
    if max_log_decay is not None and not max_log_decay > 0:
        raise ValueError(f"max_log_decay: found {max_log_decay}, accepted are None and positive numbers")


def _check_shape(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: found shape {list(x.shape)}, accepted is {list(shape)}")
