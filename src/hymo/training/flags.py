"""From `training` flags to the blocks: which way each block computes is decided once, before the first step."""

from __future__ import annotations

import os

import torch
from torch import nn

from hymo.config import AutoBool, HyMoConfig, TrainingConfig
from hymo.distributed.mesh import launched_by_torchrun
from hymo.errors import HyMoError
from hymo.kernels.attention import choose_backend
from hymo.kernels.recurrence import HAS_TRITON
from hymo.models.gdn import GatedDeltaNetBlock
from hymo.models.layers import CompilableBlock
from hymo.models.mla import MLABlock
from hymo.models.moe import DeepSeekMoE


def resolve_fused_gdn(flag: AutoBool, device: torch.device) -> bool:
    """Whether the recurrence runs as the Triton kernel. Never a silent fallback: what cannot run is refused."""
    if flag == "auto":
        if device.type == "cuda" and not HAS_TRITON:
            raise HyMoError(
                "training.fused_gdn: found auto on CUDA without Triton; accepted: pip install triton, or false (the "
                "chunked PyTorch form, many times slower)"
            )
        return device.type == "cuda"
    if flag and device.type != "cuda":
        raise HyMoError(f"training.fused_gdn: found true on {device.type}; accepted: a CUDA device, or auto, or false")
    if flag and not HAS_TRITON:
        raise HyMoError("training.fused_gdn: found true without Triton; accepted: pip install triton, or false")
    return bool(flag)


def make_deterministic() -> None:
    """Algorithms that give the same bits each time, or an error where there are none. Before the first CUDA call."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def resolve_fsdp(flag: AutoBool, device: torch.device) -> bool:
    """Whether the model is sharded by FSDP2: auto is yes under torchrun or on CUDA, no for one CPU process."""
    return (launched_by_torchrun() or device.type == "cuda") if flag == "auto" else bool(flag)


def refuse_flags(config: HyMoConfig, device: torch.device) -> None:
    """Raise HyMoError for what does not run on this device, as far as it can be told before there is a model."""
    t = config.training
    resolve_fused_gdn(t.fused_gdn, device)
    computing_precision(t, device)
    if resolve_fsdp(t.fsdp, device):
        resolve_cuda_graphs(config, "step" if t.reshard == "auto" else t.reshard, device)
    else:
        resolve_cuda_graphs(config, None, device)
        if t.replicas != 1:
            raise HyMoError(
                f"training.replicas: found {t.replicas} for a model that is not sharded; accepted: 1, or training.fsdp "
                "true"
            )


def resolve_cuda_graphs(config: HyMoConfig, reshard: str | None, device: torch.device) -> bool:
    """Whether micro-batches are replayed. ``reshard``: how the model is sharded (None: it is not)."""
    t = config.training
    if not t.cuda_graphs:
        return False
    float32_experts = t.fsdp_mixed_precision == "float32" or not t.moe_mixed_precision  # the host reads their counts
    for wrong, found, accepted in (
        (device.type != "cuda", f"on {device.type}", "a CUDA device"),
        (
            reshard != "step",
            f"with reshard {reshard}" if reshard else "for a model that is not sharded",
            "training.fsdp with reshard step",
        ),
        (
            t.activation_checkpointing != "none",
            f"with activation_checkpointing {t.activation_checkpointing}",
            "activation_checkpointing none",
        ),
        (
            config.model.n_routed > 0 and float32_experts,
            "with experts in float32",
            "fsdp_mixed_precision bfloat16 and moe_mixed_precision true",
        ),
    ):
        if wrong:
            raise HyMoError(f"training.cuda_graphs: found true {found}; accepted: {accepted}, or false")
    return True


def computing_precision(training: TrainingConfig, device: torch.device) -> str:
    """The dtype of the computation: a model that is not sharded computes in its parameters' float32."""
    if resolve_fsdp(training.fsdp, device):
        return training.fsdp_mixed_precision
    if device.type == "cuda" and training.fsdp_mixed_precision != "float32":
        raise HyMoError(
            f"training.fsdp: found false with training.fsdp_mixed_precision {training.fsdp_mixed_precision} on CUDA; "
            "accepted: true (also on one GPU), or fsdp_mixed_precision float32"
        )
    return "float32"


def thread_optimization_flags(model: nn.Module, training: TrainingConfig, device: torch.device) -> dict[str, str]:
    """Push the flags onto the blocks; returns what was chosen, to be said once in the log."""
    fused, precision = resolve_fused_gdn(training.fused_gdn, device), computing_precision(training, device)
    compiled = device.type == "cuda" if training.torch_compile_gdn == "auto" else bool(training.torch_compile_gdn)
    apart = precision != "float32" and not training.moe_mixed_precision  # experts sharded in float32, by themselves
    for module in model.modules():
        if isinstance(module, GatedDeltaNetBlock | MLABlock) or (apart and isinstance(module, DeepSeekMoE)):
            module.checkpointing = training.activation_checkpointing
        if isinstance(module, CompilableBlock) and (apart or not isinstance(module, DeepSeekMoE)):
            module.use_compile = compiled
        if isinstance(module, MLABlock):
            module.experts_apart = apart and isinstance(module.ffn, DeepSeekMoE)
        if isinstance(module, GatedDeltaNetBlock):
            module.use_triton = fused
        elif isinstance(module, DeepSeekMoE):
            module.use_mixed_precision = training.moe_mixed_precision
    experts = ", experts float32" if apart else ""
    if device.type == "cuda" and (apart or precision == "float32"):  # grouped products are of bfloat16 alone
        experts += ", experts one by one"
    return {
        "recurrence": "triton" if fused else "chunked torch",
        "attention": choose_backend(device.type, packed=True),
        "compile": "per block" if compiled else "off",
        "checkpointing": training.activation_checkpointing,
        "precision": precision + experts,
    }
