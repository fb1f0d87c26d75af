"""Launching Triton kernels with little work on the host.

Triton binds and examines every argument at every launch, which for a kernel of forty arguments takes as long as the
kernel runs. What it finds out depends on dtypes, on which addresses and integers are multiples of 16, and on the
compile-time arguments; where all of these have been seen, the compiled kernel is launched at once.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(
    kernel: Any, grid: tuple[int, int], args: tuple[Tensor | float, ...], constants: Mapping[str, Any],
    options: Mapping[str, int],
) -> None:  # fmt: skip
    """``kernel[grid](*args, **constants, **options)`` on the current stream.

    Args:
        args: the kernel's run-time arguments in order; they come before the compile-time ones in its signature.
        constants: all of its compile-time arguments. options: num_warps and its like.
    """
    if INTERPRETED:
        kernel[grid](*args, **constants, **options)
        return
    key = (kernel, torch.cuda.current_device(), *constants.values(), *options.values(), *map(_kind, args))
    found = _compiled.get(key)
    if found is None:
        compiled = kernel[grid](*args, **constants, **options)
        _compiled[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :])
    else:
        compiled, tail = found
        compiled[(*grid, 1)](*args, *tail)


def _kind(x: Tensor | float) -> Any:
    """All that a compiled kernel may take for granted of an argument."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16
    return x == 1, x % 16 == 0, x < 1 << 31
