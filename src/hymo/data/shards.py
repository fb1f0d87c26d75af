"""Token shards on disk: memory-mapped tokens with document boundaries.

A *token set* is a folder:
    manifest.json          counts, element type, tokenizer, fingerprint of the content; written last
    part-00000.tokens      ids, uint16 (vocabulary <= 65,536) or uint32, little endian; an end token a document
    part-00000.ends        int64 a document: where it ends in the part, end token included
    part-00000.bytes       int64 a document: UTF-8 bytes of its text
Documents never span parts. Folders are written under another name, synced, and renamed, so that one under its own name
is whole.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hymo.data.source import DataError
from hymo.data.tokenize import Tokenizer

MANIFEST = "manifest.json"
FORMAT = "hymo token set 1"
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG} if hasattr(errno, "EDQUOT") else {errno.ENOSPC, errno.EFBIG}


class TokenSet:
    """A token set, opened for reading. Raises DataError when the folder is not whole.

    Attributes: n_tokens (end tokens included), n_documents, n_bytes (UTF-8 bytes of all text), vocab_size,
    token_bytes_scale (1.0 where the tokenizer's byte table adds up to n_bytes, as it does for bytes and byte-level
    BPE), fingerprint (of documents and tokenizer: the same text has the same one wherever it lies), tokenizer_name.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        manifest = read_manifest(self.folder)
        self.n_tokens: int = manifest["n_tokens"]
        self.n_documents: int = manifest["n_documents"]
        self.n_bytes: int = manifest["n_bytes"]
        self.vocab_size: int = manifest["vocab_size"]
        self.fingerprint: str = manifest["fingerprint"]
        self.tokenizer_name: str = manifest["tokenizer"]
        self.token_bytes_scale: float = self.n_bytes / max(1, manifest["n_token_bytes"])
        self.dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
        self._parts = [_Part(self.folder, part, self.dtype) for part in manifest["parts"]]
        self._token_starts = np.cumsum([0] + [len(part.tokens) for part in self._parts])
        self._document_starts = np.cumsum([0] + [len(part.ends) for part in self._parts])
        if self._token_starts[-1] != self.n_tokens or self._document_starts[-1] != self.n_documents:
            raise DataError(f"{self.folder}: the parts do not add up to the manifest's {self.n_tokens} tokens")

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
        return int(part.bytes[local])

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
    """The three mapped arrays of one part."""

    def __init__(self, folder: Path, described: dict[str, Any], dtype: np.dtype[Any]):
        name = described["name"]
        self.tokens = _map(folder / f"{name}.tokens", dtype, described["n_tokens"])
        self.ends = _map(folder / f"{name}.ends", np.dtype("<i8"), described["n_documents"])
        self.bytes = _map(folder / f"{name}.bytes", np.dtype("<i8"), described["n_documents"])

    def documents_at(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        first = int(np.searchsorted(self.ends, start, side="right"))
        last = int(np.searchsorted(self.ends, stop - 1, side="right"))
        return first + np.searchsorted(np.asarray(self.ends[first:last]), np.arange(start, stop), side="right")


def _map(path: Path, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    found = path.stat().st_size if path.exists() else -1
    if found != count * dtype.itemsize:
        state = "is missing" if found < 0 else f"has {found} bytes"
        raise DataError(f"{path} {state}, its manifest says {count * dtype.itemsize}; build the folder again")
    return np.memmap(path, dtype=dtype, mode="r") if count else np.zeros(0, dtype)


class TokenSetWriter:
    """Writes one token set into `folder` (made, must not exist), a document at a time; `close` makes it whole."""

    def __init__(self, folder: Path, tokenizer: Tokenizer):
        folder.mkdir(parents=True)
        self.folder = folder
        self.n_tokens = self.n_documents = self.n_bytes = self.n_token_bytes = 0
        self._tokenizer = tokenizer
        self._dtype = np.dtype("<u2" if tokenizer.vocab_size <= 65536 else "<u4")
        self._digest = hashlib.blake2b(tokenizer.fingerprint.encode(), digest_size=16)
        self._files = {kind: open(folder / f"part-00000.{kind}", "wb") for kind in ("tokens", "ends", "bytes")}  # noqa: SIM115

    def add(self, tokens: npt.NDArray[np.uint32], n_bytes: int, text_digest: bytes) -> None:
        """One document: its tokens (the end token is added here), the UTF-8 bytes and the digest of its text."""
        self._files["tokens"].write(np.append(tokens, self._tokenizer.end_id).astype(self._dtype).tobytes())
        self.n_tokens += len(tokens) + 1
        self.n_documents += 1
        self.n_bytes += n_bytes
        self.n_token_bytes += int(self._tokenizer.token_bytes[tokens].sum())
        self._files["ends"].write(self.n_tokens.to_bytes(8, "little"))
        self._files["bytes"].write(n_bytes.to_bytes(8, "little"))
        self._digest.update(text_digest)

    def close(self) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        manifest = {
            "format": FORMAT,
            "dtype": self._dtype.name,
            "tokenizer": self._tokenizer.name,
            "vocab_size": self._tokenizer.vocab_size,
            "fingerprint": self._digest.hexdigest(),
            "n_tokens": self.n_tokens,
            "n_documents": self.n_documents,
            "n_bytes": self.n_bytes,
            "n_token_bytes": self.n_token_bytes,
            "parts": [{"name": "part-00000", "n_tokens": self.n_tokens, "n_documents": self.n_documents}],
        }
        write_synced(self.folder / MANIFEST, json.dumps(manifest, indent=1).encode())
        sync_folder(self.folder)

    def abandon(self) -> None:
        """Close the files without syncing; the folder stays unfinished."""
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a token set. Raises DataError when there is none, or it is of another format."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{folder} is no token set: it has no {MANIFEST}") from None
    except (OSError, ValueError) as error:
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

    A target that exists by then is left as it is (another process was faster). A full disk becomes a DataError.
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
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise DataError(f"data.cache_dir: cannot write {target.parent}: {error.strerror or error}") from error
        free = shutil.disk_usage(target.parent).free
        raise DataError(
            f"data.cache_dir: no room for token shards in {target.parent} ({free >> 20} MiB free, {error.strerror});"
            " nothing was kept. Free some space, or set data.cache_dir or HYMO_CACHE to a folder on a larger disk"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_left_over(target: Path) -> None:
    """Remove temporary folders of `target` that killed processes left. Only for who holds its lock."""
    for path in target.parent.glob(f".{target.name}.*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
