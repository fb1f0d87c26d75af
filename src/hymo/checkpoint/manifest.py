"""What a checkpoint folder says about itself, and which of a run's checkpoints are whole.

``RUN/checkpoints/step-N/`` holds the tensor files and ``manifest.json``: every file's size and SHA-256, every tensor's
name, dtype and shape, the step, the attempt, and whatever the trainer needs beside tensors (``meta``). The folder gets
its name by one rename after all of that is on the disk, so a folder is either whole or visibly not: nothing is trusted
by its name, and ``RUN/latest`` is only a note for people. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hymo.errors import HyMoError

FORMAT = 1
"""Raised when a reader of the old format would misread the new one."""
MANIFEST, METADATA, FOLDER, LATEST = "manifest.json", ".metadata", "checkpoints", "latest"
WEIGHTS_ONLY = "weights_only"
"""Key of ``meta`` in a checkpoint without optimizer state: where its weights come from."""
TEMPORARY, TRASH, PIN = ".writing-", ".removing-", ".pinned"
T = TypeVar("T")
R = TypeVar("R")
_NAME = re.compile(r"step-(\d+)(?:-a(\d+))?(?:-r(\d+))?")


class CheckpointError(HyMoError):
    """A checkpoint cannot be written or read. ``alternative`` is the newest whole one before it, where there is one."""

    def __init__(self, message: str, alternative: Path | None = None):
        super().__init__(message + (f"; the one before, {alternative}, is whole" if alternative else ""))
        self.alternative = alternative


class NewerFormatError(CheckpointError):
    """A checkpoint was written by a version of this package whose format is not known here."""


@dataclass(frozen=True)
class Manifest:
    """The contents of ``manifest.json``.

    ``files``: name -> {"size": bytes, "sha256": hex}. ``tensors``: key -> [dtype, *shape]. ``meta``: JSON values only.
    """

    step: int
    attempt: int
    files: dict[str, dict[str, Any]]
    tensors: dict[str, list[Any]]
    meta: dict[str, Any] = field(default_factory=dict)
    world_size: int = 1
    saved_at: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def sections(self) -> dict[str, int]:
        """Top-level parts of the state ("model", "optimizer", ...) with their number of tensors."""
        counts: dict[str, int] = {}
        for key in self.tensors:
            counts[key.split(".", 1)[0]] = counts.get(key.split(".", 1)[0], 0) + 1
        return counts

    def to_json(self) -> str:
        """The text of the file: the fields, and a digest over them that a flipped bit does not survive."""
        body = json.loads(json.dumps(asdict(self)))
        return json.dumps({"digest": _digest(body), **body}, indent=1)


def read_manifest(path: str | os.PathLike) -> Manifest:
    """Read and check ``PATH/manifest.json`` (not the files that it lists).

    Raises CheckpointError: no such folder or manifest, not JSON, digest wrong, or written by a newer version.
    """
    with _offering_the_one_before(Path(path)):
        return _read(Path(path))


def refuse_weights_only(path: Path, manifest: Manifest) -> None:
    """Raise for a checkpoint that no run goes on from: an average, or an import."""
    if WEIGHTS_ONLY in manifest.meta:
        raise CheckpointError(
            f"{path}: holds weights alone, no state to go on with; accepted: a new run, hymo train --init-from {path}"
        )


def faults(path: Path, manifest: Manifest, *, hashes: bool, only: Iterable[str] | None = None) -> list[str]:
    """What is wrong with the files of a checkpoint, one line each; [] if nothing. ``only``: the files to look at."""

    def fault(name: str) -> str | None:
        listed, file = manifest.files[name], path / name
        try:
            if not file.is_file():
                return f"{name} is missing"
            if (size := file.stat().st_size) != listed["size"]:
                return f"{name} has {size} bytes, not {listed['size']}"
            if hashes and sha256(file) != listed["sha256"]:
                return f"{name} has another SHA-256 than when it was saved"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror or error})"
        return None

    return [found for found in _some_at_a_time(fault, sorted(manifest.files if only is None else only)) if found]


def verify(path: str | os.PathLike, *, hashes: bool = True) -> Manifest:
    """Check a checkpoint on this process: sizes always, SHA-256 by default. Returns its manifest.

    Raises CheckpointError that names the damaged files and offers the newest whole checkpoint before it.
    """
    with _offering_the_one_before(Path(path)):
        return _check(Path(path), hashes=hashes)


def is_whole(path: Path, *, hashes: bool = False) -> bool:
    """Whether a folder is a whole checkpoint (of a format that can be read here)."""
    try:
        _check(path, hashes=hashes)
    except CheckpointError:
        return False
    return True


def list_checkpoints(run_dir: str | os.PathLike, *, whole: bool = True, hashes: bool = False) -> list[Path]:
    """A run's checkpoint folders in the order they were made (by attempt, then step); the newest is last.

    ``whole`` leaves out the damaged and the unfinished (manifest and sizes are checked; contents too with ``hashes``).
    Without it, folders whose manifest cannot be read come first. Raises CheckpointError where the folder of them all
    cannot be read: that is not the same as none.
    """
    folder = Path(run_dir) / FOLDER
    try:
        named = [p for p in folder.iterdir() if _NAME.fullmatch(p.name) and p.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read ({error.strerror or error})") from None
    if whole:
        named = [p for p in named if is_whole(p, hashes=hashes)]
    return sorted(named, key=_age)


def latest(run_dir: str | os.PathLike, *, hashes: bool = False) -> Path | None:
    """The newest whole checkpoint of a run, or None. Found by looking, never by trusting the note ``latest``.

    For one process. Ranks that must agree use ``hymo.checkpoint.store.latest_on_all_ranks``.
    """
    found = list_checkpoints(run_dir, hashes=hashes)
    return found[-1] if found else None


def damaged(run_dir: str | os.PathLike) -> dict[Path, str]:
    """A run's checkpoints that are not whole, each with what is wrong with it.

    Raises NewerFormatError where one is of a newer version: it may well be whole, and what came after the others.
    """
    found = {}
    for path in list_checkpoints(run_dir, whole=False):
        try:
            _check(path, hashes=False)
        except NewerFormatError:
            raise
        except CheckpointError as error:
            found[path] = str(error)
    return found


def free_name(run_dir: Path, step: int, attempt: int) -> str:
    """A folder name not yet taken: step-N, then step-N-aA, then step-N-aA-r2, ... (nothing is ever overwritten)."""
    names = [f"step-{step}", f"step-{step}-a{attempt}"]
    folder = run_dir / FOLDER
    for name in names:
        if not (folder / name).exists():
            return name
    repeat = 2
    while (folder / f"{names[1]}-r{repeat}").exists():
        repeat += 1
    return f"{names[1]}-r{repeat}"


def one_before(path: Path) -> Path | None:
    """The newest whole checkpoint of the same run up to the step of ``path``, to offer instead of a damaged one."""
    path = path.absolute()
    if path.parent.name != FOLDER or not _NAME.fullmatch(path.name):
        return None
    others = [p for p in list_checkpoints(path.parent.parent) if p.name != path.name and step_of(p) <= step_of(path)]
    return others[-1] if others else None


def step_of(path: Path) -> int:
    """The step in a checkpoint folder's name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path}: found a folder named {path.name!r}, accepted: step-N")
    return int(match[1])


# --- retention ---


def pin(path: Path, reason: str) -> None:
    """Keep a checkpoint for good: a note beside it, one line a reason. Retention then leaves it alone."""
    with open(path.with_name(path.name + PIN), "a+", encoding="utf-8") as note:  # of two at once both are kept
        note.seek(0)
        if reason not in note.read().splitlines():
            note.write(reason + "\n")
            note.flush()
            os.fsync(note.fileno())


def prune(
    run_dir: str | os.PathLike, keep: int | None, keep_every: int | None = None, protect: Iterable[int] = ()
) -> list[Path]:
    """Remove old checkpoints; returns those removed.

    Kept: the newest ``keep`` whole ones (None = all; at least the last good one always), those whose step is a multiple
    of ``keep_every``, those whose step is in ``protect`` (the last at the peak rate, u = N - D), and pinned ones
    (parents of branches). Damaged folders are not counted and not touched: they are evidence. One that cannot be
    removed stays, with a warning.
    """
    if keep is None:
        return []
    if keep < 1:
        raise ValueError(f"checkpoint.keep: found {keep}, accepted: 1 or more")
    protected, removed = set(protect), []
    for path in list_checkpoints(run_dir)[:-keep]:
        step = step_of(path)
        multiple = keep_every is not None and step % keep_every == 0
        if multiple or step in protected or path.with_name(path.name + PIN).exists():
            continue
        try:
            remove(path)
        except OSError as error:
            warnings.warn(f"{path} could not be removed: {error}", stacklevel=2)
        else:
            removed.append(path)
    return removed


def remove(path: Path) -> None:
    """Delete a checkpoint so that no half of it is ever seen under its name: rename away first."""
    gone = path.with_name(TRASH + path.name)
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def sweep(run_dir: Path) -> None:
    """Delete what killed saves and removals left behind. Only one process of a run may do so, and not during a save."""
    folder = run_dir / FOLDER
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.startswith((TEMPORARY, TRASH)):
            shutil.rmtree(path, ignore_errors=True)


# --- description ---


def inspect(path: str | os.PathLike, *, hashes: bool = True) -> str:
    """What is in a checkpoint, whether it is whole, and from which config, as plain text. Reads no tensor."""
    return inspected(path, hashes=hashes)[0]


def inspected(path: str | os.PathLike, *, hashes: bool = True) -> tuple[str, list[str]]:
    """What `inspect` says, and what is wrong with the checkpoint's files."""
    path = Path(path)
    manifest = read_manifest(path)
    found = faults(path, manifest, hashes=hashes)
    size = sum(f["size"] for f in manifest.files.values())
    lines = [
        f"checkpoint  {path}",
        f"step        {manifest.step:,} updates, attempt {manifest.attempt:,}",
        f"saved       {manifest.saved_at} by " + ", ".join(f"{k} {v}" for k, v in manifest.versions.items()),
        f"ranks       {manifest.world_size}",
        f"files       {len(manifest.files)}, {size / 1e6:,.1f} MB",
        "whole       " + ("NO: " + "; ".join(found) if found else "yes" + ("" if hashes else " (sizes only)")),
    ]
    for section, count in manifest.sections.items():
        elements = sum(_elements(t) for k, t in manifest.tensors.items() if k.split(".", 1)[0] == section)
        kinds = sorted({t[0] for k, t in manifest.tensors.items() if k.split(".", 1)[0] == section})
        lines.append(f"  {section:<10}{count:,} tensors, {elements:,} numbers ({', '.join(kinds)})")
    for key, value in manifest.meta.items():
        if key == "config" and isinstance(value, Mapping):
            lines.append("config")
            lines += [f"  {name}: {json.dumps(section)}" for name, section in value.items()]
        else:
            text, key = json.dumps(value), "total loss" if key == "losses" else key  # with MTP and z-loss terms
            lines.append(f"{key:<11} {text if len(text) <= 100 else text[:97] + '...'}")
    return "\n".join(lines), found


# --- small file work ---


def sha256(file: Path) -> str:
    """SHA-256 of a file's contents, in hex."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_of(files: Sequence[Path]) -> list[str]:
    """The same for several files, some at a time."""
    return _some_at_a_time(sha256, files)


def write_durably(file: Path, text: str) -> None:
    """Write a text file and wait until it is on the disk."""
    with open(file, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def write_atomically(file: Path, text: str) -> None:
    """Replace a text file so that a reader sees the old or the new contents, never a part."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        write_durably(beside, text)
        os.replace(beside, file)
    finally:
        beside.unlink(missing_ok=True)


def fsync_folder(folder: Path) -> None:
    """Wait until a folder's list of names is on the disk (there is no such call on Windows)."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _some_at_a_time(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """The results for several files, in threads (reading and hashing leave the interpreter free)."""
    if len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(len(items), 8)) as pool:
        return list(pool.map(function, items))


def _read(path: Path) -> Manifest:
    try:
        body = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        what = "no manifest.json (a save that did not end, or no checkpoint)" if path.is_dir() else "no such folder"
        raise CheckpointError(f"{path}: {what}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST} is damaged: it cannot be read ({error})") from None
    if not isinstance(body, dict) or not isinstance(body.get("format"), int):
        raise CheckpointError(f"{path / MANIFEST} is damaged: it is not a manifest")
    if body["format"] > FORMAT:
        raise NewerFormatError(
            f"{path}: written in format {body['format']} by hymo {body.get('versions', {}).get('hymo', '?')}; "
            f"accepted here: up to format {FORMAT} (use that version or a newer one)"
        )
    if body.pop("digest", None) != _digest(body):
        raise CheckpointError(f"{path / MANIFEST} is damaged: its digest does not match")
    return Manifest(**body)


def _check(path: Path, *, hashes: bool) -> Manifest:
    manifest = _read(path)
    if found := faults(path, manifest, hashes=hashes):
        raise CheckpointError(f"{path} is damaged: " + "; ".join(found))
    return manifest


@contextlib.contextmanager
def _offering_the_one_before(path: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise type(error)(str(error), one_before(path)) from None


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _elements(tensor: list[Any]) -> int:
    count = 1
    for length in tensor[1:]:
        count *= length
    return count


def _age(path: Path) -> tuple[int, int, int]:
    """Sort key: the attempt (it only grows), then the step, then the repeat; -1 where the manifest cannot be read."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    try:
        attempt = _read(path).attempt
    except CheckpointError:
        attempt = -1
    return attempt, int(match[1]), int(match[3] or 1)
