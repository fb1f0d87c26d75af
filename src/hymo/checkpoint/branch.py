"""New runs out of old ones: a decay from the stable phase, or a longer stable phase.

A run in its stable phase can end in many ways: ``branch`` starts a new run at one of its checkpoints that decays over
the next steps, on other data, rates or batches if asked; ``extend`` starts one that goes on for longer. The parent goes
on untouched: the new run's folder holds the checkpoint itself (as links to the same bytes where the file system can),
the rows of ``metrics.jsonl`` up to it, its own ``config.yaml``, and ``branch.json``, which says where it came from and
what differs. It is then a run like any other: ``hymo train --run-dir NEW --resume`` goes on with it.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hymo.checkpoint import manifest as files
from hymo.checkpoint import store
from hymo.checkpoint.manifest import Manifest, list_checkpoints, step_of, verify
from hymo.config import HyMoConfig
from hymo.config_io import build_config, load_config, merge, parse_overrides, to_dict
from hymo.errors import HyMoError
from hymo.models.model import build_hymo
from hymo.runs import CONFIG, METRICS, with_absolute_paths, write_config
from hymo.training.scheduler import Phases, branch_phases, eligible, extend_phases

BRANCH = "branch.json"
SET_BY_VERB = ("total_steps", "total_tokens", "warmup_steps", "warmup_frac", "stable_frac", "decay_steps", "decay_frac")
"""Keys of the scheduler that --at, --decay and --extend decide; the shape of the decay and its minimum may be given."""

STATE_KEYS = ("experts", "normalize", "axis")
"""Keys of the optimizer that decide which state tensors there are: a branch keeps the parent's."""


@dataclass(frozen=True)
class Branch:
    """What ``branch.json`` says: where a run began, and in what it differs from its parent.

    ``differences``: key -> [the parent's value, this run's]. ``before`` and ``after``: [W, S, D] of the two schedules.
    """

    kind: str
    parent: str
    checkpoint: str
    step: int
    attempt: int
    before: list[int]
    after: list[int]
    differences: dict[str, list[Any]]


def read_branch(run_dir: str | os.PathLike) -> Branch | None:
    """Where a run was branched from, or None for a run that began at update 0."""
    file = Path(run_dir) / BRANCH
    if not file.is_file():
        return None
    try:
        return Branch(**json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise HyMoError(f"{file}: cannot be read ({error}); accepted: as hymo branch wrote it") from None


def branch(
    run: str | os.PathLike,
    at: int | None,
    decay: int,
    overrides: Sequence[str] = (),
    run_dir: str | os.PathLike | None = None,
) -> Path:
    """Create a run that leaves ``run`` at update ``at`` (None: its newest eligible checkpoint) and decays.

    Its W is the parent's, its N = at + decay. It goes on at the parent's place in the data, or at the start of other
    data. Returns the new run's folder (``run_dir``, or the next free ``RUN-decay-AT``).

    Args:
        overrides: ``--section.key value`` of everything but the model's shape and the lengths of the phases.

    Raises HyMoError if there is no whole checkpoint at ``at`` in the stable phase (those there are are listed), or if
    an override cannot be.
    """
    parent = _Parent.find(Path(run), at)
    phases = branch_phases(parent.phases, parent.step, decay)
    return _create(parent, "decay", phases, overrides, run_dir, name=f"decay-{parent.step}")


def extend(
    run: str | os.PathLike,
    total: int,
    at: int | None = None,
    decay_steps: int | None = None,
    overrides: Sequence[str] = (),
    run_dir: str | os.PathLike | None = None,
) -> Path:
    """Create a run like ``run`` with ``total`` updates: a longer stable phase, the warm-up it began with.

    No factor before the old decay start changes. D = floor(total * decay_frac), or ``decay_steps``. Arguments, result
    and errors otherwise as for ``branch``; the folder is ``RUN-extend-TOTAL``.
    """
    parent = _Parent.find(Path(run), at)
    try:
        phases = extend_phases(parent.phases, total, parent.config.scheduler.decay_frac, decay_steps)
    except ValueError as error:
        raise HyMoError(f"--extend: {error}") from None
    return _create(parent, "extend", phases, overrides, run_dir, name=f"extend-{total}")


def eligible_checkpoints(run: Path) -> list[Path]:
    """A run's whole checkpoints of its stable phase, oldest first: a branch may start from these."""
    phases = _phases(load_config(run / CONFIG))
    return [p for p in list_checkpoints(run) if eligible(phases, step_of(p))]


@dataclass(frozen=True)
class _Parent:
    run: Path
    checkpoint: Path
    record: Manifest
    config: HyMoConfig

    @classmethod
    def find(cls, run: Path, at: int | None) -> _Parent:
        """The run and its newest eligible checkpoint, or that of update ``at``; its contents are verified."""
        if not (run / CONFIG).is_file():
            raise HyMoError(f"{run}: no such run; accepted: the folder of a run")
        found = eligible_checkpoints(run)
        wanted = found if at is None else [p for p in found if step_of(p) == at]
        config = load_config(run / CONFIG)
        if wanted:
            record = verify(wanted[-1])
            files.refuse_weights_only(wanted[-1], record)
            return cls(run, wanted[-1], record, config)
        steps = ", ".join(map(str, sorted({step_of(p) for p in found}))) or "none is there yet"
        phases = _phases(config)
        raise HyMoError(
            f"--at: found {'no' if at is None else at}; accepted: a checkpoint of the stable phase ({phases.W} to "
            f"{phases.decay_start}): {steps}"
        )

    @property
    def phases(self) -> Phases:
        return _phases(self.config)

    @property
    def step(self) -> int:
        return self.record.step


def _phases(config: HyMoConfig) -> Phases:
    s = config.scheduler
    assert s.total_steps is not None and s.warmup_steps is not None and s.decay_steps is not None
    return Phases(s.warmup_steps, s.total_steps - s.warmup_steps - s.decay_steps, s.decay_steps)


def _create(
    parent: _Parent,
    kind: str,
    phases: Phases,
    overrides: Sequence[str],
    run_dir: str | os.PathLike | None,
    name: str,
) -> Path:
    config = _new_config(parent, phases, overrides)
    about = Branch(
        kind=kind,
        parent=str(parent.run.resolve()),
        checkpoint=parent.checkpoint.name,
        step=parent.step,
        attempt=parent.record.attempt,
        before=list(parent.phases),
        after=list(phases),
        differences=_differences(to_dict(parent.config), to_dict(config)),
    )
    first = Path(os.path.abspath(parent.run))  # "." has no name
    first = Path(run_dir) if run_dir is not None else first.with_name(f"{first.name}-{name}")
    if run_dir is not None and first.exists() and (not first.is_dir() or any(first.iterdir())):
        raise HyMoError(f"--run-dir: {first} exists already; accepted: another name")
    partial = first.with_name(f".{first.name}.{uuid.uuid4().hex[:8]}.part")  # its own, of two branches at once
    try:
        files.pin(parent.checkpoint, f"{kind} in {first.resolve()}")
        _fill(partial, parent, config, about)
        for number in itertools.count(1):
            target = first if number == 1 else first.with_name(f"{first.name}-{number}")
            if _take_name(partial, target):
                break
            if run_dir is not None:
                raise HyMoError(f"--run-dir: {target} exists already; accepted: another name")
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    if target != first:
        files.pin(parent.checkpoint, f"{kind} in {target.resolve()}")
    return target


def _take_name(partial: Path, target: Path) -> bool:
    """Rename a folder that is complete, unless something is there (an empty folder is nothing): then False."""
    try:
        if os.name == "nt" and target.is_dir():  # where no folder is renamed over an empty one
            target.rmdir()
        partial.rename(target)
    except OSError:
        if target.exists() or target.is_symlink():
            return False
        raise
    return True


def _new_config(parent: _Parent, phases: Phases, overrides: Sequence[str]) -> HyMoConfig:
    asked = parse_overrides(overrides)
    for key in SET_BY_VERB:
        if key in asked.get("scheduler", {}):
            raise HyMoError(f"scheduler.{key}: found beside a branch; accepted: --at and --decay, or --extend, set it")
    schedule = {
        "total_steps": phases.total,
        "total_tokens": None,
        "warmup_steps": phases.W,
        "warmup_frac": parent.config.scheduler.warmup_frac,
        "stable_frac": None,
        "decay_steps": phases.D,
        "decay_frac": parent.config.scheduler.decay_frac,  # what a later extension goes by
    }
    config = with_absolute_paths(build_config(merge(merge(to_dict(parent.config), {"scheduler": schedule}), asked)))
    for key in STATE_KEYS:
        old, new = getattr(parent.config.optimizer, key), getattr(config.optimizer, key)
        if old != new:
            raise HyMoError(
                f"optimizer.{key}: found {new}; accepted: {old}, the parent's optimizer state is of that form"
            )
    shapes = store.flatten({"model": build_hymo(config, device="meta").state_dict()})
    if other := store.difference(shapes, parent.record, only=("model",)):
        raise HyMoError(f"model: found another shape than the checkpoint's ({other}); accepted: the parent's model")
    return config


def _fill(partial: Path, parent: _Parent, config: HyMoConfig, about: Branch) -> None:
    checkpoint = partial / files.FOLDER / parent.checkpoint.name
    checkpoint.mkdir(parents=True)
    for name in (*parent.record.files, files.MANIFEST):
        _link_or_copy(parent.checkpoint / name, checkpoint / name)
    verify(checkpoint, hashes=False)
    if rows := _rows_until(parent.run / METRICS, parent.record.attempt):
        files.write_durably(partial / METRICS, rows)
    files.write_durably(partial / BRANCH, json.dumps(asdict(about), indent=1) + "\n")
    write_config(partial, config)
    files.fsync_folder(partial)


def _link_or_copy(source: Path, target: Path) -> None:
    """A second name for the same bytes (a checkpoint's files are never written again), or a copy of them."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _rows_until(metrics: Path, attempt: int) -> str:
    """The parent's rows up to an attempt, so that the new run's record is one line from update 1 on."""
    if not metrics.is_file():
        return ""
    kept = []
    for line in metrics.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # a line that was cut off by a kill
        if row.get("attempt", attempt + 1) <= attempt:
            kept.append(line)
    return "".join(line + "\n" for line in kept)


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Every key that differs: section.key -> [before, after]."""
    found = {}
    for section in after:
        old, new = before.get(section, {}), after[section]
        for key in new:
            if old.get(key) != new[key]:
                found[f"{section}.{key}"] = [old.get(key), new[key]]
    return found
