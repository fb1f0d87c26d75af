"""NorMuon: Muon with a second moment a row, fp32 state and cautious weight decay.

For each matrix, in this order: momentum (EMA; Nesterov) -> orthogonalize -> second moment of the rows -> rescale to the
norm from before -> shape scale -> update with decay. Plain Muon is the same without the second moment.
Sources: Muon (Keller Jordan); NorMuon, arXiv 2510.05491; cautious weight decay, arXiv 2510.12402.

N = matrices of one shape in a batch, m = rows, n = columns.
"""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hymo.distributed.exchange import layout_of, statistic_like
from hymo.optim.base import (
    Algorithm,
    Group,
    GroupedOptimizer,
    check_choice,
    check_number,
    group_name,
    register,
    state_dtype,
)
from hymo.optim.matrices import check_row_blocks
from hymo.optim.matrix_step import group_orthogonalizer, prepare
from hymo.optim.orthogonalize import Orthogonalizer
from hymo.optim.presets import preset_settings
from hymo.optim.update import (
    AXES,
    DECAYS,
    MASKS,
    SCALES,
    statistic_axis,
)

DEFAULT_LR = 0.02
DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")
MOST_PREPARED = 16

DEFAULTS = {
    "momentum": 0.95,
    "betas": (0.95, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "cautious_wd": True,
    "ns_iterations": 5,
    "nesterov": True,
    "orthogonalize": "polar_express",
    "dtype": "auto",
    "scale": "original",
    "normalize": True,
    "axis": "row",
    "mask": "update",
    "decay": "lr",
    "row_blocks": None,
}


class NorMuon(GroupedOptimizer):
    """The published NorMuon for parameters of shape [m, n] or [E, m, n] (E matrices).

    betas = (momentum, decay rate of the row second moment); `momentum` must equal betas[0]. eps is added outside the
    root. orthogonalize: a name of `orthogonalize.REGISTRY` or an `Orthogonalizer`; ns_iterations its steps; dtype its
    products'. scale: `original` (goes with lr 0.02), `match_rms_adamw` and `fixed_rms` (need an lr of AdamW's size),
    `spectral`, `grad_norm`, `none`. normalize=False is Muon. axis: `row`, or `long` = average over the longer side.
    mask: whose sign decides on decay. decay `lr_squared` decays by lr^2 * weight_decay. preset: `presets.PRESETS`,
    e.g. `paper`. A group with `row_blocks=(r1, r2, ...)` holds fused weights: each block of rows is its own matrix.

    None = not given: the preset's value, else that of `DEFAULTS` (lr 0.02). What is given wins over the preset.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor | None = None,
        momentum: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        cautious_wd: bool | None = None,
        ns_iterations: int | None = None,
        *,
        nesterov: bool | None = None,
        orthogonalize: str | Orthogonalizer | None = None,
        dtype: str | None = None,
        scale: str | None = None,
        normalize: bool | None = None,
        axis: str | None = None,
        mask: str | None = None,
        decay: str | None = None,
        preset: str | None = None,
    ):
        arguments: dict[str, Any] = {
            "lr": lr,
            "momentum": momentum,
            "betas": None if betas is None else tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "cautious_wd": cautious_wd,
            "ns_iterations": ns_iterations,
            "nesterov": nesterov,
            "orthogonalize": orthogonalize,
            "dtype": dtype,
            "scale": scale,
            "normalize": normalize,
            "axis": axis,
            "mask": mask,
            "decay": decay,
        }
        settings: dict[str, Any] = {**DEFAULTS, "lr": DEFAULT_LR, **preset_settings(preset)}
        settings |= {key: value for key, value in arguments.items() if value is not None}
        if lr is None and settings["scale"] in ("match_rms_adamw", "fixed_rms"):
            raise ValueError(
                f"lr: must be given with scale {settings['scale']!r} (of AdamW's size, about 3e-4 to 3e-3; 0.02 is far "
                "too much)"
            )
        super().__init__(params, dict(settings, algorithm="normuon" if settings["normalize"] else "muon"))


def _check(group: Group) -> None:
    check_number(group, "momentum", 0.0, 1.0)
    check_number(group, "eps", 0.0, above=True)  # a row without gradient is divided by it
    check_number(group, "weight_decay", 0.0)
    choices = {"scale": SCALES, "axis": AXES, "mask": MASKS, "decay": DECAYS, "dtype": DTYPES}
    for key, accepted in (choices | dict.fromkeys(("nesterov", "cautious_wd", "normalize"), (True, False))).items():
        check_choice(group, key, accepted)
    betas = group["betas"] = tuple(group["betas"])
    if len(betas) != 2 or not all(0.0 <= b < 1.0 for b in betas):
        raise ValueError(f"betas: found {betas!r}, accepted: two numbers from 0 below 1")
    if group["momentum"] != betas[0]:
        raise ValueError(f"betas: found betas[0] {betas[0]} and momentum {group['momentum']}, accepted: equal values")
    if group["normalize"] != (group["algorithm"] == "normuon"):
        raise ValueError(f"normalize: found {group['normalize']} in a {group['algorithm']} group")
    group["row_blocks"] = tuple(group["row_blocks"]) if group["row_blocks"] is not None else None
    check_choice({"dtype": group_orthogonalizer(group).dtype}, "dtype", DTYPES)  # a record brings its own
    for i, param in enumerate(group["params"]):
        check_row_blocks(param.shape, group["row_blocks"], group_name(group, i))
        layout_of(param, True, group_name(group, i))  # refuses by name what it cannot cut
    if group["scale"] == "grad_norm":
        warnings.warn(
            "scale='grad_norm' multiplies the update by the gradient's norm: a rate that fits another scale does not "
            "fit it (in lab/LOG.md its best rate is 0.05, with a loss of 2.40; NorMuon's loss is 2.18)",
            stacklevel=5,
        )


def _state(param: Tensor, group: Group) -> dict[str, Tensor]:
    """`momentum` like the parameter; `second_moment` [..., m, 1] and, where columns are averaged, its columns' form."""
    dtype = state_dtype(param)
    state = {"momentum": torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format).detach()}
    if group["algorithm"] == "normuon":
        *lead, m, n = param.shape
        rows = group["row_blocks"] or (m,)
        axes = {statistic_axis(group["axis"], r, n) for r in rows}
        if -1 in axes:
            state["second_moment"] = statistic_like(param, (*lead, m, 1), -1, dtype)
        if -2 in axes:
            state["second_moment_columns"] = statistic_like(param, (*lead, len(rows), n), -2, dtype)
    return state


def muon_step(optimizer: GroupedOptimizer, groups: list[Group]) -> None:
    active = frozenset(p for group in groups for p in group["params"] if p.grad is not None)
    if not active:
        return
    steps = optimizer.prepared.get(active)
    if steps is None:
        if len(optimizer.prepared) >= MOST_PREPARED:  # which parameters have gradients keeps changing
            optimizer.prepared.clear()
        steps = prepare(groups, optimizer.share_replicas, optimizer.bucket_bytes, set(active))
        optimizer.prepared[active] = steps
    for step in steps:
        step.run(optimizer.state)


register(Algorithm("normuon", DEFAULTS, _check, _state, muon_step))
register(Algorithm("muon", DEFAULTS | {"normalize": False}, _check, _state, muon_step))
