"""Trackers beside metrics.jsonl, under the same names. Each is optional and imported only when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from hymo.config import ConfigError, LoggingConfig


class Tracker(Protocol):
    """Takes numbers by name at a step."""

    def log(self, step: int, values: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Scalars into ``RUN/tensorboard``; a resumed run goes on in the same place."""

    def __init__(self, run_dir: Path, first_step: int):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                ["logging.tensorboard: found true without the package; accepted: pip install 'hymo[track]', or false"]
            ) from None
        # Rows after the resumed step are of an attempt that was lost: TensorBoard hides what it purges.
        purge = first_step + 1 if first_step else None
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge)  # type: ignore[no-untyped-call]

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                self._writer.add_scalar(name, value, step)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._writer.close()  # type: ignore[no-untyped-call]


def open_trackers(config: LoggingConfig, run_dir: Path, first_step: int) -> list[Tracker]:
    """The trackers that the configuration asks for."""
    return [TensorBoard(run_dir, first_step)] if config.tensorboard else []
