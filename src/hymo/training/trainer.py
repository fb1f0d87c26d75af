"""The trainer: builds the parts of a run, then goes through its steps. Read it from top to bottom.

What a step computes is in ``step.py``; this file decides when things happen and writes what a person keeps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import hymo
from hymo.checkpoint import store
from hymo.config import HyMoConfig
from hymo.config_io import to_dict
from hymo.data.batch import left_over_tokens, sample_order
from hymo.data.loader import BatchStream, Deal, EvalBatches
from hymo.data.prepare import TokenData, prepare
from hymo.distributed import mesh, reduce
from hymo.distributed.fsdp import wrap_model_with_fsdp
from hymo.errors import HyMoError, NotFiniteError
from hymo.evaluate import EvalResult, evaluate
from hymo.models.model import HyMo, build_hymo
from hymo.observe.log import Log, step_line
from hymo.observe.metrics import MetricsFile, Throughput, device_peak_flops, memory_bytes
from hymo.observe.profile import StepProfiler
from hymo.observe.trackers import open_trackers
from hymo.observe.units import count, size
from hymo.optim.build import build_optimizers
from hymo.plan import flops_per_token
from hymo.training.flags import resolve_fsdp, thread_optimization_flags
from hymo.training.loss import Loss, PretrainingLoss
from hymo.training.scheduler import JointWSDScheduler, Step
from hymo.training.step import TrainStepResult, attempt_update
from hymo.training.stop import StopRequest

MOST_FILLER = 0.25  # a larger share of filler sequences is refused: the run would pay for nothing


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. ``stopped``: why it ended before its last update (a signal, max_hours), or None."""

    step: int
    checkpoint: Path | None
    evaluation: dict[str, EvalResult]
    stopped: str | None = None


class Trainer:
    """Trains one model as a configuration says.

    Args:
        config: the whole configuration.
        model: a model of your own, already initialised (default: `build_hymo`).
        data: token sets of your own (default: `prepare` of ``config.data``).
        loss: a `Loss` of your own (default: cross entropy with MTP and z-loss).
        run_dir: where the run is written; None writes nothing.
        profile: (start, stop) updates of which a trace is written.
    """

    def __init__(
        self,
        config: HyMoConfig,
        model: HyMo | None = None,
        data: TokenData | None = None,
        loss: Loss | None = None,
        *,
        run_dir: Path | None = None,
        profile: tuple[int, int] | None = None,
    ):
        self.config, self.run_dir = config, run_dir
        t = config.training
        self.device = mesh.init_distributed(t.device)
        self.log = Log()
        self.data = data if data is not None else self._prepare_data()
        self._check_data()
        self.sharded = resolve_fsdp(t.fsdp, self.device)
        if model is None:  # under FSDP2 no rank ever holds the whole model
            model = build_hymo(config, device="meta" if self.sharded else self.device, seed=t.seed)
        self.model = model.train()
        self.chosen = self._thread_optimization_flags()
        if self.sharded:
            wrap_model_with_fsdp(self.model, config)
        self.optimizers = build_optimizers(self.model, config.optimizer)
        self.scheduler = JointWSDScheduler(config.scheduler)
        default_loss = PretrainingLoss(config.model.mtp_weights, config.model.z_loss)
        self.loss: Loss = loss if loss is not None else default_loss
        self.deal = Deal(t.global_batch_size, reduce.world_size(), t.micro_batch_size)
        self._check_deal()
        self.flops_per_token = flops_per_token(config.model, t.seq_len)
        self.peak_flops = device_peak_flops(self.device)
        self.profiler = StepProfiler(run_dir, profile)
        self.step, self.attempt, self.position, self.skips_in_a_row = 0, 0, 0, 0
        self.last_checkpoint: Path | None = None
        self._saved_at: tuple[int, int] | None = None
        self._stream: BatchStream | None = None

    # ------------------------------------------------------------------------------------------------------- the run
    def train(self) -> TrainResult:
        """Go on from where this trainer stands to the last update; evaluate, save and log on the way."""
        total = self.total_steps
        metrics = self._open_metrics()
        trackers = open_trackers(self.config.logging, self.run_dir, self.step) if self._writes else []
        throughput, stopped, evaluation = Throughput(), None, {}
        began, began_step = time.perf_counter(), self.step
        self.log.start("train", total, self.step)
        with StopRequest(self.config.training.max_hours, self.device) as stop, self.stream() as stream:
            while self.step < total:
                with self.profiler.step(self.step + 1):
                    result = self.train_step()
                throughput.add(self.config.tokens_per_step, stream.wait_s)
                row = self._row(result)
                if self._line_due(result):
                    row |= self._speed(throughput)
                    eta = (total - self.step) * (time.perf_counter() - began) / max(1, self.step - began_step)
                    self.log.line(step_line(row, total, eta))
                self.log.advance(self.step, f"loss {result.loss:.3f}")
                self._record(metrics, trackers, row)
                self._stop_if_not_finite(result)

                pause = time.perf_counter()
                stopped = stop.reason()
                last = self.step >= total
                if result.is_update and not stopped and (last or self._due(self.config.training.eval_every)):
                    evaluation = self.evaluate()
                    self._record(metrics, trackers, self._evaluation_row(evaluation))
                if stopped or (result.is_update and (last or self._checkpoint_due())):
                    self.save()
                throughput.pause(time.perf_counter() - pause)
                if stopped:
                    self.log.line(f"stopped by {stopped} after update {self.step}; go on with --resume")
                    break
        self.log.stop()
        for closing in (metrics, *trackers):
            if closing is not None:
                closing.close()
        return TrainResult(self.step, self.last_checkpoint, evaluation, stopped)

    def train_step(self) -> TrainStepResult:
        """One attempt: all micro-batches, then an update or a skip (see `hymo.training.step`)."""
        micro_batches = [batch.to(self.device) for batch in next(self.stream())]
        self.attempt += 1
        self.position = self.stream().position
        result = attempt_update(
            self.model, self.optimizers, micro_batches, self.loss,
            factor=self.scheduler.get_factor(Step(self.step + 1)), grad_clip=self.config.training.grad_clip,
        )  # fmt: skip
        self.step += result.is_update
        self.skips_in_a_row = 0 if result.is_update else self.skips_in_a_row + 1
        return result

    def evaluate(self) -> dict[str, EvalResult]:
        """Loss and bits per byte on every validation set, printed in one line each."""
        t, results = self.config.training, {}
        for name, token_set in self.data.val.items():
            batches = EvalBatches(
                token_set, self.data.tokenizer.token_bytes, seq_len=t.seq_len, mtp_depth=self.config.model.mtp_depth,
                batch_size=t.micro_batch_size, rank=reduce.rank(), world_size=reduce.world_size(),
                max_tokens=t.eval_tokens,
            )  # fmt: skip
            results[name] = r = evaluate(self.model, batches, self.device)
            self.log.line(
                f"eval {self.step}/{self.total_steps} | {name}_loss {r.val_loss:.4f} | {name}_bpb {r.val_bpb:.4f} | "
                f"perplexity {r.perplexity:.2f}"
            )
        return results

    # ---------------------------------------------------------------------------------------------- saving and resuming
    def save(self) -> Path | None:
        """Write a checkpoint of this moment; the folder appears whole or not at all."""
        if self.run_dir is None or self._saved_at == self._moment:
            return self.last_checkpoint
        decay_start = self.total_steps - (self.config.scheduler.decay_steps or 0)
        self.last_checkpoint = store.save(
            self.run_dir, self.step, self.attempt, self._state(), self._meta(),
            keep=self.config.checkpoint.keep, keep_every=self.config.checkpoint.keep_every, protect=(decay_start,),
        )  # fmt: skip
        self._saved_at = self._moment
        return self.last_checkpoint

    def resume(self, checkpoint: Path) -> None:
        """Take everything from a checkpoint: parameters, optimizer state, counters and the place in the data."""
        manifest = store.read_manifest(checkpoint)
        self.optimizers.check_settings(manifest.meta["optimizer_settings"])
        store.load(checkpoint, self._state())
        self.step, self.attempt = manifest.step, manifest.attempt
        self.position, self.skips_in_a_row = manifest.meta["position"], 0
        if manifest.meta["data_fingerprint"] != self.data.train.fingerprint:
            raise HyMoError(
                f"{checkpoint}: the run read other text (fingerprint {manifest.meta['data_fingerprint'][:12]}, found "
                f"{self.data.train.fingerprint[:12]}); accepted: the same data.source and data.tokenizer"
            )
        torch.set_rng_state(torch.frombuffer(bytearray.fromhex(manifest.meta["rng"]), dtype=torch.uint8))
        self.last_checkpoint, self._saved_at = checkpoint, self._moment
        how = self._bitwise(manifest)
        self.log.line(f"resumed from {checkpoint}: update {self.step}, attempt {self.attempt}; {how}")

    def init_from(self, checkpoint: Path) -> None:
        """Take the weights alone (and the gate biases) from a checkpoint; the run starts at update 0."""
        store.load(checkpoint, {"model": self.model.state_dict()}, only=("model",))
        self.log.line(f"weights from {checkpoint}")

    def _state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizers.named_state()}

    def _meta(self) -> dict[str, Any]:
        return {
            "config": to_dict(self.config),
            "position": self.position,
            "data_fingerprint": self.data.train.fingerprint,
            "optimizer_settings": self.optimizers.settings(),
            "rng": torch.get_rng_state().numpy().tobytes().hex(),
            "world_size": reduce.world_size(),
            "device": self.device.type,
            "threads": torch.get_num_threads(),
            "versions": {"hymo": hymo.__version__, "torch": torch.__version__},
        }

    def _bitwise(self, manifest: Any) -> str:
        """Whether what follows repeats the run bit for bit, and if not, why."""
        now, then = self._meta(), manifest.meta
        differing = [key for key in ("world_size", "device", "threads", "versions") if now[key] != then[key]]
        if self.device.type == "cuda" and not self.config.training.deterministic:
            differing.append("training.deterministic is false")
        return "resume: bitwise" if not differing else f"resume: not bitwise ({', '.join(differing)})"

    # ------------------------------------------------------------------------------------------------- small decisions
    @property
    def total_steps(self) -> int:
        assert self.config.scheduler.total_steps is not None
        return self.config.scheduler.total_steps

    @property
    def _writes(self) -> bool:
        return self.run_dir is not None and reduce.is_main()

    @property
    def _moment(self) -> tuple[int, int]:
        return self.step, self.attempt

    def stream(self) -> BatchStream:
        """The batches of this rank from the present position on."""
        if self._stream is None:
            t = self.config.training
            order = sample_order(self.data.train, t.seq_len, self.config.model.mtp_depth, t.seed)
            self._stream = BatchStream(
                self.data.train, order, self.position, t.global_batch_size, seq_len=t.seq_len,
                mtp_depth=self.config.model.mtp_depth, micro_batch_size=t.micro_batch_size,
                rank=reduce.rank(), world_size=reduce.world_size(), pin_memory=self.device.type == "cuda",
            )  # fmt: skip
        return self._stream

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _checkpoint_due(self) -> bool:
        s = self.config.scheduler
        decay_starts = bool(s.decay_steps) and self.step == self.total_steps - (s.decay_steps or 0)
        return decay_starts or self._due(self.config.checkpoint.every)

    def _line_due(self, result: TrainStepResult) -> bool:
        return (
            result.skipped or self.attempt == 1 or self.step == self.total_steps or self._due(self.config.logging.every)
        )

    def _stop_if_not_finite(self, result: TrainStepResult) -> None:
        if not result.skipped:
            return
        t = self.config.training
        self.log.warn(f"attempt {self.attempt} skipped: {result.reason}")
        limit = t.consecutive_nan_limit if t.loss_nan_skip else 1
        if self.skips_in_a_row >= limit:
            self.log.stop()
            kept = f"last good checkpoint: {self.last_checkpoint}" if self.last_checkpoint else "nothing was saved yet"
            raise NotFiniteError(f"{self.skips_in_a_row} attempts in a row were not finite ({result.reason}); {kept}")

    # ------------------------------------------------------------------------------------------------------------ rows
    def _row(self, result: TrainStepResult) -> dict[str, Any]:
        """A row of metrics.jsonl; ``step`` is the update tried (done on success, the next one on a skip)."""
        further = {k: v for k, v in result.metrics.items() if k != "main_loss"}
        return {
            "step": self.step if result.is_update else self.step + 1,
            "attempt": self.attempt,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr_muon": result.lr_muon,
            "lr_adamw": result.lr_adamw,
            "tokens": self.attempt * self.config.tokens_per_step,
            "skipped": result.skipped,
            **further,
        }

    def _speed(self, throughput: Throughput) -> dict[str, Any]:
        tokens_per_s, data_wait = throughput.read()
        mfu = None
        if self.peak_flops is not None:
            mfu = tokens_per_s * self.flops_per_token / (self.peak_flops * reduce.world_size())
        return {"tokens_per_s": tokens_per_s, "data_wait": data_wait, "mfu": mfu, **memory_bytes(self.device)}

    def _evaluation_row(self, evaluation: dict[str, EvalResult]) -> dict[str, Any]:
        row: dict[str, Any] = {"step": self.step, "attempt": self.attempt}
        for name, result in evaluation.items():
            row |= {f"{name}_loss": result.val_loss, f"{name}_bpb": result.val_bpb}
        return row

    def _record(self, metrics: MetricsFile | None, trackers: list[Any], row: dict[str, Any]) -> None:
        if metrics is not None:
            metrics.write(row)
        for tracker in trackers:
            tracker.log(row["step"], {k: v for k, v in row.items() if k not in ("step", "attempt")})

    def _open_metrics(self) -> MetricsFile | None:
        return MetricsFile(self.run_dir / "metrics.jsonl") if self._writes and self.run_dir is not None else None

    # ------------------------------------------------------------------------------------------------------- the parts
    def _prepare_data(self) -> TokenData:
        """Open the token shards, building them first where the cache has none, with a bar on a terminal."""
        started = False

        def progress(done: int, total: int) -> None:
            nonlocal started
            if not started:
                self.log.line(f"building token shards from {size(total)} of text")
                self.log.start("tokenize", total)
                started = True
            self.log.advance(done, size(done))

        try:
            return prepare(self.config.data, progress)
        finally:
            self.log.stop()

    def _check_data(self) -> None:
        m, t, train = self.config.model, self.config.training, self.data.train
        if self.data.tokenizer.vocab_size > m.vocab_size:
            raise HyMoError(
                f"model.vocab_size: found {m.vocab_size}; accepted: at least {self.data.tokenizer.vocab_size}, the "
                f"size of data.tokenizer {self.data.tokenizer.name}"
            )
        left = left_over_tokens(train, t.seq_len, m.mtp_depth)
        held_out = ", ".join(f"{count(s.n_tokens)} tokens of {name}" for name, s in self.data.val.items())
        self.log.line(
            f"data: {count(train.n_tokens)} tokens in {train.n_documents:,} documents, {held_out} held out; {left} "
            "tokens at the end of an epoch are left over"
        )

    def _check_deal(self) -> None:
        t, deal = self.config.training, self.deal
        given = t.gradient_accumulation_steps
        if given is not None and given != deal.n_micro_batches:
            raise HyMoError(
                f"training.gradient_accumulation_steps: found {given}; accepted: {deal.n_micro_batches} for "
                f"{t.global_batch_size} sequences on {reduce.world_size()} ranks at {t.micro_batch_size} a micro-batch"
            )
        if deal.padded_share > MOST_FILLER:
            per_rank = -(-t.global_batch_size // reduce.world_size())
            fits = next(m for m in range(t.micro_batch_size, 0, -1) if per_rank % m == 0)
            raise HyMoError(
                f"training.micro_batch_size: found {t.micro_batch_size}, which fills {deal.padded_share:.0%} of each "
                f"update with empty sequences; accepted: at most {MOST_FILLER:.0%}, for example {fits}"
            )
        if deal.padded_share > 0:
            self.log.line(f"{deal.padded_share:.1%} of the sequences computed are filler (they count for nothing)")

    def _thread_optimization_flags(self) -> dict[str, str]:
        """Push the training flags onto the model's blocks, once; what was chosen is said in the log."""
        chosen = thread_optimization_flags(self.model, self.config.training, self.device)
        self.log.line("device: " + " | ".join([str(self.device), *(f"{k}: {v}" for k, v in chosen.items())]))
        return chosen

    def _update_moe_gate_biases(self, counts_NE: torch.Tensor) -> None:
        """Move every layer's gate bias by the expert counts of one update (already summed over ranks)."""
        self.model.update_gate_biases(counts_NE)
