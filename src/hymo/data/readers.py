"""Documents out of files: text, JSONL and JSON (field "text"), Parquet (column "text"); all but Parquet also .gz, .zst.

Bytes are kept as found: what is not valid UTF-8 reaches the byte tokenizer unchanged. Reading is streamed, so memory is
bounded by the longest document. A *piece* is a file or a part of one, so that several processes can share a large file.
"""

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from hymo.data.encodings import as_utf8, utf16_without_mark
from hymo.data.json_values import JSONError, loads, values
from hymo.data.packed import PACKED, is_packed, unpacked
from hymo.errors import DataError

TEXT_COLUMN = "text"
CHOOSE_COLUMN = "accepted: the one that holds the text, as data.text_column (hymo data build: --text-column NAME)"
HUB = "hf://"  # begins the name of a data set of the hub, see hub.py
# A text file longer than this becomes several documents, cut at line ends, so that memory stays bounded.
MAX_DOCUMENT_BYTES = 16 << 20
SNIFF_BYTES = 8192
_BLOCK = 256 << 10
_JSON_NAMES = {
    dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number", bool: "true or false",
}  # fmt: skip

OnBad = Callable[[str], None]
OnNull = Callable[[str], None]


class Document(NamedTuple):
    """One text: its name, its bytes, and how many bytes of the source file it took (for progress).

    path, at: of text files, the file, and where in it (unpacked, as UTF-8) the text begins.
    """

    name: str
    text: bytes
    source_bytes: int
    path: str = ""
    at: int = 0


class Piece(NamedTuple):
    """Part of a file: bytes [start, stop) of JSONL, row groups of Parquet, shards of a hub set, else the whole.

    column: where records have their text. as_text: read as one text whatever the name says.
    """

    path: str
    name: str
    start: int = 0
    stop: int | None = None
    column: str = TEXT_COLUMN
    as_text: bool = False


def expanded(path: str | Path) -> Path:
    """A path with its ~ or ~USER written out. Raises DataError where that has no home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise DataError(f"{str(path)!r}: found a ~ without a home folder; accepted: a path that is there") from None


def kind_of(path: str | Path) -> str:
    """ "hub", "jsonl", "json", "parquet" or "text", by the name."""
    if str(path).startswith(HUB):
        return "hub"
    suffixes = [suffix for suffix in Path(path).suffixes if suffix not in PACKED]
    last = suffixes[-1] if suffixes else ""
    return {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet"}.get(last, "text")


def read_documents(path: str | Path, on_bad: OnBad | None = None) -> Iterator[Document]:
    """The documents of one file; empty ones are passed over.

    Raises DataError naming the file (and line) at fault; with `on_bad`, a broken line is told to it and passed over.
    """
    return read_piece(Piece(str(path), Path(path).name), on_bad)


def read_piece(piece: Piece, on_bad: OnBad | None = None, on_null: OnNull | None = None) -> Iterator[Document]:
    """The documents of one piece, as `read_documents`. on_null is told of each record whose text is null."""
    kind = "text" if piece.as_text else kind_of(piece.path)
    told = _Told(on_bad, on_null)
    try:
        if kind == "hub":
            from hymo.data.hub import read_shards

            documents = read_shards(piece.path, piece.start, piece.stop, piece.column, told.null)
        elif kind == "jsonl":
            documents = _read_jsonl(piece, told)
        elif kind == "json":
            documents = _read_json(piece, told)
        else:
            documents = _read_parquet(piece, told) if kind == "parquet" else _read_text(piece, told)
        for document in documents:
            if document.text:
                yield document
    except OSError as error:
        fault = f"cannot read {piece.path!r}: {error.strerror or error}"
        if error.errno is not None or kind == "hub":  # the disk or the network, not what the file holds
            raise DataError(f"data.source: {fault}") from None
        told.bad(fault)


class _Told(NamedTuple):
    """Who is told of what is passed over."""

    on_bad: OnBad | None
    on_null: OnNull | None

    def bad(self, fault: str) -> None:
        if self.on_bad is None:
            raise DataError(f"data.source: {fault}")
        self.on_bad(fault)

    def null(self, place: str) -> None:
        if self.on_null is not None:
            self.on_null(place)


# ---------------------------------------------------------------------------------------------------------------- text
def _read_text(piece: Piece, told: _Told) -> Iterator[Document]:
    with open(piece.path, "rb") as raw:
        done = at = 0
        for number, text in enumerate(_cut(as_utf8(unpacked(raw, piece.path)))):
            if number == 0 and (encoding := utf16_without_mark(text[:SNIFF_BYTES])):
                told.bad(_convert_first(piece.path, encoding))
                return
            read = raw.tell()
            name = piece.name if number == 0 else f"{piece.name}#{number}"
            yield Document(name, text, read - done, piece.path, at)
            done, at = read, at + len(text)


def _convert_first(path: str, encoding: str) -> str:
    name = shlex.quote(path)
    return f"{path}: it is {encoding} without a mark; accepted: UTF-8 (iconv -f {encoding} -t UTF-8 {name} > NEW)"


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


# ------------------------------------------------------------------------------------------------------------- records
def _read_jsonl(piece: Piece, told: _Told) -> Iterator[Document]:
    with open(piece.path, "rb") as raw:
        packed = is_packed(piece.path)
        stream = unpacked(raw, piece.path)
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
                text, fault = _text_of_line(line, piece.column)
                if text is not None:
                    yield Document(f"{piece.name}@{at}", text, size)
                else:
                    place = f"{piece.path}:{_lines_before(piece.path, first) + number + 1}"
                    told.bad(f"{place}: {fault}") if fault else told.null(place)
            at += len(line)


def _text_of_line(line: bytes, column: str) -> tuple[bytes | None, str]:
    try:
        return text_of_record(loads(line), column)
    except (ValueError, RecursionError) as error:
        accepted = f"accepted: an object with a string {column!r}"
        if b"\0" in line:
            return None, f"not UTF-8, it looks like UTF-16; {accepted}, in UTF-8"
        return None, f"not valid JSON ({error}); {accepted}"


def text_of_record(row: Any, column: str, *, strings: bool = False) -> tuple[bytes | None, str]:
    """The text of a record, or None and what is wrong with it; None and nothing where the text is null.

    strings: a record may be the text itself.
    """
    accepted = f"accepted: an object with a string {column!r}" + (", or a string" if strings else "")
    if strings and isinstance(row, str):
        return row.encode("utf-8", "surrogatepass"), ""
    if isinstance(row, dict) and column not in row:
        return None, f"no field {column!r}; found {', '.join(sorted(row)[:12]) or 'an empty object'}; {CHOOSE_COLUMN}"
    if not isinstance(row, dict):
        return None, f"found {_JSON_NAMES.get(type(row), 'null')}; {accepted}"
    text = row[column]
    if text is not None and not isinstance(text, str):
        return None, f"{column!r} is {_JSON_NAMES[type(text)]}; {accepted}"
    return (None if text is None else text.encode("utf-8", "surrogatepass")), ""


def _lines_before(path: str, offset: int) -> int:
    """Line ends in the first `offset` bytes: counted only when a fault must be named."""
    count = 0
    with open(path, "rb") as file:
        while offset > 0 and (block := file.read(min(_BLOCK, offset))):
            count += block.count(b"\n")
            offset -= len(block)
    return count


def _read_json(piece: Piece, told: _Told) -> Iterator[Document]:
    with open(piece.path, "rb") as raw:
        done = 0
        try:
            for number, row in enumerate(values(as_utf8(unpacked(raw, piece.path)))):
                text, fault = text_of_record(row, piece.column, strings=True)
                read = raw.tell()
                place = f"{piece.path}, record {number + 1}"
                if text is not None:
                    yield Document(f"{piece.name}:{number + 1}", text, read - done)
                    done = read
                else:
                    told.bad(f"{place}: {fault}") if fault else told.null(place)
        except JSONError as error:
            accepted = "accepted: a list of objects or strings, or an object a line; as text under another name"
            told.bad(f"{piece.path}: not valid JSON ({error}); {accepted}")


def _read_parquet(piece: Piece, told: _Told) -> Iterator[Document]:
    """The rows of some row groups. Of a broken group the rest is passed over, so that it matters to no other."""
    try:
        file = open_parquet(piece.path, piece.column)
    except TornParquetError as error:
        told.bad(str(error).removeprefix("data.source: "))
        return
    share = Path(piece.path).stat().st_size // max(1, file.metadata.num_rows)
    for group in range(piece.start, file.num_row_groups if piece.stop is None else piece.stop):
        row = sum(file.metadata.row_group(before).num_rows for before in range(group))
        try:
            for batch in file.iter_batches(batch_size=256, columns=[piece.column], row_groups=[group]):
                for text in _binary(batch.column(0)).to_pylist():
                    row += 1
                    if text is None:
                        told.null(f"{piece.path}, row {row}")
                    else:
                        yield Document(f"{piece.name}:{row}", text, share)
        except _arrow_faults() as error:
            if getattr(error, "errno", None) is not None:
                raise
            told.bad(_torn(f"{piece.path}, row {row + 1} and the rest of its row group", error))


class TornParquetError(DataError):
    """A file that is named like Parquet and cannot be opened as such."""


def _arrow_faults() -> tuple[type[Exception], ...]:
    """What pyarrow raises where a file's bytes are not what they should be."""
    import pyarrow as arrow

    return arrow.ArrowException, OSError


def _torn(place: str, error: Exception) -> str:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    short = reason[:80].rstrip() + ("..." if len(reason) > 80 else "")
    return f"{place}: not a whole Parquet file ({short}); accepted: a whole one, fetched again"


def _binary(column: Any) -> Any:
    """Strings as their bytes, which need not be valid UTF-8."""
    import pyarrow as arrow

    large = arrow.types.is_large_string(column.type)
    return column.view(arrow.large_binary() if large else arrow.binary())


def open_parquet(path: str, column: str = TEXT_COLUMN) -> Any:
    """The opened file, with its text column checked. Raises DataError; TornParquetError where it cannot be opened."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        file = parquet.ParquetFile(path)
    except _arrow_faults() as error:
        if getattr(error, "errno", None) is not None:
            raise
        raise TornParquetError(f"data.source: {_torn(path, error)}") from None
    schema = file.schema_arrow
    if column not in schema.names:
        found = ", ".join(f"{name} ({schema.field(name).type})" for name in schema.names)
        raise DataError(f"data.source: {path}: no column {column!r}; found {found}; {CHOOSE_COLUMN}")
    kind = schema.field(column).type
    if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
        raise DataError(f"data.source: {path}: the column {column!r} is {kind}; accepted: a column of strings")
    return file
