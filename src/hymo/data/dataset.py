"""`hymo data build`: a data set in a folder of its own, with its tokenizer, to be trained on by any number of runs.

    DIR/data.json        what it was made of; written last
    DIR/tokenizer.json   the tokenizer (none for bytes)
    DIR/train DIR/val    token sets
It is made in DIR.part and renamed when whole; a build that was killed goes on from there.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from hymo.cores import own_cores
from hymo.data.bpe import train_bpe
from hymo.data.parts import Job, NoTextError, Split, digests, units_of, write_token_sets
from hymo.data.readers import TEXT_COLUMN, DataError, Document, expanded, read_piece
from hymo.data.shards import disk_errors, sync_folder, write_synced
from hymo.data.source import DATA, Source, check_unchanged, open_source
from hymo.data.tokenize import SETTINGS, TOKENIZER, FileTokenizer, Tokenizer, open_tokenizer

FORMAT = "hymo data set 1"
PLAN = "plan.json"
_BPE_UNITS = 16  # places in the source that a BPE is trained on

StageProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class BuildReport:
    """What `build` made. n_bad: broken lines, records and files passed over; faults: the first few of them,
    and files of folders that are no text."""

    folder: Path
    tokenizer: str  # for data.tokenizer
    vocab_size: int
    encoder: str
    n_bad: int
    faults: list[str]


def read_description(folder: str | Path) -> dict[str, Any]:
    """data.json of a built folder. Raises DataError."""
    path = Path(folder, DATA)
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if not isinstance(described, dict) or described.get("format") != FORMAT:
        found = described.get("format") if isinstance(described, dict) else type(described).__name__
        raise DataError(f"{path}: the format is {found!r}; this version reads {FORMAT!r}")
    return described


def open_data_set(path: str | Path, tokenizer: Tokenizer) -> Path:
    """The folder of a built data set, whose tokenizer must be the given one. Raises DataError."""
    folder = expanded(path).absolute()
    described = read_description(folder)
    if described["tokenizer_fingerprint"] != tokenizer.fingerprint:
        right = folder / TOKENIZER if (folder / TOKENIZER).exists() else "bytes"
        raise DataError(f"data.tokenizer: found {tokenizer.name!r}; accepted: {right}, with which {folder} was built")
    return folder


def build(
    sources: Sequence[str | Path] | None,
    out: str | Path,
    *,
    tokenizer: str = "bpe",
    vocab_size: int = 32768,
    val_fraction: float = 0.02,
    workers: int | None = None,
    skip_bad: bool = False,
    text_column: str = TEXT_COLUMN,
    encoder: str = "auto",
    bpe_bytes: int = 256 << 20,
    progress: StageProgress | None = None,
) -> BuildReport:
    """Make a data set of text, JSONL, JSON (.gz, .zst) and Parquet files and hub data sets in the new folder `out`.

    tokenizer: "bpe" (trained here, `vocab_size` ids, on about `bpe_bytes` of the text), "bytes", or a tokenizers file.
    encoder: "tiktoken", "tokenizers", or "auto" (tiktoken where it can). workers: processes, by default one a core.
    skip_bad: count broken lines, records, row groups and files (cut off, damaged, in UTF-16 without a mark), and pass
    over them, instead of stopping at the first.
    text_column: the field or column of records that is their text. progress(stage, done_bytes, total_bytes).
    Called again after a kill it goes on; memory is bounded (about 300 MB a worker). Raises DataError.
    """
    target = Path(out).absolute()
    if target.exists():
        raise DataError(f"--out: {target} exists already; accepted: a folder that does not")
    if encoder not in ("auto", "tiktoken", "tokenizers"):
        raise DataError(f"--encoder: found {encoder!r}; accepted: auto, tiktoken, tokenizers")
    settings: dict[str, Any] = {"tokenizer": tokenizer, "val_fraction": val_fraction}
    settings |= {"skip_bad": skip_bad, "encoder": encoder}
    if tokenizer == "bpe":
        settings |= {"vocab_size": vocab_size, "bpe_bytes": bpe_bytes}
    source = open_source(sources, hub=True, column=text_column)
    work = target.with_name(f"{target.name}.part")
    with disk_errors("--out", target.parent, "what is built stays for the same command to go on"):
        work.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(work / ".lock", timeout=0):
                _agree_with_plan(work / PLAN, settings | {"source": source.fingerprint()})
                try:
                    report = _build_in(work, source, settings, workers, progress)
                except NoTextError:  # whatever is done holds nothing
                    shutil.rmtree(work, ignore_errors=True)
                    raise
                except DataError:
                    done = any((work / "journal").glob("*/*.json")) or (work / TOKENIZER).exists()
                    if not done:  # nothing to go on from: the next try may have other settings
                        shutil.rmtree(work, ignore_errors=True)
                    raise
        except Timeout:
            raise DataError(f"--out: another process is building {target} now") from None
        os.rename(work, target)
        sync_folder(target.parent)
        for name in (PLAN, ".lock", "journal"):  # last: without its plan, what is built would be of unknown settings
            path = target / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return BuildReport(target, str(target / TOKENIZER) if report[0] != "bytes" else "bytes", *report[1:])


def _agree_with_plan(path: Path, settings: dict[str, Any]) -> None:
    """Note the settings of a new build; refuse to go on with a build of other settings, or of unknown ones.

    --skip-bad may be added, as one does after a broken line: the parts that are done hold none.
    """
    before = json.loads(path.read_text()) if path.exists() else None
    if before is None and {found.name for found in path.parent.iterdir()} - {".lock", path.with_suffix(".tmp").name}:
        raise DataError(f"--out: {path.parent} holds files and no {path.name}; remove it, or give another --out")
    if before is None or before | {"skip_bad": True} == settings:
        write_synced(path.with_suffix(".tmp"), json.dumps(settings).encode())
        os.replace(path.with_suffix(".tmp"), path)
        return
    changed = [key for key in settings | before if settings.get(key) != before.get(key)]
    if changed:
        found = ", ".join(
            "its source was other files, or they have changed since"
            if key == "source"
            else f"{key} was {before.get(key)!r}, now {settings.get(key)!r}"
            for key in changed
        )
        raise DataError(f"--out: {path.parent} holds an unfinished build ({found}); remove it, or give another --out")


def _build_in(
    work: Path, source: Source, settings: dict[str, Any], workers: int | None, progress: StageProgress | None
) -> tuple[str, int, str, int, list[str]]:
    """Fill the working folder. Returns tokenizer name, vocabulary, encoder, number of bad lines, the first of them."""
    choice = _place_tokenizer(work, source, settings, progress)
    wanted = settings["encoder"]
    tokenizer = open_tokenizer(choice, fast=wanted != "tokenizers")
    fast = isinstance(tokenizer, FileTokenizer) and tokenizer.fast
    if wanted == "tiktoken" and not fast:
        raise DataError(
            "--encoder: found tiktoken, which is not installed or cannot read this tokenizer; accepted: auto"
        )
    split = Split.of(settings["val_fraction"])
    job = Job(str(work), choice, fast=fast, split=split, skip_bad=settings["skip_bad"])

    stage, last = "encode", 0

    def encoding(done: int, total: int) -> None:
        nonlocal stage, last
        if done < last:  # the share held out was far from the one asked for: write_token_sets begins again
            stage = "encode again, held out otherwise"
        last = done
        if progress is not None:
            progress(stage, done, total)

    n_workers = own_cores() if workers is None else workers
    results = write_token_sets(source, job, workers=n_workers, progress=encoding)
    check_unchanged(source)
    n_bad = sum(result.n_bad for result in results)
    hub = any(file.n_shards for file in source.files)  # whose sizes may be estimates
    encoder = "tiktoken" if fast else "bytes" if choice == "bytes" else "tokenizers"
    described = {
        "format": FORMAT,
        "source": source.described,
        "source_bytes": sum(result.source_bytes for result in results) if hub else source.n_bytes,
        "tokenizer": tokenizer.name,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "val_fraction": settings["val_fraction"],
        "encoder": encoder,
        "n_bad": n_bad,
    }
    write_synced(work / DATA, json.dumps(described, indent=1).encode())
    faults = [fault for result in results for fault in result.faults][:5]
    if n_binary := len(source.binary):
        faults.append(f"{n_binary:,} files that are no text (zero bytes), the first {source.binary[0]}")
    return tokenizer.name, tokenizer.vocab_size, encoder, n_bad, faults


def _place_tokenizer(work: Path, source: Source, settings: dict[str, Any], progress: StageProgress | None) -> str:
    """Put the tokenizer into the folder; returns what to open."""
    choice, place = settings["tokenizer"], work / TOKENIZER
    if choice == "bytes":
        return "bytes"
    if not place.exists():
        if choice == "bpe":
            content = _trained(source, settings, progress).encode()
        else:
            given = open_tokenizer(choice)
            assert isinstance(given, FileTokenizer)
            content = given.path.read_bytes()
            beside = {"eos_token": given.backend.id_to_token(given.end_id)}
            write_synced(work / SETTINGS, json.dumps(beside).encode())
        write_synced(place.with_suffix(".tmp"), content)
        os.replace(place.with_suffix(".tmp"), place)
    return str(place)


def _trained(source: Source, settings: dict[str, Any], progress: StageProgress | None) -> str:
    """A BPE trained on about bpe_bytes of the documents that are not held out, from places spread over the source."""
    every = units_of(source)
    units = every[:: max(1, len(every) // _BPE_UNITS)]
    total = source.n_bytes * len(units) // len(every)
    share = min(1.0, settings["bpe_bytes"] / max(1, total))
    split = Split.of(settings["val_fraction"])
    split = replace(split, cut_from=max(2, int(split.share * source.n_bytes)))  # a huge one is not left out
    on_bad = (lambda fault: None) if settings["skip_bad"] else None  # counted when the text is encoded
    read = 0

    def documents() -> Iterator[Document]:
        nonlocal read
        for whole in (document for unit in units for piece in unit for document in read_piece(piece, on_bad)):
            read += whole.source_bytes
            for document, held_out in split.sides(whole):
                digest, position = digests(document.text)
                held_out = position < split.threshold if held_out is None else held_out
                if len(every) == 1 or (not held_out and int.from_bytes(digest[:8], "little") < share * 2**64):
                    yield document
            if progress is not None:
                progress("train tokenizer", min(read, total), total)

    return train_bpe(documents(), settings["vocab_size"])
