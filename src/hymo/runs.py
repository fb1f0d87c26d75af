"""Run folders: names, what lies in them, opening one for evaluation or generation.

RUN/config.yaml, RUN/metrics.jsonl, RUN/checkpoints/step-N/, RUN/latest, and where it is no byte one the tokenizer:
RUN/tokenizer.json, RUN/tokenizer_config.json.
"""

from __future__ import annotations

import contextlib
import filecmp
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hymo.checkpoint import store
from hymo.checkpoint.manifest import MANIFEST, damaged, write_atomically
from hymo.config import HyMoConfig
from hymo.config_io import build_config, merge, parse_overrides, to_yaml
from hymo.data.readers import expanded
from hymo.data.tokenize import SETTINGS, TOKENIZER, Tokenizer, copy_tokenizer, file_and_end, open_tokenizer
from hymo.distributed import mesh, reduce
from hymo.errors import HyMoError
from hymo.models.model import HyMo, build_hymo
from hymo.observe.watchdog import STACKS
from hymo.training.flags import thread_optimization_flags

CONFIG, METRICS, SAMPLES = "config.yaml", "metrics.jsonl", "samples.jsonl"


def reserve_run_dir(name: str, root: Path = Path("runs")) -> Path:
    """Make the next free ``runs/NAME-N``; of two runs that start at once, each gets its own."""
    make_run_dir(root)
    number = max(_run_numbers(name, root), default=0)
    while True:
        number += 1  # also where a name is taken that is not seen: file systems that take Exp-1 for exp-1
        folder = root / f"{name}-{number}"
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            raise HyMoError(
                f"--run-dir: {folder} cannot be made ({error.strerror}); accepted: another folder"
            ) from None


def check_run_dir(name: str) -> Path:
    """The folder that --run-dir names; a remote address is refused, not made into a folder of that name."""
    if "://" in name:
        raise HyMoError(f"--run-dir: found {name}; accepted: a folder of this machine (remote addresses are not built)")
    return Path(name)


def make_run_dir(folder: Path) -> None:
    """Make the folder of a run, or say why that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HyMoError(f"--run-dir: {folder} cannot be made ({error.strerror}); accepted: another folder") from None


def forget_if_empty(folder: Path) -> None:
    """Give a reserved name back when the run never began."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def with_absolute_paths(config: HyMoConfig) -> HyMoConfig:
    """The same text and tokenizer from whatever folder the run is used later."""
    d = config.data
    source: list[Any] | None = None
    if d.source is not None:
        source = [
            absolute_path(entry)
            if isinstance(entry, str)
            else entry.model_copy(update={"path": absolute_path(entry.path)})
            for entry in d.source
        ]
    val = None if d.val is None else {name: [absolute_path(path) for path in paths] for name, paths in d.val.items()}
    tokenizer = d.tokenizer if d.tokenizer == "bytes" else absolute_path(d.tokenizer)
    data = d.model_copy(update={"source": source, "val": val, "tokenizer": tokenizer})
    t = config.training
    if t.init_from is not None:
        t = t.model_copy(update={"init_from": absolute_path(t.init_from)})
    return config.model_copy(update={"data": data, "training": t})


def absolute_path(path: str) -> str:
    """A path that means the same from every folder; a remote address stays as it is."""
    return path if "://" in path else str(expanded(path).absolute())


def keep_tokenizer(run_dir: Path, config: HyMoConfig) -> None:
    """A copy of the tokenizer in the run, with the same end token, so that the run can be used without the original."""
    if config.data.tokenizer == "bytes" or not reduce.is_main():
        return
    file, copy = file_and_end(config.data.tokenizer)[0], run_dir / TOKENIZER
    if not (copy.exists() and copy.samefile(file)):
        copy_tokenizer(file, run_dir)


def newest_run_dir(name: str, root: Path = Path("runs")) -> Path:
    """The newest ``runs/NAME-N``, or the first name where there is none."""
    return root / f"{name}-{max(_run_numbers(name, root), default=1)}"


def _run_numbers(name: str, root: Path) -> list[int]:
    names = [path.name for path in root.iterdir()] if root.is_dir() else []
    tails = [found.removeprefix(f"{name}-") for found in names if found.startswith(f"{name}-")]
    return [int(tail) for tail in tails if tail.isdecimal()]


def holds_something(run_dir: Path) -> bool:
    """Whether a folder holds more than a run leaves there that never began: its lock, stacks, hidden files."""
    if not run_dir.is_dir():
        return run_dir.exists()
    return any(not path.name.startswith(".") and path.name != STACKS for path in run_dir.iterdir())


def refuse_existing(run_dir: Path) -> None:
    """A new run never writes over an old one."""
    if holds_something(run_dir):
        raise HyMoError(f"--run-dir: {run_dir} exists already; accepted: --resume to go on with it, or another name")


def refuse_foreign(run_dir: Path) -> None:
    """--resume goes on with a run or starts one in an empty folder, never among other files."""
    if holds_something(run_dir) and not (run_dir / CONFIG).is_file():
        raise HyMoError(f"--run-dir: {run_dir} holds files and no run; accepted: the folder of a run, or an empty one")


def write_config(run_dir: Path, config: HyMoConfig) -> None:
    """Write RUN/config.yaml whole or not at all."""
    run_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(run_dir / CONFIG, "# The resolved configuration of this run.\n" + to_yaml(config))


def refuse_absent_text(config: HyMoConfig, *, instead: str = "") -> None:
    """Name the option that helps where the text or tokenizer of a run was moved or removed.

    instead: what is accepted too, in which case the tokenizer is not looked for.
    """
    d = config.data
    places = [entry if isinstance(entry, str) else entry.path for entry in d.source or ()]
    lines = [
        f"data.source: {path!r} is not there any more; accepted: {instead}--data.source PATH, where it is now"
        for path in places
        if "://" not in path and not Path(path).exists()
    ]
    if not instead and d.tokenizer != "bytes" and not (file := file_and_end(d.tokenizer)[0]).exists():
        lines.append(
            f"data.tokenizer: {str(file)!r} is not there any more; accepted: --data.tokenizer FILE, where it is now"
        )
    if lines:
        raise HyMoError("\n".join(lines))


@dataclass(frozen=True)
class OpenRun:
    """A trained model with what is needed to use it. data.tokenizer of its configuration is where the tokenizer is."""

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
    for path, why in damaged(folder).items():
        print(f"warning: {path} is damaged and left out ({why})", file=sys.stderr)
    if newest is None:
        raise HyMoError(f"{path}: holds no whole checkpoint; accepted: a run folder, or one of its checkpoints/step-N")
    return newest


def open_run(path: str | Path, overrides: Sequence[str] = ()) -> OpenRun:
    """Load the model of a run or checkpoint onto this machine's device, in evaluation mode.

    Its tokenizer is the run's own copy, unless the overrides name another.
    """
    checkpoint = find_checkpoint(path)
    manifest = store.read_manifest(checkpoint)
    if "config" not in manifest.meta:
        raise HyMoError(f"{checkpoint}: holds no configuration; accepted: a checkpoint that hymo train wrote")
    asked = parse_overrides(overrides)
    config = build_config(merge(manifest.meta["config"], asked))
    if "tokenizer" not in (asked.get("data") or {}):
        data = config.data.model_copy(update={"tokenizer": tokenizer_of(checkpoint, config)})
        config = config.model_copy(update={"data": data})
    choice = config.data.tokenizer
    if choice != "bytes" and not (file := file_and_end(choice)[0]).exists():
        raise HyMoError(
            f"{path}: its tokenizer {str(file)!r} is not there any more;"
            " accepted: --data.tokenizer FILE, where it is now"
        )
    device = mesh.init_distributed(config.training.device)
    model = build_hymo(config, device=device, initialise=False)  # the checkpoint has every parameter
    store.load(checkpoint, {"model": model.state_dict()}, only=("model",))
    thread_optimization_flags(model, config.training, device)
    return OpenRun(config, model.eval(), open_tokenizer(choice), device, checkpoint, manifest.step)


def tokenizer_of(checkpoint: Path, config: HyMoConfig) -> str:
    """The run's own copy of the tokenizer file where there is one, with the end token that the configuration names."""
    # "." has no parents, and of a run whose checkpoints lie on another disk (a link) the first place is the right one
    places = [Path(os.path.abspath(checkpoint)), checkpoint.resolve()]
    copy = next((file for p in places if (file := p.parent.parent / TOKENIZER).is_file()), None)
    if copy is None:
        return config.data.tokenizer
    original, end_token = file_and_end(config.data.tokenizer)
    if end_token is not None:
        return f"{copy}#{end_token}"
    # the first versions copied no settings, which may name the end token: the same file with its settings has them
    alone = original.with_name(SETTINGS).is_file() and not copy.with_name(SETTINGS).is_file()
    same = alone and original.is_file() and filecmp.cmp(original, copy, shallow=False)
    return str(original if same else copy)
