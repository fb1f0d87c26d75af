"""From `data.*` settings to token sets: tokenize once into a cache folder, hold some documents out for validation."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from filelock import FileLock

from hymo.data.shards import TokenSet, TokenSetWriter, built_whole, remove_left_over
from hymo.data.source import DataError, Document, Source, open_source
from hymo.data.tokenize import Tokenizer, open_tokenizer

Progress = Callable[[int, int], None]
_LAYOUT = "hymo-cache-1"  # part of every cache key: raised when what is written changes
_BATCH_DOCUMENTS, _BATCH_BYTES = 256, 4 << 20


class DataSettings(Protocol):
    """The part of the configuration that is read here (hymo.config.DataConfig has it)."""

    @property
    def source(self) -> list[str] | None: ...
    @property
    def tokenizer(self) -> str: ...
    @property
    def val_fraction(self) -> float: ...
    @property
    def cache_dir(self) -> str | None: ...


@dataclass(frozen=True)
class TokenData:
    """What a run reads: the training set, validation sets by name, and the tokenizer that made them."""

    train: TokenSet
    val: dict[str, TokenSet]
    tokenizer: Tokenizer


@dataclass(frozen=True)
class _Split:
    """A document is held out iff its hash is below `threshold`; a lone document is cut at `cut` bytes instead."""

    threshold: int
    cut: int | None = None


def prepare(config: DataSettings, progress: Progress | None = None) -> TokenData:
    """Open the token sets of a source, building them first if the cache has none that fits.

    progress(done_bytes, total_bytes) is called while building, and not at all when nothing is built. Raises DataError.
    Any number of processes may call this at once: one builds, the others wait for it.
    """
    source = open_source(config.source)
    tokenizer = open_tokenizer(config.tokenizer)
    root = cache_folder(config.cache_dir)
    settings = f"{_LAYOUT}|{source.fingerprint()}|{tokenizer.fingerprint}|{config.val_fraction!r}"
    target = root / hashlib.blake2b(settings.encode(), digest_size=12).hexdigest()
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(root / f".{target.name}.lock")
        with lock:
            if not _is_whole(target):
                remove_left_over(target)
                with built_whole(target) as folder:
                    _build(source, tokenizer, config.val_fraction, folder, progress)
    except OSError as error:
        raise DataError(f"data.cache_dir: cannot write {str(root)!r}: {error.strerror or error}") from None
    return TokenData(TokenSet(target / "train"), {"val": TokenSet(target / "val")}, tokenizer)


def cache_folder(configured: str | None) -> Path:
    """HYMO_CACHE if set, else the configured folder, else ~/.cache/hymo."""
    return Path(os.environ.get("HYMO_CACHE") or configured or "~/.cache/hymo").expanduser().absolute()


def _is_whole(target: Path) -> bool:
    """Whether both sets are there; a damaged folder (a disk that lost data, a hand that removed files) is cleared."""
    if not target.exists():
        return False
    try:
        for name in ("train", "val"):
            TokenSet(target / name)
    except DataError:
        shutil.rmtree(target)
        return False
    return True


def _build(source: Source, tokenizer: Tokenizer, val_fraction: float, folder: Path, progress: Progress | None) -> None:
    before = source.fingerprint()
    split = _Split(int(val_fraction * 2**64))
    lowest, highest, count, size = _write_sets(source, tokenizer, split, folder, progress)
    if count == 0:
        raise DataError(f"data.source: {source.described} holds no text: every document is empty")
    better = _other_split(split, lowest, highest, count, int(size * (1 - val_fraction)))
    if better is not None:
        for name in ("train", "val"):
            shutil.rmtree(folder / name)
        _write_sets(source, tokenizer, better, folder, progress)
    if before != _again(source).fingerprint():
        raise DataError(f"data.source: {source.described} changed while it was read; start again when it rests")


def _other_split(split: _Split, lowest: int, highest: int, count: int, cut: int) -> _Split | None:
    """Where chance left a set empty: hold out the least hash, or all but the greatest, or cut a lone document."""
    if lowest < split.threshold <= highest:
        return None
    if lowest == highest:
        return _Split(split.threshold, cut)
    return _Split(lowest + 1) if lowest >= split.threshold else _Split(highest)


def _again(source: Source) -> Source:
    """The same files as they are now; one that vanished counts as empty."""
    files = []
    for file in source.files:
        status = file.path.stat() if file.path.exists() else None
        size, mtime_ns = (status.st_size, status.st_mtime_ns) if status else (-1, -1)
        files.append(replace(file, size=size, mtime_ns=mtime_ns))
    return Source(tuple(files), source.described)


def _write_sets(
    source: Source, tokenizer: Tokenizer, split: _Split, folder: Path, progress: Progress | None
) -> tuple[int, int, int, int]:
    """Write folder/train and folder/val. Returns the least and greatest hash, and number and size of documents."""
    writers = {name: TokenSetWriter(folder / name, tokenizer) for name in ("train", "val")}
    lowest, highest, count, size, done = 2**64, -1, 0, 0, 0
    try:
        for batch in _batches(_cut_documents(source.documents(), split.cut)):
            for document, tokens in zip(batch, tokenizer.encode_batch([d.text for d in batch]), strict=True):
                digest, held_out_hash = _digests(document.text)
                held_out = count % 2 == 1 if split.cut is not None else held_out_hash < split.threshold
                writers["val" if held_out else "train"].add(tokens, len(document.text), digest)
                lowest, highest = min(lowest, held_out_hash), max(highest, held_out_hash)
                count += 1
                size += len(document.text)
                done += document.source_bytes
            if progress is not None:
                progress(min(done, source.n_bytes), source.n_bytes)
        for writer in writers.values():
            writer.close()
    finally:
        for writer in writers.values():
            writer.abandon()
    return lowest, highest, count, size


def _digests(text: bytes) -> tuple[bytes, int]:
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
