"""Token sets from a source, in parts that several processes write: resumable after a kill, in bounded memory.

A source is cut into units; each unit becomes one part of the training set and one of the validation set, and then an
entry in the journal. What is in the journal is never done again. Which documents are held out, their order and the
fingerprint depend on the text alone, not on the units or on who wrote them.
"""

import hashlib
import json
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

from hymo.data.readers import DataError, Document, Piece, read_piece
from hymo.data.shards import PartWriter, write_manifest, write_synced
from hymo.data.source import Source
from hymo.data.tokenize import Tokenizer, open_tokenizer

Progress = Callable[[int, int], None]
SETS = ("train", "val")
LEAST_UNIT_BYTES, MOST_UNITS = 4 << 20, 256
_BATCH_DOCUMENTS, _BATCH_BYTES = 256, 4 << 20
_KEPT_FAULTS = 5
_STOP = -(1 << 62)  # in place of the bytes read: workers are to stop


@dataclass(frozen=True)
class Split:
    """A document is held out iff its hash is below `threshold`; where all are alike, each is cut at `cut` bytes."""

    threshold: int
    cut: int | None = None

    @staticmethod
    def of(val_fraction: float) -> "Split":
        return Split(int(val_fraction * 2**64))


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
    """What a unit came to: its parts by set, the extreme hashes of its documents, and what was passed over."""

    number: int
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    lowest: int = 2**64
    highest: int = -1
    n_documents: int = 0
    n_bytes: int = 0
    source_bytes: int = 0
    n_bad: int = 0
    faults: list[str] = field(default_factory=list)


def write_token_sets(
    source: Source, job: Job, val_fraction: float, *, workers: int = 0, progress: Progress | None = None
) -> list[UnitResult]:
    """Write job.folder/train and job.folder/val whole, going on where an earlier call for that folder was cut off.

    workers: processes that write, 0 for this one. progress(done_bytes, total_bytes) is called now and then.
    Raises DataError, also where no document holds text.
    """
    units = units_of(source)
    tokenizer = open_tokenizer(job.tokenizer, fast=job.fast)
    results = _write_units(units, tokenizer, job, workers, progress, source.n_bytes)
    if not any(result.n_documents for result in results):
        raise DataError(f"data.source: {source.described} holds no text: every document is empty")
    better = _other_split(job.split, results, val_fraction)
    if better is not None:
        results = _write_units(units, tokenizer, replace(job, split=better), workers, progress, source.n_bytes)
    for name in SETS:
        write_manifest(Path(job.folder, name), tokenizer, [result.parts[name] for result in results])
    return results


def units_of(source: Source) -> list[list[Piece]]:
    """The source in the units that are written one at a time."""
    return source.units(max(LEAST_UNIT_BYTES, source.n_bytes // MOST_UNITS))


def _other_split(split: Split, results: Sequence[UnitResult], val_fraction: float) -> Split | None:
    """Where chance left a set empty: hold out the least hash, or all but the greatest, or cut a lone document."""
    if val_fraction in (0, 1):  # one set alone was wanted
        return None
    lowest, highest = min(r.lowest for r in results), max(r.highest for r in results)
    if lowest < split.threshold <= highest:
        return None
    if lowest == highest:
        size = sum(r.n_bytes for r in results) // sum(r.n_documents for r in results)
        return Split(split.threshold, int(size * (1 - val_fraction)))
    return Split(lowest + 1) if lowest >= split.threshold else Split(highest)


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

    def on_bad(fault: str) -> None:
        result.n_bad += 1
        if len(result.faults) < _KEPT_FAULTS:
            result.faults.append(fault)

    documents = (document for piece in pieces for document in read_piece(piece, on_bad if job.skip_bad else None))
    try:
        for batch in _batches(_cut_documents(documents, job.split.cut)):
            for document, tokens in zip(batch, tokenizer.encode_batch([d.text for d in batch]), strict=True):
                digest, position = digests(document.text)
                held_out = position < job.split.threshold if job.split.cut is None else result.n_documents % 2 == 1
                writers["val" if held_out else "train"].add(tokens, len(document.text), digest)
                result.lowest, result.highest = min(result.lowest, position), max(result.highest, position)
                result.n_documents += 1
                result.n_bytes += len(document.text)
            read = sum(document.source_bytes for document in batch)
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


def _cut_documents(documents: Iterable[Document], cut: int | None) -> Iterator[Document]:
    """Where `cut` is given (all documents are alike), each in two: a first part for training, a second held out."""
    for document in documents:
        if cut is None:
            yield document
            continue
        text = document.text
        at = text.find(b"\n", min(cut, len(text) - 1)) + 1
        if not 0 < at < len(text):
            at = max(1, min(cut, len(text) - 1))
            while at < len(text) - 1 and text[at] & 0xC0 == 0x80:  # not inside a UTF-8 character
                at += 1
        yield Document(document.name, text[:at], document.source_bytes)
        yield Document(document.name, text[at:], 0)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in groups that are worth a call of the tokenizer and fit in memory."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if len(batch) >= _BATCH_DOCUMENTS or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
