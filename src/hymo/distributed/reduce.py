"""Small collectives: counts, the verdict over all ranks, gradient norms, objects, barriers.

Each is the identity (or does nothing) on one process and then needs no process group. What all ranks must decide alike
(skip or update, the clip coefficient, which checkpoint is the newest) is decided from one reduced value, never from a
rank's own view.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate, Shard

from hymo.errors import HyMoError

CLIP_EPS = 1e-6
"""Added to the norm that a clip divides by, as in ``torch.nn.utils.clip_grad_norm_``."""


def is_distributed() -> bool:
    """Whether a process group exists (also one of a single process)."""
    return dist.is_available() and dist.is_initialized()


def world_size(group: ProcessGroup | None = None) -> int:
    return dist.get_world_size(group) if is_distributed() else 1


def rank(group: ProcessGroup | None = None) -> int:
    return dist.get_rank(group) if is_distributed() else 0


def is_main() -> bool:
    """True on the one rank that logs and writes files."""
    return rank() == 0


def sum_across(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """The sum of ``tensor`` over ranks, as a new tensor (any dtype; the argument is unchanged)."""
    result = tensor.detach().clone()
    if world_size(group) > 1:
        dist.all_reduce(result, group=group)
    return result


def max_across(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """The elementwise largest of ``tensor`` over ranks, as a new tensor."""
    result = tensor.detach().clone()
    if world_size(group) > 1:
        dist.all_reduce(result, op=dist.ReduceOp.MAX, group=group)
    return result


def sum_counts(counts: Sequence[int] | Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Whole numbers summed over ranks in one all-reduce: int64, exact, the same on every rank."""
    tensor = counts if isinstance(counts, Tensor) else torch.tensor(counts, dtype=torch.int64)
    if tensor.is_floating_point():
        raise TypeError(f"sum_counts: found {tensor.dtype}, accepted: whole numbers")
    return sum_across(tensor.to(torch.int64), group)


@dataclass(frozen=True)
class Verdict:
    """What all ranks agree on after the last backward of an attempt.

    ``finite``: every rank's loss and the gradient norm are finite. ``grad_norm``: the full norm (fp64, the same number
    on all ranks). ``norms``: the same by group of parameters. ``bad_loss_ranks``, ``bad_grad_ranks``: who to ask.
    """

    finite: bool
    grad_norm: float
    norms: dict[str, float] = field(default_factory=dict)
    bad_loss_ranks: tuple[int, ...] = ()
    bad_grad_ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.finite:
            return f"finite, gradient norm {self.grad_norm:.4g}"
        who = [
            f"{what} on rank {', '.join(map(str, ranks))}"
            for what, ranks in (("loss", self.bad_loss_ranks), ("gradient", self.bad_grad_ranks))
            if ranks
        ]
        return "not finite: " + ("; ".join(who) or "the gradient norm")


def verdict(
    loss: Tensor | float,
    parameters: Iterable[Tensor] | Mapping[str, Iterable[Tensor]],
    group: ProcessGroup | None = None,
) -> Verdict:
    """One all-reduce that tells every rank whether this attempt may become an update, and its gradient norm.

    Args:
        loss: this rank's total loss of the attempt (scalar). Non-finite on any rank makes ``finite`` false on all.
        parameters: tensors whose ``.grad`` counts, or named groups of them. DTensors of any mesh and plain tensors may
            be mixed. A plain gradient is taken to be the same on every rank (already reduced) and is counted once.
        group: the ranks that decide together (default: all).
    """
    groups = parameters if isinstance(parameters, Mapping) else {"all": parameters}
    size, me = world_size(group), rank(group)
    loss = torch.as_tensor(loss).detach()
    squares, own_finite = _sums_of_squares({name: list(ps) for name, ps in groups.items()}, me, loss.device)
    flags = torch.zeros(2, size, dtype=torch.float64, device=squares.device)
    flags[0, me] = (~torch.isfinite(loss)).to(torch.float64).to(flags.device)
    flags[1, me] = (~own_finite).to(torch.float64)
    packed = torch.cat([squares, flags.flatten()])
    if size > 1:
        dist.all_reduce(packed, group=group)
    values = packed.tolist()  # the attempt's one wait for the device
    squares_by_group, bad_loss, bad_grad = values[: len(groups)], values[len(groups) :][:size], values[-size:]
    norm = sum(squares_by_group) ** 0.5
    return Verdict(
        finite=norm < float("inf") and not any(bad_loss) and not any(bad_grad),
        grad_norm=norm,
        norms=dict(zip(groups, (s**0.5 for s in squares_by_group), strict=True)),
        bad_loss_ranks=tuple(r for r, bad in enumerate(bad_loss) if bad),
        bad_grad_ranks=tuple(r for r, bad in enumerate(bad_grad) if bad),
    )


@torch.no_grad()
def mean_replicated_gradients(parameters: Iterable[Tensor], group: ProcessGroup | None = None) -> None:
    """Average over ranks, in place, the gradients that nothing else reduces: those of plain (unsharded) parameters.

    One flat fp32 all-reduce an attempt (fp64 for fp64 parameters), after the last backward. The order of ``parameters``
    must be the same on every rank. A rank without a gradient counts as zero; one that no rank has stays None. DTensors
    are left alone: FSDP2 averaged them. Works for a model that is not sharded at all, too.
    """
    plain = [p for p in parameters if p.requires_grad and not isinstance(p, DTensor)]
    size = world_size(group)
    if size == 1 or not plain:
        return
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in plain) else torch.float32
    pieces = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten().to(dtype) for p in plain]
    has = torch.tensor([float(p.grad is not None) for p in plain], dtype=dtype, device=plain[0].device)
    flat = torch.cat([*pieces, has])
    dist.all_reduce(flat, group=group)
    *means, has = flat.split([p.numel() for p in plain] + [len(plain)])
    for p, mean, ranks in zip(plain, means, has.tolist(), strict=True):
        if ranks == 0:
            continue
        mean = mean.div_(size).view_as(p)
        if p.grad is None:
            p.grad = mean.to(p.dtype)
        else:
            p.grad.copy_(mean)


def grad_norm(parameters: Iterable[Tensor], group: ProcessGroup | None = None) -> float:
    """The full gradient norm over ranks, meshes and plain tensors: fp64, the same number on every rank."""
    return verdict(0.0, parameters, group).grad_norm


@torch.no_grad()
def clip(parameters: Iterable[Tensor], max_norm: float | None, norm: float) -> float:
    """Scale every gradient by min(1, max_norm / (norm + 1e-6)), in place, without a collective.

    ``norm`` is ``verdict(...).grad_norm``, so the coefficient (returned) is one number on all ranks. ``max_norm`` None
    or 0 means no clipping.
    """
    coefficient = min(1.0, max_norm / (norm + CLIP_EPS)) if max_norm else 1.0
    if coefficient < 1.0:
        grads = [local(p.grad) for p in parameters if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, coefficient)
    return coefficient


def broadcast_object(value: Any, src: int = 0, group: ProcessGroup | None = None) -> Any:
    """``value`` of global rank ``src`` on every rank (pickled: only between the processes of one job)."""
    if world_size(group) == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=src, group=group)
    return box[0]


def gather_objects(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Every rank's ``value``, in the order of the ranks, on every rank."""
    if world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def raise_together(error: BaseException | None, what: str, group: ProcessGroup | None = None) -> None:
    """Where any rank has an error, every rank raises: its own, or HyMoError naming the ranks that failed.

    A collective: all ranks call it, those without an error pass None.
    """
    messages = gather_objects(None if error is None else f"{type(error).__name__}: {error}", group)
    if error is not None:
        raise error
    failed = [f"rank {r}: {message}" for r, message in enumerate(messages) if message is not None]
    if failed:
        raise HyMoError(f"{what} failed on {len(failed)} of {len(messages)} ranks; " + "; ".join(failed))


def barrier(group: ProcessGroup | None = None, timeout: float | None = None, name: str = "barrier") -> None:
    """Wait for all ranks. With ``timeout`` (seconds) a gloo group raises RuntimeError that names who did not come."""
    if world_size(group) == 1:
        return
    if timeout is not None and dist.get_backend(group) == dist.Backend.GLOO:
        try:
            dist.monitored_barrier(group, timeout=timedelta(seconds=timeout), wait_all_ranks=True)
        except RuntimeError as error:
            raise RuntimeError(f"{name}: not all ranks arrived within {timeout:g} s: {error}") from error
        return
    dist.barrier(group)


def local(tensor: Tensor) -> Tensor:
    """This rank's piece of a DTensor; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def counts_here(tensor: Tensor) -> bool:
    """Whether this rank is the one that counts its piece of a tensor in a sum over ranks: no piece is counted twice."""
    return _counts_here(tensor, rank())


def _counts_here(grad: Tensor, me: int) -> bool:
    """The first rank along every axis that replicates a piece counts it."""
    if not isinstance(grad, DTensor):
        return me == 0
    coordinate = grad.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    for at, placement in zip(coordinate, grad.placements, strict=True):
        if isinstance(placement, Replicate):
            if at != 0:
                return False
        elif not isinstance(placement, Shard):
            raise ValueError(f"a gradient is placed {placement}: reduce it before its norm is taken")
    return True


def _sums_of_squares(groups: Mapping[str, list[Tensor]], me: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """This rank's part of each group's sum of squares (fp64 [groups]), and whether all its gradients are finite."""
    sums, own_finite = [], torch.ones((), dtype=torch.bool, device=device)
    for parameters in groups.values():
        grads = [p.grad for p in parameters if p.grad is not None]
        if not grads:
            sums.append(torch.zeros((), dtype=torch.float64, device=device))
            continue
        norms = torch.stack(torch._foreach_norm([local(g) for g in grads], 2.0, dtype=torch.float64))
        own_finite = own_finite.to(norms.device) & torch.isfinite(norms).all()
        counted = torch.tensor([_counts_here(g, me) for g in grads], device=norms.device)
        sums.append(norms.square().masked_fill(~counted, 0.0).sum())  # a mask: 0 * inf would be nan
    target = own_finite.device
    return torch.stack([s.to(target) for s in sums]), own_finite
