"""From `data.*` settings to token sets: built once into a cache folder, or opened where `hymo data build` made them."""

import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock

from hymo.data.dataset import is_data_set, open_data_set
from hymo.data.parts import SETS, Job, Progress, Split, write_token_sets
from hymo.data.readers import DataError
from hymo.data.shards import TokenSet, built_whole, disk_errors, remove_left_over
from hymo.data.source import Source, check_unchanged, open_source
from hymo.data.tokenize import Tokenizer, open_tokenizer

_LAYOUT = "hymo-cache-2"  # part of every cache key: raised when what is written changes


class DataSettings(Protocol):
    """The part of the configuration that is read here (hymo.config.DataConfig has it).

    source: None, or entries that are each a path or have a `path` and a `weight`. val: paths by name of further
    validation sets (may be missing).
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
class _Opener:
    """Opens the folders of one source at a time, building them first where the cache has none that fits."""

    tokenizer_choice: str
    tokenizer: Tokenizer
    root: Path
    progress: Progress | None

    def folder(self, entries: Sequence[str] | None, val_fraction: float) -> Path:
        """A folder with whole token sets "train" and "val" of a source."""
        if entries is not None and len(entries) == 1 and is_data_set(entries[0]):
            return open_data_set(entries[0], self.tokenizer)
        source = open_source(entries)
        settings = f"{_LAYOUT}|{source.fingerprint()}|{self.tokenizer.fingerprint}|{val_fraction!r}"
        target = self.root / hashlib.blake2b(settings.encode(), digest_size=12).hexdigest()
        with disk_errors("data.cache_dir", self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            with FileLock(self.root / f".{target.name}.lock"):
                if not _is_whole(target):
                    remove_left_over(target)
                    self._build(source, val_fraction, target)
        return target

    def _build(self, source: Source, val_fraction: float, target: Path) -> None:
        with built_whole(target) as folder:
            job = Job(str(folder), self.tokenizer_choice, fast=False, split=Split.of(val_fraction), skip_bad=False)
            write_token_sets(source, job, val_fraction, progress=self.progress)
            check_unchanged(source)


def prepare(config: DataSettings, progress: Progress | None = None) -> TokenData:
    """Open the token sets of `config.source`, building what the cache does not have.

    progress(done_bytes, total_bytes) is called while a source is built, and not at all when nothing is. Any number of
    processes may call this at once: one builds, the others wait for it. Raises DataError.
    """
    tokenizer = open_tokenizer(config.tokenizer)
    opener = _Opener(config.tokenizer, tokenizer, cache_folder(config.cache_dir), progress)
    paths, shares = _entries(config.source)
    groups: Mapping[str, Sequence[str] | None] = {"all": None} if paths is None else {"all": list(paths.values())}
    if paths is not None and (shares is not None or any(is_data_set(path) for path in paths.values())):
        groups = {name: [path] for name, path in paths.items()}  # each on its own
    folders = {name: opener.folder(entries, config.val_fraction) for name, entries in groups.items()}
    train = TokenSet(*(folder / "train" for folder in folders.values()), shares=shares)
    val = {"val": TokenSet(*(folder / "val" for folder in folders.values()))}
    if len(folders) > 1:
        val |= {f"val_{name}": TokenSet(folder / "val") for name, folder in folders.items()}
    for name, entries in (getattr(config, "val", None) or {}).items():
        val[name] = TokenSet(opener.folder([entries] if isinstance(entries, str) else entries, 1.0) / "val")
    return TokenData(train, {name: one for name, one in val.items() if one.n_documents}, tokenizer)


def cache_folder(configured: str | None) -> Path:
    """HYMO_CACHE if set, else the configured folder, else ~/.cache/hymo."""
    return Path(os.environ.get("HYMO_CACHE") or configured or "~/.cache/hymo").expanduser().absolute()


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
    """Whether both sets are there; a damaged folder (a disk that lost data, a hand that removed files) is cleared."""
    if not target.exists():
        return False
    try:
        for name in SETS:
            TokenSet(target / name)
    except DataError:
        shutil.rmtree(target)
        return False
    return True
