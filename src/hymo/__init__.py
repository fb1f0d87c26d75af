"""HyMo: pretrain hybrid language models with Muon-family optimizers.

Public names are imported on first use, so that ``import hymo`` (and ``hymo --help``) does not load torch.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "hymo.config": ("HyMoConfig", "ConfigError"),
    "hymo.config_io": ("load_config",),
    "hymo.models.model": ("HyMo", "build_hymo"),
    "hymo.models.gdn": ("GatedDeltaNetBlock",),
    "hymo.models.mla": ("MLABlock",),
    "hymo.models.moe": ("DeepSeekMoE",),
    "hymo.models.mtp": ("MultiTokenPrediction",),
    "hymo.optim.normuon": ("NorMuon",),
    "hymo.optim.cautious_adamw": ("CautiousAdamW",),
    "hymo.optim.build": ("Optimizers", "build_optimizers"),
    "hymo.kernels.recurrence": (
        "gated_recurrence",
        "triton_gated_delta_rule",
        "TritonGDNFunction",
        "HAS_TRITON",
        "_next_power_of_2",
    ),
    "hymo.training.scheduler": ("JointWSDScheduler", "Step"),
    "hymo.training.step": ("TrainStepResult",),
    "hymo.training.trainer": ("Trainer",),
    "hymo.distributed.fsdp": ("wrap_model_with_fsdp", "fsdp_auto_wrap_policy"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_HOME_OF]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'hymo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
