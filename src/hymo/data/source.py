"""Where text comes from: the files behind `data.source`, and how they are shared out among processes."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hymo.data.readers import (
    HUB,
    UTF16_MARKS,
    DataError,
    Document,
    OnBad,
    Piece,
    first_bytes,
    is_packed,
    kind_of,
    open_parquet,
    read_documents,
    read_piece,
)

__all__ = ["DataError", "Document", "Piece", "Source", "SourceFile", "open_source", "read_documents"]

_SNIFF_BYTES = 8192
_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "node_modules"}


@dataclass(frozen=True)
class SourceFile:
    """One file, or a data set of the hub (`n_shards` > 0, its version for a time, a size that may be estimated).

    `name` is relative to the folder it was found in, so that moving a folder renames nothing.
    """

    path: Path | str
    name: str
    size: int
    mtime_ns: int
    n_shards: int = 0


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

    def documents(self, on_bad: OnBad | None = None) -> Iterator[Document]:
        """All documents that are not empty. Raises DataError for a file that cannot be read."""
        for file in self.files:
            yield from read_piece(Piece(str(file.path), file.name), on_bad)

    def units(self, unit_bytes: int) -> list[list[Piece]]:
        """The source in parts of about `unit_bytes`, in order: small files together, large JSONL and Parquet cut."""
        units: list[list[Piece]] = []
        filled = 0
        for file in self.files:
            for piece, size in _pieces_of(file, unit_bytes):
                if not units or filled + size > unit_bytes:
                    units.append([])
                    filled = 0
                units[-1].append(piece)
                filled += size
        return units


def _pieces_of(file: SourceFile, unit_bytes: int) -> Iterator[tuple[Piece, int]]:
    path, kind = str(file.path), kind_of(file.path)
    if kind == "hub":
        for shard in range(file.n_shards):
            yield Piece(path, file.name, shard, shard + 1), file.size // file.n_shards
    elif file.size <= unit_bytes or is_packed(path) or kind == "text":
        yield Piece(path, file.name), file.size
    elif kind == "jsonl":
        for start in range(0, file.size, unit_bytes):
            stop = min(start + unit_bytes, file.size)
            yield Piece(path, file.name, start, stop), stop - start
    else:
        groups = open_parquet(path).num_row_groups
        step = max(1, groups * unit_bytes // file.size)
        for start in range(0, groups, step):
            stop = min(start + step, groups)
            yield Piece(path, file.name, start, stop), file.size * (stop - start) // groups


def open_source(entries: Sequence[str | Path] | None, *, hub: bool = False) -> Source:
    """Find the files behind `data.source`: paths of files and folders, or None for this Python's standard library.

    hub: names of data sets of the hub are accepted too.

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
            files.extend([_of_hub(str(entry))] if hub and str(entry).startswith(HUB) else _files_of(str(entry)))
        except OSError as error:
            raise DataError(f"data.source: cannot read {str(entry)!r}: {error.strerror or error}") from None
    return Source(tuple(files), ", ".join(str(entry) for entry in entries))


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
    if Source(tuple(now), source.described).fingerprint() != source.fingerprint():
        raise DataError(f"data.source: {source.described} changed while it was read; start again when it rests")


def _of_hub(entry: str) -> SourceFile:
    from hymo.data.hub import describe

    found = describe(entry)
    version = int.from_bytes(hashlib.blake2b(found.version.encode(), digest_size=8).digest(), "little")
    return SourceFile(found.path, entry, found.n_bytes, version, found.n_shards)


def _files_of(entry: str) -> list[SourceFile]:
    if entry.startswith(HUB):
        raise DataError(
            f"data.source: {entry!r} is a data set of the hub; accepted: hymo data build {entry} --out DIR, then DIR"
        )
    if "://" in entry:
        raise DataError(f"data.source: {entry!r} is a URL, which is not read; download it and give the file or folder")
    path = Path(entry).expanduser()
    if not path.exists():
        raise DataError(f"data.source: {entry!r} does not exist; accepted: files or folders of text, .jsonl, .parquet")
    if path.is_dir():
        found = [file for file in _walk(path) if _is_readable_kind(Path(file.path))]
        if not found:
            raise DataError(f"data.source: the folder {entry!r} holds no text; accepted: text files, .jsonl, .parquet")
        return found
    return [_describe(path, path.name)]


def _standard_library() -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in _walk(root) if Path(file.path).suffix == ".py"]
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
    if kind_of(path) != "text":
        return True
    try:
        head = first_bytes(path, _SNIFF_BYTES)
    except OSError as error:
        raise DataError(f"data.source: cannot read {str(path)!r}: {error.strerror}") from None
    return head.startswith(UTF16_MARKS) or b"\0" not in head
