"""One attempt at an update, without I/O: all micro-batches, one verdict of all ranks, then an update or a skip.

K: 1 + mtp_depth predictions, N: mixture-of-experts layers, E: experts of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hymo.data.batch import Batch
from hymo.distributed import fsdp, reduce
from hymo.models.model import HyMo, ModelOutput
from hymo.optim.build import Optimizers
from hymo.training.loss import Loss, PretrainingLoss
from hymo.training.probe import Probe
from hymo.training.replay import Replay


@dataclass(frozen=True)
class TrainStepResult:
    """What one attempt did.

    ``loss`` is the main cross entropy in nats a token, without MTP. ``grad_norm`` is the norm of the whole gradient
    before clipping. The rates are those of the update tried. ``metrics`` has main_loss, total_loss, mtp_1 ..., and in
    an attempt with a `Probe` what that measures and the load of each expert layer.
    ``reason`` says of a skip what was not finite, and on which rank; ``spike`` that the loss was finite but far too
    large.
    """

    loss: float
    grad_norm: float
    lr_muon: float
    lr_adamw: float
    is_update: bool = True
    skipped: bool = False
    metrics: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    spike: bool = False


train_step_result = TrainStepResult


@dataclass
class Gradients:
    """What the micro-batches of an attempt leave behind beside the gradients themselves."""

    total: Tensor  # this rank's share of the total loss
    means_K: Tensor  # this rank's share of each cross entropy
    counts_NE: Tensor  # tokens each expert received on this rank, int64
    dropped_N: Tensor  # assignments dropped over capacity on this rank
    entropy_N: Tensor  # router entropy times assignments, summed: filler weighs nothing
    logit_max_NH: Tensor | None  # largest attention logit by layer and head, where it is tracked


def accumulate_gradients(
    model: nn.Module,
    micro_batches: Sequence[Batch],
    loss: Loss,
    valid_K: Tensor,
    probe: Probe | None = None,
    replay: Replay | None = None,
) -> Gradients:
    """Forward and backward of every micro-batch; the loop is never left early.

    A rank whose loss is not finite still runs every backward, or the other ranks would wait in a collective for ever
    (facebookresearch/mmf#1073). At most one micro-batch's graph is alive at a time. With ``replay`` those between the
    first and the last repeat what the second launches.
    """
    ranks = reduce.world_size()
    weights = loss.term_weights(valid_K) if isinstance(loss, PretrainingLoss) else None
    sums: Gradients | None = None

    def compute(batch: Batch) -> None:
        nonlocal sums
        output: ModelOutput = model(
            batch.tokens_BL, doc_ids_BL=batch.doc_ids_BL, labels_KBT=batch.labels_KBT, real_B=batch.real_B,
            term_weights_K=None if weights is None else weights[0] * ranks,
            z_weight=None if weights is None else weights[1] * ranks,
        )  # fmt: skip
        total, means_K = loss(output, valid_K)
        (total * ranks).backward()  # gradients are averaged over ranks: the factor undoes it, on gloo and NCCL alike
        sums = _add(sums, total.detach(), means_K.detach(), output)

    last = len(micro_batches) - 1
    for i, batch in enumerate(micro_batches):
        fsdp.begin_micro_batch(model, is_last=i == last)
        if replay is not None and 0 < i < last:
            if i == 1:
                replay.record(model, batch, compute)
            replay(batch)
        else:
            with probe.attention() if probe is not None and i == 0 else nullcontext():
                compute(batch)
    assert sums is not None
    return sums


def _add(sums: Gradients | None, total: Tensor, means_K: Tensor, output: ModelOutput) -> Gradients:
    entropy_N = output.router_entropy_N.detach() * output.expert_counts_NE.sum(1)
    logit_max = None if output.logit_max_NH is None else output.logit_max_NH.detach()
    counts_NE, dropped_N = output.expert_counts_NE.detach(), output.dropped_N.detach()
    if sums is None:  # copies: a loss may return views of one tensor, or keep what it returns
        largest = None if logit_max is None else logit_max.clone()
        return Gradients(total.clone(), means_K.clone(), counts_NE.clone(), dropped_N.clone(), entropy_N, largest)
    sums.total += total  # in place: what is replayed adds to the same numbers
    sums.means_K += means_K
    sums.counts_NE += counts_NE
    sums.dropped_N += dropped_N
    sums.entropy_N += entropy_N
    if logit_max is not None and sums.logit_max_NH is not None:
        torch.maximum(sums.logit_max_NH, logit_max, out=sums.logit_max_NH)
    return sums


def count_valid(micro_batches: Sequence[Batch]) -> Tensor:
    """Labels that count, for each prediction: int64 [K] over all micro-batches and ranks."""
    local_K = torch.stack([(batch.labels_KBT >= 0).sum((1, 2)) for batch in micro_batches]).sum(0)
    return reduce.sum_across(local_K)


def attempt_update(
    model: HyMo,
    optimizers: Optimizers,
    micro_batches: Sequence[Batch],
    loss: Loss,
    *,
    factor: float,
    grad_clip: float,
    spike_limit: float | None = None,
    probe: Probe | None = None,
    replay: Replay | None = None,
    update_gate_biases: Callable[[Tensor], None] | None = None,
) -> TrainStepResult:
    """One attempt (see the module). ``factor`` scales both peak rates; a total loss above ``spike_limit`` is skipped.

    ``probe``: measure more in this attempt. ``replay``: see ``accumulate_gradients``. ``update_gate_biases`` takes the
    expert counts of an update, int64 [N, E] over all ranks; by default the model's own.

    On a skip the parameters, the optimizer's state, the expert counts and the gate biases are bit for bit what they
    were; only the gradients are dropped.
    """
    valid_K = count_valid(micro_batches)
    gradients = accumulate_gradients(model, micro_batches, loss, valid_K, probe, replay)
    reduce.mean_replicated_gradients(model.parameters())
    verdict = reduce.verdict(gradients.total, optimizers.parameters_by_algorithm())
    metrics, counts_NE, loads = _sum_over_ranks(gradients)
    spike = verdict.finite and spike_limit is not None and metrics["total_loss"] > spike_limit
    metrics |= {f"grad_norm_{name}": norm for name, norm in verdict.norms.items()}
    if probe is not None:
        metrics |= {"expert_load": loads} | probe.gradient_norms()
    lr_muon, lr_adamw = (factor * rate for rate in optimizers.peak_rates)
    result = TrainStepResult(metrics["main_loss"], verdict.grad_norm, lr_muon, lr_adamw, metrics=metrics)
    if spike or not verdict.finite:
        fsdp.drop_gradients(model)
        reason = f"loss spike, {metrics['total_loss']:.4f} above {spike_limit:.4f}" if spike else str(verdict)
        return replace(result, is_update=False, skipped=True, reason=reason, spike=spike)
    # From here on nothing makes the host wait for the device, but where there is a probe: the next attempt's data can
    # be fetched meanwhile.
    reduce.clip(model.parameters(), grad_clip, verdict.grad_norm)
    optimizers.set_factor(factor)
    if probe is not None:
        probe.before_step()
    optimizers.step()
    optimizers.zero_grad(set_to_none=True)
    if probe is not None:
        metrics |= probe.update_sizes()
    (update_gate_biases or model.update_gate_biases)(counts_NE)
    if gradients.logit_max_NH is not None:
        logit_max_NH = reduce.max_across(gradients.logit_max_NH)
        optimizers.clip_qk(model, logit_max_NH)
        if probe is not None:
            metrics["attention_logit_max"] = float(logit_max_NH.max())
    return result


def _sum_over_ranks(g: Gradients) -> tuple[dict[str, Any], Tensor, list[list[int]]]:
    """All figures of an attempt in one all-reduce and one transfer: metrics, and the expert counts, there and here."""
    pieces = [g.total.reshape(1), g.means_K, g.dropped_N, g.entropy_N, g.counts_NE.flatten()]
    packed = reduce.sum_across(torch.cat([piece.to(torch.float64) for piece in pieces]))  # counts are exact to 2^53
    counts = packed[packed.numel() - g.counts_NE.numel() :]
    numbers = _split(packed.tolist(), [piece.numel() for piece in pieces])
    (total,), (main, *further), dropped, entropy, flat = numbers
    n = g.counts_NE.shape[1]
    loads = [[int(count) for count in flat[i : i + n]] for i in range(0, len(flat), max(n, 1))]
    metrics = {"main_loss": main, "total_loss": total} | {f"mtp_{k}": value for k, value in enumerate(further, 1)}
    if loads:
        metrics |= _router_metrics(sum(dropped), sum(entropy), loads)
    return metrics, counts.view_as(g.counts_NE).to(torch.int64), loads


def _split(numbers: list[float], sizes: list[int]) -> list[list[float]]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [numbers[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _router_metrics(dropped: float, entropy: float, loads: list[list[int]]) -> dict[str, float]:
    """Load of the fullest expert over the mean (the worst layer's), dropped share of all assignments, mean entropy.

    The assignments are as routed, before any drop.
    """
    n = max(sum(map(sum, loads)), 1)
    fullest = max(max(layer) * len(layer) / max(sum(layer), len(layer)) for layer in loads)
    return {"expert_load_max": fullest, "dropped_share": dropped / n, "router_entropy": entropy / n}
