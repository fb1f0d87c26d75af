"""Where text comes from: files and folders become a stream of documents.

A *document* is the bytes of one text. Text files are one document each, JSONL files one a line (field "text"), Parquet
files one a row (column "text"). Bytes are kept as found: what is not valid UTF-8 reaches the byte tokenizer unchanged.
"""

import codecs
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from hymo.errors import HyMoError

TEXT_FIELD = "text"
# A text file longer than this becomes several documents, cut at line ends, so that memory stays bounded.
MAX_DOCUMENT_BYTES = 64 << 20
_SNIFF_BYTES = 8192
_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "node_modules"}
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class DataError(HyMoError):
    """The data a user gave is at fault: one line that names the file or key, what was found, what is accepted."""


class Document(NamedTuple):
    """One text: its name, its bytes, and how many bytes of the source file it took (for progress)."""

    name: str
    text: bytes
    source_bytes: int


@dataclass(frozen=True)
class SourceFile:
    """One file. `name` is relative to the folder it was found in, so that moving a folder renames nothing."""

    path: Path
    name: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Source:
    """The files of a source, in the order in which their documents are read."""

    files: tuple[SourceFile, ...]
    described: str

    @property
    def n_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def fingerprint(self) -> str:
        """Changes whenever a file appears, vanishes, moves, or changes in size or time of modification."""
        digest = hashlib.blake2b(digest_size=16)
        for file in self.files:
            line = f"{file.path}\0{file.name}\0{file.size}\0{file.mtime_ns}\n"
            digest.update(line.encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def documents(self) -> Iterator[Document]:
        """All documents that are not empty. Raises DataError for a file that cannot be read."""
        for file in self.files:
            yield from read_documents(file.path, file.name)


def open_source(entries: Sequence[str | Path] | None) -> Source:
    """Find the files behind `data.source`: paths of files and folders, or None for this Python's standard library.

    Folders are walked in sorted order; hidden files, caches and binary files in them are passed over. A file that is
    named itself is always taken.
    """
    if entries is None:
        return _standard_library()
    if isinstance(entries, str | Path):
        entries = [entries]
    if not entries:
        raise DataError("data.source: the list is empty; give files or folders of text, or leave the key out")
    files: list[SourceFile] = []
    for entry in entries:
        try:
            files.extend(_files_of(str(entry)))
        except OSError as error:
            raise DataError(f"data.source: cannot read {str(entry)!r}: {error.strerror or error}") from None
    return Source(tuple(files), ", ".join(str(entry) for entry in entries))


def _files_of(entry: str) -> list[SourceFile]:
    if "://" in entry:
        raise DataError(f"data.source: {entry!r} is a URL, which is not read; download it and give the file or folder")
    path = Path(entry).expanduser()
    if not path.exists():
        raise DataError(f"data.source: {entry!r} does not exist; accepted: files or folders of text, .jsonl, .parquet")
    if path.is_dir():
        found = [file for file in _walk(path) if _is_readable_kind(file.path)]
        if not found:
            raise DataError(f"data.source: the folder {entry!r} holds no text; accepted: text files, .jsonl, .parquet")
        return found
    return [_describe(path, path.name)]


def _standard_library() -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in _walk(root) if file.path.suffix == ".py"]
    if not files:
        raise DataError(f"data.source: this Python has no source files in {root}; name files or folders instead")
    return Source(tuple(files), "the standard library of this Python")


def _walk(root: Path) -> list[SourceFile]:
    """Every visible file below `root`, sorted by relative path; links to folders are followed once."""
    found, seen = [], set()
    for folder, subfolders, names in os.walk(root, followlinks=True, onerror=_raise_unreadable):
        real = os.path.realpath(folder)
        if real in seen:
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith(".") and name not in _SKIPPED_FOLDERS)
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                found.append(_describe(path, path.relative_to(root).as_posix()))
    return sorted(found, key=lambda file: file.name)


def _raise_unreadable(error: OSError) -> None:
    raise DataError(f"data.source: cannot read the folder {error.filename!r}: {error.strerror}")


def _describe(path: Path, name: str) -> SourceFile:
    status = path.stat()
    return SourceFile(path.absolute(), name, status.st_size, status.st_mtime_ns)


def _is_readable_kind(path: Path) -> bool:
    """Files found in a folder are text when their first 8 KiB hold no zero byte (the rule of git and grep)."""
    if path.suffix in (".jsonl", ".parquet"):
        return True
    try:
        with open(path, "rb") as file:
            head = file.read(_SNIFF_BYTES)
    except OSError as error:
        raise DataError(f"data.source: cannot read {str(path)!r}: {error.strerror}") from None
    return head.startswith(_UTF16_MARKS) or b"\0" not in head


def read_documents(path: Path, name: str | None = None) -> Iterator[Document]:
    """The documents of one file; empty ones are passed over. Raises DataError naming the file (and line) at fault."""
    name = name or path.name
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    reader = readers.get(path.suffix, _read_text)
    try:
        for document in reader(path, name):
            if document.text:
                yield document
    except OSError as error:
        raise DataError(f"data.source: cannot read {str(path)!r}: {error.strerror or error}") from None


def _read_text(path: Path, name: str) -> Iterator[Document]:
    with open(path, "rb") as file:
        for number, piece in enumerate(_pieces(file)):
            yield Document(name if number == 0 else f"{name}#{number}", _as_utf8(piece), len(piece))


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    """The file in pieces of at most MAX_DOCUMENT_BYTES, cut after a line end where there is one."""
    rest = b""
    while block := file.read(MAX_DOCUMENT_BYTES - len(rest)):
        piece = rest + block
        rest = b""
        if len(piece) == MAX_DOCUMENT_BYTES:
            cut = piece.rfind(b"\n") + 1 or _character_end(piece)
            piece, rest = piece[:cut], piece[cut:]
        yield piece
    if rest:
        yield rest


def _character_end(text: bytes) -> int:
    """Where to cut so that no UTF-8 character is torn: before the last one if its bytes may go on, else the end."""
    for back in range(1, min(4, len(text) - 1) + 1):
        if text[-back] & 0xC0 != 0x80:
            return len(text) - back if text[-back] >= 0xC0 else len(text)
    return len(text)


def _as_utf8(text: bytes) -> bytes:
    """Drop a UTF-8 mark; turn UTF-16 that says so by its mark into UTF-8; leave all else as it is."""
    if text.startswith(codecs.BOM_UTF8):
        return text[len(codecs.BOM_UTF8) :]
    if text.startswith(_UTF16_MARKS):
        return text.decode("utf-16", errors="replace").encode()
    return text


def _read_jsonl(path: Path, name: str) -> Iterator[Document]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield Document(f"{name}:{number}", _text_of_line(line, f"{path}:{number}"), len(line))


def _text_of_line(line: bytes, where: str) -> bytes:
    accepted = f"an object with a string {TEXT_FIELD!r}"
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise DataError(f"data.source: {where}: not valid JSON ({error}); accepted: {accepted}") from None
    if not isinstance(row, dict) or TEXT_FIELD not in row:
        found = f"an object with {sorted(row)[:8]}" if isinstance(row, dict) else type(row).__name__
        raise DataError(f"data.source: {where}: found {found}; accepted: {accepted}")
    if not isinstance(row[TEXT_FIELD], str):
        raise DataError(f"data.source: {where}: {TEXT_FIELD!r} is {type(row[TEXT_FIELD]).__name__}; accepted: a string")
    return row[TEXT_FIELD].encode("utf-8", "surrogatepass")


def _read_parquet(path: Path, name: str) -> Iterator[Document]:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        file = parquet.ParquetFile(path)
        if TEXT_FIELD not in file.schema_arrow.names:
            found = file.schema_arrow.names
            raise DataError(f"data.source: {path}: the columns are {found}; accepted: a column {TEXT_FIELD!r}")
        kind = file.schema_arrow.field(TEXT_FIELD).type
        if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
            raise DataError(f"data.source: {path}: the column {TEXT_FIELD!r} is {kind}; accepted: a column of strings")
        share = path.stat().st_size // max(1, file.metadata.num_rows)
        row = 0
        for batch in file.iter_batches(batch_size=256, columns=[TEXT_FIELD]):
            for text in batch.column(0).to_pylist():
                row += 1
                if text is not None:
                    yield Document(f"{name}:{row}", text.encode("utf-8", "surrogatepass"), share)
    except arrow.ArrowException as error:
        raise DataError(f"data.source: {path}: not a whole Parquet file ({str(error).splitlines()[0]})") from None
