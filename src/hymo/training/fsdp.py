"""Sharding under the path of the original design notes; the code is in ``hymo.distributed.fsdp``."""

from hymo.distributed.fsdp import fsdp_auto_wrap_policy as fsdp_auto_wrap_policy
from hymo.distributed.fsdp import wrap_model_with_fsdp as wrap_model_with_fsdp

__all__ = ["fsdp_auto_wrap_policy", "wrap_model_with_fsdp"]
