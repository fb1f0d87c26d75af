"""From `data.*` settings to token sets: built once into a cache folder, or opened where `hymo data build` made them."""

import hashlib
import itertools
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock

from hymo.data.dataset import open_data_set
from hymo.data.parts import Job, Progress, Split, write_token_sets
from hymo.data.readers import TEXT_COLUMN, DataError, expanded
from hymo.data.shards import TokenSet, built_whole, disk_errors, remove_left_over
from hymo.data.source import SETS, Source, check_unchanged, is_data_set, open_source
from hymo.data.tokenize import Tokenizer, open_tokenizer

_LAYOUT = "hymo-cache-4"  # part of every cache key: raised when what is written changes


class DataSettings(Protocol):
    """The part of the configuration that is read here (hymo.config.DataConfig has it).

    source: None, or entries that are each a path or have a `path` and a `weight`. May be missing: val, paths by name of
    further validation sets; text_column, where records have their text.
    """

    @property
    def source(self) -> Sequence[Any] | None: ...
    @property
    def tokenizer(self) -> str: ...
    @property
    def val_fraction(self) -> float: ...
    @property
    def cache_dir(self) -> str | None: ...


@dataclass(frozen=True)
class TokenData:
    """What a run reads: the training set, validation sets by name, and the tokenizer that made them.

    "val" is the text held out from all sources; "val_NAME" that of each source of a mix; further names are the user's.
    """

    train: TokenSet
    val: dict[str, TokenSet]
    tokenizer: Tokenizer


@dataclass(frozen=True)
class _Wanted:
    """Where the token sets "train" and "val" of one source are, or (source given) are to be built."""

    target: Path
    source: Source | None = None
    val_fraction: float = 0.0


def prepare(config: DataSettings, progress: Progress | None = None) -> TokenData:
    """Open the token sets of `config.source`, building what the cache does not have.

    progress(done_bytes, total_bytes) is called while sources are built, and not at all when nothing is. Any number of
    processes may call this at once: one builds, the others wait for it. Raises DataError.
    """
    tokenizer = open_tokenizer(config.tokenizer)
    paths, shares = _entries(config.source)
    groups: Mapping[str, Sequence[str] | None] = {"all": None} if paths is None else {"all": list(paths.values())}
    if paths is not None and (shares is not None or any(is_data_set(path) for path in paths.values())):
        groups = {name: [path] for name, path in paths.items()}  # each on its own
    own = [f"val_{name}" for name in groups] if len(groups) > 1 else []
    for taken in sorted({"val", *own} & set(_named(config))):
        raise DataError(f"data.val: the set {taken!r} is what is held out of data.source; accepted: another name")
    wanted = [_wanted(entries, config, tokenizer, config.val_fraction) for entries in groups.values()]
    named = {name: _wanted_whole(entries, config, tokenizer) for name, entries in _named(config).items()}
    _build_missing([*wanted, *itertools.chain(*named.values())], config.tokenizer, progress)
    train = TokenSet(*(one.target / "train" for one in wanted), shares=shares)
    val = {"val": TokenSet(*(one.target / "val" for one in wanted))}
    val |= {name: TokenSet(one.target / "val") for name, one in zip(own, wanted, strict=False)}
    val |= {name: TokenSet(*(one.target / "val" for one in whole)) for name, whole in named.items()}
    return TokenData(train, {name: one for name, one in val.items() if one.n_documents}, tokenizer)


def prepare_whole(entries: Sequence[str], config: DataSettings, progress: Progress | None = None) -> TokenSet:
    """All documents of files, folders or data sets as one token set, nothing held out. Raises DataError."""
    tokenizer = open_tokenizer(config.tokenizer)
    wanted = _wanted_whole(entries, config, tokenizer)
    _build_missing(wanted, config.tokenizer, progress)
    token_set = TokenSet(*(one.target / name for one in wanted for name in SETS))
    if not token_set.n_documents:
        raise DataError(f"{', '.join(entries)}: no documents; accepted: at least one")
    return token_set


def _named(config: DataSettings) -> dict[str, Sequence[str]]:
    """The further validation sets of `data.val`, by name."""
    return {name: [e] if isinstance(e, str) else e for name, e in (getattr(config, "val", None) or {}).items()}


def _wanted_whole(entries: Sequence[str], config: DataSettings, tokenizer: Tokenizer) -> list[_Wanted]:
    """Entries of which nothing is held out, each on its own where one of them is a data set."""
    groups = [[entry] for entry in entries] if any(is_data_set(entry) for entry in entries) else [entries]
    return [_wanted(group, config, tokenizer, 1.0) for group in groups]


def _wanted(entries: Sequence[str] | None, config: DataSettings, tokenizer: Tokenizer, val_fraction: float) -> _Wanted:
    if entries is not None and len(entries) == 1 and is_data_set(entries[0]):
        return _Wanted(open_data_set(entries[0], tokenizer))
    source = open_source(entries, column=getattr(config, "text_column", TEXT_COLUMN))
    settings = f"{_LAYOUT}|{source.fingerprint()}|{tokenizer.fingerprint}|{val_fraction!r}"
    name = hashlib.blake2b(settings.encode(), digest_size=12).hexdigest()
    return _Wanted(cache_folder(config.cache_dir) / name, source, val_fraction)


def _build_missing(wanted: Sequence[_Wanted], tokenizer: str, progress: Progress | None) -> None:
    """Build what is not there, or not whole; progress goes through all of it."""
    total = sum(one.source.n_bytes for one in wanted if one.source is not None and not one.target.exists())
    done = 0
    for one in wanted:
        if one.source is None or _is_whole(one.target):
            continue
        with disk_errors("data.cache_dir", one.target.parent):
            one.target.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(one.target.with_name(f".{one.target.name}.lock")):
                if not _is_whole(one.target):  # nobody else built it meanwhile
                    remove_left_over(one.target)
                    shutil.rmtree(one.target, ignore_errors=True)  # damaged: a disk lost data, a hand removed files

                    def tell(now: int, _: int, before: int = done) -> None:
                        if progress is not None:
                            progress(before + now, max(total, before + now))

                    _build(one.source, one, tokenizer, tell)
                    done += one.source.n_bytes


def _build(source: Source, wanted: _Wanted, tokenizer: str, progress: Progress) -> None:
    with built_whole(wanted.target) as folder:
        job = Job(str(folder), tokenizer, fast=False, split=Split.of(wanted.val_fraction), skip_bad=False)
        write_token_sets(source, job, progress=progress)
        check_unchanged(source)


def cache_folder(configured: str | None) -> Path:
    """The configured folder, else HYMO_CACHE, else ~/.cache/hymo."""
    return expanded(configured or os.environ.get("HYMO_CACHE") or "~/.cache/hymo").absolute()


def _entries(source: Sequence[Any] | None) -> tuple[dict[str, str] | None, dict[str, Fraction] | None]:
    """Paths by name and, where the entries have weights, the share of each."""
    if source is None:
        return None, None
    paths: dict[str, str] = {}
    weights: dict[str, Any] = {}
    for entry in source:
        path, weight = (str(entry), None) if isinstance(entry, str | Path) else (str(entry.path), entry.weight)
        name = _unused_name(path, paths)
        paths[name], weights[name] = path, weight
    if all(weight is None for weight in weights.values()):
        return paths, None
    for name, weight in weights.items():
        if weight is None or not weight > 0:
            raise DataError(
                f"data.source: {paths[name]!r} has weight {weight}; accepted: above 0 for all sources, or for none"
            )
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    return paths, {name: weight / sum(exact.values()) for name, weight in exact.items()}


def _unused_name(path: str, taken: Mapping[str, str]) -> str:
    stem = Path(path).name.split(".")[0] or "source"
    names = (stem, *(f"{stem}-{number}" for number in range(2, len(taken) + 3)))
    return next(name for name in names if name not in taken)


def _is_whole(target: Path) -> bool:
    """Whether both token sets are there and undamaged."""
    try:
        for name in SETS:
            TokenSet(target / name)
    except DataError:
        return False
    return True
