"""Sharding a model over ranks with FSDP2 (``fully_shard``): fp32 pieces, bf16 computation, fp32 reduction.

Each rank holds a piece of every large parameter in fp32 (the master). A unit's pieces are gathered, in the dtype of the
computation, before its forward and again before its backward; its gradients are averaged over ranks in fp32. The order
is: activation checkpointing, compile, then this. It is the same code at every world size, one included.

Small parameters that must not be rounded to bf16 (A_log, dt_bias, D, router, norms) are not sharded: they stay plain
fp32 tensors on every rank, and ``reduce.mean_replicated_gradients`` averages their gradients in one all-reduce an
attempt. Who computes a step calls, in this order: ``begin_micro_batch`` before each micro-batch,
``reduce.mean_replicated_gradients`` after the last backward, ``reduce.verdict``, ``reduce.clip``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard

from hymo.distributed.mesh import SHARD, build_mesh, ensure_group, pick_device
from hymo.distributed.reduce import is_distributed, is_main
from hymo.errors import HyMoError
from hymo.models.gdn import GatedDeltaNetBlock
from hymo.models.init import Place, initialize_
from hymo.models.layers import RMSNorm
from hymo.models.mla import MLABlock
from hymo.models.model import HyMo, LMHead, build_hymo
from hymo.models.moe import DeepSeekMoE
from hymo.models.mtp import MTPDepth

PRECISIONS = {"bfloat16": torch.bfloat16, "float32": None}  # None: no cast
RESHARD = ("auto", "layer", "step", "never")
UNITS = (GatedDeltaNetBlock, MLABlock, MTPDepth, nn.Embedding, LMHead)
STEP_SHARE = 0.2
"""``reshard: auto`` keeps gathered weights and gradients through a step if they need at most this share of memory."""

Policy = Callable[..., bool]


@dataclass
class Sharding:
    """How a model was sharded: what ``begin_micro_batch`` and the plan read (``model.sharding``).

    ``set_for_last``: whether its units are set for the last micro-batch of an attempt (None: not set yet).
    """

    mesh: DeviceMesh
    units: tuple[str, ...]
    reshard: str
    reduce_each_micro_batch: bool
    replicas: int
    set_for_last: bool | None = None


def fsdp_auto_wrap_policy(module: nn.Module, recurse: bool = True, nonwrapped_numel: int = 0) -> bool:
    """Whether a module is a unit, gathered and freed as one: trunk blocks, MTP depths, embedding, head.

    The signature is that of FSDP1's policies; neither ``recurse`` nor ``nonwrapped_numel`` changes the answer. Of
    nested units the outermost counts (an MTP depth with the block in it is one).
    """
    del recurse, nonwrapped_numel
    return isinstance(module, UNITS)


def wrap_model_with_fsdp(
    model: nn.Module,
    config: Any,
    *,
    mesh: DeviceMesh | None = None,
    world_size: int | None = None,
    auto_wrap_policy: Policy = fsdp_auto_wrap_policy,
) -> nn.Module:
    """Shard ``model`` in place and return it.

    A model on the meta device (``build_hymo(config, device="meta")``) is sharded first, then each rank draws its own
    pieces: no rank ever holds the whole, and the numbers are bitwise those of one process. A model with storage must
    hold the same numbers on all ranks.

    Args:
        config: a HyMoConfig or its ``training`` section: fsdp_mixed_precision, reshard, replicas,
            reduce_each_micro_batch, moe_mixed_precision, seed, device.
        mesh: 1-D (shard) or 2-D (replicate, shard); default: all ranks, ``replicas`` copies of the model.
        world_size: if given, checked against the mesh.
        auto_wrap_policy: predicate (module, recurse=True, nonwrapped_numel=0) that picks the units.

    Raises ValueError for float16 (gradients would need a loss scale), an unknown reshard, a mesh of another size.
    """
    if isinstance(model, FSDPModule):
        raise ValueError("model: found one that is sharded already; accepted: a plain module")
    training = getattr(config, "training", config)
    first = next(model.parameters())
    precision = _precision(training.fsdp_mixed_precision, first.dtype)
    mesh = mesh if mesh is not None else _default_mesh(model, training)
    if world_size is not None and world_size != mesh.size():
        raise ValueError(f"world_size: found {world_size}, accepted: {mesh.size()}, the number of ranks of the mesh")
    reshard = resolve_reshard(getattr(training, "reshard", "auto"), model, mesh.device_type)
    units = dict(find_units(model, auto_wrap_policy))
    _shard_units(model, units, _sharding_mesh(mesh), precision, reshard, fp32_experts=not training.moe_mixed_precision)
    replicas = mesh.size(0) if mesh.ndim == 2 else 1
    each = getattr(training, "reduce_each_micro_batch", True)
    model.sharding = Sharding(mesh, tuple(units), reshard, each, replicas)  # type: ignore[assignment]
    if any(p.is_meta for p in model.parameters()):
        _materialise(model, mesh.device_type, training.seed)
    return model


def find_units(model: nn.Module, policy: Policy = fsdp_auto_wrap_policy) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of each unit in the order of definition: the outermost modules that ``policy`` picks.

    A tied embedding and head are no units of their own: they stay with the root, gathered once for both uses.
    """
    tied = _tied_modules(model)
    inside: str | None = None
    for name, module in model.named_modules():
        if not name or module in tied or (inside is not None and name.startswith(inside)):
            continue
        if policy(module, recurse=True, nonwrapped_numel=0):
            inside = name + "."
            yield name, module


def replicated_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that stay whole and fp32 on every rank, by name: A_log, dt_bias, D, routers, norm weights."""
    found = {}
    for prefix, module in model.named_modules():
        leaves: tuple[str, ...] = ()
        if isinstance(module, GatedDeltaNetBlock):
            leaves = ("A_log", "dt_bias", "D")
        elif isinstance(module, RMSNorm):
            leaves = ("weight",)
        elif isinstance(module, DeepSeekMoE):
            leaves = ("router.weight",)
        for leaf in leaves:
            found[f"{prefix}.{leaf}"] = module.get_parameter(leaf)
    return found


def placement(shape: torch.Size | tuple[int, ...], shards: int) -> Shard:
    """The axis along which a parameter is cut into ``shards`` pieces.

    Stacked experts [E, m, n] on 0 where E divides, else on 1 where m divides (FSDP2 wants even pieces there): on axis 0
    at 64 ranks, 16 experts would lie on 16 ranks and nothing of them on the others. All else on 0, uneven if need be.
    """
    if len(shape) == 3 and shape[0] % shards and shape[1] % shards == 0:
        return Shard(1)
    return Shard(0)


def placements(model: nn.Module, shards: int) -> list[tuple[str, tuple[int, ...], str]]:
    """(name, shape, "replicate" | "shard(axis)" | "shard(axis), uneven") of every parameter, as ``plan`` prints it."""
    whole, table = replicated_parameters(model), []
    for name, param in model.named_parameters():
        axis = placement(param.shape, shards).dim
        text = f"shard({axis})" + (", uneven" if param.shape[axis] % shards else "")
        table.append((name, tuple(param.shape), "replicate" if name in whole else text))
    return table


def begin_micro_batch(model: nn.Module, *, is_last: bool) -> None:
    """Say before its forward whether a micro-batch is the last of the attempt. Nothing to do for an unsharded model.

    Where gradients are held back (``reshard: step``, or ``reduce_each_micro_batch: false``) they are reduced in the
    last backward; copies of the model (HSDP) are averaged once an attempt in any case.
    """
    sharding = getattr(model, "sharding", None)
    if sharding is None or not isinstance(model, FSDPModule) or sharding.set_for_last == is_last:
        return  # three walks over all modules take the host 2 ms
    sharding.set_for_last = None
    keeps_weights = sharding.reshard == "step"
    model.set_requires_gradient_sync(is_last or (sharding.reduce_each_micro_batch and not keeps_weights))
    if sharding.replicas > 1:
        model.set_requires_all_reduce(is_last)
    if keeps_weights:
        model.set_reshard_after_backward(is_last)
    sharding.set_for_last = is_last


def let_gather_streams_be(model: nn.Module) -> None:
    """Before a forward that is recorded and gathers nothing: FSDP2's streams would wait for it and be recorded too."""
    if isinstance(model, FSDPModule):
        model.set_post_optim_event(torch.cuda.current_stream().record_event())


def drop_gradients(model: nn.Module) -> None:
    """Forget all gradients, those too that were held back for a last micro-batch that never came.

    An optimizer's ``zero_grad`` does not see the latter: an attempt given up half-way would leak into the next one.
    """
    model.zero_grad(set_to_none=True)
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        one = getattr(state, "_fsdp_param_group", None)  # torch before 2.13 has one group a unit
        for group in getattr(state, "_fsdp_param_groups", [one] if one is not None else []):
            group._partial_reduce_output = None
            for param in group.fsdp_params:
                param.sharded_param.grad = param.unsharded_accumulated_grad = None
                if hasattr(param, "_unsharded_param"):
                    param._unsharded_param.grad = None


@torch.no_grad()
def gather_model(model: HyMo) -> HyMo:
    """An unsharded copy of a model for rank 0, for generation (a collective: all ranks gather every parameter).

    The other ranks keep nothing: they get a model on the meta device. Returns the model itself where it is not sharded.
    """
    if not isinstance(model, FSDPModule):
        return model
    device = next(model.parameters()).device if is_main() else "meta"
    whole = build_hymo(model.config, device=device, initialise=False)
    source = model.state_dict()
    for name, tensor in whole.state_dict().items():
        value = source[name]
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if is_main():
            tensor.copy_(full)
        del full  # before the next is gathered
    return whole.train(model.training)


def resolve_reshard(choice: str, model: nn.Module, device_type: str, memory: float | None = None) -> str:
    """``layer`` | ``step`` | ``never``.

    ``auto`` is ``step`` where six bytes a parameter (unsharded bf16 weights and fp32 gradients) fit into a fifth of the
    GPU's memory (bytes; None: that of this process's GPU), else ``layer``.
    """
    if choice not in RESHARD:
        raise ValueError(f"training.reshard: found {choice!r}, accepted: {', '.join(RESHARD)}")
    if choice != "auto":
        return choice
    if device_type != "cuda":
        return "layer"
    needed = 6 * sum(p.numel() for p in model.parameters())
    if memory is None:
        memory = torch.cuda.get_device_properties().total_memory
    return "step" if needed <= STEP_SHARE * memory else "layer"


# --- the steps of wrapping ---


def _precision(name: str, held: torch.dtype = torch.float32) -> MixedPrecisionPolicy:
    if name not in PRECISIONS:
        hint = " (it would need a loss scale)" if name == "float16" else ""
        raise ValueError(f"training.fsdp_mixed_precision: found {name!r}{hint}, accepted: {', '.join(PRECISIONS)}")
    # Inputs are not cast: the residual stream has the dtype of the embedding's output, and the rotary angles and the
    # router's logits beside it must stay fp32.
    reduced = torch.promote_types(held, torch.float32)  # float64 parameters: what tests compare with
    return MixedPrecisionPolicy(PRECISIONS[name], reduced, cast_forward_inputs=False)


def _default_mesh(model: nn.Module, training: Any) -> DeviceMesh:
    if not is_distributed() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise HyMoError("no process group in a job of several processes: call hymo.distributed.mesh.init_distributed")
    first = next(model.parameters())
    device = pick_device(training.device) if first.is_meta else first.device
    ensure_group(device)
    return build_mesh(device.type, getattr(training, "replicas", 1))


def _sharding_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Without copies the replicate axis is left out, and with it an all-reduce of one."""
    if mesh.ndim == 2 and mesh.size(0) == 1:
        return mesh[(mesh.mesh_dim_names or ("", SHARD))[1]]
    return mesh


def _shard_units(
    model: nn.Module,
    units: dict[str, nn.Module],
    mesh: DeviceMesh,
    precision: MixedPrecisionPolicy,
    reshard: str,
    fp32_experts: bool,
) -> None:
    shards = mesh.size(mesh.ndim - 1)
    common: dict[str, Any] = {
        "mesh": mesh,
        "ignored_params": set(replicated_parameters(model).values()),
        "shard_placement_fn": lambda param: placement(param.shape, shards),
    }
    free = reshard == "layer"
    if fp32_experts and precision.param_dtype is not None:
        for module in model.modules():
            if isinstance(module, DeepSeekMoE):
                fully_shard(module, mp_policy=_precision("float32"), reshard_after_forward=free, **common)
    for module in units.values():
        is_last = isinstance(module, LMHead)  # its backward comes at once: gathering it again would be for nothing
        fully_shard(module, mp_policy=precision, reshard_after_forward=free and not is_last, **common)
    fully_shard(model, mp_policy=precision, reshard_after_forward=False, **common)
    for module in units.values():
        if isinstance(module, nn.Embedding):
            module.set_unshard_in_backward(False)  # type: ignore[operator]  # its backward needs no weight
    _prefetch([m for name, m in units.items() if name.startswith("layers.")])
    for unit, method in ((getattr(model, "head", None), "logits"), (model, "forward_with_hidden")):
        if isinstance(unit, FSDPModule) and hasattr(unit, method):
            register_fsdp_forward_method(cast(nn.Module, unit), method)


def _prefetch(trunk: list[nn.Module]) -> None:
    """Ask for the next block's weights before this one computes; routing may make the host wait in between.

    Only inside the trunk, whose blocks always all run: weights fetched for a block that then does not run (an MTP depth
    during evaluation) would be taken for current after the next update.
    """
    for here, following in pairwise(trunk):
        here.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
        following.set_modules_to_backward_prefetch([here])  # type: ignore[operator]


def _materialise(model: nn.Module, device_type: str, seed: int) -> None:
    """Storage for this rank's pieces, then their numbers."""
    if not isinstance(model, HyMo):
        raise ValueError(
            "model: found parameters on the meta device; accepted for models other than HyMo: with storage"
        )
    model.to_empty(device=torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else "cpu")
    model.tie_weights()  # to_empty gives each of two tied names a tensor of its own
    initialize_(model, seed, _own_places)


def _own_places(param: Tensor) -> list[Place]:
    """Which part of a parameter this rank holds: equal pieces of ceil(n / shards), the last ones short or empty."""
    if not isinstance(param, DTensor):
        return [(param, 0, 0, param.shape[0])]
    local, dim, start = param.to_local(), 0, 0
    for axis, place in enumerate(param.placements):
        if isinstance(place, Shard):
            dim = place.dim
            length = -(-param.shape[dim] // param.device_mesh.size(axis))
            start = min(param.device_mesh.get_local_rank(axis) * length, param.shape[dim])
        elif not isinstance(place, Replicate):
            raise ValueError(f"a parameter is placed {place}, accepted: Shard and Replicate")
    return [(local, dim, start, start + local.shape[dim])]


def _tied_modules(model: nn.Module) -> set[nn.Module]:
    """Modules that own one parameter together."""
    owners: dict[Tensor, list[nn.Module]] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            owners.setdefault(param, []).append(module)
    return {module for modules in owners.values() if len(modules) > 1 for module in modules}
