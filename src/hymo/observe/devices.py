"""GPUs that are known: memory and dense bf16 peak of their makers' data sheets.

A GPU that is not here has no MFU and no plan of its memory: never a guess, and never the figure with sparsity
(fms-fsdp#89, Megatron-LM#1565).
"""

from __future__ import annotations

from dataclasses import dataclass

from hymo.errors import HyMoError


@dataclass(frozen=True)
class Device:
    """``memory``: bytes, the data sheet's GB as 1e9 (the driver shows a few percent more). ``peak``: FLOP/s."""

    memory: float
    peak: float


def _device(gigabytes: float, teraflops: float) -> Device:
    return Device(gigabytes * 1e9, teraflops * 1e12)


# By the whole name that the driver gives: by a part of it an H100 NVL would be an H100.
DEVICES = {
    "NVIDIA A100-SXM4-40GB": _device(40, 312),
    "NVIDIA A100-PCIE-40GB": _device(40, 312),
    "NVIDIA A100-SXM4-80GB": _device(80, 312),
    "NVIDIA A100 80GB PCIe": _device(80, 312),
    "NVIDIA H100 80GB HBM3": _device(80, 989),
    "NVIDIA H100 PCIe": _device(80, 756),
    "NVIDIA H100 NVL": _device(94, 835),
    "NVIDIA H200": _device(141, 989),
    "NVIDIA B200": _device(180, 2250),
    "NVIDIA GB200": _device(186, 2500),
    "NVIDIA L40S": _device(48, 362),
    "NVIDIA GeForce RTX 4090": _device(24, 165),
}
SHORT = {
    "a100-40gb": "NVIDIA A100-SXM4-40GB",
    "a100-80gb": "NVIDIA A100-SXM4-80GB",
    "h100": "NVIDIA H100 80GB HBM3",
    "h100-pcie": "NVIDIA H100 PCIe",
    "h100-nvl": "NVIDIA H100 NVL",
    "h200": "NVIDIA H200",
    "b200": "NVIDIA B200",
    "gb200": "NVIDIA GB200",
    "l40s": "NVIDIA L40S",
    "rtx4090": "NVIDIA GeForce RTX 4090",
}


def find_device(name: str) -> Device:
    """By its short name or the driver's, in any case."""
    whole = {known.lower(): known for known in DEVICES} | SHORT
    found = whole.get(name.lower())
    if found is None:
        raise HyMoError(f"--device: found {name}; accepted: {', '.join(SHORT)}")
    return DEVICES[found]
