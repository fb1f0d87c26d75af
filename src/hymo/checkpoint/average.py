"""The mean of several checkpoints' weights: at the stable rate, a cheap look at what a decay would give.

arXiv 2405.18392 compares averages at a constant rate with decays. Norms, gate biases and expert counts are averaged
like all other tensors.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from hymo.checkpoint.branch import eligible_checkpoints
from hymo.checkpoint.manifest import FOLDER, MANIFEST, sha256, step_of
from hymo.checkpoint.weights import CheckpointWeights, groups_by_size, refuse_used, tokenizer_file, write_weights
from hymo.data.tokenize import open_tokenizer
from hymo.errors import HyMoError
from hymo.runs import CONFIG, find_checkpoint

AT_ONCE = 256e6
"""Bytes of a checkpoint that are read at a time."""


def average(paths: Sequence[str | Path], last: int | None = None, out: str | Path | None = None) -> Path:
    """Write the mean of checkpoints' weights, as a folder that is used like a run; returns its checkpoint.

    Args:
        paths: one run, of which the ``last`` checkpoints of the stable phase are taken (one a step), or two or more
            checkpoints.
        out: the new folder (default: ``RUN-average-K`` beside the run).

    Every checkpoint is hashed and read once, a part at a time; sums are in float64 and the mean is float32. In memory
    is the result, and AT_ONCE of one checkpoint. Raises HyMoError: not enough checkpoints, or of different models.
    """
    chosen = _last_of_stable_phase(Path(paths[0]), last) if last is not None else [find_checkpoint(p) for p in paths]
    chosen = [Path(os.path.abspath(path)) for path in chosen]  # "." has no name, and no folder beside it
    if last is not None and len(paths) > 1:
        raise HyMoError(f"--last: found beside {len(paths)} paths; accepted: one run, or checkpoints without --last")
    if len(chosen) < 2:
        raise HyMoError(f"average: found {len(chosen)} checkpoint; accepted: a run with --last K, or two checkpoints")
    if doubled := [path for path in chosen if chosen.count(path) > 1]:
        raise HyMoError(f"average: found {doubled[0]} twice; accepted: different checkpoints")
    run = chosen[-1].parent.parent if chosen[-1].parent.name == FOLDER else chosen[-1]
    target = Path(out) if out is not None else run.with_name(f"{run.name}-average-{len(chosen)}")
    refuse_used(target)
    weights = [CheckpointWeights(path) for path in chosen]
    for other in weights[1:]:
        _refuse_another_model(weights[0], other)
    newest = weights[-1]
    about = {
        "averaged": [
            {"checkpoint": str(w.path.absolute()), "step": w.step, "manifest_sha256": sha256(w.path / MANIFEST)}
            for w in weights
        ]
    }
    return write_weights(
        target, _mean(weights), newest.config, step=newest.step, about=about,
        tokenizer_file=tokenizer_file(newest.tokenizer),
    )  # fmt: skip


def _last_of_stable_phase(run: Path, last: int) -> list[Path]:
    if last < 2:
        raise HyMoError(f"--last: found {last}; accepted: a whole number >= 2")
    if not (run / CONFIG).is_file():
        raise HyMoError(f"{run}: no such run; accepted: the folder of a run with --last, or checkpoints")
    by_step = {step_of(path): path for path in eligible_checkpoints(run)}  # of one step the newest attempt
    if len(by_step) < last:
        steps = ", ".join(map(str, sorted(by_step))) or "none"
        raise HyMoError(
            f"--last: found {last}; accepted: at most {len(by_step)}, the checkpoints of its stable phase "
            f"({steps}); checkpoint.keep and checkpoint.keep_every decide how many stay"
        )
    return [by_step[step] for step in sorted(by_step)[-last:]]


def _refuse_another_model(first: CheckpointWeights, other: CheckpointWeights) -> None:
    """Shapes alone do not tell models apart: theta, norms and the tokenizer do not show in them."""
    for section, names in (("model", type(first.config.model).model_fields), ("data", ("tokenizer",))):
        for name in names:
            a, b = getattr(getattr(first.config, section), name), getattr(getattr(other.config, section), name)
            if a != b and not (name == "tokenizer" and _same_tokenizer(first, other)):
                raise HyMoError(
                    f"average: {section}.{name} is {a!r} in {first.path} and {b!r} in {other.path}; accepted: "
                    "checkpoints of one model"
                )
    if first.shapes != other.shapes:
        raise HyMoError(
            f"average: {first.path} and {other.path} hold other tensors; accepted: checkpoints of one model"
        )


def _same_tokenizer(first: CheckpointWeights, other: CheckpointWeights) -> bool:
    """Whether two tokenizers are the same by content: a run whose data set was moved names two places."""
    return open_tokenizer(first.tokenizer).fingerprint == open_tokenizer(other.tokenizer).fingerprint


@torch.no_grad()
def _mean(weights: Sequence[CheckpointWeights]) -> dict[str, Tensor]:
    shapes = weights[0].shapes
    mean: dict[str, Tensor] = {}
    for names in groups_by_size(shapes, dict.fromkeys(shapes, 8), AT_ONCE):
        sums = {name: torch.zeros(shapes[name], dtype=torch.float64) for name in names}
        for one in weights:
            for name, tensor in one.read(names).items():
                sums[name] += tensor
        mean |= {name: (total / len(weights)).float() for name, total in sums.items()}
    return mean
