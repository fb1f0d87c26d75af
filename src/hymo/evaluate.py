"""Loss and bits per byte on held-out text."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

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


def evaluate_run_tasks(
    path: str, tasks: Sequence[str], overrides: Sequence[str], *, limit: int | None, json_file: str | None
) -> int:
    """``hymo eval --tasks``: print the results of lm-evaluation-harness, and write them if asked."""
    if limit is not None and limit < 1:
        raise HyMoError(f"--limit: found {limit}; accepted: a whole number >= 1")
    try:
        from hymo.harness import evaluate_tasks, result_table
    except ImportError as error:
        raise HyMoError(f"--tasks needs lm-eval ({error}); accepted: pip install 'hymo[eval]'") from None
    results = evaluate_tasks(path, tasks, overrides, limit)
    print(result_table(results))
    if json_file is not None:
        Path(json_file).write_text(json.dumps(results, indent=1, default=str) + "\n", encoding="utf-8")
    return 0


def evaluate_run(path: str, sources: Sequence[str] | None, overrides: Sequence[str]) -> int:
    """``hymo eval``: print loss, bits per byte and perplexity on a run's validation sets, or on all of ``sources``.

    Below each the same by length of document.

    Raises HyMoError where there is nothing to evaluate.
    """
    from hymo.checkpoint import store
    from hymo.checkpoint.manifest import WEIGHTS_ONLY
    from hymo.evaluate_lengths import evaluate_by_length, table
    from hymo.runs import open_run, refuse_absent_text

    run = open_run(path, overrides)
    t, meta = run.config.training, store.read_manifest(run.checkpoint).meta
    if sources is None and "imported_from" in meta.get(WEIGHTS_ONLY, {}):
        raise HyMoError(f"{path}: was imported without text of its own; accepted: --data PATH, text to evaluate")
    if sources is None:
        refuse_absent_text(run.config, instead="--data PATH, other text to evaluate, or ")
        own = prepare(run.config.data)
        sets = own.val
        if meta.get("data_fingerprint", own.train.fingerprint) != own.train.fingerprint and reduce.is_main():
            print("data.source is not the text that the run was trained on: it was changed, or another one was given")
    else:
        sets = {"data": prepare_whole(sources, run.config.data)}
        for note in sets["data"].notes if reduce.is_main() else ():
            print(f"warning: data: {note}")
    if not sets:
        raise HyMoError(f"{path}: its data has no held-out documents; accepted: --data PATH, other text to evaluate")
    for name, token_set in sets.items():
        batches = EvalBatches(
            token_set, run.tokenizer.token_bytes, seq_len=t.seq_len, mtp_depth=0, batch_size=t.micro_batch_size,
            rank=reduce.rank(), world_size=reduce.world_size(), max_tokens=t.eval_tokens if sources is None else None,
        )  # fmt: skip
        result, rows = evaluate_by_length(run.model, batches, token_set, run.tokenizer.token_bytes, run.device)
        if reduce.is_main():
            print(
                f"{name}: val_loss {result.val_loss:.4f} | val_bpb {result.val_bpb:.4f} | "
                f"perplexity {result.perplexity:.2f} | "
                f"{count(result.tokens)} tokens, {count(result.text_bytes)} bytes | step {run.step}"
            )
            print(table(rows))
    return 0
