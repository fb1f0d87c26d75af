"""What must fit together before the first step: data and model, batch and ranks."""

from __future__ import annotations

from hymo.config import HyMoConfig
from hymo.data.batch import left_over_tokens
from hymo.data.loader import Deal
from hymo.data.prepare import TokenData, prepare
from hymo.data.tokenize import Tokenizer, open_tokenizer
from hymo.distributed import reduce
from hymo.errors import HyMoError
from hymo.observe.log import Log
from hymo.observe.units import count, size

MOST_FILLER = 0.25
"""A larger share of filler sequences is refused: the run would pay for nothing."""


def prepare_data(config: HyMoConfig, log: Log) -> TokenData:
    """Open the token shards, building them first where the cache has none, with a bar on a terminal."""
    started = False

    def progress(done: int, total: int) -> None:
        nonlocal started
        if not started:
            log.line(f"building token shards from {size(total)} of text")
            log.start("tokenize", total)
            started = True
        log.advance(done, size(done))

    data, problem = None, None
    try:
        if config.data.tokenizer != "bytes":  # before any text is encoded, which may take hours
            check_vocabulary(config, open_tokenizer(config.data.tokenizer))
        data = prepare(config.data, progress)
    except (HyMoError, OSError) as error:
        problem = error
    finally:
        log.stop()
    reduce.raise_together(problem, "reading the data")  # one host's missing file must not keep the others waiting
    assert data is not None
    return data


def check_vocabulary(config: HyMoConfig, tokenizer: Tokenizer) -> None:
    """The model has a row for every id."""
    if tokenizer.vocab_size > config.model.vocab_size:
        accepted = f"at least {tokenizer.vocab_size}, the size of data.tokenizer {tokenizer.name}"
        raise HyMoError(f"model.vocab_size: found {config.model.vocab_size}; accepted: {accepted}")


def check_data(config: HyMoConfig, data: TokenData, log: Log) -> None:
    """The vocabulary fits; what is read, held out and left over is said."""
    m, t, train = config.model, config.training, data.train
    check_vocabulary(config, data.tokenizer)
    left = left_over_tokens(train, t.seq_len, m.mtp_depth)
    held_out = ", ".join(f"{count(s.n_tokens)} tokens of {name}" for name, s in data.val.items())
    log.line(
        f"data: {count(train.n_tokens)} tokens in {train.n_documents:,} documents, {held_out} held out; {left} tokens "
        "at the end of an epoch are left over"
    )
    if train.split not in ("", "whole documents"):
        log.line(f"held out: {train.split}")
    for note in dict.fromkeys(note for one in (train, *data.val.values()) for note in one.notes):
        log.warn(f"data: {note}")


def check_deal(config: HyMoConfig, deal: Deal, log: Log) -> None:
    """The sequences of an update can be dealt to the ranks without paying much for filler."""
    t, ranks = config.training, reduce.world_size()
    given = t.gradient_accumulation_steps
    if given is not None and given != deal.n_micro_batches:
        raise HyMoError(
            f"training.gradient_accumulation_steps: found {given}; accepted: {deal.n_micro_batches} for "
            f"{t.global_batch_size} sequences on {ranks} ranks at {t.micro_batch_size} a micro-batch"
        )
    if deal.padded_share > MOST_FILLER:
        sizes = range(t.micro_batch_size, 0, -1)
        fits = next((m for m in sizes if Deal(t.global_batch_size, ranks, m).padded_share <= MOST_FILLER), None)
        none = f"which {t.global_batch_size} sequences on {ranks} ranks cannot meet"
        example = f"for example {fits}" if fits else none
        raise HyMoError(
            f"training.micro_batch_size: found {t.micro_batch_size}, which fills {deal.padded_share:.0%} of an update "
            f"with empty sequences; accepted: at most {MOST_FILLER:.0%}, {example}"
        )
    if deal.padded_share > 0:
        log.line(f"{deal.padded_share:.1%} of the sequences computed are filler (they count for nothing)")
