"""HyMo: pretrain hybrid language models with Muon-family optimizers.

Public names are imported on first use, so that ``import hymo`` (and ``hymo --help``) does not load torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names for a type checker; "as" says that they are public
    from hymo.config import ConfigError as ConfigError
    from hymo.config import HyMoConfig as HyMoConfig
    from hymo.config_io import load_config as load_config
    from hymo.distributed.fsdp import fsdp_auto_wrap_policy as fsdp_auto_wrap_policy
    from hymo.distributed.fsdp import wrap_model_with_fsdp as wrap_model_with_fsdp
    from hymo.kernels.recurrence import HAS_TRITON as HAS_TRITON
    from hymo.kernels.recurrence import TritonGDNFunction as TritonGDNFunction
    from hymo.kernels.recurrence import _next_power_of_2 as _next_power_of_2
    from hymo.kernels.recurrence import gated_recurrence as gated_recurrence
    from hymo.kernels.recurrence import triton_gated_delta_rule as triton_gated_delta_rule
    from hymo.models.gdn import GatedDeltaNetBlock as GatedDeltaNetBlock
    from hymo.models.mla import MLABlock as MLABlock
    from hymo.models.model import HyMo as HyMo
    from hymo.models.model import build_hymo as build_hymo
    from hymo.models.moe import DeepSeekMoE as DeepSeekMoE
    from hymo.models.mtp import MultiTokenPrediction as MultiTokenPrediction
    from hymo.optim.build import Optimizers as Optimizers
    from hymo.optim.build import build_optimizers as build_optimizers
    from hymo.optim.cautious_adamw import CautiousAdamW as CautiousAdamW
    from hymo.optim.normuon import NorMuon as NorMuon
    from hymo.training.scheduler import JointWSDScheduler as JointWSDScheduler
    from hymo.training.scheduler import Step as Step
    from hymo.training.step import TrainStepResult as TrainStepResult
    from hymo.training.trainer import Trainer as Trainer

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
