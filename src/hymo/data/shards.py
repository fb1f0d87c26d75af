"""Token shards on disk: memory-mapped tokens with document boundaries.

A *token set* is a folder:
    manifest.json          counts, element type, tokenizer, fingerprint of the content; written last
    part-00000.tokens      ids, uint16 (vocabulary <= 65,536) or uint32, little endian; an end token a document
    part-00000.ends        int64 a document: where it ends in the part, end token included
    part-00000.bytes       int64 a document: UTF-8 bytes of its text
    part-00000.digests     16 bytes a document: of its text, from which the fingerprint is made
Documents never span parts. Folders are written under another name, synced, and renamed, so that one under its own name
is whole.
"""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hymo.data.readers import DataError
from hymo.data.tokenize import Tokenizer
from hymo.errors import HyMoError

MANIFEST = "manifest.json"
FORMAT = "hymo token set 1"
_AT_ONCE = 1 << 20
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG} if hasattr(errno, "EDQUOT") else {errno.ENOSPC, errno.EFBIG}


class MixedSource(NamedTuple):
    """One source of a mix: its name, its share of the samples, and where its tokens lie in the set."""

    name: str
    share: Fraction
    first_token: int
    n_tokens: int
    fingerprint: str


class TokenSet:
    """A token set, opened for reading: one folder, or several of one tokenizer end to end.

    shares: with several folders, the share of samples each is to have, by name, adding up to 1 (see `MixOrder`).
    Raises DataError when a folder is not whole, HyMoError when the system lets no more files be mapped.

    Attributes: n_tokens (end tokens included), n_documents, n_bytes (UTF-8 bytes of all text), vocab_size,
    token_bytes_scale (1.0 where the tokenizer's byte table adds up to n_bytes, as it does for bytes and byte-level
    BPE), fingerprint (of documents and tokenizer: the same text has the same one wherever it lies), tokenizer_name,
    sources (where each source of a mix lies; one of share 1 without a mix), notes (what was odd with the
    source, a line each: text that is not UTF-8, what was passed over), split (what of the source was held out).
    """

    def __init__(self, *folders: str | Path, shares: Mapping[str, Fraction] | None = None):
        manifests = [read_manifest(Path(folder)) for folder in folders]
        self.folder = Path(folders[0])
        self.tokenizer_name: str = manifests[0]["tokenizer"]
        self.vocab_size: int = manifests[0]["vocab_size"]
        self.dtype = np.dtype(manifests[0]["dtype"]).newbyteorder("<")
        self.fingerprint: str = manifests[0]["fingerprint"]
        if len(folders) > 1:
            self.fingerprint = _fingerprint_of_mix(manifests, shares)
        parts = [(Path(folder), part) for folder, m in zip(folders, manifests, strict=True) for part in m["parts"]]
        try:
            self._parts = [_Part(folder, part, self.dtype) for folder, part in parts]
        except OSError as error:
            place, limits = error.filename or self.folder, _limits(error, 2 * len(parts))
            raise HyMoError(f"{place} cannot be read: {error.strerror}{limits}") from None
        self._token_starts = np.cumsum([0, *(len(part.tokens) for part in self._parts)])
        self._document_starts = np.cumsum([0, *(len(part.ends) for part in self._parts)])
        self.n_tokens, self.n_documents = int(self._token_starts[-1]), int(self._document_starts[-1])
        if self.n_tokens != sum(m["n_tokens"] for m in manifests):
            raise DataError(f"{self.folder}: the parts do not add up to the tokens of the manifest")
        self.n_bytes: int = sum(m["n_bytes"] for m in manifests)
        self.token_bytes_scale: float = self.n_bytes / max(1, sum(m["n_token_bytes"] for m in manifests))
        self.notes: list[str] = list(dict.fromkeys(note for m in manifests for note in m.get("notes", ())))
        self.split: str = manifests[0].get("split", "")
        self.sources = [MixedSource("all", Fraction(1), 0, self.n_tokens, self.fingerprint)]
        if shares is not None:
            starts = itertools.accumulate((m["n_tokens"] for m in manifests), initial=0)
            self.sources = [
                MixedSource(name, share, start, m["n_tokens"], m["fingerprint"])
                for (name, share), m, start in zip(shares.items(), manifests, starts, strict=False)
            ]

    def read(self, start: int, stop: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Tokens [start, stop) and the number of the document (from 0, in this set) that each belongs to."""
        if not 0 <= start <= stop <= self.n_tokens:
            raise IndexError(f"tokens [{start}, {stop}) of a set of {self.n_tokens}")
        tokens = np.empty(stop - start, dtype=np.int64)
        documents = np.empty(stop - start, dtype=np.int64)
        for p in self._parts_between(self._token_starts, start, stop):
            base = int(self._token_starts[p])
            a, b = max(start - base, 0), min(stop - base, len(self._parts[p].tokens))
            place = slice(base + a - start, base + b - start)
            tokens[place] = self._parts[p].tokens[a:b]
            documents[place] = self._parts[p].documents_at(a, b) + self._document_starts[p]
        return tokens, documents

    def document(self, number: int) -> npt.NDArray[np.int64]:
        """The tokens of one document, its end token included."""
        part, local = self._locate(number)
        start = int(part.ends[local - 1]) if local else 0
        return part.tokens[start : int(part.ends[local])].astype(np.int64)

    def document_bytes(self, number: int) -> int:
        """UTF-8 bytes of the text of one document."""
        part, local = self._locate(number)
        return part.document_bytes(local)

    def document_lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each document, end token included: [n_documents]."""
        return np.concatenate([np.diff(part.ends, prepend=0) for part in self._parts] or [np.zeros(0, np.int64)])

    def _locate(self, number: int) -> tuple["_Part", int]:
        if not 0 <= number < self.n_documents:
            raise IndexError(f"document {number} of {self.n_documents}")
        p = int(np.searchsorted(self._document_starts, number, side="right")) - 1
        return self._parts[p], number - int(self._document_starts[p])

    @staticmethod
    def _parts_between(starts: npt.NDArray[np.int64], start: int, stop: int) -> range:
        if start == stop:
            return range(0)
        first = int(np.searchsorted(starts, start, side="right")) - 1
        return range(first, int(np.searchsorted(starts, stop, side="left")))


class _Part:
    """One part: its tokens and document ends are mapped; the bytes of documents are read when asked for."""

    def __init__(self, folder: Path, described: dict[str, Any], dtype: np.dtype[Any]):
        name = described["name"]
        self.tokens = _map(folder / f"{name}.tokens", dtype, described["n_tokens"])
        self.ends = _map(folder / f"{name}.ends", np.dtype("<i8"), described["n_documents"])
        self._bytes = folder / f"{name}.bytes"
        _check_size(self._bytes, 8 * described["n_documents"])

    def document_bytes(self, local: int) -> int:
        return int(np.fromfile(self._bytes, "<i8", count=1, offset=8 * local)[0])

    def documents_at(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        first = int(np.searchsorted(self.ends, start, side="right"))
        last = int(np.searchsorted(self.ends, stop - 1, side="right"))
        return first + np.searchsorted(np.asarray(self.ends[first:last]), np.arange(start, stop), side="right")


def _map(path: Path, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    """A file as an array that is read when it is used. Raises DataError for another size, OSError at a limit.

    A map of torch keeps no file open; one of numpy does, and a set has hundreds of files where 1,024 may be open. But
    torch's counts as memory that may be written to, which the system may not promise for a file larger than memory.
    """
    size = count * dtype.itemsize
    _check_size(path, size)
    if not size:
        return np.zeros(0, dtype)
    import torch  # here: processes that only write parts start without it

    try:
        name: Any = os.fsencode(path)  # which need not be UTF-8
        array = torch.from_file(name, shared=False, size=size, dtype=torch.uint8).numpy().view(dtype)
    except RuntimeError:
        return np.memmap(path, dtype=dtype, mode="r")
    array.flags.writeable = False
    return array


def _check_size(path: Path, size: int) -> None:
    found = path.stat().st_size if path.exists() else -1
    if found != size:
        state = "is missing" if found < 0 else f"has {found} bytes"
        raise DataError(f"{path} {state}, its manifest says {size}; build the folder again")


def _limits(error: OSError, needed: int) -> str:
    """What this system sets against mapping the `needed` files of a set, where that was the error."""
    if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM) or os.name == "nt":
        return ""
    import resource

    limits = [f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]:,} open (ulimit -n)"]
    if (most := Path("/proc/sys/vm/max_map_count")).exists():
        limits.append(f"{int(most.read_text()):,} mapped (vm.max_map_count)")
    return (
        f"; this set has {needed:,} files to map, of all files a process may have {' and '.join(limits)};"
        " accepted: limits that are above it, with as much again for each further set"
    )


def _fingerprint_of_mix(manifests: Sequence[dict[str, Any]], shares: Mapping[str, Fraction] | None) -> str:
    names = {manifest["tokenizer"] for manifest in manifests}  # of the folder it lies in: one content may have several
    contents = {m["tokenizer_fingerprint"] for m in manifests if "tokenizer_fingerprint" in m}
    if len(contents) > 1 or len({manifest["vocab_size"] for manifest in manifests}) > 1:
        raise DataError(f"data.source: the sources have several tokenizers ({', '.join(sorted(names))}); accepted: one")
    text = "|".join(manifest["fingerprint"] for manifest in manifests)
    if shares is not None:
        text += "|" + "|".join(str(share) for share in shares.values())
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class PartWriter:
    """Writes one part of a token set, a document at a time; `close` syncs it and says what it holds."""

    def __init__(self, folder: Path, number: int, tokenizer: Tokenizer):
        folder.mkdir(parents=True, exist_ok=True)
        self.name = f"part-{number:05}"
        self.n_tokens = self.n_documents = self.n_bytes = self.n_token_bytes = 0
        self._tokenizer, self._dtype = tokenizer, _dtype_of(tokenizer)
        kinds = ("tokens", "ends", "bytes", "digests")
        self._files = {kind: open(folder / f"{self.name}.{kind}", "wb") for kind in kinds}  # noqa: SIM115

    def add(self, tokens: npt.NDArray[np.uint32], n_bytes: int, text_digest: bytes) -> None:
        """One document: its tokens (the end token is added here), UTF-8 bytes and the 16-byte digest of its text."""
        for start in range(0, len(tokens), _AT_ONCE):  # a huge document takes no multiple of its size
            some = tokens[start : start + _AT_ONCE]
            self._files["tokens"].write(some.astype(self._dtype).tobytes())
            self.n_token_bytes += int(self._tokenizer.token_bytes[some].sum())
        self._files["tokens"].write(np.array([self._tokenizer.end_id], self._dtype).tobytes())
        self.n_tokens += len(tokens) + 1
        self.n_documents += 1
        self.n_bytes += n_bytes
        self._files["ends"].write(self.n_tokens.to_bytes(8, "little"))
        self._files["bytes"].write(n_bytes.to_bytes(8, "little"))
        self._files["digests"].write(text_digest)

    def close(self) -> dict[str, Any]:
        """The part's entry in the manifest."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        counts = ("name", "n_tokens", "n_documents", "n_bytes", "n_token_bytes")
        return {key: getattr(self, key) for key in counts}

    def abandon(self) -> None:
        """Close the files without syncing; the part stays unfinished."""
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()


def write_manifest(
    folder: Path, tokenizer: Tokenizer, parts: Sequence[dict[str, Any]], *, notes: Sequence[str] = (), split: str = ""
) -> None:
    """Make a token set of parts that are written: this is the last thing to do. notes, split: see `TokenSet`."""
    digest = hashlib.blake2b(tokenizer.fingerprint.encode(), digest_size=16)
    for part in parts:
        with open(folder / f"{part['name']}.digests", "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "dtype": _dtype_of(tokenizer).name,
        "tokenizer": tokenizer.name,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "fingerprint": digest.hexdigest(),
    }
    manifest |= {
        key: sum(part[key] for part in parts) for key in ("n_tokens", "n_documents", "n_bytes", "n_token_bytes")
    }
    manifest |= {"notes": list(notes), "split": split}
    manifest["parts"] = [part for part in parts if part["n_documents"]]
    write_synced(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
    sync_folder(folder)


def _dtype_of(tokenizer: Tokenizer) -> np.dtype[Any]:
    return np.dtype("<u2" if tokenizer.vocab_size <= 65536 else "<u4")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a token set. Raises DataError when there is none, it is damaged, or of another format."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{folder} is no token set: it has no {MANIFEST}") from None
    except OSError as error:  # no damage, for which the set would be built anew
        raise HyMoError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise DataError(f"{path}: the format is {found!r}; this version reads {FORMAT!r}")
    return manifest


def write_synced(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make names in a folder durable (a no-op where folders cannot be opened, as on Windows)."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def built_whole(target: Path) -> Iterator[Path]:
    """A new folder to write in, which becomes `target` by one rename if the block ends well and is removed if it fails.

    A target that exists by then is left as it is (another process was faster).
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        sync_folder(temporary)
        try:
            os.rename(temporary, target)
        except OSError:
            if not target.is_dir():
                raise
        sync_folder(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def disk_errors(key: str, folder: Path, kept: str = "nothing was kept") -> Iterator[None]:
    """Turns an OSError while writing below `folder`, which the setting `key` named, into a DataError."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise DataError(f"{key}: cannot write {str(folder)!r}: {error.strerror or error}") from error
        free = shutil.disk_usage(folder).free
        raise DataError(
            f"{key}: no room for token shards in {str(folder)!r} ({free >> 20} MiB free, {error.strerror}); {kept};"
            " accepted: a folder on a larger disk (data.cache_dir, HYMO_CACHE, --out), or more space"
        ) from error


def remove_left_over(target: Path) -> None:
    """Remove temporary folders of `target` that killed processes left. Only for who holds its lock."""
    for path in target.parent.glob(f".{target.name}.*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
