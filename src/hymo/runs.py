"""Run folders: names, what lies in them, opening one for evaluation or generation.

RUN/config.yaml, RUN/metrics.jsonl, RUN/checkpoints/step-N/, RUN/latest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hymo.checkpoint import store
from hymo.checkpoint.manifest import MANIFEST
from hymo.config import HyMoConfig
from hymo.config_io import build_config, load_config, merge, parse_overrides, read_yaml, to_dict, to_yaml
from hymo.data.tokenize import Tokenizer, open_tokenizer
from hymo.distributed import mesh
from hymo.errors import HyMoError
from hymo.models.model import HyMo, build_hymo
from hymo.training.flags import thread_optimization_flags

CONFIG, METRICS = "config.yaml", "metrics.jsonl"

# What a resumed run may change: where and how often things happen, not the mathematics.
FREE_KEYS = {
    "training": {
        "micro_batch_size", "gradient_accumulation_steps", "device", "fsdp", "reshard", "replicas",
        "reduce_each_micro_batch", "fused_gdn", "torch_compile_gdn",
        "consecutive_nan_limit", "eval_every", "eval_tokens", "deterministic", "max_hours",
        "spike_guard", "loss_nan_skip", "activation_checkpointing",
    },
    "data": {"cache_dir", "val"},
}  # fmt: skip
FREE_SECTIONS = ("checkpoint", "logging")


def next_run_dir(name: str, root: Path = Path("runs")) -> Path:
    """The next free ``runs/NAME-N``."""
    return root / f"{name}-{max(_run_numbers(name, root), default=0) + 1}"


def newest_run_dir(name: str, root: Path = Path("runs")) -> Path:
    """The newest ``runs/NAME-N``, or the first name where there is none."""
    return root / f"{name}-{max(_run_numbers(name, root), default=1)}"


def _run_numbers(name: str, root: Path) -> list[int]:
    tails = [path.name.removeprefix(f"{name}-") for path in root.glob(f"{name}-*")]
    return [int(tail) for tail in tails if tail.isdigit()]


def refuse_existing(run_dir: Path) -> None:
    """A new run never writes over an old one."""
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise HyMoError(f"--run-dir: {run_dir} exists already; accepted: --resume to go on with it, or another name")


def write_config(run_dir: Path, config: HyMoConfig) -> None:
    """Write RUN/config.yaml whole or not at all."""
    run_dir.mkdir(parents=True, exist_ok=True)
    temporary = run_dir / f".{CONFIG}.part"
    temporary.write_text("# The resolved configuration of this run.\n" + to_yaml(config), encoding="utf-8")
    temporary.replace(run_dir / CONFIG)


def resumed_config(run_dir: Path, path: Path | None, overrides: Sequence[str]) -> HyMoConfig:
    """The configuration a run goes on with.

    Without a file, the run's own with the overrides on top. A key that changes the mathematics must be what it was.
    """
    before = load_config(run_dir / CONFIG)
    base = to_dict(before) if path is None else read_yaml(path)
    after = build_config(merge(base, parse_overrides(overrides)))
    changed = changed_keys(before, after)
    if changed:
        lines = [f"{key}: the run has {old!r}, found {new!r}" for key, (old, new) in changed.items()]
        if any(key.startswith("scheduler.") for key in changed):
            lines.append("a longer run or another decay is a new run: hymo branch RUN --extend TOTAL, or --at STEP")
        raise HyMoError("\n".join([*lines, f"--resume {run_dir}: accepted: the values the run began with"]))
    return after


def changed_keys(before: HyMoConfig, after: HyMoConfig) -> dict[str, tuple[Any, Any]]:
    """Keys that change the mathematics and differ: key -> (before, after)."""
    old, new = to_dict(before), to_dict(after)
    changed = {}
    for section in old:
        if section in FREE_SECTIONS:
            continue
        for key in old[section]:
            if key not in FREE_KEYS.get(section, ()) and old[section][key] != new[section][key]:
                changed[f"{section}.{key}"] = (old[section][key], new[section][key])
    return changed


@dataclass(frozen=True)
class OpenRun:
    """A trained model with what is needed to use it."""

    config: HyMoConfig
    model: HyMo
    tokenizer: Tokenizer
    device: torch.device
    checkpoint: Path
    step: int


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint that a run folder (its newest whole one) or a checkpoint folder names."""
    folder = Path(path)
    if not folder.is_dir():
        raise HyMoError(f"{path}: no such run or checkpoint; accepted: a run folder, or one of its checkpoints/step-N")
    if (folder / MANIFEST).is_file():
        return folder
    newest = store.latest(folder)
    if newest is None:
        raise HyMoError(f"{path}: holds no whole checkpoint; accepted: a run folder, or one of its checkpoints/step-N")
    return newest


def open_run(path: str | Path, overrides: Sequence[str] = ()) -> OpenRun:
    """Load the model of a run or checkpoint onto this machine's device, in evaluation mode."""
    checkpoint = find_checkpoint(path)
    manifest = store.read_manifest(checkpoint)
    config = build_config(merge(manifest.meta["config"], parse_overrides(overrides)))
    device = mesh.init_distributed(config.training.device)
    model = build_hymo(config, device=device, seed=config.training.seed)
    store.load(checkpoint, {"model": model.state_dict()}, only=("model",))
    thread_optimization_flags(model, config.training, device)
    tokenizer = open_tokenizer(config.data.tokenizer)
    return OpenRun(config, model.eval(), tokenizer, device, checkpoint, manifest.step)
