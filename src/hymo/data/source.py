"""Where text comes from: the files behind `data.source`, and how they are shared out among processes."""

import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hymo.data.encodings import marked, utf16_without_mark
from hymo.data.json_values import DECODER
from hymo.data.packed import first_bytes, is_packed
from hymo.data.readers import (
    HUB,
    SNIFF_BYTES,
    TEXT_COLUMN,
    DataError,
    Document,
    OnBad,
    Piece,
    TornParquetError,
    expanded,
    kind_of,
    open_parquet,
    read_documents,
    read_piece,
)

__all__ = ["DataError", "Document", "Piece", "Source", "SourceFile", "open_source", "read_documents"]

DATA = "data.json"  # describes a data set that `hymo data build` made
SETS = ("train", "val")  # the folders of its token sets
_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "node_modules"}


@dataclass(frozen=True)
class SourceFile:
    """One file, or a data set of the hub (`n_shards` > 0, its version for a time, a size that may be estimated).

    `name` is relative to the folder it was found in, so that moving a folder renames nothing. `as_text`: it is one text
    whatever its name says.
    """

    path: Path | str
    name: str
    size: int
    mtime_ns: int
    n_shards: int = 0
    as_text: bool = False

    @property
    def kind(self) -> str:
        return "text" if self.as_text else kind_of(self.path)


@dataclass(frozen=True)
class Source:
    """The files of a source, in the order in which their documents are read; the column of records that is the text.

    binary: files of its folders that hold zero bytes and are passed over.
    """

    files: tuple[SourceFile, ...]
    described: str
    column: str = TEXT_COLUMN
    binary: tuple[str, ...] = ()

    @property
    def n_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def fingerprint(self) -> str:
        """Changes whenever a file appears, vanishes, moves, or changes in size or time of modification."""
        digest = hashlib.blake2b(digest_size=16)
        for file in self.files:
            line = f"{file.path}\0{file.name}\0{file.size}\0{file.mtime_ns}\n"
            digest.update(line.encode("utf-8", "surrogateescape"))
        if self.column != TEXT_COLUMN:
            digest.update(self.column.encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def documents(self, on_bad: OnBad | None = None) -> Iterator[Document]:
        """All documents that are not empty. Raises DataError for a file that cannot be read."""
        for file in self.files:
            yield from read_piece(Piece(str(file.path), file.name, column=self.column, as_text=file.as_text), on_bad)

    def units(self, unit_bytes: int) -> list[list[Piece]]:
        """The source in parts of about `unit_bytes`, in order: small files together, large JSONL and Parquet cut."""
        units: list[list[Piece]] = []
        filled = 0
        for file in self.files:
            for piece, size in _pieces_of(file, self.column, unit_bytes):
                if not units or filled + size > unit_bytes:
                    units.append([])
                    filled = 0
                units[-1].append(piece)
                filled += size
        return units


def _pieces_of(file: SourceFile, column: str, unit_bytes: int) -> Iterator[tuple[Piece, int]]:
    whole = Piece(str(file.path), file.name, column=column, as_text=file.as_text)
    if file.kind == "hub":
        for shard in range(file.n_shards):
            yield whole._replace(start=shard, stop=shard + 1), file.size // file.n_shards
    elif file.size <= unit_bytes or is_packed(whole.path) or file.kind in ("text", "json"):
        yield whole, file.size
    elif file.kind == "jsonl":
        for start in range(0, file.size, unit_bytes):
            stop = min(start + unit_bytes, file.size)
            yield whole._replace(start=start, stop=stop), stop - start
    else:
        try:
            groups = open_parquet(whole.path, column).num_row_groups
        except TornParquetError:  # said, or counted, when it is read
            yield whole, file.size
            return
        step = max(1, groups * unit_bytes // file.size)
        for start in range(0, groups, step):
            stop = min(start + step, groups)
            yield whole._replace(start=start, stop=stop), file.size * (stop - start) // groups


def open_source(entries: Sequence[str | Path] | None, *, hub: bool = False, column: str = TEXT_COLUMN) -> Source:
    """Find the files behind `data.source`: paths of files and folders, or None for this Python's standard library.

    hub: names of data sets of the hub are accepted too. column: where JSONL, JSON, Parquet and the hub have the text.

    Folders are walked in sorted order; hidden files, caches and binary files in them are passed over, and .json files
    that hold no records are text. A file that is named itself is always taken.
    """
    if entries is None:
        return _standard_library()
    if isinstance(entries, str | Path):
        entries = [entries]
    if not entries:
        raise DataError("data.source: the list is empty; give files or folders of text, or leave the key out")
    files: list[SourceFile] = []
    binary: list[str] = []
    for entry in entries:
        try:
            files.extend(
                [_of_hub(str(entry), column)]
                if hub and str(entry).startswith(HUB)
                else _files_of(str(entry), column, binary)
            )
        except OSError as error:
            raise DataError(f"data.source: cannot read {str(entry)!r}: {error.strerror or error}") from None
    return Source(tuple(files), ", ".join(str(entry) for entry in entries), column, tuple(binary))


def is_data_set(path: str | Path) -> bool:
    """Whether a path is a folder that `hymo data build` made, by what its data.json says."""
    try:
        with open(expanded(path) / DATA, "rb") as file:
            return b'"hymo data set' in file.read(64)
    except OSError:
        return False


def check_unchanged(source: Source) -> None:
    """Raises DataError when a file of the source is not as it was when the source was opened."""
    now = []
    for file in source.files:
        if file.n_shards:  # read by its revision
            now.append(file)
            continue
        path = Path(file.path)
        status = path.stat() if path.exists() else None
        size, mtime_ns = (status.st_size, status.st_mtime_ns) if status else (-1, -1)
        now.append(replace(file, size=size, mtime_ns=mtime_ns))
    if replace(source, files=tuple(now)).fingerprint() != source.fingerprint():
        raise DataError(f"data.source: {source.described} changed while it was read; start again when it rests")


def _of_hub(entry: str, column: str) -> SourceFile:
    from hymo.data.hub import describe

    found = describe(entry, column)
    version = int.from_bytes(hashlib.blake2b(found.version.encode(), digest_size=8).digest(), "little")
    return SourceFile(found.path, entry, found.n_bytes, version, found.n_shards)


def _files_of(entry: str, column: str, binary: list[str]) -> list[SourceFile]:
    """The files that a path names; those of a folder that are no text are added to `binary`."""
    if entry.startswith(HUB):
        raise DataError(
            f"data.source: {entry!r} is a data set of the hub; accepted: hymo data build {entry} --out DIR, then DIR"
        )
    if "://" in entry:
        raise DataError(f"data.source: {entry!r} is a URL, which is not read; download it and give the file or folder")
    path = expanded(entry)
    if not path.exists():
        raise DataError(
            f"data.source: {entry!r} does not exist; accepted: files or folders of text, .json, .jsonl, .parquet"
        )
    if is_data_set(path):
        raise DataError(
            f"data.source: {entry!r} is a data set that hymo data build made; accepted: text here, and the data set as"
            " an entry of data.source or data.val of hymo train, or of hymo eval --data"
        )
    if _holds_tokens(path) or _is_broken(path / DATA):
        raise DataError(
            f"data.source: {entry!r} is a part of a data set, or one whose {DATA} is empty, broken or missing;"
            " accepted: text, or a data set as hymo data build made it"
        )
    if path.is_dir():
        walked = [_as_found(file, column) for file in _walk(path)]
        found = [file for file in walked if file.kind != "text" or _is_text(Path(file.path))]
        taken = set(found)
        binary.extend(str(file.path) for file in walked if file not in taken)
        if not found:
            raise DataError(
                f"data.source: the folder {entry!r} holds no text; accepted: text files, .json, .jsonl, .parquet"
            )
        return found
    return [_describe(path, path.name)]


def _standard_library() -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in _walk(root) if Path(file.path).suffix == ".py"]
    if not files:
        raise DataError(f"data.source: this Python has no source files in {root}; name files or folders instead")
    return Source(tuple(files), "the standard library of this Python")


def _walk(root: Path) -> list[SourceFile]:
    """Every visible file below `root`, sorted by relative path; links to folders are followed once, and what HyMo wrote
    is passed over."""
    found, seen = [], set()
    for folder, subfolders, names in os.walk(root, followlinks=True, onerror=_raise_unreadable):
        real = os.path.realpath(folder)
        if real in seen:
            subfolders.clear()
            continue
        seen.add(real)
        if folder != os.fspath(root) and _is_our_own(Path(folder), {*names, *subfolders}):
            subfolders.clear()
            continue
        subfolders[:] = sorted(name for name in subfolders if not name.startswith(".") and name not in _SKIPPED_FOLDERS)
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                found.append(_describe(path, path.relative_to(root).as_posix()))
    return sorted(found, key=lambda file: file.name)


def _is_our_own(folder: Path, names: set[str]) -> bool:
    """Whether a folder is a run, an export, or a data set or a folder of the cache, finished or not: text to train on
    holds no results of training, nor does it change with them."""
    return (
        {"plan.json", ".lock"} <= names
        or (folder.name == "stacks" and all(re.fullmatch(r"rank-\d+\.txt", name) for name in names))
        or _says(folder / "config.yaml", rb"\A# The resolved configuration of this run\.")
        or _says(folder / "config.json", rb'"model_type":\s*"hymo"')
        or any(folder.glob("checkpoints/step-*/manifest.json"))
        or _holds_tokens(folder)
    )


def _holds_tokens(folder: Path) -> bool:
    """Whether a folder is a token set, or holds those of a data set."""
    return any(_says(folder / name / "manifest.json", rb'\A\{\s*"format": "hymo token set') for name in ("", *SETS))


def _says(path: Path, pattern: bytes) -> bool:
    """Whether a file that is there begins with something of the pattern."""
    return path.is_file() and re.search(pattern, _head(path)) is not None


def _is_broken(path: Path) -> bool:
    """Whether a file that is there is not JSON, by its first value as far as that is read."""
    if not path.is_file():
        return False
    head = _head(path)
    try:
        DECODER.raw_decode(head.decode("utf-8-sig", "replace").lstrip())
        return False
    except (ValueError, RecursionError):
        return len(head) < SNIFF_BYTES


def _raise_unreadable(error: OSError) -> None:
    raise DataError(f"data.source: cannot read the folder {error.filename!r}: {error.strerror}")


def _describe(path: Path, name: str) -> SourceFile:
    status = path.stat()
    return SourceFile(path.absolute(), name, status.st_size, status.st_mtime_ns)


def _as_found(file: SourceFile, column: str) -> SourceFile:
    """A file of a folder: .json is text unless it begins with a record, since folders of code are full of others."""
    if file.kind != "json":
        return file
    return replace(file, as_text=not _begins_with_record(_head(Path(file.path)), column))


def _begins_with_record(head: bytes, column: str) -> bool:
    """Whether a .json file begins with an object that has the column, or with a list of such or of strings."""
    text = head.decode("utf-8-sig", "replace").lstrip()
    first = text.removeprefix("[").lstrip()
    if text.startswith("[") and first.startswith('"'):
        return len(head) == SNIFF_BYTES or _is_list_of_strings(text)
    try:
        row, _ = DECODER.raw_decode(first)
        return isinstance(row, dict) and column in row
    except (ValueError, RecursionError):  # it may be longer than what was read
        return len(head) == SNIFF_BYTES and first.startswith("{") and f"{json.dumps(column)}:" in first.replace(" ", "")


def _is_list_of_strings(text: str) -> bool:
    try:
        return all(isinstance(one, str) for one in DECODER.decode(text))
    except ValueError:
        return False


def _is_text(path: Path) -> bool:
    """Files found in a folder are text when their first 8 KiB hold no zero byte (the rule of git and grep).

    UTF-16 has such bytes: it is text too, read where a mark says what it is, refused by name where none does.
    """
    head = _head(path)
    return marked(head) is not None or b"\0" not in head or utf16_without_mark(head) is not None


def _head(path: Path) -> bytes:
    try:
        return first_bytes(path, SNIFF_BYTES)
    except OSError as error:
        raise DataError(f"data.source: cannot read {str(path)!r}: {error.strerror or error}") from None
