"""The bytes and collectives that the plan names, beside those counted in a step on real processes."""

import json
import os
from pathlib import Path

import pytest

from hymo.config_io import load_config
from hymo.data.prepare import prepare
from hymo.models.model import build_hymo
from hymo.observe.collectives import counted
from hymo.planning.traffic import traffic_of
from hymo.training.trainer import Trainer

FLAGS = [
    f"--data.source={Path(json.__file__).parent}", "--training.device=cpu", "--training.seq_len=16",
    "--training.global_batch_size=16", "--training.fsdp=true", "--model.vocab_size=263",
]  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("shards"))
    prepare(load_config("tiny", [*FLAGS, f"--data.cache_dir={folder}"]).data)
    return folder


def counted_step(flags, cache):
    """What one step sent, after a first one that sets things up."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    trainer = Trainer(load_config("tiny", [*FLAGS, *flags, f"--data.cache_dir={cache}"]))
    trainer.train_step()
    with counted() as sent:
        trainer.train_step()
    trainer.stream().close()
    return sent


KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
GRID = [
    (2, ["--training.reshard=layer", "--training.micro_batch_size=2"]),  # 4 micro-batches
    (2, ["--training.reshard=never", "--training.micro_batch_size=4"]),
    (3, ["--training.reshard=step", "--training.micro_batch_size=2"]),  # filler, uneven cuts
    (4, ["--training.reshard=layer", "--training.micro_batch_size=1", "--training.reduce_each_micro_batch=false"]),
    (4, ["--training.reshard=layer", "--training.micro_batch_size=2", "--training.replicas=2"]),
    (2, ["--training.reshard=layer", "--training.micro_batch_size=8", "--optimizer.experts=muon"]),
    (
        2,
        [
            "--training.micro_batch_size=8",
            "--training.fsdp_mixed_precision=bfloat16",
            "--training.moe_mixed_precision=false",
        ],
    ),
    (2, ["--training.micro_batch_size=8", "--model.tie_embeddings=true"]),
]


@pytest.mark.parametrize("ranks, flags", GRID)
def test_the_plan_sends_what_a_step_sends(pool, cache, ranks, flags):
    """Within 5 % of the bytes of each kind (of the rank that sends most), and exactly as many collectives."""
    config = load_config("tiny", [*FLAGS, *flags])
    reshard = "layer" if config.training.reshard == "auto" else config.training.reshard
    plan = traffic_of(config, build_hymo(config, device="meta"), ranks, reshard, device_type="cpu")
    found = pool(ranks, counted_step, flags, cache)
    for kind in KINDS:
        most = max(sent.of_kind(kind) for sent in found)
        assert plan.of_kind(kind) == pytest.approx(most, rel=0.05), kind
        assert {sent.calls_of_kind(kind) for sent in found} == {plan.calls_of_kind(kind)}, kind
    assert plan.total == pytest.approx(max(sent.total for sent in found), rel=0.05)
