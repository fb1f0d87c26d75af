"""What rows of logged attempts hold beside the losses: right, everywhere the same, and free where not logged."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import DTensor

from hymo.config_io import build_config, load_config, merge, to_dict
from hymo.data.prepare import prepare
from hymo.kernels.attention import max_logit
from hymo.models.mla import MLABlock
from hymo.observe.trackers import WeightsAndBiases, numbers
from hymo.training.probe import Probe, part_of
from hymo.training.trainer import Trainer

DETAILS = {
    "expert_load", "attention_logit_max", "data_wait", "memory_peak",
    *(f"{what}_{part}" for what in ("grad_norm", "update_rms")
      for part in ("embedding", "gdn", "attention", "experts", "mtp", "head")),
}  # fmt: skip


def changed(config, **sections):
    return build_config(merge(to_dict(config), sections))


def weights(model):
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
    return {n: p.detach().clone() for n, p in whole.items()}


def rms(changes, part):
    chosen = [c.double().square().flatten() for n, c in changes.items() if part_of(n) == part]
    return torch.cat(chosen).mean().sqrt().item()


def test_the_numbers_are_what_they_say(small_config):
    """Against the definitions: weights before and after, the whole norm, all logits of the batch.

    Switched off: no difference taken (zeros); the norm after the clip; a hook that looks at the block's output.
    """
    trainer = Trainer(changed(small_config, training={"micro_batch_size": 4}))
    before, batch = weights(trainer.model), next(trainer.stream())[0]
    trainer._restart_stream()
    trainer.model.track_logit_max(True)
    with torch.no_grad():
        whole = trainer.model(batch.tokens_BL, doc_ids_BL=batch.doc_ids_BL, labels_KBT=batch.labels_KBT)
    trainer.model.track_logit_max(False)
    metrics = trainer.train_step().metrics
    after = weights(trainer.model)
    changes = {n: after[n] - before[n] for n in after}
    assert {part_of(n) for n in after} == {"embedding", "gdn", "attention", "experts", "mtp", "head"}
    for part in {part_of(n) for n in after}:
        assert metrics[f"update_rms_{part}"] == pytest.approx(rms(changes, part), rel=1e-5)
    squares = sum(metrics[f"grad_norm_{part}"] ** 2 for part in {part_of(n) for n in after})
    by_algorithm = metrics["grad_norm_normuon"] ** 2 + metrics["grad_norm_adamw"] ** 2
    assert squares == pytest.approx(by_algorithm, rel=1e-9)
    assert metrics["attention_logit_max"] == pytest.approx(whole.logit_max_NH.max().item(), rel=1e-5)
    assert metrics["expert_load"] == whole.expert_counts_NE.tolist()
    assert metrics["expert_load_max"] == pytest.approx(
        (whole.expert_counts_NE.amax(1) / whole.expert_counts_NE.double().mean(1)).max().item()
    )


def test_with_qk_clip_the_logits_are_those_of_the_pass(small_config, monkeypatch):
    """All queries of all micro-batches, which the step has anyway; the sample is not taken beside them."""
    with monkeypatch.context() as patch:
        patch.setattr("hymo.models.mla.LatentAttention.sampled_logit_max", lambda *_: pytest.fail("sampled too"))
        clipping = Trainer(changed(small_config, optimizer={"qk_clip": 50.0}))
        found = clipping.train_step().metrics["attention_logit_max"]
    assert found >= Trainer(small_config).train_step().metrics["attention_logit_max"] > 0


def test_queries_are_sampled_evenly_and_see_their_own_keys_alone():
    """Switched off: keys of later tokens or of other documents let in give larger logits."""
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 50, 3, 8, generator=g), torch.randn(2, 50, 3, 8, generator=g)
    docs = torch.arange(50).div(17, rounding_mode="floor").int().expand(2, -1).contiguous()
    logits = torch.einsum("bthk,bshk->bhts", q, k) * 0.3
    allowed = torch.ones(50, 50).tril().bool() & (docs[0][:, None] == docs[0])
    for stride in (1, 3, 7, 50):
        right = logits.masked_fill(~allowed, -math.inf)[:, :, ::stride].amax((0, 2, 3))
        found = max_logit(q[:, ::stride], k, docs, 0.3, rows=4, stride=stride)
        torch.testing.assert_close(found, right)


def test_details_stand_in_logged_rows_and_on_every_board(small_config, tmp_path, monkeypatch):
    """Switched off: a probe in every attempt puts them into all rows; ``numbers`` that drops nested lists."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    calls, sent = [], []
    real = Probe.before_step
    monkeypatch.setattr(Probe, "before_step", lambda self: (calls.append(1), real(self)))
    monkeypatch.setattr(WeightsAndBiases, "__init__", lambda self, *_: None)
    monkeypatch.setattr(WeightsAndBiases, "log", lambda self, step, values: sent.append((step, numbers(values))))
    monkeypatch.setattr(WeightsAndBiases, "close", lambda self: None)
    config = changed(small_config, logging={"every": 4, "trackers": ["tensorboard", "wandb"]})
    Trainer(config, run_dir=tmp_path / "run").train()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    table = [row for row in rows if "loss" in row]
    assert [row["step"] for row in table if row.keys() >= DETAILS] == [1, 4, 6]
    assert [row["step"] for row in table if row.keys() & DETAILS] == [1, 4, 6]
    assert all("skipped_share" in row for row in table)
    assert len(calls) == 3
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    scalars = DETAILS - {"expert_load"} | {"expert_load/0/0", "expert_load/0/3"}
    for name in scalars:
        assert [e.step for e in events.Scalars(name)] == [1, 4, 6], name
        assert [step for step, values in sent if name in values] == [1, 4, 6], name


def host_reads(config, monkeypatch):
    """How often the second attempt, which is not logged, reads a tensor's values, and its metrics."""
    trainer, reads = Trainer(changed(config, logging={"every": 100}, data={"workers": 0})), []
    trainer.train_step()
    with monkeypatch.context() as patch:
        for name in ("tolist", "item", "__float__", "__bool__", "__int__", "cpu", "numpy"):
            real = getattr(torch.Tensor, name)
            spied = lambda self, *a, real=real, name=name, **k: (reads.append(name), real(self, *a, **k))[1]  # noqa: E731
            patch.setattr(torch.Tensor, name, spied)
        metrics = trainer.train_step().metrics
    return len(reads), metrics


def test_attempts_that_are_not_logged_read_nothing_more_from_the_device(small_config, monkeypatch):
    """Each read of a GPU's tensor would make the host wait. With qk_clip the logits stay where they are.

    Switched off: ``attention_logit_max`` read in every attempt, as it once was.
    """
    plain, metrics = host_reads(small_config, monkeypatch)
    assert not metrics.keys() & DETAILS
    clipped, metrics = host_reads(changed(small_config, optimizer={"qk_clip": 50.0}), monkeypatch)
    assert not metrics.keys() & DETAILS
    assert clipped == plain


def test_a_bad_gradient_says_in_which_part(small_config):
    trainer = Trainer(small_config)
    trainer.model.layers[0].in_proj.weight.register_hook(lambda g: g * math.inf)
    result = trainer.train_step()
    assert result.skipped
    assert not math.isfinite(result.metrics["grad_norm_gdn"])
    assert math.isfinite(result.metrics["grad_norm_head"])
    assert "update_rms_gdn" not in result.metrics


def test_looking_compiles_nothing_more(small_config):
    """The blocks keep their one graph, whether an attempt is logged or not."""
    torch._dynamo.reset()
    trainer = Trainer(small_config)
    counter = CompileCounterWithBackend("aot_eager")
    block = next(m for m in trainer.model.layers if isinstance(m, MLABlock))
    block.compile_compute(backend=counter)
    logged = trainer.train_step().metrics
    unlogged = Trainer.train_step
    trainer._line_due = lambda step, attempt: False
    unlogged(trainer)
    assert counter.frame_count == 1
    assert logged["attention_logit_max"] > 0
    torch._dynamo.reset()


def test_a_large_tensor_is_sampled_evenly(small_config, monkeypatch):
    """Every n-th element stands for n; a few percent off, no more. Switched off: without the scale it is a third."""
    monkeypatch.setattr("hymo.training.probe.SAMPLE", 64)
    trainer = Trainer(small_config)
    before = weights(trainer.model)
    metrics = trainer.train_step().metrics
    after = weights(trainer.model)
    for part in ("gdn", "attention", "experts"):
        exact = rms({n: after[n] - before[n] for n in after}, part)
        assert metrics[f"update_rms_{part}"] == pytest.approx(exact, rel=0.2)


FLAGS = [
    f"--data.source={Path(json.__file__).parent}", "--training.device=cpu", "--training.seq_len=48",
    "--training.global_batch_size=12", "--training.micro_batch_size=12", "--training.fsdp_mixed_precision=float32",
]  # fmt: skip


def first_details(flags):
    trainer = Trainer(load_config("tiny", [*FLAGS, *flags]))
    return {k: v for k, v in trainer.train_step().metrics.items() if k in DETAILS}


def test_every_number_of_ranks_measures_the_same(pool):
    """Sharded over 3 and copied on 2: pieces and copies are counted once. Switched off: each rank counts its own."""
    prepare(load_config("tiny", FLAGS).data)
    alone = first_details(["--training.fsdp=false"])
    for ranks, flags in ((3, ["--training.fsdp=true"]), (2, ["--training.fsdp=true", "--training.replicas=2"])):
        for found in pool(ranks, first_details, [*flags, f"--training.micro_batch_size={12 // ranks}"]):
            assert found["expert_load"] == alone["expert_load"]
            for name in alone.keys() - {"expert_load"}:
                assert found[name] == pytest.approx(alone[name], rel=2e-3), name
