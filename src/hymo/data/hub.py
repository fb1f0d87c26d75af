"""Data sets of the Hugging Face hub, by the `datasets` library (extra `hub`).

    hf://NAME[@REVISION][:CONFIG][#SPLIT]

NAME is ORG/NAME, or a local folder that `datasets` can load; SPLIT is train unless named. Rows are streamed, nothing is
downloaded as a whole. Offline (HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is 1) they come out of the library's cache.
A *shard* is what the library can read alone: a file of the data set, or a part of the cached table.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from hymo.data.readers import CHOOSE_COLUMN, HUB, TEXT_COLUMN, DataError, Document, OnNull

FORM = "hf://NAME[@REVISION][:CONFIG][#SPLIT]"
SHARD_BYTES = 64 << 20  # of a shard whose size the library does not know, for progress
_PATTERN = re.compile(r"hf://(?P<name>[^@:#]+)(@(?P<revision>[^@:#]+))?(:(?P<config>[^:#]+))?(#(?P<split>\w+))?")
_CACHED_SHARDS, _CACHED_ROWS = 256, 1000  # at most so many shards of a cached table, of at least so many rows


class HubSet(NamedTuple):
    """What a name says, and what was found under it."""

    path: str  # with the revision that was found, so that all processes and later calls read the same rows
    n_shards: int
    n_bytes: int  # of text, about
    version: str


def describe(entry: str, column: str = TEXT_COLUMN) -> HubSet:
    """Look a data set up: on the hub, in a local folder, or in the cache. Raises DataError."""
    library, parts = _library(entry), _parsed(entry)
    try:
        rows = _opened(entry, column)
        builder = library.load_dataset_builder(parts["name"], parts["config"], revision=parts["revision"])
    except DataError:
        raise
    except Exception as error:  # the libraries underneath raise what they like
        raise _cannot(entry, error) from None
    columns = rows.column_names
    if columns is not None and column not in columns:
        found = ", ".join(columns)
        raise DataError(f"data.source: {entry}: no column {column!r}; found {found}; {CHOOSE_COLUMN}")
    version = str(builder.hash)
    if re.fullmatch("[0-9a-f]{40}", version) and not parts["revision"] and not _offline(library):
        entry = _written({**parts, "revision": version})
    sizes = (builder.info.splits or {}).get(parts["split"])
    n_bytes = (sizes.num_bytes if sizes else None) or SHARD_BYTES * rows.num_shards
    return HubSet(entry, rows.num_shards, int(n_bytes), version)


def read_shards(
    entry: str, start: int, stop: int | None, column: str = TEXT_COLUMN, on_null: OnNull | None = None
) -> Iterator[Document]:
    """The documents of shards [start, stop). Raises DataError, also where the connection breaks off."""
    try:
        rows = _opened(entry, column)
        for shard in range(start, rows.num_shards if stop is None else stop):
            for number, row in enumerate(rows.shard(num_shards=rows.num_shards, index=shard)):
                text, place = row.get(column), f"{entry}/{shard}:{number}"
                if not isinstance(text, str | None):
                    kind = type(text).__name__
                    raise DataError(f"data.source: {entry}: the column {column!r} is {kind}; accepted: strings")
                if text is None and on_null is not None:
                    on_null(place)
                raw = (text or "").encode("utf-8", "surrogatepass")
                yield Document(place, raw, len(raw))
    except DataError:
        raise
    except Exception as error:
        raise _cannot(entry, error) from None


@lru_cache(maxsize=2)
def _opened(entry: str, column: str) -> Any:
    """The rows as an iterable of `datasets`, in shards."""
    library, parts = _library(entry), _parsed(entry)
    offline = _offline(library)
    rows = library.load_dataset(
        parts["name"], parts["config"], split=parts["split"], revision=parts["revision"], streaming=not offline
    )
    if offline:
        rows = rows.to_iterable_dataset(num_shards=max(1, min(_CACHED_SHARDS, len(rows) // _CACHED_ROWS)))
    if rows.column_names and column in rows.column_names:
        rows = rows.select_columns([column])  # of Parquet, the others are then not fetched
    return rows


def _library(entry: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise DataError(f"data.source: {entry} needs the datasets package: pip install 'hymo[hub]'") from None
    datasets.disable_progress_bars()
    return datasets


def _offline(library: Any) -> bool:
    return bool(library.config.HF_HUB_OFFLINE)


def _parsed(entry: str) -> dict[str, Any]:
    found = _PATTERN.fullmatch(entry)
    if found is None:
        raise DataError(f"data.source: found {entry!r}; accepted: {FORM}")
    return {**found.groupdict(), "split": found["split"] or "train"}


def _written(parts: dict[str, Any]) -> str:
    config = f":{parts['config']}" if parts["config"] else ""
    return f"{HUB}{parts['name']}@{parts['revision']}{config}#{parts['split']}"


def _cannot(entry: str, error: Exception) -> DataError:
    said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return DataError(
        f"data.source: {entry} cannot be read ({said}); accepted: {FORM} of a data set that can be reached, or with"
        " HF_HUB_OFFLINE=1 one that is in the cache"
    )
