"""Saving and loading a run's tensors: torch DCP files in a folder that is committed by one rename.

The order of a save: tensor files (each rank its own, fsynced) into a hidden folder beside; their SHA-256, each rank its
own; ``manifest.json``, written last; fsync of the folder; rename to ``step-N``. Whatever instant a process dies at, the
checkpoints that were there stay whole and ``latest`` finds them. The state holds tensors only, everything else is JSON.

Both functions are collectives under a process group (every rank calls them with the same keys) and plain functions
without one. A checkpoint of any number of ranks loads on any other number.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import time
import uuid
import warnings
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from importlib import metadata as package_metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from hymo.checkpoint import manifest as files
from hymo.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    inspect,
    is_whole,
    latest,
    list_checkpoints,
    read_manifest,
    verify,
)
from hymo.checkpoint.safe_metadata import SafeReader, TensorPlanner, lost_pieces, read_metadata
from hymo.distributed.reduce import broadcast_object, gather_objects, is_distributed, rank, world_size

__all__ = [
    "CheckpointError",
    "Manifest",
    "difference",
    "flatten",
    "inspect",
    "is_whole",
    "latest",
    "latest_on_all_ranks",
    "list_checkpoints",
    "load",
    "prove_shared",
    "read_manifest",
    "save",
    "verify",
]

State = Mapping[str, Any]
"""Nested dicts of tensors, plain or DTensor."""


def save(
    run_dir: str | os.PathLike,
    step: int,
    attempt: int,
    state: State,
    meta: Mapping[str, Any],
    *,
    keep: int | None = None,
    keep_every: int | None = None,
    protect: Iterable[int] = (),
    group: ProcessGroup | None = None,
) -> Path:
    """Write one checkpoint and return its folder ``RUN/checkpoints/step-N`` (a second one at this step: ``step-N-aA``).

    If this very (step, attempt) is there already and its contents are intact, that folder is returned and nothing is
    written.

    Args:
        step, attempt: updates done and attempts made; an attempt happens once in a run, so the pair names the state.
        state: nested dicts of tensors; the same keys on every rank. DTensors are saved sharded, plain ones once.
        meta: JSON values that the trainer needs beside tensors (config, RNG, data position, ...).
        keep, keep_every, protect: retention after the save (``manifest.prune``); keep None removes nothing.
        group: the ranks that save together, for a save in the background (default: all).

    Raises CheckpointError on every rank if any rank could not write (a full disk, say): earlier checkpoints are intact
    and a later save may be tried. TypeError for a state or meta that cannot be stored, before anything is written.
    """
    run_dir = Path(run_dir)
    tensors = flatten(state)
    try:
        json.dumps(meta)
    except (TypeError, ValueError) as error:
        raise TypeError(f"meta: {error}; accepted: JSON values") from None
    folder, done = _begin(run_dir, step, attempt, group)
    if done is not None:
        return done
    problem: BaseException | None = None
    written: dict[str, dict[str, Any]] = {}
    try:
        _write_tensors(folder, tensors, group)
        written = _describe_own_files(folder, group)
    except (Exception, dcp.CheckpointException) as error:
        problem = error
    reports = gather_objects((written, _say(problem)), group)
    problems = [f"rank {r}: {text}" for r, (_, text) in enumerate(reports) if text]
    final: Path | None = None
    if rank(group) == 0 and not problems:
        record = Manifest(
            step=step,
            attempt=attempt,
            files={name: entry for part, _ in reports for name, entry in part.items()},
            tensors={key: describe_tensor(t) for key, t in tensors.items()},
            meta=dict(meta),
            world_size=world_size(group),
            saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=_versions(),
        )
        try:
            final = _commit(run_dir, folder, record)
        except (OSError, CheckpointError) as error:
            problems.append(f"rank 0: {_say(error)}")
    if rank(group) == 0 and problems:
        shutil.rmtree(folder, ignore_errors=True)
    final, problems = broadcast_object((final, problems), group=group)
    if problems:
        raise CheckpointError(f"step {step} could not be saved in {run_dir}: " + "; ".join(problems))
    assert final is not None
    if rank(group) == 0:
        try:
            files.prune(run_dir, keep, keep_every, protect)
        except (OSError, CheckpointError) as error:  # what was saved is saved
            warnings.warn(f"old checkpoints in {run_dir} could not be removed: {error}", stacklevel=2)
    return final


def load(
    path: str | os.PathLike,
    state: State,
    *,
    only: Collection[str] | None = None,
    hashes: bool = True,
    group: ProcessGroup | None = None,
) -> Manifest:
    """Fill the tensors of ``state`` in place from a checkpoint and return its manifest.

    Args:
        state: nested dicts of tensors, as saved: the same keys, shapes and dtypes, on any number of ranks.
        only: top-level parts to read, for example ``("model",)``. None means all of them: a part that ``state`` has and
            the checkpoint has not (or the other way round) is an error.
        hashes: compare every file's SHA-256 first (shared among the ranks); sizes are always compared.

    Raises CheckpointError, before ``state`` is touched, for a damaged checkpoint (its files named, the one before
    offered), one of a newer format, one of another model (the difference named), or a ``.metadata`` that would do
    anything but describe tensors.
    """
    path = Path(path)
    record = _verify_together(path, hashes, group)
    tensors = flatten(state)
    if only is not None:
        tensors = {key: t for key, t in tensors.items() if key.split(".", 1)[0] in only}
    problem: CheckpointError | None = None
    try:
        if other := difference(tensors, record, only):
            raise CheckpointError(f"{path} holds another state than this one: {other}")
        described = read_metadata(path, record.files)
        if missing := [key for key in tensors if key not in described.state_dict_metadata]:
            raise CheckpointError(f"{path} is damaged: its .metadata lacks {_some(missing)}", files.one_before(path))
    except CheckpointError as error:
        problem = error
    _raise_alike(problem, group)
    try:
        _read_tensors(path, tensors, described, group)
    except dcp.CheckpointException as error:
        pass_on_interrupt(error)
        raise CheckpointError(f"{path} could not be read: {_say(error)}", files.one_before(path)) from None
    return record


def latest_on_all_ranks(run_dir: str | os.PathLike, group: ProcessGroup | None = None) -> Path | None:
    """The newest whole checkpoint as rank 0 sees it, the same answer on every rank (a collective)."""
    newest, problem = None, None
    if rank(group) == 0:
        try:
            newest = latest(run_dir)
        except CheckpointError as error:
            problem = error
    newest, problem = broadcast_object((newest, problem), group=group)
    if problem is not None:
        raise problem
    return newest


def prove_shared(run_dir: str | os.PathLike, group: ProcessGroup | None = None, patience_s: float = 10.0) -> None:
    """Show, before any step is spent, that every rank sees the run folder that rank 0 writes (a collective).

    Rank 0 writes a file with a random token and the others read it. Raises CheckpointError on every rank, naming the
    ranks and hosts that see another folder.
    """
    token, file = str(uuid.uuid4()), Path(run_dir) / ".shared"
    problem = None
    if rank(group) == 0:
        try:
            Path(run_dir).mkdir(parents=True, exist_ok=True)
            files.write_durably(file, token)
        except OSError as error:
            problem = error.strerror or str(error)
    token, problem = broadcast_object((token, problem), group=group)
    if problem is not None:
        raise CheckpointError(f"{run_dir}: cannot be written ({problem}); accepted: a folder that rank 0 may write to")
    until = time.monotonic() + patience_s  # network file systems may show a new file late
    while not (seen := _reads(file, token)) and time.monotonic() < until:
        time.sleep(0.1)
    blind = [
        f"rank {r} on {host}" for r, (ok, host) in enumerate(gather_objects((seen, platform.node()), group)) if not ok
    ]
    if rank(group) == 0:
        file.unlink(missing_ok=True)
    if blind:
        raise CheckpointError(
            f"{run_dir}: not the same folder for {', '.join(blind)}; accepted: one that all ranks share"
        )


def flatten(state: State, prefix: str = "") -> dict[str, Tensor]:
    """Nested dicts to one with dotted keys. TypeError for anything that is no tensor, ValueError for a doubled key."""
    flat: dict[str, Tensor] = {}
    for name, value in state.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            inner = flatten(value, key + ".")
        elif isinstance(value, Tensor):
            inner = {key: value.detach()}
        else:
            raise TypeError(
                f"{key}: found {type(value).__name__}, accepted: tensors and dicts of them (rest goes in meta)"
            )
        if doubled := flat.keys() & inner.keys():
            raise ValueError(f"{sorted(doubled)[0]}: two entries of the state have this name")
        flat |= inner
    return flat


def describe_tensor(tensor: Tensor) -> list[Any]:
    """[dtype, *global shape], as the manifest lists it."""
    return [str(tensor.dtype).removeprefix("torch."), *tensor.shape]


# --- the steps of a save ---


class _Writer(dcp.FileSystemWriter):
    """DCP's writer of files, each fsynced; its records then name no path of this machine.

    One thread and one file a rank: an error in one of several threads would be lost.
    """

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


def _begin(run_dir: Path, step: int, attempt: int, group: ProcessGroup | None) -> tuple[Path, Path | None]:
    """Rank 0 makes the hidden folder to write into; all learn its name, or that this state is saved already."""
    answer: tuple[Path | None, Path | None, str | None] = (None, None, None)
    if rank(group) == 0:
        try:
            answer = (*_prepare(run_dir, step, attempt), None)
        except (OSError, CheckpointError) as error:
            answer = (None, None, _say(error))
    folder, done, problem = broadcast_object(answer, group=group)
    if problem:
        raise CheckpointError(f"step {step} could not be saved in {run_dir}: {problem}")
    return folder, done


def _prepare(run_dir: Path, step: int, attempt: int) -> tuple[Path, Path | None]:
    files.sweep(run_dir)
    for path in list_checkpoints(run_dir):
        same = read_manifest(path)
        if (same.step, same.attempt) == (step, attempt) and is_whole(path, hashes=True):
            return path, path
    folder = run_dir / files.FOLDER / f"{files.TEMPORARY}step-{step}-a{attempt}"
    folder.mkdir(parents=True)
    return folder, None


def _write_tensors(folder: Path, tensors: dict[str, Tensor], group: ProcessGroup | None) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        dcp.save(
            tensors,
            storage_writer=_Writer(folder, sync_files=True, overwrite=False),
            planner=dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
            no_dist=not is_distributed(),
        )


def _describe_own_files(folder: Path, group: ProcessGroup | None) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of what this rank wrote (rank 0: the metadata too)."""
    own = sorted(folder.glob(f"__{rank(group)}_*"))
    if rank(group) == 0:
        own.append(folder / files.METADATA)
    digests = files.sha256_of(own)
    return {f.name: {"size": f.stat().st_size, "sha256": digest} for f, digest in zip(own, digests, strict=True)}


def _commit(run_dir: Path, folder: Path, record: Manifest) -> Path:
    """Manifest last, everything on the disk, then the name."""
    if found := files.faults(folder, record, hashes=False):
        raise OSError(f"files of other ranks are not here ({'; '.join(found)}): the run folder must be shared")
    if lost := lost_pieces(read_metadata(folder, record.files)):
        raise OSError(f"not all tensors were written: {_some(lost)}")
    files.write_durably(folder / files.MANIFEST, record.to_json())
    files.fsync_folder(folder)
    final = folder.with_name(files.free_name(run_dir, record.step, record.attempt))
    folder.rename(final)
    files.fsync_folder(final.parent)
    try:
        files.write_atomically(run_dir / files.LATEST, f"{files.FOLDER}/{final.name}\n")
    except OSError as error:  # a note for people: the checkpoint is safe without it
        warnings.warn(f"{run_dir / files.LATEST} could not be written: {error}", stacklevel=2)
    return final


def _versions() -> dict[str, str]:
    try:
        own = package_metadata.version("hymo")
    except package_metadata.PackageNotFoundError:
        own = "not installed"
    return {"hymo": own, "torch": torch.__version__, "python": platform.python_version()}


# --- the steps of a load ---


def _verify_together(path: Path, hashes: bool, group: ProcessGroup | None) -> Manifest:
    """Read the manifest on rank 0; the ranks share the hashing of the files; all raise alike."""
    record, problem = None, None
    if rank(group) == 0:
        try:
            record = read_manifest(path)
        except CheckpointError as error:
            problem = error
    record, problem = broadcast_object((record, problem), group=group)
    if problem is not None or record is None:
        raise problem or CheckpointError(f"{path}: no manifest")
    mine = sorted(record.files)[rank(group) :: world_size(group)]
    found = [
        fault for part in gather_objects(files.faults(path, record, hashes=hashes, only=mine), group) for fault in part
    ]
    if found:
        raise CheckpointError(f"{path} is damaged: " + "; ".join(found), files.one_before(path))
    return record


def difference(tensors: Mapping[str, Tensor], record: Manifest, only: Collection[str] | None) -> str:
    """How the wanted tensors differ from the saved ones, in words; '' if they agree."""
    saved = {k: t for k, t in record.tensors.items() if only is None or k.split(".", 1)[0] in only}
    wanted = {k: describe_tensor(t) for k, t in tensors.items()}
    parts = []
    if missing := sorted(wanted.keys() - saved.keys()):
        parts.append(f"missing in it: {_some(missing)}")
    if extra := sorted(saved.keys() - wanted.keys()):
        parts.append(f"unexpected in it: {_some(extra)}")
    if other := [
        f"{k} ({_shape(saved[k])} there, {_shape(wanted[k])} here)"
        for k in wanted
        if saved.get(k, wanted[k]) != wanted[k]
    ]:
        parts.append(f"of another shape: {_some(other)}")
    return "; ".join(parts)


def _some(names: list[str], most: int = 4) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def _shape(description: list[Any]) -> str:
    return f"{description[0]} {list(description[1:])}"


def _read_tensors(path: Path, tensors: dict[str, Tensor], described: Metadata, group: ProcessGroup | None) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(
            dict(tensors),
            storage_reader=SafeReader(path, described),
            planner=TensorPlanner(),
            process_group=group,
            no_dist=not is_distributed(),
        )


def _raise_alike(problem: CheckpointError | None, group: ProcessGroup | None) -> None:
    """If any rank has a problem, every rank raises it (the first rank's)."""
    for found in gather_objects(problem, group):
        if found is not None:
            raise found


def _reads(file: Path, token: str) -> bool:
    try:
        return file.read_text(encoding="utf-8") == token
    except OSError:
        return False


def pass_on_interrupt(error: dcp.CheckpointException) -> None:
    """Raise the Ctrl-C or the exit that DCP has wrapped like a failure to read; do nothing for such failures."""
    for inner, _ in error.failures.values():
        if isinstance(inner, KeyboardInterrupt | SystemExit):
            raise inner from None


def _say(error: BaseException | None) -> str | None:
    """An error in one line; DCP wraps the first of each rank's errors and a traceback."""
    if error is None:
        return None
    inner = getattr(error, "failures", None)
    if inner:
        error = next(iter(inner.values()))[0]
    while not isinstance(error, OSError) and isinstance(error.__context__, Exception):
        error = error.__context__  # torch's writer of a file says where it stood, the disk said why before that
    return f"{type(error).__name__}: {error}".splitlines()[0]
