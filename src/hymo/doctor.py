"""``hymo doctor``: what this machine can run, and what to install for the rest. Asks; changes nothing."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

from hymo.cores import own_cores

EXTRAS = {
    "data": ("tiktoken", "zstandard"),
    "hub": ("datasets", "transformers", "safetensors"),
    "eval": ("lm-eval",),
    "track": ("tensorboard", "wandb", "trackio"),
    "report": ("matplotlib",),
    "gpu": ("flash-linear-attention",),
}
"""Optional packages by the extra that brings them."""
USES = {
    "tiktoken": "faster encoding of data sets",
    "zstandard": "text in .zst files",
    "datasets": "data sets of the hub",
    "transformers": "import hymo.hub",
    "safetensors": "hymo export, hymo import",
    "lm-eval": "hymo eval --tasks",
    "tensorboard": "logging.trackers: [tensorboard]",
    "wandb": "logging.trackers: [wandb]",
    "trackio": "logging.trackers: [trackio]",
    "matplotlib": "hymo report --png",
    "flash-linear-attention": "the peer of hymo bench recurrence",
}
NEWEST_KNOWN = (9, 0)
"""Compute capability of the GPUs that the kernels are tested on (H200)."""


def doctor() -> str:
    """The whole report as text."""
    sections = [_machine(), _torch(), _kernels(), _distribution(), _folders(), _extras()]
    return "\n".join("\n".join(section) for section in sections)


def _line(name: str, text: str) -> str:
    return f"{name:<14} {text}"


def _machine() -> list[str]:
    import hymo

    return [
        _line("hymo", f"{hymo.__version__} in {Path(hymo.__file__).parent}"),
        _line("python", f"{platform.python_version()} ({sys.executable})"),
        _line("machine", f"{platform.system()} {platform.machine()}, {own_cores()} cores{_memory()}"),
    ]


def _memory() -> str:
    try:
        return f", {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    except (AttributeError, ValueError, OSError):
        return ""


def _torch() -> list[str]:
    import torch

    lines = [_line("torch", f"{torch.__version__}, {torch.get_num_threads()} threads")]
    triton = version_of("triton")
    lines.append(_line("triton", triton or "absent: pip install triton (Linux; needed on CUDA alone)"))
    if not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda}, and sees none" if torch.version.cuda else "a CPU torch"
        lines.append(_line("GPU", f"none ({built}); training.device auto = cpu, in float32"))
        return lines
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        text = f"{index}: {found.name}, {found.total_memory / 2**30:.0f} GiB, capability {found.major}.{found.minor}"
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            text += "; no bfloat16: set training.fsdp_mixed_precision float32"
        elif (found.major, found.minor) != NEWEST_KNOWN:
            text += f"; the kernels are tested on {NEWEST_KNOWN[0]}.{NEWEST_KNOWN[1]} alone"
        lines.append(_line("GPU", text))
    return lines


def _kernels() -> list[str]:
    """Which way each operation would take, by the rules that training itself goes by."""
    import torch

    from hymo.config import TrainingConfig
    from hymo.errors import HyMoError
    from hymo.kernels import grouped
    from hymo.kernels.attention import choose_backend
    from hymo.training.flags import computing_precision, resolve_fused_gdn

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_cuda = device.type == "cuda"
    try:
        fused = resolve_fused_gdn("auto", device)
        recurrence = "triton (CUDA with Triton)" if fused else "chunked torch (no CUDA device)"
    except HyMoError as error:
        recurrence = f"cannot run: {error}"
    attention = choose_backend(device.type, packed=True)
    why = "CUDA with Triton, packed documents" if attention == "flex" else "no CUDA with Triton"
    if on_cuda and grouped._grouped_mm is not None:
        experts = "torch's grouped_mm (bfloat16 on CUDA)"
    else:
        experts = f"a loop over the experts ({'this torch has no grouped_mm' if on_cuda else 'no CUDA device'})"
    return [
        _line("recurrence", recurrence),
        _line("attention", f"{attention} ({why})"),
        _line("experts", experts),
        _line("precision", computing_precision(TrainingConfig(), device) + ", float32 parameters"),
        _line("compile", "per block (CUDA)" if on_cuda else "off (training.torch_compile_gdn auto on a CPU)"),
    ]


def _distribution() -> list[str]:
    import torch.distributed as dist

    if not dist.is_available():
        return [_line("distributed", "torch.distributed is absent from this torch: one process")]
    gloo = "gloo" if dist.is_gloo_available() else "no gloo"
    nccl = "nccl" if dist.is_nccl_available() else "no nccl"
    return [_line("distributed", f"{gloo} (CPU tensors, checkpoints), {nccl} (CUDA tensors)")]


def _folders() -> list[str]:
    from hymo.data.prepare import cache_folder

    folder = cache_folder(None)
    exists = folder
    while not exists.exists() and exists != exists.parent:
        exists = exists.parent
    fault = "" if os.access(exists, os.W_OK) else "; it cannot be written: set HYMO_CACHE or data.cache_dir"
    return [_line("cache", f"{folder} (HYMO_CACHE, data.cache_dir){fault}")]


def _extras() -> list[str]:
    lines = ["optional packages"]
    for extra, packages in EXTRAS.items():
        for package in packages:
            version = version_of(package)
            state = version or f"absent: pip install 'hymo[{extra}]'"
            lines.append(f"  {package:<24} {state:<34} {USES[package]}")
    return lines


def version_of(package: str) -> str | None:
    """The version of an installed package, without importing it; None where it is absent."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "present" if importlib.util.find_spec(package.replace("-", "_")) else None
