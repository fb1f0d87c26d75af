"""The trainer: builds the parts of a run, then goes through its steps. Read it from top to bottom.

What a step computes is in ``step.py``, what a checkpoint holds in ``recovery.py``; this file decides when things happen
and writes what a person keeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from hymo.checkpoint.saver import Saver
from hymo.checkpoint.weights import fill, open_weights
from hymo.config import HyMoConfig
from hymo.data.batch import sample_order
from hymo.data.loader import BatchStream, Deal, EvalBatches
from hymo.data.prepare import TokenData
from hymo.distributed import mesh, reduce
from hymo.distributed.fsdp import Sharding, wrap_model_with_fsdp
from hymo.errors import NotFiniteError
from hymo.evaluate import BrokenOffError, EvalResult, evaluate
from hymo.models.model import HyMo, build_hymo
from hymo.observe.log import Log, step_line
from hymo.observe.metrics import MetricsFile, Throughput, device_peak_flops, has_evaluation, memory_bytes
from hymo.observe.profile import StepProfiler
from hymo.observe.trackers import Tracker, check_trackers, open_trackers
from hymo.observe.units import duration
from hymo.observe.watchdog import Watchdog
from hymo.optim.build import build_optimizers
from hymo.plan import flops_per_token
from hymo.runs import METRICS, write_config
from hymo.training import recovery
from hymo.training.checks import check_data, check_deal, prepare_data
from hymo.training.flags import (
    make_deterministic,
    refuse_flags,
    resolve_cuda_graphs,
    resolve_fsdp,
    thread_optimization_flags,
)
from hymo.training.garbage import long_lived_objects
from hymo.training.loss import Loss, PretrainingLoss
from hymo.training.probe import Probe
from hymo.training.replay import Replay
from hymo.training.scheduler import JointWSDScheduler, Step
from hymo.training.step import TrainStepResult, attempt_update, train_step_result
from hymo.training.stop import StopRequest

__all__ = ["TrainResult", "Trainer", "train_step_result"]


Record = Callable[[dict[str, Any]], None]
"""Takes a row."""


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
        t, c = config.training, config.checkpoint
        self.device = mesh.init_distributed(t.device)
        self.log = Log()
        if t.deterministic:
            make_deterministic()
        # What needs no data is checked before the first text is read.
        refuse_flags(config, self.device)
        self.deal = Deal(t.global_batch_size, reduce.world_size(), t.micro_batch_size)
        check_deal(config, self.deal, self.log)
        if run_dir is not None:
            check_trackers(config)
        self.data = data if data is not None else prepare_data(config, self.log)
        check_data(config, self.data, self.log)

        self.sharded = resolve_fsdp(t.fsdp, self.device)
        if model is None:  # under FSDP2 no rank ever holds the whole model
            model = build_hymo(config, device="meta" if self.sharded else self.device, seed=t.seed)
        self.model = model.train()
        self._thread_optimization_flags()
        if self.sharded:
            wrap_model_with_fsdp(self.model, config)
        reshard = cast(Sharding, self.model.sharding).reshard if self.sharded else None
        self.replay = Replay(self.device) if resolve_cuda_graphs(config, reshard, self.device) else None
        self.model.track_logit_max(config.optimizer.qk_clip is not None)
        self.optimizers = build_optimizers(self.model, config.optimizer)
        self.probe = Probe(self.model)
        self.scheduler = JointWSDScheduler(config.scheduler)
        default_loss = PretrainingLoss(config.model.mtp_weights, config.model.z_loss)
        self.loss: Loss = loss if loss is not None else default_loss

        self.progress = recovery.Progress()
        self.last_checkpoint: Path | None = None
        self.saver: Saver | None = None
        if run_dir is not None:
            self.saver = Saver(
                run_dir, asynchronous=c.asynchronous, keep=c.keep, keep_every=c.keep_every, protect=(self.decay_start,)
            )
        self._saved_moment: tuple[int, int] | None = None
        self._resumed_from: str | None = None
        self.evaluation: dict[str, EvalResult] = {}
        self._save_began = self._save_took = 0.0
        self._stream: BatchStream | None = None
        self.flops_per_token = flops_per_token(config.model, t.seq_len)
        self.peak_flops = device_peak_flops(self.device)
        self.profiler = StepProfiler(run_dir, profile)

    # ------------------------------------------------------------------------------------------------------- the run
    def train(self, stop: StopRequest | None = None, watchdog: Watchdog | None = None) -> TrainResult:
        """Go on from where this trainer stands to the last update; evaluate, save and log on the way.

        ``stop`` and ``watchdog``: those that are at work already (`hymo train` has them from its start on); by default
        they are of this call alone.
        """
        if stop is None:
            with StopRequest(self.config.training.max_hours) as own:
                return self.train(own, watchdog)
        if watchdog is None:
            with Watchdog(self.run_dir, patience_s=self.config.training.patience_s) as watchdog:
                return self.train(stop, watchdog)
        throughput, stopped, tightened = Throughput(), None, False
        began, began_step = time.perf_counter(), self.step
        self.log.start("train", self.total_steps, self.step)
        with stop.between_steps(), long_lived_objects() as keep_objects, self._records() as record:
            if self._owes_evaluation():
                stopped = self._evaluate_and_record(record, stop, watchdog)
            while self.step < self.total_steps and not stopped:
                watchdog.tick()
                with self.profiler.step(self.step + 1):
                    result = self.train_step()
                throughput.add(self.config.tokens_per_step, self.stream().wait_s)
                row = self._row(result) | {"tokens_per_s": throughput.last()}
                eta = (self.total_steps - self.step) * (time.perf_counter() - began) / max(1, self.step - began_step)
                if result.skipped or self._line_due(self.step, self.progress.attempt):
                    row |= self._speed(throughput)
                    self.log.line(step_line(row, self.total_steps, eta))
                self.log.advance(self.step, f"loss {result.loss:.3f}, {duration(eta)} left")
                record(row)
                if result.skipped:
                    self._after_skip(result)

                pause = time.perf_counter()
                if not tightened:  # whatever had to be compiled or read first is there now
                    mesh.set_timeout(self.config.training.timeout_s, self._mesh())
                    keep_objects()
                    tightened = True
                stopped = stop.reason() or (self._after_update(record, stop, watchdog) if result.is_update else None)
                watchdog.tick()
                if stopped:
                    self._save_before_stop(stop)
                self._hear_saves()
                throughput.pause(time.perf_counter() - pause)
        if stopped:
            self.log.line(f"stopped by {stopped} after update {self.step}; go on with --resume")
        else:
            stopped = stop.reason(clock=False)  # a signal that came while the last save was waited for
        return TrainResult(self.step, self.last_checkpoint, self.evaluation, stopped)

    def _after_update(self, record: Record, stop: StopRequest, watchdog: Watchdog) -> str | None:
        """Save and evaluate where it is time to; why to stop, if that came meanwhile."""
        saving = self._checkpoint_due()
        if saving:
            watchdog.tick()
            self.save()
        if self._evaluation_due():
            return self._evaluate_and_record(record, stop, watchdog)
        return stop.reason() if saving else None

    def _evaluate_and_record(self, record: Record, stop: StopRequest, watchdog: Watchdog) -> str | None:
        """Evaluate, unless a stop is asked for: then it ends at the next batch, on all ranks. Why to stop, or None."""
        stopped: list[str | None] = [None]

        def break_off() -> bool:
            watchdog.tick()
            stopped[0] = stop.reason()
            return stopped[0] is not None

        try:
            self.evaluation = self.evaluate(break_off)
        except BrokenOffError:
            self.log.line("evaluation broken off: it is made again by --resume")
            return stopped[0]
        record(self._evaluation_row(self.evaluation))
        return None

    @contextmanager
    def _records(self) -> Iterator[Record]:
        """Open what is written while training, and close it however training ends; a save in flight is waited for."""
        sinks: list[Tracker] = []
        metrics = None
        if self.run_dir is not None and reduce.is_main():
            write_config(self.run_dir, self.config)
            metrics = MetricsFile(self.run_dir / METRICS, self.progress.attempt)
            sinks = open_trackers(self.config, self.run_dir, self.step)

        def record(row: dict[str, Any]) -> None:
            if metrics is not None and (problem := metrics.write(row)):
                self.log.warn(problem)
            for sink in sinks:
                sink.log(row["step"], {k: v for k, v in row.items() if k not in ("step", "attempt")})

        try:
            yield record
        finally:
            self.log.stop()
            self.profiler.close()
            if self.saver is not None:
                self.saver.wait()
                self._hear_saves()
            self._restart_stream()
            if metrics is not None and (problem := metrics.close()):
                self.log.warn(problem)
            for sink in sinks:
                sink.close()

    def train_step(self) -> TrainStepResult:
        """One attempt: all micro-batches, then an update or a skip (see `hymo.training.step`)."""
        p = self.progress
        micro_batches = [batch.to(self.device) for batch in next(self.stream())]
        p.attempt, p.position, p.tokens = p.attempt + 1, self.stream().position, p.tokens + self.config.tokens_per_step
        result = attempt_update(
            self.model, self.optimizers, micro_batches, self.loss,
            factor=self.scheduler.get_factor(Step(p.step + 1)), grad_clip=self.config.training.grad_clip,
            spike_limit=None if self.config.training.spike_guard == "off" else p.spike_limit(),
            probe=self.probe if self._line_due(p.step + 1, p.attempt) else None, replay=self.replay,
            update_gate_biases=self._update_moe_gate_biases,
        )  # fmt: skip
        p.note(result.metrics["total_loss"], is_update=result.is_update, spike=result.spike)
        return result

    def evaluate(self, break_off: Callable[[], object] | None = None) -> dict[str, EvalResult]:
        """Loss and bits per byte on every validation set, printed in one line each.

        ``break_off`` is asked before each batch; BrokenOffError is raised where it says so.
        """
        t, results = self.config.training, {}
        for name, token_set in self.data.val.items():
            batches = EvalBatches(
                token_set, self.data.tokenizer.token_bytes, seq_len=t.seq_len, mtp_depth=self.config.model.mtp_depth,
                batch_size=t.micro_batch_size, rank=reduce.rank(), world_size=reduce.world_size(),
                max_tokens=t.eval_tokens,
            )  # fmt: skip
            results[name] = r = evaluate(self.model, batches, self.device, break_off)
            self.log.line(
                f"eval {self.step}/{self.total_steps} | {name}_loss {r.val_loss:.4f} | {name}_bpb {r.val_bpb:.4f} | "
                f"perplexity {r.perplexity:.2f}"
            )
        return results

    # ---------------------------------------------------------------------------------------------- saving and resuming
    def save(self) -> None:
        """Write a checkpoint of this moment; the folder appears whole or not at all. A failure is said, not raised."""
        if self.saver is None or self._saved_moment == self.progress.moment:
            return
        self.saver.wait()
        self._hear_saves()  # of the save before: what is heard from here on is of this one
        self._save_began = time.perf_counter()
        state = recovery.tensors(self.model, self.optimizers)
        meta = recovery.meta(self.config, self.progress, self.data.train, self.optimizers, self.device)
        self.saver.save(self.step, self.progress.attempt, state, meta)
        self._saved_moment = self.progress.moment
        self._hear_saves()

    def resume(self, checkpoint: Path, *, moved: bool = False) -> None:
        """Take everything from a checkpoint: parameters, optimizer state, counters and the place in the data.

        moved: the text lies elsewhere than before, and must be known by its fingerprint.
        """
        self.progress, manifest = recovery.restore(
            checkpoint, self.model, self.optimizers, self.data.train, self.run_dir, moved=moved
        )
        self._restart_stream()
        self.last_checkpoint, self._saved_moment = checkpoint, self.progress.moment
        self._resumed_from = checkpoint.name
        if branch := recovery.branched_at(self.run_dir, manifest):
            same_data = manifest.meta["data_fingerprint"] == self.data.train.fingerprint
            how = recovery.said_of_branch(branch, same_data=same_data)
        else:
            how = recovery.said_of_bits(manifest.meta, self.config, self.device)
        self.log.line(f"resumed from {checkpoint}: update {self.step}, attempt {self.progress.attempt}; {how}")

    def init_from(self, path: str | Path) -> None:
        """Take the weights alone (and the gate biases) from a run, a checkpoint or an exported folder.

        The run starts at update 0, with a fresh optimizer, at the start of its data.
        """
        weights = open_weights(path, hashes=False)
        fill(self.model, weights)
        self.log.line(f"weights from {weights.path} (step {weights.step})")

    def _save_before_stop(self, stop: StopRequest) -> None:
        """Save within the grace period, all ranks alike; what cannot end in time is not begun."""
        if self.saver is None:
            return
        free = self.saver.wait(stop.seconds_left(self.config.checkpoint.grace_s))
        self._hear_saves()
        saved = self._saved_moment == self.progress.moment  # before an evaluation, say
        # How a save in the background ended may have been heard by some ranks alone: all enter the next one, or none.
        ranks = reduce.gather_objects((free, saved))
        free, saved = all(f for f, _ in ranks), all(s for _, s in ranks)
        if not saved:
            self._saved_moment = None
        left = stop.seconds_left(self.config.checkpoint.grace_s)
        can = reduce.broadcast_object(free and (saved or left is None or self._save_took < left))
        if can:
            self.save()
            self.saver.wait()
        else:
            self.log.warn("no time left to save before the stop; the last checkpoint stands")

    @property
    def last_state_saved(self) -> bool:
        """Whether a checkpoint holds the present state; also where nothing is to be saved, or nothing has been done."""
        return self.saver is None or self.progress.attempt == 0 or self._saved_moment == self.progress.moment

    def _hear_saves(self) -> None:
        for outcome in self.saver.outcomes() if self.saver is not None else ():
            if isinstance(outcome, Path):
                self.last_checkpoint, self._save_took = outcome, time.perf_counter() - self._save_began
            else:
                self._saved_moment = None  # nothing of this moment is on the disk: the next save tries again
                self.log.warn(str(outcome))

    # ------------------------------------------------------------------------------------------------- small decisions
    @property
    def step(self) -> int:
        """Updates done."""
        return self.progress.step

    @property
    def total_steps(self) -> int:
        assert self.config.scheduler.total_steps is not None
        return self.config.scheduler.total_steps

    @property
    def decay_start(self) -> int:
        """The last update at the peak rate: its checkpoint is always written and kept, branches start there."""
        return self.total_steps - (self.config.scheduler.decay_steps or 0)

    def stream(self) -> BatchStream:
        """The batches of this rank from the present position on."""
        if self._stream is None:
            t, depth = self.config.training, self.config.model.mtp_depth
            order = sample_order(self.data.train, t.seq_len, depth, t.seed)
            self._stream = BatchStream(
                self.data.train, order, self.progress.position, t.global_batch_size, seq_len=t.seq_len, mtp_depth=depth,
                micro_batch_size=t.micro_batch_size, rank=reduce.rank(), world_size=reduce.world_size(),
                threads=self.config.data.workers, pin_memory=self.device.type == "cuda",
            )  # fmt: skip
        return self._stream

    def _restart_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _mesh(self) -> DeviceMesh | None:
        sharding = getattr(self.model, "sharding", None)
        return None if sharding is None else sharding.mesh

    def _due(self, every: int, step: int | None = None) -> bool:
        step = self.step if step is None else step
        return step >= self.total_steps or (every > 0 and step % every == 0)

    def _evaluation_due(self) -> bool:
        return self._due(self.config.training.eval_every)

    def _checkpoint_due(self) -> bool:
        return self.step == self.decay_start or self._due(self.config.checkpoint.every)

    def _owes_evaluation(self) -> bool:
        """Whether the update that was resumed from was to be evaluated, and the run ended before that was done."""
        if self.run_dir is None or not self.step or not self._evaluation_due():
            return False
        path = self.run_dir / METRICS
        return bool(reduce.broadcast_object(reduce.is_main() and not has_evaluation(path, self.progress.attempt)))

    def _line_due(self, step: int, attempt: int) -> bool:
        """Whether the attempt at an update is logged; one that turns out a skip is in any case."""
        return attempt == 1 or self._due(self.config.logging.every, step)

    def _after_skip(self, result: TrainStepResult) -> None:
        """Say why; go back a checkpoint after a spike if asked; stop after too many in a row."""
        t, p = self.config.training, self.progress
        self.log.warn(f"attempt {p.attempt} skipped: {result.reason}")
        kept = f"last good checkpoint: {self.last_checkpoint}" if self.last_checkpoint else "nothing was saved yet"
        if p.spikes_in_a_row >= t.consecutive_nan_limit:
            raise NotFiniteError(f"{p.spikes_in_a_row} loss spikes in a row ({result.reason}); {kept}")
        if result.spike:
            if t.spike_guard == "rewind" and self.saver is not None:
                self.saver.wait()  # or one rank would have heard of the save in flight, and another not
                self._hear_saves()
                self.last_checkpoint = reduce.broadcast_object(self.last_checkpoint)
            if t.spike_guard == "rewind" and self.last_checkpoint is not None:
                recovery.rewind(self.last_checkpoint, self.model, self.optimizers, p)
                self.log.line(f"back to {self.last_checkpoint}: update {p.step}; the data read since is left out")
            return
        if p.skips_in_a_row >= (t.consecutive_nan_limit if t.loss_nan_skip else 1):
            raise NotFiniteError(f"{p.skips_in_a_row} attempts in a row were not finite ({result.reason}); {kept}")

    # ------------------------------------------------------------------------------------------------------------ rows
    def _row(self, result: TrainStepResult) -> dict[str, Any]:
        """A row of metrics.jsonl; ``step`` is the update tried (done on success, the next one on a skip)."""
        further: dict[str, Any] = {k: v for k, v in result.metrics.items() if k != "main_loss"}
        if self._resumed_from is not None:  # the first row after a resume says so
            further["resumed_from"], self._resumed_from = self._resumed_from, None
        return {
            "step": self.step if result.is_update else self.step + 1,
            "attempt": self.progress.attempt,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr_muon": result.lr_muon,
            "lr_adamw": result.lr_adamw,
            "tokens": self.progress.tokens,
            "skipped": result.skipped,
            "skipped_share": 1 - self.step / self.progress.attempt,
            **further,
        }

    def _speed(self, throughput: Throughput) -> dict[str, Any]:
        tokens_per_s, data_wait = throughput.read()
        mfu = None
        if self.peak_flops is not None:
            mfu = tokens_per_s * self.flops_per_token / (self.peak_flops * reduce.world_size())
        return {"tokens_per_s": tokens_per_s, "data_wait": data_wait, "mfu": mfu, **memory_bytes(self.device)}

    def _evaluation_row(self, evaluation: dict[str, EvalResult]) -> dict[str, Any]:
        row: dict[str, Any] = {"step": self.step, "attempt": self.progress.attempt}
        for name, result in evaluation.items():
            row |= {f"{name}_loss": result.val_loss, f"{name}_bpb": result.val_bpb}
        return row

    # ---------------------------------------------------------------------------------- names of the design notes
    def _thread_optimization_flags(self) -> None:
        """Push the training flags onto the model's blocks, once; what was chosen is said in the log."""
        chosen = thread_optimization_flags(self.model, self.config.training, self.device)
        self.log.line("device: " + " | ".join([str(self.device), *(f"{k}: {v}" for k, v in chosen.items())]))

    def _update_moe_gate_biases(self, counts_NE: torch.Tensor) -> None:
        """Move every layer's gate bias by the expert counts of one update (already summed over ranks)."""
        self.model.update_gate_biases(counts_NE)
