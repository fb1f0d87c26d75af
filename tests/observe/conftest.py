"""A real run with a skipped attempt, a resume and a sample, for the tests of its page."""

import math
from pathlib import Path

import pytest

from hymo.cli import main
from hymo.config_io import load_config
from hymo.training.loss import PretrainingLoss
from hymo.training.stop import StopRequest
from hymo.training.trainer import Trainer

MADE: dict[str, Path] = {}


class NotFiniteOnce(PretrainingLoss):
    """The loss of the second attempt (of two micro-batches each) is NaN."""

    def __init__(self):
        super().__init__((0.3, 0.1))
        object.__setattr__(self, "calls", [0])

    def __call__(self, output, valid_K):
        self.calls[0] += 1
        total, means_K = super().__call__(output, valid_K)
        return (total * math.nan if self.calls[0] in (3, 4) else total), means_K


class After(StopRequest):
    """Stops a trainer after an update."""

    def __init__(self, trainer, update):
        super().__init__(None)
        self.trainer, self.update = trainer, update

    def reason(self):
        return "a test" if self.trainer.step >= self.update else None


@pytest.fixture
def recorded_run(small_flags, tmp_path_factory) -> Path:
    """Six updates: attempt 2 is skipped, the run stops after update 4 and is resumed there. Not to be written into."""
    if "run" not in MADE:
        run_dir = tmp_path_factory.mktemp("report") / "recorded"
        trainer = Trainer(load_config("tiny", small_flags), loss=NotFiniteOnce(), run_dir=run_dir)
        trainer.train(After(trainer, 4))
        assert main(["train", "--run-dir", str(run_dir), "--resume"]) == 0
        MADE["run"] = run_dir
    return MADE["run"]
