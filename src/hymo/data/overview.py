"""What `hymo data build` and `hymo data inspect` print."""

import math
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hymo.data.dataset import TOKENIZER, build, read_description
from hymo.data.readers import TEXT_COLUMN, DataError
from hymo.data.shards import MANIFEST, TokenSet
from hymo.data.source import SETS, is_data_set
from hymo.data.tokenize import ByteTokenizer, Tokenizer, open_tokenizer
from hymo.observe.units import duration, size

_BAR = 40
_SAMPLE_TOKENS = 96


def build_command(
    sources: Sequence[str],
    out: str,
    *,
    tokenizer: str = "bpe",
    vocab_size: int = 32768,
    val_fraction: float = 0.02,
    workers: int | None = None,
    skip_bad: bool = False,
    text_column: str = TEXT_COLUMN,
    encoder: str = "auto",
) -> int:
    """``hymo data build``: make a data set, with progress, and say how to train on it. Returns the exit code."""
    progress = _Progress()
    began = time.monotonic()
    report = build(
        sources or None, out, tokenizer=tokenizer, vocab_size=vocab_size, val_fraction=val_fraction, workers=workers,
        skip_bad=skip_bad, text_column=text_column, encoder=encoder, progress=progress,
    )  # fmt: skip
    progress.end()
    for fault in report.faults:
        print(f"passed over: {fault}")
    sets = _sets_in(report.folder)
    for line in (*_notes(sets), *_table(sets)):
        print(line)
    print(f"{report.encoder} encoding; {duration(time.monotonic() - began)} in all")
    options = {"--data.source": report.folder, "--data.tokenizer": report.tokenizer}
    words = " ".join(f"{option} {shlex.quote(str(value))}" for option, value in options.items())
    print(f"train on it: hymo train {words} --model.vocab_size {report.vocab_size}")
    return 0


def inspect_command(folder: str, *, samples: int = 3, tokenizer: str | None = None) -> int:
    """``hymo data inspect``: print what `inspect` finds. Returns the exit code."""
    for line in inspect(folder, samples=samples, tokenizer=tokenizer):
        print(line)
    return 0


def inspect(folder: str | Path, *, samples: int = 3, tokenizer: str | None = None) -> Iterator[str]:
    """Lines about a data set, a folder of the cache, or a token set: counts, a histogram of lengths, decoded samples.

    tokenizer: what decodes where the folder has no tokenizer of its own. Raises DataError.
    """
    folder = Path(folder)
    sets = _sets_in(folder)
    if is_data_set(folder):
        described = read_description(folder)
        yield f"{folder}: {size(described['source_bytes'])} of {described['source']}, encoded by {described['encoder']}"
    one = next(iter(sets.values()))
    yield f"tokenizer {one.tokenizer_name}, {one.vocab_size:,} ids; counts of tokens include an end token a document"
    yield ""
    yield from _table(sets)
    yield from _notes(sets)
    lengths = np.concatenate([one.document_lengths() for one in sets.values()])
    if len(lengths):
        yield ""
        yield from _histogram(lengths)
    decoder = _decoder(folder, next(iter(sets.values())), tokenizer)
    for name, one in sets.items():
        for number in _spread(one.n_documents, samples):
            tokens = one.document(number)
            yield ""
            yield f"{name}, document {number:,} ({len(tokens):,} tokens, {size(one.document_bytes(number))} of text)"
            if decoder is None:
                yield f"  {tokens[:_SAMPLE_TOKENS].tolist()}  (--tokenizer FILE decodes)"
            else:
                text = decoder.decode(tokens[:_SAMPLE_TOKENS])
                yield from (f"  | {_printable(line)}" for line in text.splitlines())


def _sets_in(folder: Path) -> dict[str, TokenSet]:
    if (folder / MANIFEST).is_file():
        return {folder.name: TokenSet(folder)}
    sets = {name: TokenSet(folder / name) for name in SETS if (folder / name / MANIFEST).is_file()}
    if not folder.is_dir():
        raise DataError(f"{folder} does not exist; accepted: a folder that hymo data build made, or one of the cache")
    if not sets:
        raise DataError(
            f"{folder} holds no token sets; accepted: a folder that hymo data build made, or one of the cache"
        )
    return sets


def _decoder(folder: Path, one: TokenSet, choice: str | None) -> Tokenizer | None:
    if choice is not None:
        return open_tokenizer(choice)
    if (folder / TOKENIZER).is_file():
        return open_tokenizer(str(folder / TOKENIZER))
    return ByteTokenizer() if one.tokenizer_name == ByteTokenizer.name else None


def _notes(sets: dict[str, TokenSet]) -> Iterator[str]:
    """How the text was split, and what was odd with it: a warning each."""
    yield from (f"held out: {split}" for split in {one.split for one in sets.values()} - {""})
    yield from (f"warning: {note}" for note in dict.fromkeys(note for one in sets.values() for note in one.notes))


def _table(sets: dict[str, TokenSet]) -> Iterator[str]:
    rows = [("set", "documents", "tokens", "share", "text", "bytes a token", "median length", "longest")]
    total = sum(one.n_tokens for one in sets.values())
    for name, one in sets.items():
        lengths = one.document_lengths()
        median, longest = (int(np.median(lengths)), int(lengths.max())) if len(lengths) else (0, 0)
        per_token = one.n_bytes / max(1, one.n_tokens - one.n_documents)
        rows.append((
            name, f"{one.n_documents:,}", f"{one.n_tokens:,}", f"{one.n_tokens / max(1, total):.1%}",
            size(one.n_bytes), f"{per_token:.3f}", f"{median:,}", f"{longest:,}",
        ))  # fmt: skip
    yield from _aligned(rows)


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Rows of cells as columns: the first to the left, numbers to the right."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    for row in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield "  ".join([f"{row[0]:<{widths[0]}}", *cells])


def _histogram(lengths: npt.NDArray[np.int64]) -> Iterator[str]:
    """Documents by powers of two of their length, with the share of all tokens that they hold."""
    buckets = np.floor(np.log2(np.maximum(lengths, 1))).astype(int)
    numbers, tokens = np.bincount(buckets), np.bincount(buckets, weights=lengths)
    first = int(buckets.min())
    rows = [("length in tokens", "documents", "of documents", "of tokens")]
    for k in range(first, len(numbers)):
        shares = (f"{numbers[k] / len(lengths):.1%}", f"{tokens[k] / tokens.sum():.1%}")
        rows.append((f"{2**k:,} to {2 ** (k + 1) - 1:,}", f"{numbers[k]:,}", *shares))
    heading, *lines = _aligned(rows)
    yield heading
    for k, line in enumerate(lines, first):
        yield f"{line}  {'#' * math.ceil(_BAR * numbers[k] / numbers.max())}".rstrip()


def _spread(n: int, samples: int) -> list[int]:
    """A few document numbers, evenly spread."""
    return sorted({n * i // max(1, samples) for i in range(samples)}) if n else []


def _printable(line: str) -> str:
    """Text of others must not steer the terminal."""
    return "".join(c if c.isprintable() or c == "\t" else "\ufffd" for c in line)


def _speed(rate: float) -> str:
    return f"{rate / 1e6:.1f} MB/s" if rate >= 1e5 else f"{rate / 1e3:.1f} kB/s"


class _Progress:
    """Rate and time left: one line that is written over on a terminal, a line every ten seconds elsewhere."""

    def __init__(self) -> None:
        self._stage, self._began, self._first, self._shown, self._whole = "", 0.0, 0, 0.0, False

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._began, self._first, self._shown, self._whole = stage, now, done, 0.0, False
        if now - self._shown < (0.2 if sys.stdout.isatty() else 10) and (done < total or self._whole):
            return
        self._shown, self._whole = now, done == total
        rate = (done - self._first) / max(now - self._began, 1e-9)
        left = duration((total - done) / rate) if rate > 0 else "?"
        text = f"{stage}: {size(done)} of {size(total)} ({done / max(total, 1):.0%}), {_speed(rate)}, {left} left"
        print(f"\r{text:<79}" if sys.stdout.isatty() else text, end="" if sys.stdout.isatty() else "\n", flush=True)

    def end(self) -> None:
        if sys.stdout.isatty():
            print()
