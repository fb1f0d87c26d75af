"""What `hymo data build` and `hymo data inspect` print."""

import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hymo.data.dataset import TOKENIZER, build, is_data_set, read_description
from hymo.data.parts import SETS
from hymo.data.readers import DataError
from hymo.data.shards import MANIFEST, TokenSet
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
    encoder: str = "auto",
) -> int:
    """``hymo data build``: make a data set, with progress, and say how to train on it. Returns the exit code."""
    progress = _Progress()
    began = time.monotonic()
    report = build(
        sources or None, out, tokenizer=tokenizer, vocab_size=vocab_size, val_fraction=val_fraction, workers=workers,
        skip_bad=skip_bad, encoder=encoder, progress=progress,
    )  # fmt: skip
    progress.end()
    for fault in report.faults:
        print(f"passed over: {fault}")
    if report.n_bad:
        print(f"{report.n_bad} broken lines passed over")
    for line in _table(_sets_in(report.folder)):
        print(line)
    print(f"{report.encoder} encoding; {duration(time.monotonic() - began)} in all")
    print(f"train on it: hymo train --data.source {report.folder} --data.tokenizer {report.tokenizer}", end=" ")
    print(f"--model.vocab_size {report.vocab_size}")
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
    yield from _table(sets)
    lengths = np.concatenate([one.document_lengths() for one in sets.values()])
    if len(lengths):
        yield ""
        yield "tokens a document"
        yield from _histogram(lengths)
    decoder = _decoder(folder, next(iter(sets.values())), tokenizer)
    for name, one in sets.items():
        for number in _spread(one.n_documents, samples):
            tokens = one.document(number)
            yield ""
            yield f"{name}, document {number} ({len(tokens)} tokens, {size(one.document_bytes(number))} of text)"
            if decoder is None:
                yield f"  {tokens[:_SAMPLE_TOKENS].tolist()}  (--tokenizer FILE decodes)"
            else:
                text = decoder.decode(tokens[:_SAMPLE_TOKENS])
                yield from (f"  | {_printable(line)}" for line in text.splitlines())


def _sets_in(folder: Path) -> dict[str, TokenSet]:
    if (folder / MANIFEST).is_file():
        return {folder.name: TokenSet(folder)}
    sets = {name: TokenSet(folder / name) for name in SETS if (folder / name / MANIFEST).is_file()}
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


def _table(sets: dict[str, TokenSet]) -> Iterator[str]:
    yield f"{'set':<8}{'tokens':>16}{'documents':>14}{'text':>12}{'bytes/token':>13}{'median':>12}{'longest':>13}"
    for name, one in sets.items():
        lengths = one.document_lengths()
        median, longest = (int(np.median(lengths)), int(lengths.max())) if len(lengths) else (0, 0)
        per_token = one.n_bytes / max(1, one.n_tokens - one.n_documents)
        yield (
            f"{name:<8}{one.n_tokens:>16,}{one.n_documents:>14,}{size(one.n_bytes):>12}{per_token:>13.3f}"
            f"{median:>12,}{longest:>13,}"
        )


def _histogram(lengths: npt.NDArray[np.int64]) -> Iterator[str]:
    """Documents by powers of two of their length, with the share of all tokens that they hold."""
    buckets = np.floor(np.log2(np.maximum(lengths, 1))).astype(int)
    numbers, tokens = np.bincount(buckets), np.bincount(buckets, weights=lengths)
    for k in range(int(buckets.min()), len(numbers)):
        bar = "#" * math.ceil(_BAR * numbers[k] / numbers.max())
        share = tokens[k] / tokens.sum()
        yield f"{2**k:>10,} - {2 ** (k + 1) - 1:<12,}{numbers[k]:>12,} {share:>6.1%} of tokens  {bar}".rstrip()


def _spread(n: int, samples: int) -> list[int]:
    """A few document numbers, evenly spread."""
    return sorted({n * i // max(1, samples) for i in range(samples)}) if n else []


def _printable(line: str) -> str:
    """Text of others must not steer the terminal."""
    return "".join(c if c.isprintable() or c == "\t" else "\ufffd" for c in line)


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
        text = (
            f"{stage}: {size(done)} of {size(total)} ({done / max(total, 1):.0%}), {rate / 1e6:.1f} MB/s, {left} left"
        )
        print(f"\r{text:<79}" if sys.stdout.isatty() else text, end="" if sys.stdout.isatty() else "\n", flush=True)

    def end(self) -> None:
        if sys.stdout.isatty():
            print()
