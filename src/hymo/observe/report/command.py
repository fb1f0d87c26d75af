"""``hymo report RUN [RUN...]``: a page, a page that follows the run, or a picture."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hymo.errors import HyMoError
from hymo.observe.report.page import render
from hymo.observe.report.read import RunReader, open_readers, read_runs
from hymo.observe.units import size

PAGES, PICTURES = (".html", ".htm"), (".png", ".pdf", ".svg")


def report(runs: Sequence[str], *, out: str | None, png: str | None, watch: bool, port: int | None) -> int:
    """Run ``hymo report``; returns the exit code."""
    if port is not None and not watch:
        raise HyMoError("--port: found without --watch; accepted: both, or neither")
    if watch and (out or png):
        raise HyMoError(f"--watch: found beside {'--out' if out else '--png'}; accepted: one of them")
    page = None if out is None else _named(out, "--out", PAGES)
    picture = None if png is None else _named(png, "--png", PICTURES)
    readers = open_readers(runs)
    if watch:
        from hymo.observe.report.watch import watch as serve

        return serve(readers, port or 0)
    if picture is not None:
        from hymo.observe.report.picture import draw

        draw(read_runs(readers), picture)
        print(f"picture: {picture}")
    if page is not None or picture is None:
        page = page or _default_page(readers)
        text = render(read_runs(readers))
        write(page, text)
        print(f"page: {page} ({size(len(text.encode()))})")
    return 0


def _default_page(readers: Sequence[RunReader]) -> Path:
    """In the run's folder; of several runs, in this one."""
    return readers[0].path / "report.html" if len(readers) == 1 else Path("report.html")


def _named(name: str, option: str, endings: Sequence[str]) -> Path:
    """A file to write; the ending is asked for, so that a slip does not write over a run's own files."""
    path = Path(name)
    if path.suffix.lower() not in endings or path.is_dir():
        raise HyMoError(f"{option}: found {name}; accepted: a file that ends in {' or '.join(endings)}")
    return path


def write(path: Path, text: str) -> None:
    """Write whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise HyMoError(f"--out: {path} cannot be written ({error.strerror}); accepted: another place") from None
