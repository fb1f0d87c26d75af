"""Weights without the rest of a run: read a few tensors at a time, put into a model, written as a folder like a run's.

A source of weights is a run (its newest whole checkpoint), a checkpoint, or a folder that ``hymo export`` made.
"""

from __future__ import annotations

import math
import os
import shutil
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from hymo.checkpoint import store
from hymo.checkpoint.manifest import WEIGHTS_ONLY, CheckpointError, Manifest, verify
from hymo.checkpoint.safe_metadata import SafeReader, TensorPlanner, read_metadata
from hymo.config import HyMoConfig
from hymo.config_io import build_config, to_dict
from hymo.data.tokenize import copy_tokenizer, file_and_end
from hymo.errors import HyMoError
from hymo.models.model import HyMo
from hymo.runs import find_checkpoint, tokenizer_of, write_config

PREFIX = "model."
"""What the names of the model's tensors begin with, in a checkpoint and in an exported folder."""


class Weights(Protocol):
    """The tensors of one model by their names in ``HyMo.state_dict()``.

    ``shapes``: of each tensor. ``step``: updates they were trained for. ``tokenizer``: as ``data.tokenizer`` names it.
    """

    path: Path
    config: HyMoConfig
    step: int
    shapes: dict[str, tuple[int, ...]]
    tokenizer: str

    def read(self, names: Collection[str]) -> dict[str, Tensor]:
        """Some of the tensors, whole, on the CPU."""
        ...


class CheckpointWeights:
    """The weights of a checkpoint of any number of ranks; ``hashes``: compare its files with theirs first."""

    def __init__(self, checkpoint: Path, *, hashes: bool = True):
        self.path, self.manifest = checkpoint, verify(checkpoint, hashes=hashes)
        self.config = config_of(checkpoint, self.manifest)
        self.step = self.manifest.step
        self.tokenizer = tokenizer_of(checkpoint, self.config)
        self._listed = {
            key.removeprefix(PREFIX): tensor for key, tensor in self.manifest.tensors.items() if key.startswith(PREFIX)
        }
        self.shapes = {name: tuple(tensor[1:]) for name, tensor in self._listed.items()}
        self._described = read_metadata(checkpoint, self.manifest.files)

    def read(self, names: Collection[str]) -> dict[str, Tensor]:
        if lost := [name for name in names if PREFIX + name not in self._described.state_dict_metadata]:
            raise CheckpointError(f"{self.path} is damaged: its .metadata lacks {_some(lost)}")
        tensors = {
            PREFIX + name: torch.empty(self.shapes[name], dtype=getattr(torch, self._listed[name][0])) for name in names
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
            reader = SafeReader(self.path, self._described)
            try:
                dcp.load(tensors, storage_reader=reader, planner=TensorPlanner(), no_dist=True)
            except dcp.CheckpointException as error:
                store.pass_on_interrupt(error)
                raise CheckpointError(f"{self.path} could not be read: {error}") from None
        return {key.removeprefix(PREFIX): tensor for key, tensor in tensors.items()}


def config_of(checkpoint: Path, manifest: Manifest) -> HyMoConfig:
    """The configuration that a checkpoint was trained with."""
    if "config" not in manifest.meta:
        raise HyMoError(f"{checkpoint}: holds no configuration; accepted: a checkpoint that hymo train wrote")
    return build_config(manifest.meta["config"])


def open_weights(path: str | os.PathLike, *, hashes: bool = True) -> Weights:
    """The weights of a run, a checkpoint or an exported folder. Raises HyMoError."""
    from hymo.checkpoint.export import ExportedWeights, is_export

    folder = Path(path)
    return ExportedWeights(folder) if is_export(folder) else CheckpointWeights(find_checkpoint(folder), hashes=hashes)


def shape_faults(model: HyMo, weights: Weights) -> list[str]:
    """Every tensor that a model and a source of weights do not share alike, one line each."""
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    lines = [f"{name}: not in the weights" for name in wanted if name not in weights.shapes]
    lines += [f"{name}: not in this model" for name in weights.shapes if name not in wanted]
    lines += [
        f"{name}: {list(weights.shapes[name])} in the weights, {list(shape)} in this model"
        for name, shape in wanted.items()
        if weights.shapes.get(name, shape) != shape
    ]
    return lines


def refuse_other_shapes(model: HyMo, weights: Weights, option: str = "--init-from", most: int = 8) -> None:
    """Raise HyMoError that names the tensors which differ; the model may be on the meta device."""
    if lines := shape_faults(model, weights):
        rest = [f"... and {len(lines) - most} more"] if len(lines) > most else []
        last = f"{option}: found {weights.path}; accepted: weights of this model's shape"
        raise HyMoError("\n".join([*lines[:most], *rest, last]))


@torch.no_grad()
def fill(model: HyMo, weights: Weights) -> None:
    """Put the weights into a model of their shape, in place: parameters and buffers, sharded or not.

    Every rank reads its part of a checkpoint; of an exported folder it reads one tensor at a time and keeps its part.
    A checkpoint's files are hashed first, shared among the ranks. Other dtypes are converted.
    """
    refuse_other_shapes(model, weights)
    if isinstance(weights, CheckpointWeights):
        store.load(weights.path, {"model": model.state_dict()}, only=("model",))
        return
    for name, tensor in model.state_dict().items():
        whole = weights.read([name])[name]
        if isinstance(tensor, DTensor):
            whole = whole.to(tensor.device, tensor.dtype)
            part = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.to_local().copy_(part.to_local())
        else:
            tensor.copy_(whole)


def write_weights(
    out: Path,
    tensors: Mapping[str, Tensor],
    config: HyMoConfig,
    *,
    step: int,
    about: Mapping[str, Any],
    tokenizer_file: Path | None,
    option: str = "--out",
) -> Path:
    """A folder like a run's with one checkpoint that holds weights alone; returns the checkpoint.

    ``eval``, ``generate``, ``export``, ``inspect`` and ``train --init-from`` read it as they read a run. The folder
    appears whole or not at all. ``about`` is JSON that says where the weights come from.
    """
    refuse_used(out, option)
    partial = fresh_partial(out)
    try:
        meta = {"config": to_dict(config), WEIGHTS_ONLY: dict(about)}
        saved = store.save(partial, step, max(step, 1), {"model": dict(tensors)}, meta)
        write_config(partial, config)
        if tokenizer_file is not None:
            copy_tokenizer(tokenizer_file, partial)
        publish(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out / saved.relative_to(partial)


def refuse_used(out: Path, option: str = "--out") -> None:
    """A folder that holds something is never written into."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise HyMoError(f"{option}: {out} exists already; accepted: a new folder, or an empty one")


def fresh_partial(out: Path) -> Path:
    """An empty hidden folder beside ``out`` to write into."""
    partial = out.absolute().with_name(f".{out.absolute().name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise HyMoError(f"--out: {out} cannot be made ({error.strerror}); accepted: another folder") from None
    return partial


def publish(partial: Path, out: Path) -> None:
    """Give a folder that is complete its name."""
    if out.is_dir():
        out.rmdir()
    partial.rename(out)


def tokenizer_file(choice: str) -> Path | None:
    """The file of a tokenizer that ``data.tokenizer`` names, or None for bytes."""
    return None if choice == "bytes" else file_and_end(choice)[0]


def groups_by_size(shapes: Mapping[str, Sequence[int]], sizes: Mapping[str, int], most: float) -> list[list[str]]:
    """Names in their order, in groups of at most ``most`` bytes (``sizes``: bytes of a number, by name)."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * sizes[name]
        if groups[-1] and filled + size > most:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups


def _some(names: Iterable[str], most: int = 4) -> str:
    found = list(names)
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")
