"""Documents out of files: text, JSONL (field "text"), Parquet (column "text"); the first two also as .gz and .zst.

Bytes are kept as found: what is not valid UTF-8 reaches the byte tokenizer unchanged. Reading is streamed, so memory is
bounded by the longest document. A *piece* is a file or a part of one, so that several processes can share a large file.
"""

import codecs
import io
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from hymo.errors import HyMoError

TEXT_FIELD = "text"
HUB = "hf://"  # begins the name of a data set of the hub, see hub.py
# A text file longer than this becomes several documents, cut at line ends, so that memory stays bounded.
MAX_DOCUMENT_BYTES = 16 << 20
UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_PACKED = (".gz", ".zst")
_BLOCK = 256 << 10

OnBad = Callable[[str], None]


class DataError(HyMoError):
    """The data a user gave is at fault: one line that names the file or key, what was found, what is accepted."""


class Document(NamedTuple):
    """One text: its name, its bytes, and how many bytes of the source file it took (for progress)."""

    name: str
    text: bytes
    source_bytes: int


class Piece(NamedTuple):
    """Part of a file: bytes [start, stop) of JSONL, row groups of Parquet, shards of a hub set, else the whole."""

    path: str
    name: str
    start: int = 0
    stop: int | None = None


def kind_of(path: str | Path) -> str:
    """ "hub", "jsonl", "parquet" or "text", by the name."""
    if str(path).startswith(HUB):
        return "hub"
    suffixes = [suffix for suffix in Path(path).suffixes if suffix not in _PACKED]
    last = suffixes[-1] if suffixes else ""
    return {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}.get(last, "text")


def is_packed(path: str | Path) -> bool:
    return Path(path).suffix in _PACKED


def first_bytes(path: str | Path, count: int) -> bytes:
    """The first bytes of a file, unpacked. Raises OSError."""
    with open(path, "rb") as raw:
        return _unpacked(raw, str(path)).read(count)


def read_documents(path: str | Path, on_bad: OnBad | None = None) -> Iterator[Document]:
    """The documents of one file; empty ones are passed over.

    Raises DataError naming the file (and line) at fault; with `on_bad`, a broken line is told to it and passed over.
    """
    return read_piece(Piece(str(path), Path(path).name), on_bad)


def read_piece(piece: Piece, on_bad: OnBad | None = None) -> Iterator[Document]:
    """The documents of one piece, as `read_documents`."""
    kind = kind_of(piece.path)
    try:
        if kind == "hub":
            from hymo.data.hub import read_shards

            documents = read_shards(piece.path, piece.start, piece.stop)
        elif kind == "jsonl":
            documents = _read_jsonl(piece, on_bad)
        else:
            documents = _read_parquet(piece) if kind == "parquet" else _read_text(piece)
        for document in documents:
            if document.text:
                yield document
    except OSError as error:
        raise DataError(f"data.source: cannot read {piece.path!r}: {error.strerror or error}") from None


def _read_text(piece: Piece) -> Iterator[Document]:
    with open(piece.path, "rb") as raw:
        done = 0
        for number, text in enumerate(_cut(_unpacked(raw, piece.path))):
            at = raw.tell()
            yield Document(piece.name if number == 0 else f"{piece.name}#{number}", _as_utf8(text), at - done)
            done = at


def _cut(stream: BinaryIO) -> Iterator[bytes]:
    """The stream in parts of at most MAX_DOCUMENT_BYTES, cut after a line end where there is one."""
    rest = b""
    while block := stream.read(MAX_DOCUMENT_BYTES - len(rest)):
        part, rest = rest + block, b""
        if len(part) == MAX_DOCUMENT_BYTES:
            cut = part.rfind(b"\n") + 1 or character_end(part)
            part, rest = part[:cut], part[cut:]
        yield part
    if rest:
        yield rest


def character_end(text: bytes) -> int:
    """Where to cut so that no UTF-8 character is torn: before the last one if its bytes may go on, else the end."""
    for back in range(1, min(4, len(text) - 1) + 1):
        if text[-back] & 0xC0 != 0x80:
            return len(text) - back if text[-back] >= 0xC0 else len(text)
    return len(text)


def _as_utf8(text: bytes) -> bytes:
    """Drop a UTF-8 mark; turn UTF-16 that says so by its mark into UTF-8; leave all else as it is."""
    if text.startswith(codecs.BOM_UTF8):
        return text[len(codecs.BOM_UTF8) :]
    if text.startswith(UTF16_MARKS):
        return text.decode("utf-16", errors="replace").encode()
    return text


def _read_jsonl(piece: Piece, on_bad: OnBad | None) -> Iterator[Document]:
    with open(piece.path, "rb") as raw:
        packed = is_packed(piece.path)
        stream = _unpacked(raw, piece.path)
        if piece.start:  # a line belongs to the piece that holds its first byte
            stream.seek(piece.start - 1)
            stream.readline()
        at = 0 if packed else stream.tell()
        first, done = at, 0
        for number, line in enumerate(stream):
            if piece.stop is not None and at >= piece.stop:
                return
            if line.strip():
                size = raw.tell() - done if packed else len(line)
                done += size
                found = _text_of_line(line)
                if isinstance(found, bytes):
                    yield Document(f"{piece.name}@{at}", found, size)
                else:
                    fault = f"{piece.path}:{_lines_before(piece.path, first) + number + 1}: {found}"
                    if on_bad is None:
                        raise DataError(f"data.source: {fault}")
                    on_bad(fault)
            at += len(line)


def _text_of_line(line: bytes) -> bytes | str:
    """The text of a line, or (str) what is wrong with the line."""
    accepted = f"accepted: an object with a string {TEXT_FIELD!r}"
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        if b"\0" in line:
            return f"not UTF-8, it looks like UTF-16; {accepted}, in UTF-8"
        return f"not valid JSON ({error}); {accepted}"
    if not isinstance(row, dict) or TEXT_FIELD not in row:
        found = f"an object with {sorted(row)[:8]}" if isinstance(row, dict) else type(row).__name__
        return f"found {found}; {accepted}"
    if not isinstance(row[TEXT_FIELD], str):
        return f"{TEXT_FIELD!r} is {type(row[TEXT_FIELD]).__name__}; {accepted}"
    return row[TEXT_FIELD].encode("utf-8", "surrogatepass")


def _lines_before(path: str, offset: int) -> int:
    """Line ends in the first `offset` bytes: counted only when a fault must be named."""
    count = 0
    with open(path, "rb") as file:
        while offset > 0 and (block := file.read(min(_BLOCK, offset))):
            count += block.count(b"\n")
            offset -= len(block)
    return count


def _read_parquet(piece: Piece) -> Iterator[Document]:
    import pyarrow as arrow

    try:
        file = open_parquet(piece.path)
        groups = range(piece.start, file.num_row_groups if piece.stop is None else piece.stop)
        share = Path(piece.path).stat().st_size // max(1, file.metadata.num_rows)
        row = sum(file.metadata.row_group(group).num_rows for group in range(piece.start))
        for batch in file.iter_batches(batch_size=256, columns=[TEXT_FIELD], row_groups=groups):
            for text in batch.column(0).to_pylist():
                row += 1
                if text is not None:
                    yield Document(f"{piece.name}:{row}", text.encode("utf-8", "surrogatepass"), share)
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"data.source: {piece.path}: not a whole Parquet file ({str(error).splitlines()[0]})") from None


def open_parquet(path: str) -> Any:
    """The opened file, with its text column checked. Raises DataError, or pyarrow's own errors where it is torn."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        file = parquet.ParquetFile(path)
    except arrow.ArrowException as error:
        raise DataError(f"data.source: {path}: not a whole Parquet file ({str(error).splitlines()[0]})") from None
    columns = file.schema_arrow.names
    if TEXT_FIELD not in columns:
        raise DataError(f"data.source: {path}: the columns are {columns}; accepted: a column {TEXT_FIELD!r}")
    kind = file.schema_arrow.field(TEXT_FIELD).type
    if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
        raise DataError(f"data.source: {path}: the column {TEXT_FIELD!r} is {kind}; accepted: a column of strings")
    return file


def _unpacked(raw: BinaryIO, path: str) -> BinaryIO:
    if not is_packed(path):
        return raw
    if path.endswith(".gz"):
        return io.BufferedReader(_Unpacked(raw, lambda: zlib.decompressobj(wbits=31)), _BLOCK)
    try:
        import zstandard
    except ImportError:
        raise DataError(f"data.source: {path} needs the zstandard package: pip install zstandard") from None
    return io.BufferedReader(_Unpacked(raw, lambda: zstandard.ZstdDecompressor().decompressobj()), _BLOCK)


class _Unpacked(io.RawIOBase):
    """A stream of what `raw` holds compressed. Raises OSError where the data is damaged or ends in the middle of a
    member (which the zstandard package's own reader takes for the end of the file)."""

    def __init__(self, raw: BinaryIO, new_member: Callable[[], Any]):
        self._raw, self._new_member = raw, new_member
        self._member: Any = None
        self._packed = self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._packed = self._packed or self._raw.read(_BLOCK)
            if not self._packed:
                if self._member is not None:
                    raise OSError("it ends in the middle of its compressed data")
                return 0
            self._member = self._member or self._new_member()
            try:
                self._ready = self._member.decompress(self._packed)
            except Exception as error:  # zlib and zstandard have their own, without a common class
                raise OSError(f"its compressed data is damaged ({error})") from None
            self._packed = b""
            if self._member.eof:
                self._packed, self._member = self._member.unused_data, None
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size
