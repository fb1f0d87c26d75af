"""Loss and bits per byte on held-out text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hymo.data.loader import EvalBatches, bits_per_byte
from hymo.data.prepare import prepare, prepare_whole
from hymo.distributed import reduce
from hymo.errors import HyMoError
from hymo.observe.units import count


@dataclass(frozen=True)
class EvalResult:
    """``val_loss``: nats a predicted token; ``val_bpb``: bits a UTF-8 byte of the text those tokens spell."""

    val_loss: float
    val_bpb: float
    tokens: int
    text_bytes: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.val_loss, 700.0))


class BrokenOffError(Exception):
    """An evaluation was asked to end before its last batch."""


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: EvalBatches, device: torch.device, break_off: Callable[[], object] | None = None
) -> EvalResult:
    """Go through a validation set once, in evaluation mode. Every rank runs the same number of forwards.

    ``break_off`` is asked before each batch and answers alike on all ranks; where it says so, BrokenOffError is raised.

    Only the main prediction is computed, whatever the look-ahead of the batches. Expert counts of these forwards are
    not used: balancing sees training tokens alone (prime-rl#2953).
    """
    was_training = model.training
    model.eval()
    nats = torch.zeros((), dtype=torch.float64, device=device)
    try:
        for batch in batches:
            if break_off is not None and break_off():
                raise BrokenOffError
            b = batch.to(device)
            tokens_BL, doc_ids_BL = (x[:, : b.labels_KBT.shape[-1]] for x in (b.tokens_BL, b.doc_ids_BL))
            output = model(tokens_BL, doc_ids_BL=doc_ids_BL, labels_KBT=b.labels_KBT[:1], real_B=b.real_B)
            nats += output.ce_sum_K[0].double()
    finally:
        model.train(was_training)
    total = float(reduce.sum_across(nats))
    labels = batches.n_labels
    return EvalResult(total / max(labels, 1), bits_per_byte(total, batches.n_bytes), labels, batches.n_bytes)


def evaluate_run(path: str, sources: Sequence[str] | None, overrides: Sequence[str]) -> int:
    """``hymo eval``: print loss, bits per byte and perplexity on a run's validation sets, or on all of ``sources``.

    Raises HyMoError where there is nothing to evaluate.
    """
    from hymo.checkpoint import store
    from hymo.checkpoint.manifest import WEIGHTS_ONLY
    from hymo.runs import open_run

    run = open_run(path, overrides)
    t, data = run.config.training, run.config.data
    if sources is None and "imported_from" in store.read_manifest(run.checkpoint).meta.get(WEIGHTS_ONLY, {}):
        raise HyMoError(f"{path}: was imported without text of its own; accepted: --data PATH, text to evaluate")
    sets = prepare(data).val if sources is None else {"data": prepare_whole(sources, data)}
    if not sets:
        raise HyMoError(f"{path}: its data has no held-out documents; accepted: --data PATH, other text to evaluate")
    for name, token_set in sets.items():
        batches = EvalBatches(
            token_set, run.tokenizer.token_bytes, seq_len=t.seq_len, mtp_depth=0, batch_size=t.micro_batch_size,
            rank=reduce.rank(), world_size=reduce.world_size(), max_tokens=t.eval_tokens if sources is None else None,
        )  # fmt: skip
        result = evaluate(run.model, batches, run.device)
        if reduce.is_main():
            print(
                f"{name}: val_loss {result.val_loss:.4f} | val_bpb {result.val_bpb:.4f} | "
                f"perplexity {result.perplexity:.2f} | "
                f"{count(result.tokens)} tokens, {count(result.text_bytes)} bytes | step {run.step}"
            )
    return 0
