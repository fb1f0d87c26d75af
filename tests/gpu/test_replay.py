"""Micro-batches replayed as a CUDA graph: the losses, gradients and counts of those that run one by one."""

import json
from pathlib import Path

import pytest
import torch

from hymo.config_io import load_config
from hymo.training.trainer import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FLAGS = [
    f"--data.source={Path(json.__file__).parent}", "--training.device=cuda", "--training.seq_len=64",
    "--training.global_batch_size=12", "--training.micro_batch_size=2", "--training.reshard=step",
    "--training.fsdp_mixed_precision=bfloat16", "--training.deterministic=true", "--checkpoint.every=0",
    "--training.eval_every=0",
]  # fmt: skip


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_replayed_run_is_the_run(compiled):
    """Five updates of six micro-batches, four of them replayed; bit for bit, with deterministic algorithms."""
    runs = []
    for graphs in ("false", "true"):
        flags = [*FLAGS, f"--training.cuda_graphs={graphs}", f"--training.torch_compile_gdn={str(compiled).lower()}"]
        trainer = Trainer(load_config("tiny", flags))
        results = [trainer.train_step() for _ in range(5)]
        runs.append([(r.loss, r.grad_norm, r.metrics["expert_load_max"]) for r in results])
        trainer.stream().close()
    assert runs[0] == runs[1]
