"""A model as a folder that ``transformers`` loads: safetensors, its configuration, its tokenizer; and back.

    DIR/config.json  generation_config.json  model.safetensors  tokenizer.json  tokenizer_config.json

Above MOST_A_FILE the weights are in several files with an index. Names of tensors are those of a checkpoint. Nothing in
the folder is code: the class that reads it is ``hymo.hub``'s.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hymo
from hymo.checkpoint.export_tokenizer import tokenizer_files
from hymo.checkpoint.manifest import MANIFEST, WEIGHTS_ONLY, sha256
from hymo.checkpoint.weights import (
    PREFIX,
    CheckpointWeights,
    fresh_partial,
    groups_by_size,
    publish,
    refuse_other_shapes,
    refuse_used,
    tokenizer_file,
    write_weights,
)
from hymo.config import HyMoConfig
from hymo.config_io import build_config, to_dict
from hymo.data.tokenize import TOKENIZER, open_tokenizer
from hymo.errors import HyMoError
from hymo.models.model import build_hymo
from hymo.runs import find_checkpoint

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
MOST_A_FILE = 5e9
DTYPES = ("float32", "bfloat16")
KEPT_FLOAT32 = ("norm", "router", "A_log", "dt_bias", r"\.D$", "gate_bias", "ema_expert_counts")
"""Patterns of the tensors that stay float32 in a bfloat16 export: those that FSDP2 never lowers in training either."""
TIED, SOURCE = "head.weight", "embedding.weight"


@dataclass(frozen=True)
class Exported:
    """What was written: the folder, the checkpoint it is of, its files of weights, and their bytes."""

    folder: Path
    checkpoint: Path
    step: int
    files: int
    size: int


def export(path: str | Path, out: str | Path, *, dtype: str = "float32", most_a_file: float = MOST_A_FILE) -> Exported:
    """Write the weights of a run or checkpoint into a new folder, which appears whole or not at all.

    One file's tensors are in memory at a time. ``dtype``: of the weights; KEPT_FLOAT32 stay float32 in any case.
    Raises HyMoError: no such checkpoint, a damaged one, a folder that is used, the library not installed.
    """
    save_file = _safetensors("hymo export").torch.save_file
    if dtype not in DTYPES:
        raise HyMoError(f"--dtype: found {dtype}; accepted: {', '.join(DTYPES)}")
    target = Path(out)
    refuse_used(target)
    weights = CheckpointWeights(find_checkpoint(path))
    tied = weights.config.model.tie_embeddings
    shapes = {name: shape for name, shape in weights.shapes.items() if not (tied and name == TIED)}
    dtypes = {name: torch.float32 if _kept_float32(name) else getattr(torch, dtype) for name in shapes}
    groups = groups_by_size(shapes, {name: kind.itemsize for name, kind in dtypes.items()}, most_a_file)
    partial = fresh_partial(target)
    try:
        placed: dict[str, str] = {}
        size = 0
        for number, names in enumerate(groups, start=1):
            file = SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            tensors = {PREFIX + name: t.to(dtypes[name]).contiguous() for name, t in weights.read(names).items()}
            save_file(tensors, str(partial / file), metadata={"format": "pt"})
            (partial / file).chmod(partial.stat().st_mode & 0o666)  # the library makes it readable to its owner alone
            placed |= dict.fromkeys(tensors, file)
            size += (partial / file).stat().st_size
            del tensors
        if len(groups) > 1:
            _write(partial / INDEX, {"metadata": {"total_size": size}, "weight_map": placed})
        _write_description(partial, weights, dtype)
        publish(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Exported(target, weights.path, weights.step, len(groups), size)


def _write_description(folder: Path, weights: CheckpointWeights, dtype: str) -> None:
    """config.json, generation_config.json and the tokenizer's files."""
    tokenizer = open_tokenizer(weights.tokenizer)
    context = weights.config.training.seq_len
    files, pad_id = tokenizer_files(tokenizer, context)
    for name, content in files.items():
        _write(folder / name, content)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.end_id, "pad_token_id": pad_id}
    model = to_dict(weights.config)["model"]
    origin = {
        "hymo": hymo.__version__,
        "step": weights.step,
        "run": weights.path.absolute().parent.parent.name,
        "manifest_sha256": sha256(weights.path / MANIFEST),
        "tokenizer": "bytes" if weights.tokenizer == "bytes" else TOKENIZER,
    }
    if WEIGHTS_ONLY in weights.manifest.meta:
        origin[WEIGHTS_ONLY] = weights.manifest.meta[WEIGHTS_ONLY]
    description = {
        "architectures": ["HyMoForCausalLM"],
        "model_type": "hymo",
        "dtype": dtype,
        "vocab_size": model["vocab_size"],
        "hidden_size": model["dim"],
        "num_hidden_layers": model["n_layers"],
        "max_position_embeddings": context,
        "tie_word_embeddings": model["tie_embeddings"],
        **ids,
        "model": model,
        "origin": origin,
    }
    _write(folder / CONFIG, description)
    _write(folder / "generation_config.json", {key: value for key, value in ids.items() if value is not None})


def _kept_float32(name: str) -> bool:
    return re.search("|".join(KEPT_FLOAT32), PREFIX + name) is not None


def is_export(folder: Path) -> bool:
    """Whether a folder holds a model in the form of ``hymo export``."""
    return (folder / CONFIG).is_file() and not (folder / MANIFEST).is_file() and not (folder / "config.yaml").is_file()


class ExportedWeights:
    """The weights of an exported folder, also after ``save_pretrained`` of transformers wrote it anew."""

    def __init__(self, folder: Path):
        self._safe_open = _safetensors(f"{folder}: reading it").safe_open
        self.path = folder
        described = _read(folder / CONFIG)
        if described.get("model_type") != "hymo" or not isinstance(described.get("model"), dict):
            raise HyMoError(f"{folder}: found model_type {described.get('model_type')!r}; accepted: a hymo export")
        self.origin: dict[str, Any] = described.get("origin") or {}
        self.step = int(self.origin.get("step", 0))
        self.tokenizer = self._find_tokenizer()
        self.config = self._configuration(described)
        self._files = self._find_files()
        self.shapes = dict(self._read_shapes())

    def _configuration(self, described: Mapping[str, Any]) -> HyMoConfig:
        sections = {
            "model": described["model"],
            "data": {"tokenizer": self.tokenizer},
            "training": {"seq_len": described.get("max_position_embeddings") or 4096},
            "scheduler": {"total_steps": max(self.step, 1)},
        }
        return build_config(sections)

    def _find_tokenizer(self) -> str:
        if self.origin.get("tokenizer") == "bytes":
            return "bytes"
        file = self.path / TOKENIZER
        if not file.is_file():
            raise HyMoError(f"{self.path}: holds no {TOKENIZER}; accepted: a folder with the model's tokenizer")
        return str(file)  # whose end token is named beside it

    def _find_files(self) -> dict[str, Path]:
        """The file of each tensor, by the names of ``HyMo.state_dict()``."""
        if (self.path / INDEX).is_file():
            placed = _read(self.path / INDEX)["weight_map"]
        elif (self.path / SINGLE).is_file():
            with self._safe_open(self.path / SINGLE, framework="pt") as file:
                placed = dict.fromkeys(file.keys(), SINGLE)
        else:
            raise HyMoError(f"{self.path}: holds neither {SINGLE} nor {INDEX}; accepted: a hymo export")
        files = {key.removeprefix(PREFIX): self.path / Path(name).name for key, name in placed.items()}
        if lost := sorted({file.name for file in files.values() if not file.is_file()}):
            raise HyMoError(f"{self.path}: {', '.join(lost)} is missing; accepted: all files of the export")
        if self.config.model.tie_embeddings and TIED not in files and SOURCE in files:
            files[TIED] = files[SOURCE]
        return files

    def _read_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for file, names in self._by_file(self._files):
            with self._safe_open(file, framework="pt") as opened:
                known = set(opened.keys())
                for name in names:
                    key = self._key(name, known)
                    if key not in known:
                        raise HyMoError(f"{file}: holds no tensor {key}; accepted: all files of one export")
                    yield name, tuple(opened.get_slice(key).get_shape())

    def read(self, names: Collection[str]) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for file, wanted in self._by_file(names):
            with self._safe_open(file, framework="pt") as opened:
                known = set(opened.keys())
                tensors |= {name: opened.get_tensor(self._key(name, known)) for name in wanted}
        return {name: tensors[name] for name in names}

    def _by_file(self, names: Collection[str]) -> Iterator[tuple[Path, list[str]]]:
        for file in dict.fromkeys(self._files[name] for name in names):
            yield file, [name for name in names if self._files[name] == file]

    @staticmethod
    def _key(name: str, known: Collection[str]) -> str:
        return PREFIX + (SOURCE if name == TIED and PREFIX + TIED not in known else name)


def import_export(folder: str | Path, out: str | Path) -> Path:
    """An exported folder as one that hymo's verbs take like a run; the weights are those of the export, bit for bit.

    Returns the checkpoint. Weights of another dtype than float32 are kept as their exact float32 values.
    """
    if not is_export(Path(folder)):
        raise HyMoError(f"{folder}: holds no {CONFIG} of an exported model; accepted: a folder of hymo export")
    weights, target = ExportedWeights(Path(folder)), Path(out)
    refuse_used(target)
    model = build_hymo(weights.config, device="meta")
    refuse_other_shapes(model, weights, "import")
    tensors = {name: tensor.float() for name, tensor in weights.read(list(weights.shapes)).items()}
    data, copied = weights.config.data, tokenizer_file(weights.tokenizer)
    if copied is not None:
        data = data.model_copy(update={"tokenizer": str((target / TOKENIZER).absolute())})
    return write_weights(
        target, tensors, weights.config.model_copy(update={"data": data}), step=weights.step,
        about={"imported_from": str(weights.path.absolute()), "origin": weights.origin}, tokenizer_file=copied,
    )  # fmt: skip


def _safetensors(what: str) -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise HyMoError(f"{what} needs the safetensors package; accepted: pip install 'hymo[hub]'") from None
    return safetensors


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HyMoError(f"{file}: cannot be read ({error}); accepted: a file of hymo export") from None
    if not isinstance(content, dict):
        raise HyMoError(f"{file}: holds no JSON object; accepted: a file of hymo export")
    return content


def _write(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
