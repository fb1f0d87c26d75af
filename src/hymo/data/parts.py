"""Token sets from a source, in parts that several processes write: resumable after a kill, in bounded memory.

A source is cut into units; each unit becomes one part of the training set and one of the validation set, and then an
entry in the journal. What is in the journal is never done again. Which documents are held out, their order and the
fingerprint depend on the text alone, not on the units or on who wrote them.
"""

import bisect
import hashlib
import json
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hymo.data.encodings import not_utf8
from hymo.data.readers import DataError, Document, Piece, read_piece
from hymo.data.shards import PartWriter, write_manifest, write_synced
from hymo.data.source import SETS, Source
from hymo.data.tokenize import ByteTokenizer, Tokenizer, open_tokenizer
from hymo.observe.units import size

Progress = Callable[[int, int], None]
LEAST_UNIT_BYTES, MOST_UNITS = 4 << 20, 256
_BATCH_DOCUMENTS, _BATCH_BYTES = 256, 4 << 20
_KEPT_FAULTS = 5
LEAST, MOST = 0.25, 6.0  # of the share asked for: what is held out between them is near enough
LEAST_TAIL = 64  # bytes: documents are cut where that much of each is held out, shorter ones are taken whole
KEPT_LEAST = 64
_STOP = -(1 << 62)  # in place of the bytes read: workers are to stop


class NoTextError(DataError):
    """A source was read whole and holds no text."""


@dataclass(frozen=True)
class Split:
    """A document is held out iff its hash is below `threshold`. One of at least `cut_from` bytes is cut instead: its
    last `share` is held out, the rest is trained on. share: what was asked for."""

    threshold: int
    share: float
    cut_from: int | None = None

    def __str__(self) -> str:
        if self.cut_from is None:
            return "whole documents"
        return f"the last {self.share:.3g} of each document of {size(self.cut_from)} or more, whole ones of the others"

    @staticmethod
    def of(val_fraction: float) -> "Split":
        return Split(int(val_fraction * 2**64), val_fraction)

    def sides(self, document: Document) -> list[tuple[Document, bool | None]]:
        """The document, or the two that it is cut into, each with whether it is held out (None: its hash decides)."""
        text = document.text
        if self.cut_from is None or len(text) < max(2, self.cut_from):
            return [(document, None)]
        at = min(max(1, int(len(text) * (1 - self.share))), len(text) - 1)
        line_end = text.find(b"\n", at, at + (len(text) - at) // 2) + 1
        while not line_end and at < len(text) - 1 and text[at] & 0xC0 == 0x80:  # not inside a UTF-8 character
            at += 1
        at = line_end or at
        first = document._replace(text=text[:at])
        return [(first, False), (document._replace(text=text[at:], source_bytes=0, at=document.at + at), True)]


@dataclass(frozen=True)
class Job:
    """All that a process needs to write units of a source into `folder`."""

    folder: str
    tokenizer: str
    fast: bool
    split: Split
    skip_bad: bool


@dataclass
class UnitResult:
    """What a unit came to: its parts by set, the extreme hashes of its documents, what was passed over, what was odd.

    faults, null_at, odd_at: where some of them are. bytes_by_size[k]: bytes of documents of 2^(k-1) to below 2^k bytes.
    least: (hash, bytes) of the documents with the least hashes.
    """

    number: int
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    lowest: int = 2**64
    highest: int = -1
    n_documents: int = 0
    n_bytes: int = 0
    source_bytes: int = 0
    n_bad: int = 0
    faults: list[str] = field(default_factory=list)
    n_null: int = 0
    null_at: str = ""
    n_odd: int = 0
    odd_bytes: int = 0
    odd_at: str = ""
    bytes_by_size: list[int] = field(default_factory=list)
    least: list[tuple[int, int]] = field(default_factory=list)

    def on_bad(self, fault: str) -> None:
        self.n_bad += 1
        if len(self.faults) < _KEPT_FAULTS:
            self.faults.append(fault)

    def on_null(self, place: str) -> None:
        self.n_null += 1
        self.null_at = self.null_at or place

    def count(self, document: Document, position: int) -> None:
        """A document of some hash."""
        self.lowest, self.highest = min(self.lowest, position), max(self.highest, position)
        self.n_documents += 1
        n_bytes = len(document.text)
        self.n_bytes += n_bytes
        self.bytes_by_size += [0] * (n_bytes.bit_length() + 1 - len(self.bytes_by_size))
        self.bytes_by_size[n_bytes.bit_length()] += n_bytes
        if len(self.least) < KEPT_LEAST or position < self.least[-1][0]:
            bisect.insort(self.least, (position, n_bytes))
            del self.least[KEPT_LEAST:]
        odd, first = not_utf8(document.text)
        if odd:
            self.n_odd += 1
            self.odd_bytes += odd
            place = f"{document.path}, byte {document.at + first}" if document.path else document.name
            self.odd_at = self.odd_at or place


def write_token_sets(
    source: Source, job: Job, *, workers: int = 0, progress: Progress | None = None
) -> list[UnitResult]:
    """Write job.folder/train and job.folder/val whole, going on where an earlier call for that folder was cut off.

    workers: processes that write, 0 for this one. progress(done_bytes, total_bytes) is called now and then.
    Raises DataError, also where no document holds text.
    """
    units = units_of(source)
    tokenizer = open_tokenizer(job.tokenizer, fast=job.fast)
    results = _write_units(units, tokenizer, job, workers, progress, source.n_bytes)
    if not any(result.n_documents for result in results):
        what = "what is not empty is broken" if any(result.n_bad for result in results) else "every document is empty"
        raise NoTextError(f"data.source: {source.described} holds no text: {what}")
    noted, split = notes(results, tokenizer), better_split(job.split, results)
    if split is not None:
        results = _write_units(units, tokenizer, replace(job, split=split), workers, progress, source.n_bytes)
    for name in SETS:
        parts = [result.parts[name] for result in results]
        write_manifest(Path(job.folder, name), tokenizer, parts, notes=noted, split=str(split or job.split))
    return results


def units_of(source: Source) -> list[list[Piece]]:
    """The source in the units that are written one at a time."""
    return source.units(max(LEAST_UNIT_BYTES, source.n_bytes // MOST_UNITS))


def better_split(split: Split, results: Sequence[UnitResult]) -> Split | None:
    """Another split where the one that was tried is far from the share asked for; None where it is near enough.

    Few documents, or one that is huge beside the others: those that are large beside what is to be held out are cut,
    and of the others whole ones are held out in the order of their hashes until there are enough.
    """
    share, total = split.share, sum(result.n_bytes for result in results)
    held_out = sum(result.parts["val"]["n_bytes"] for result in results)
    if share in (0, 1) or near(held_out / total, share):
        return None
    lowest, highest = min(r.lowest for r in results), max(r.highest for r in results)
    smaller = min(share, 1 - share)
    power = math.floor(math.log2(smaller * total)) + (share <= 1 / 3)
    power = max(power, math.ceil(math.log2(LEAST_TAIL / smaller)))
    whole = total - sum(n for result in results for k, n in enumerate(result.bytes_by_size) if k > power)
    if whole < total:
        return Split(_threshold(results, 2**power, whole * share / 2) or split.threshold, share, 2**power)
    if lowest == highest:
        return replace(split, cut_from=2)
    enough = _threshold(results, 2**power, total * share / 2) if share <= 0.5 else highest
    return replace(split, threshold=min(enough or split.threshold, highest))  # one is left to train on


def _threshold(results: Sequence[UnitResult], below: int, wanted: float) -> int | None:
    """The least threshold that holds out so many bytes of documents shorter than `below`.

    None: it is not known, there are too many, and of many the hash alone finds enough.
    """
    known = min((r.least[-1][0] for r in results if len(r.least) == KEPT_LEAST), default=2**64)
    filled = 0
    for position, n_bytes in sorted(tuple(pair) for result in results for pair in result.least):
        if position > known:
            return None
        filled += n_bytes if n_bytes < below else 0
        if filled >= wanted:
            return position + 1
    return None


def near(found: float, asked: float) -> bool:
    """Whether a share held out is near the one asked for, up to what chance does to a few hundred documents."""
    return asked * LEAST <= found <= min(asked * MOST, asked + 0.25) if asked <= 0.5 else near(1 - found, 1 - asked)


def notes(results: Sequence[UnitResult], tokenizer: Tokenizer) -> list[str]:
    """What a person should know of the text, a line each: what was passed over, what is not UTF-8."""
    lines = []
    n_bad, n_null, n_odd = (sum(getattr(r, key) for r in results) for key in ("n_bad", "n_null", "n_odd"))
    if n_bad:
        first = next(result.faults[0] for result in results if result.faults)
        lines.append(f"broken lines, records or files passed over: {n_bad:,}, the first {first}")
    if n_null:
        first = next(result.null_at for result in results if result.null_at)
        lines.append(f"records without text (null) passed over: {n_null:,}, the first {first}")
    if n_odd:
        first = next(result.odd_at for result in results if result.odd_at)
        odd, documents = sum(r.odd_bytes for r in results), sum(r.n_documents for r in results)
        total = sum(r.n_bytes for r in results)
        became = "kept as they are" if tokenizer.name == ByteTokenizer.name else "read as U+FFFD each, NUL as it is"
        lines.append(
            f"bytes that are not UTF-8 text: {odd:,} ({odd / total:.2%}; {became}) in {n_odd:,} of {documents:,} "
            f"documents, the first {first}; Latin-1 for example becomes UTF-8 by iconv -f LATIN1 -t UTF-8"
        )
    return lines


# ----------------------------------------------------------------------------------------------------- many units
def _write_units(
    units: list[list[Piece]], tokenizer: Tokenizer, job: Job, workers: int, progress: Progress | None, total: int
) -> list[UnitResult]:
    """All units, by number: those in the journal of this split, and the rest written now."""
    journal = Path(job.folder, "journal", hashlib.blake2b(repr(job.split).encode(), digest_size=4).hexdigest())
    journal.mkdir(parents=True, exist_ok=True)
    entries = [UnitResult(**json.loads(path.read_text())) for path in journal.glob("*.json")]
    results = {result.number: result for result in entries}
    waiting = {number: pieces for number, pieces in enumerate(units) if number not in results}
    finished = sum(result.source_bytes for result in entries)

    def tell(done: int) -> None:
        if progress is not None:
            progress(min(finished + done, total), total)

    tell(0)
    write = _write_in_processes if workers else _write_here
    for result in write(waiting, tokenizer, job, workers, tell):
        name = f"{result.number:05}"
        write_synced(journal / f"{name}.tmp", json.dumps(asdict(result)).encode())
        os.replace(journal / f"{name}.tmp", journal / f"{name}.json")
        results[result.number] = result
    tell(total)
    return [results[number] for number in range(len(units))]


def _write_here(
    waiting: dict[int, list[Piece]], tokenizer: Tokenizer, job: Job, workers: int, tell: Callable[[int], None]
) -> Iterator[UnitResult]:
    done = 0

    def add(size: int) -> None:
        nonlocal done
        done += size
        tell(done)

    for number, pieces in waiting.items():
        yield write_unit(number, pieces, tokenizer, job, add)


def _write_in_processes(
    waiting: dict[int, list[Piece]], tokenizer: Tokenizer, job: Job, workers: int, tell: Callable[[int], None]
) -> Iterator[UnitResult]:
    context = multiprocessing.get_context("spawn")  # a forked copy of running threads may hang
    counter = context.Value("q", 0)
    pool = ProcessPoolExecutor(min(workers, max(1, len(waiting))), context, _begin_worker, (job, counter))
    try:
        futures: set[Future[UnitResult]] = {pool.submit(_work, n, pieces) for n, pieces in waiting.items()}
        while futures:
            done, futures = wait(futures, timeout=0.2, return_when=FIRST_COMPLETED)
            tell(counter.value)
            for future in done:
                yield future.result()
    except (BrokenProcessPool, MemoryError):
        raise DataError(
            "hymo data build: a worker process died, most likely for want of memory; the same command goes on where"
            " this one stopped, and --workers with a smaller number takes less memory"
        ) from None
    finally:
        with counter.get_lock():
            counter.value = _STOP  # where this ends early, the units in work are not waited for
        pool.shutdown(cancel_futures=True)


_worker: dict[str, Any] = {}  # of a worker process: its job, tokenizer and counter


def _begin_worker(job: Job, counter: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the work
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core
    _worker.update(job=job, counter=counter, tokenizer=open_tokenizer(job.tokenizer, fast=job.fast))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # it was killed: nobody waits for the result


def _work(number: int, pieces: list[Piece]) -> UnitResult:
    def add(size: int) -> None:
        counter = _worker["counter"]
        with counter.get_lock():
            if counter.value < 0:
                raise KeyboardInterrupt
            counter.value += size

    return write_unit(number, pieces, _worker["tokenizer"], _worker["job"], add)


# ------------------------------------------------------------------------------------------------------- one unit
def write_unit(
    number: int, pieces: Sequence[Piece], tokenizer: Tokenizer, job: Job, progress: Callable[[int], None]
) -> UnitResult:
    """Write part `number` of both sets. progress(bytes of the source read since the last call)."""
    result = UnitResult(number)
    writers = {name: PartWriter(Path(job.folder, name), number, tokenizer) for name in SETS}
    on_bad = result.on_bad if job.skip_bad else None
    documents = (document for piece in pieces for document in read_piece(piece, on_bad, result.on_null))
    try:
        for batch in _batches(side for document in documents for side in job.split.sides(document)):
            texts = [document.text for document, _ in batch]
            for (document, held_out), tokens in zip(batch, tokenizer.encode_batch(texts), strict=True):
                digest, position = digests(document.text)
                if held_out is None:
                    held_out = position < job.split.threshold
                writers["val" if held_out else "train"].add(tokens, len(document.text), digest)
                result.count(document, position)
            read = sum(document.source_bytes for document, _ in batch)
            result.source_bytes += read
            progress(read)
        result.parts = {name: writer.close() for name, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.abandon()
    return result


def digests(text: bytes) -> tuple[bytes, int]:
    """A digest of a text, and the hash that decides whether it is held out: equal texts are never on both sides."""
    digest = hashlib.blake2b(text, digest_size=16).digest()
    return digest, int.from_bytes(hashlib.blake2b(digest, digest_size=8, key=b"hymo-held-out-1").digest(), "little")


def _batches(documents: Iterable[tuple[Document, bool | None]]) -> Iterator[list[tuple[Document, bool | None]]]:
    """Documents in groups that are worth a call of the tokenizer and fit in memory."""
    batch: list[tuple[Document, bool | None]] = []
    filled = 0
    for document in documents:
        batch.append(document)
        filled += len(document[0].text)
        if len(batch) >= _BATCH_DOCUMENTS or filled >= _BATCH_BYTES:
            yield batch
            batch, filled = [], 0
    if batch:
        yield batch
