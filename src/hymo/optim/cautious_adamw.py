"""AdamW with cautious weight decay (arXiv 2510.12402): decay acts only where it agrees with the update."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hymo.optim.base import (
    Algorithm,
    Group,
    GroupedOptimizer,
    check_choice,
    check_number,
    gradient,
    local,
    register,
    runs_triton,
    state_dtype,
    target,
)
from hymo.optim.update import MASKS, opposes

CHUNK = 1 << 24  # elements updated together: bounds the temporaries of the foreach form


class CautiousAdamW(GroupedOptimizer):
    """AdamW whose decay is masked: W <- W - lr (u + wd * 1[u * W >= 0] * W), u = m_hat / (sqrt(v_hat) + eps).

    A group with `embedding: True` decays by `embed_weight_decay` instead of `weight_decay`. `mask` names the tensor
    whose sign decides: the `update` u, the `momentum` m or the raw `grad`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        embed_weight_decay: float = 0.0,
        cautious_wd: bool = True,
        *,
        mask: str = "update",
    ):
        defaults = dict(DEFAULTS, algorithm="adamw", lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay)
        super().__init__(
            params, defaults | {"embed_weight_decay": embed_weight_decay, "cautious_wd": cautious_wd, "mask": mask}
        )


DEFAULTS = {
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "embed_weight_decay": 0.0,
    "embedding": False,
    "cautious_wd": True,
    "mask": "update",
}


def _check(group: Group) -> None:
    check_number(group, "eps", 0.0, above=True)
    for key in ("weight_decay", "embed_weight_decay"):
        check_number(group, key, 0.0)
    for key in ("embedding", "cautious_wd"):
        check_choice(group, key, (True, False))
    check_choice(group, "mask", MASKS)
    betas = group["betas"] = tuple(group["betas"])
    if len(betas) != 2 or not all(0.0 <= b < 1.0 for b in betas):
        raise ValueError(f"betas: found {betas!r}, accepted: two numbers from 0 below 1")


def _state(param: Tensor, group: Group) -> dict[str, Tensor]:
    def zeros() -> Tensor:
        return torch.zeros_like(param, dtype=state_dtype(param), memory_format=torch.preserve_format).detach()

    return {"step": torch.zeros((), dtype=torch.float32), "exp_avg": zeros(), "exp_avg_sq": zeros()}


def decay_of(group: Group) -> float:
    """The decay that applies to a group."""
    return group["embed_weight_decay"] if group["embedding"] else group["weight_decay"]


def adamw_step(optimizer: GroupedOptimizer, groups: list[Group]) -> None:
    for group in groups:
        with_grad = [p for p in group["params"] if p.grad is not None]
        if not with_grad:
            continue
        torch._foreach_add_([optimizer.state[p]["step"] for p in with_grad], 1.0)
        if runs_triton(with_grad[0].device) and _fused(optimizer, group, with_grad):
            continue
        for chunk in _chunks(with_grad):
            _update([(p, optimizer.state[p]) for p in chunk], group)


def _fused(optimizer: GroupedOptimizer, group: Group, params: list[Tensor]) -> bool:
    """One launch for the whole group, where Triton is there and the tensors allow it."""
    try:
        from hymo.optim import triton_step
    except ImportError:
        return False
    key = frozenset(params)
    if key not in optimizer.prepared:
        optimizer.prepared[key] = triton_step.adamw_tables(params)
    for tables in optimizer.prepared[key]:
        tables.run(optimizer.state, group, decay_of(group))
    return bool(optimizer.prepared[key])


def _chunks(params: list[Tensor]) -> Iterable[list[Tensor]]:
    chunk: list[Tensor] = []
    size = 0
    for p in params:
        if chunk and size + p.numel() > CHUNK:
            yield chunk
            chunk, size = [], 0
        chunk.append(p)
        size += p.numel()
    if chunk:
        yield chunk


def _update(items: list[tuple[Tensor, dict[str, Tensor]]], group: Group) -> None:
    """The foreach form: a fixed number of launches for all parameters of a chunk."""
    beta1, beta2 = group["betas"]
    w = [target(p, s) for p, s in items]
    g = [gradient(p, x.dtype) for (p, _), x in zip(items, w, strict=True)]
    m = [local(s["exp_avg"]) for _, s in items]
    v = [local(s["exp_avg_sq"]) for _, s in items]
    steps = [s["step"].item() for _, s in items]  # on the CPU: no wait
    torch._foreach_lerp_(m, g, 1.0 - beta1)
    torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, g, g, 1.0 - beta2)
    denominator = list(torch._foreach_div(v, [1.0 - beta2**t for t in steps]))
    torch._foreach_sqrt_(denominator)
    torch._foreach_add_(denominator, group["eps"])
    u = list(torch._foreach_div(m, [1.0 - beta1**t for t in steps]))
    torch._foreach_div_(u, denominator)
    apply_update_foreach(w, u, group["lr"], decay_of(group), _mask_source(group, u, m, g))
    for (p, s), new in zip(items, w, strict=True):
        if "master" in s:
            local(p).copy_(new)


def _mask_source(group: Group, u: list[Tensor], m: list[Tensor], g: list[Tensor]) -> list[Tensor] | None:
    if not group["cautious_wd"]:
        return None
    return {"update": u, "momentum": m, "grad": g}[group["mask"]]


def apply_update_foreach(
    w: list[Tensor], u: list[Tensor], lr: Tensor | float, weight_decay: float, source: list[Tensor] | None
) -> None:
    """`update.apply_update` for lists of tensors; u is overwritten."""
    if weight_decay:
        decay = list(torch._foreach_mul(w, weight_decay))
        if source is not None:
            for d, x, y in zip(decay, source, w, strict=True):
                d.masked_fill_(opposes(x, y), 0.0)
        torch._foreach_add_(u, decay)
    torch._foreach_mul_(u, lr)
    torch._foreach_sub_(w, u)


register(Algorithm("adamw", DEFAULTS, _check, _state, adamw_step))
