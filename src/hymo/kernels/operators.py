"""Operators of ours in the dispatcher of PyTorch: what ``torch.compile`` and checkpointing see as one node."""

from collections.abc import Callable
from typing import Any

import torch


def register_operator(
    name: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Any:
    """Define ``hymo::name`` from a function's annotations and return it, to be called like the function.

    Args:
        function: what runs, on every device; it changes no argument, and no output shares memory with one.
        fake: the outputs' shapes, dtypes and devices without running.
        setup_context, backward: as of ``torch.library.register_autograd``; without them there is no gradient.

    ``torch.library.custom_op`` does the same and looks for shared memory at every call, which takes the host about
    as long as launching a kernel.
    """
    qualified = f"hymo::{name}"
    torch.library.define(qualified, torch.library.infer_schema(function, mutates_args=()))
    torch.library.impl(qualified, "default", function)
    torch.library.register_fake(qualified, fake)
    if backward is not None:
        torch.library.register_autograd(qualified, backward, setup_context=setup_context)
    return getattr(torch.ops.hymo, name).default
