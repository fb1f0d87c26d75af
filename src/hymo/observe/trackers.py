"""Trackers beside metrics.jsonl, under the same names. Each is optional and imported only when asked for."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from hymo.config import ConfigError, HyMoConfig
from hymo.config_io import to_dict
from hymo.distributed import reduce

PACKAGES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}


class Tracker(Protocol):
    """Takes numbers by name at a step."""

    def log(self, step: int, values: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row; of a list, also one of lists, each under its name and place."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, list):
            found |= numbers({f"{name}/{i}": item for i, item in enumerate(value)})
        elif isinstance(value, (int, float)):
            found[name] = float(value)
    return found


class TensorBoard:
    """Scalars into ``RUN/tensorboard``; a resumed run goes on in the same place."""

    def __init__(self, run_dir: Path, first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        # Rows after the resumed step are of attempts that are made again: TensorBoard hides what it purges. From update
        # 0 on too: a run that ended before its first checkpoint begins anew in its folder.
        folder = str(run_dir / "tensorboard")
        self._writer = SummaryWriter(folder, purge_step=first_step + 1)  # type: ignore[no-untyped-call]

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in numbers(values).items():
            self._writer.add_scalar(name, value, step)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._writer.close()  # type: ignore[no-untyped-call]


class WeightsAndBiases:
    """Weights & Biases, offline unless WANDB_MODE says otherwise; a resumed run goes on under its name."""

    def __init__(self, run_dir: Path, config: HyMoConfig):
        import wandb

        identity = run_dir / "wandb.json"
        known = json.loads(identity.read_text()) if identity.exists() else {"id": uuid.uuid4().hex[:8]}
        identity.write_text(json.dumps(known) + "\n")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "hymo"), id=known["id"], name=run_dir.name, dir=str(run_dir),
            config=to_dict(config), resume="allow", mode=os.environ.get("WANDB_MODE", "offline"),  # type: ignore[arg-type]
        )  # fmt: skip

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log(numbers(values) | {"step": step})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """trackio, on this machine alone: in its own store (TRACKIO_DIR), where `trackio show` finds all runs.

    A resumed run goes on under its name, which RUN/trackio.json keeps; steps made again are there twice.
    """

    def __init__(self, run_dir: Path, config: HyMoConfig):
        import trackio

        identity = run_dir / "trackio.json"
        fresh = {
            "project": os.environ.get("TRACKIO_PROJECT", "hymo"),
            "name": f"{run_dir.absolute().name}-{uuid.uuid4().hex[:6]}",
        }
        known = json.loads(identity.read_text()) if identity.exists() else fresh
        identity.write_text(json.dumps(known) + "\n")
        with contextlib.redirect_stdout(sys.stderr):  # what it says is no line of the run
            self._run = trackio.init(
                project=known["project"], name=known["name"], config=to_dict(config), resume="allow", embed=False,
                auto_log_gpu=False, auto_log_cpu=False,
            )  # fmt: skip

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log(numbers(values), step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()


def check_trackers(config: HyMoConfig) -> None:
    """Raise ConfigError on all ranks where the main one, which opens the trackers, lacks a package of theirs."""
    problem = None
    if reduce.is_main():
        for name in config.logging.trackers:
            try:
                importlib.import_module(PACKAGES[name])
            except ImportError:
                problem = (
                    f"logging.trackers: found {name} without its package; accepted: pip install 'hymo[track]', or "
                    "another"
                )
                break
    problem = reduce.broadcast_object(problem)
    if problem is not None:
        raise ConfigError([problem])


def open_trackers(config: HyMoConfig, run_dir: Path, first_step: int) -> list[Tracker]:
    """The trackers that ``logging.trackers`` names, whose packages are there (`check_trackers`)."""
    found: list[Tracker] = []
    for name in config.logging.trackers:
        if name == "tensorboard":
            found.append(TensorBoard(run_dir, first_step))
        else:
            found.append((Trackio if name == "trackio" else WeightsAndBiases)(run_dir, config))
    return found
