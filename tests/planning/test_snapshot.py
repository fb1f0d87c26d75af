"""The host memory that the plan names for saves in the background, beside what such a save holds."""

import json
from pathlib import Path

import pytest

from hymo.config_io import load_config
from hymo.distributed.reduce import local
from hymo.models.model import build_hymo
from hymo.planning.memory import snapshot_of
from hymo.training.trainer import Trainer

FLAGS = [
    f"--data.source={Path(json.__file__).parent}", "--training.device=cpu", "--training.seq_len=16",
    "--training.global_batch_size=12", "--training.micro_batch_size=2", "--model.vocab_size=263",
    "--checkpoint.asynchronous=true",
]  # fmt: skip


def held_by_a_save(run, flags):
    """Bytes of the storages that a trainer's save in the background has left in memory."""
    trainer = Trainer(load_config("tiny", flags), run_dir=Path(run))
    trainer.train_step()
    trainer.save()
    assert trainer.saver.wait(60)
    (written,) = trainer.saver.outcomes()
    assert isinstance(written, Path)
    trainer.stream().close()
    storages = [local(tensor).untyped_storage() for tensor in trainer.saver._copy.values()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


@pytest.mark.parametrize(
    "ranks, flags",
    [
        (1, ["--training.fsdp=false"]),
        (1, ["--training.fsdp=false", "--model.tie_embeddings=true", "--optimizer.axis=long"]),
        (3, ["--training.fsdp=true", "--optimizer.experts=muon"]),  # uneven cuts
        (4, ["--training.fsdp=true", "--training.replicas=2", "--optimizer.axis=long", "--optimizer.experts=muon"]),
    ],
)
def test_the_plan_names_what_a_background_save_holds(pool, tmp_path, ranks, flags):
    """To the byte, on the fullest rank."""
    config = load_config("tiny", [*FLAGS, *flags])
    plan = snapshot_of(config, build_hymo(config, device="meta"), ranks)
    assert max(pool(ranks, held_by_a_save, str(tmp_path), [*FLAGS, *flags])) == plan.copied
    assert plan.copied < plan.pinned < 2 * plan.copied
