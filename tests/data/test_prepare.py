import contextlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from fractions import Fraction
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from hymo.data import (
    DataError,
    TokenSet,
    build,
    cache_folder,
    count_samples,
    left_over_tokens,
    make_batch,
    sample_order,
)
from hymo.data.parts import digests
from hymo.data.prepare import prepare

needs_posix = pytest.mark.skipif(os.name == "nt", reason="signals and limits of POSIX")


def write_texts(folder: Path, count: int) -> Path:
    folder.mkdir(parents=True)
    for i in range(count):
        (folder / f"{i:03}.txt").write_bytes(f"text number {i}\n".encode() * (1 + i % 5))
    return folder


def documents(data: TokenSet) -> list[bytes]:
    return [bytes(data.document(i)[:-1].astype("uint8")) for i in range(data.n_documents)]


def test_every_document_is_on_one_side(tmp_path, settings):
    source = write_texts(tmp_path / "text", 200)
    (source / "copy.txt").write_bytes((source / "007.txt").read_bytes())
    data = prepare(settings([source]))
    train, val = documents(data.train), documents(data.val["val"])
    assert sorted(train + val) == sorted(path.read_bytes() for path in source.iterdir())
    assert 20 <= len(val) <= 60  # 20 % of 201
    assert not set(train) & set(val)  # equal texts never on both sides


def test_the_split_is_of_the_content_not_of_the_place(tmp_path, settings):
    a = prepare(settings([write_texts(tmp_path / "a", 50)]))
    b = prepare(settings([write_texts(tmp_path / "moved" / "b", 50)]))
    assert a.train.folder != b.train.folder
    assert a.train.fingerprint == b.train.fingerprint
    assert a.val["val"].fingerprint == b.val["val"].fingerprint != a.train.fingerprint


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
@pytest.mark.parametrize("count", [2, 3, 10])
def test_both_sides_have_a_document(tmp_path, settings, fraction, count):
    data = prepare(settings([write_texts(tmp_path / "text", count)], val_fraction=fraction))
    assert (data.val["val"] if fraction < 0.5 else data.train).n_documents == 1
    assert data.train.n_documents + data.val["val"].n_documents == count


@pytest.mark.parametrize("text", [b"line %d of this\n" * 100, "日本語".encode() * 200])
def test_a_lone_document_is_cut(tmp_path, settings, text):
    path = tmp_path / "one.txt"
    path.write_bytes(text)
    data = prepare(settings([path]))
    [train], [val] = documents(data.train), documents(data.val["val"])
    assert train + val == text
    assert 0.75 < len(train) / len(text) < 0.85
    assert train.decode()
    assert val.decode()


def test_built_once_and_again_when_the_source_changes(tmp_path, settings):
    source = write_texts(tmp_path / "text", 20)
    calls: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        calls.append((done, total))

    first = prepare(settings([source]), progress)
    total = sum(path.stat().st_size for path in source.iterdir())
    assert calls[-1] == (total, total)
    assert calls == sorted(calls)
    calls.clear()
    again = prepare(settings([source]), progress)
    assert calls == []
    assert again.train.fingerprint == first.train.fingerprint
    (source / "new.txt").write_bytes(b"new")
    assert prepare(settings([source]), progress).train.folder != first.train.folder
    assert calls
    other = prepare(settings([source], val_fraction=0.5))
    assert other.val["val"].n_documents > first.val["val"].n_documents
    assert documents(first.train) == documents(again.train)  # the old set is untouched


def test_another_tokenizer_has_its_own_shards(tmp_path, settings, bpe_file):
    source = write_texts(tmp_path / "text", 20)
    plain = prepare(settings([source]))
    bpe = prepare(settings([source], tokenizer=str(bpe_file)))
    assert bpe.train.n_bytes == plain.train.n_bytes
    assert bpe.train.token_bytes_scale == 1.0
    assert bpe.train.n_tokens < plain.train.n_tokens
    assert bpe.tokenizer.decode(bpe.train.document(0)) == plain.tokenizer.decode(plain.train.document(0))


def test_a_damaged_cache_is_built_again(tmp_path, settings):
    source = write_texts(tmp_path / "text", 10)
    first = prepare(settings([source]))
    before = documents(first.train)
    (first.train.folder / "part-00000.ends").write_bytes(b"")
    assert documents(prepare(settings([source])).train) == before


def test_a_whole_cache_is_read_without_writing(tmp_path, settings, monkeypatch):
    source = write_texts(tmp_path / "text", 10)
    first = prepare(settings([source]))

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(sys.modules[prepare.__module__], "FileLock", refuse)
    assert prepare(settings([source])).train.fingerprint == first.train.fingerprint


@needs_posix
def test_a_cache_that_is_cleared_and_built_again_under_a_running_job(tmp_path, settings):
    source = write_texts(tmp_path / "text", 10)
    running = prepare(settings([source])).train
    before = documents(running)
    shutil.rmtree(tmp_path / "cache")
    (source / "000.txt").write_bytes(b"other text")
    assert documents(prepare(settings([source])).train) != before
    assert documents(running) == before


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("HYMO_CACHE", raising=False)
    assert cache_folder(None) == Path.home() / ".cache" / "hymo"
    assert cache_folder(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HYMO_CACHE", str(tmp_path / "env"))
    assert cache_folder(None) == tmp_path / "env"
    assert cache_folder(str(tmp_path)) == tmp_path  # what is said for this run wins


def test_errors(tmp_path, settings):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").write_bytes(b"")
    with pytest.raises(DataError, match="every document is empty"):
        prepare(settings([tmp_path / "empty"]))
    (tmp_path / "file").write_bytes(b"")
    source = write_texts(tmp_path / "text", 3)
    with pytest.raises(DataError, match=r"data.cache_dir: cannot write '.*file/cache': Not a directory"):
        prepare(settings([source], cache_dir=str(tmp_path / "file" / "cache")))


def test_a_source_that_changes_while_it_is_read(tmp_path, settings):
    source = write_texts(tmp_path / "text", 3)

    def write_more(done: int, total: int) -> None:
        (source / "000.txt").write_bytes(b"longer than it was before, by far")

    with pytest.raises(DataError, match="changed while it was read"):
        prepare(settings([source]), write_more)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


BUILD = """
    import resource, sys, time
    from types import SimpleNamespace
    from hymo.data import DataError
    from hymo.data.prepare import prepare

    source, cache, mode = sys.argv[1:]
    if mode == "full":  # writing past the limit fails as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    def progress(done, total):
        if done:
            print("building", flush=True)
            time.sleep(60 if mode == "slow" else 0)
    config = SimpleNamespace(source=[source], tokenizer="bytes", val_fraction=0.2, cache_dir=cache)
    try:
        print(prepare(config, progress).train.fingerprint)
    except DataError as error:
        sys.exit(str(error))
"""


def start_build(source: Path, cache: Path, mode: str) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(BUILD), str(source), str(cache), mode]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@needs_posix
def test_a_full_disk_is_an_error_that_leaves_nothing(tmp_path, settings):
    source = write_texts(tmp_path / "text", 3)
    kept = prepare(settings([source])).train
    (source / "big.txt").write_bytes(b"many bytes " * 5000)
    process = start_build(source, tmp_path / "cache", "full")
    _, errors = process.communicate(timeout=150)
    assert process.returncode == 1
    assert errors.count("\n") == 1
    assert "no room for token shards in" in errors
    assert "(data.cache_dir, HYMO_CACHE, --out)" in errors
    assert not list((tmp_path / "cache").glob("*.tmp"))
    assert documents(TokenSet(kept.folder)) == documents(kept)
    prepare(settings([source]))  # with room, all is well


@needs_posix
def test_kill_9_while_building_then_two_builders_at_once(tmp_path, settings):
    source = write_texts(tmp_path / "text", 30)
    cache = tmp_path / "cache"
    process = start_build(source, cache, "slow")
    assert process.stdout is not None
    assert process.stdout.readline() == "building\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list(cache.glob(".*.tmp"))
    builders = [start_build(source, cache, "plain") for _ in range(2)]
    outputs = [builder.communicate(timeout=150)[0].split() for builder in builders]
    assert [output.count("building") > 0 for output in outputs].count(True) == 1  # the other waited for it
    assert outputs[0][-1] == outputs[1][-1] == prepare(settings([source])).train.fingerprint
    assert not list(cache.glob(".*.tmp"))


def test_without_a_lock_two_builders_do_no_harm(tmp_path, settings, monkeypatch):
    # The lock only saves work: where a file system has none, the second rename stands back.
    source = write_texts(tmp_path / "text", 10)
    nested: list[str] = []

    def build_again(done: int, total: int) -> None:
        if not nested:
            nested.append("begun")
            nested.append(prepare(settings([source])).train.fingerprint)

    module = sys.modules[prepare.__module__]
    monkeypatch.setattr(module, "FileLock", lambda path: contextlib.nullcontext())
    monkeypatch.setattr(module, "remove_left_over", lambda target: None)
    assert prepare(settings([source]), build_again).train.fingerprint == nested[1]


def test_the_held_out_hash_has_its_golden_value():
    digest, held_out = digests(b"hello")
    assert (digest.hex(), held_out) == ("46fb7408d4f285228f4af516ea25851b", 14131953147721378844)


def test_the_default_source_opens_again_at_once(settings):
    config = settings(None, val_fraction=0.02)
    prepare(config)
    began = time.perf_counter()
    data = prepare(config)
    assert time.perf_counter() - began < 2
    assert data.train.n_documents > 300


class Weighted:
    def __init__(self, path: Path, weight: float | None):
        self.path, self.weight = str(path), weight


def test_a_mix_has_the_shares_and_its_own_validation_sets(tmp_path, settings):
    big, small = write_texts(tmp_path / "big", 60), write_texts(tmp_path / "small", 20)
    config = settings(None)
    config.source = [Weighted(big, 0.3), Weighted(small, 0.7)]
    data = prepare(config)
    assert [(s.name, s.share) for s in data.train.sources] == [("big", Fraction(3, 10)), ("small", Fraction(7, 10))]
    alone = {path: prepare(settings([path])) for path in (big, small)}
    assert documents(data.train) == documents(alone[big].train) + documents(alone[small].train)
    assert sorted(data.val) == ["val", "val_big", "val_small"]
    assert data.val["val"].n_documents == data.val["val_big"].n_documents + data.val["val_small"].n_documents
    order = sample_order(data.train, 8, 1, seed=3)
    assert order.n_samples == count_samples(data.train, 8, 1)
    drawn = [order.index(p) < count_samples(alone[big].train, 8, 1) for p in range(1000)]
    assert drawn.count(True) == 300
    batch = make_batch(data.train, order, list(range(200)), 8, 1)
    texts_of_big = set(b" ".join(documents(alone[big].train)))
    for row, from_big in zip(batch.tokens_BL.tolist(), drawn[:200], strict=True):
        source = alone[big if from_big else small].train
        assert bytes(t for t in row if t < 256) in b"".join(documents(source)), texts_of_big
    reweighted = settings(None)
    reweighted.source = [Weighted(big, 0.4), Weighted(small, 0.6)]
    assert prepare(reweighted).train.fingerprint != data.train.fingerprint


def test_left_over_tokens_of_a_mix_are_counted_by_source(tmp_path, settings):
    a, b = write_texts(tmp_path / "a", 30), write_texts(tmp_path / "b", 11)
    config = settings(None)
    config.source = [Weighted(a, 1), Weighted(b, 1)]
    data = prepare(config)
    parts = [prepare(settings([path])).train for path in (a, b)]
    assert left_over_tokens(data.train, 16, 2) == sum(left_over_tokens(part, 16, 2) for part in parts)
    with pytest.raises(DataError, match=r"data.source: 'b': \d+ tokens of training text are less than one sample"):
        count_samples(data.train, parts[1].n_tokens, 2)


def test_weights_for_all_or_none(tmp_path, settings):
    config = settings(None)
    for weight in (None, 0, -1.5):
        config.source = [
            Weighted(write_texts(tmp_path / f"a{weight}", 3), 1),
            Weighted(tmp_path / f"a{weight}", weight),
        ]
        with pytest.raises(DataError, match=f"has weight {weight}; accepted: above 0 for all sources, or for none"):
            prepare(config)


def test_named_validation_sets(tmp_path, settings):
    source, other = write_texts(tmp_path / "text", 20), write_texts(tmp_path / "other", 4)
    data = prepare(settings([source], val={"other": [str(other)]}))
    assert sorted(data.val) == ["other", "val"]
    assert documents(data.val["other"]) == [path.read_bytes() for path in sorted(other.iterdir())]


def test_data_sets_beside_others_in_a_validation_set_are_read_as_such(tmp_path, settings):
    """A data set was one only where it stood alone: beside other paths its manifests were read as text."""
    source, other = write_texts(tmp_path / "text", 20), write_texts(tmp_path / "other", 4)
    a = build([write_texts(tmp_path / "a", 30)], tmp_path / "A", tokenizer="bytes", val_fraction=0.2, workers=0).folder
    b = build([write_texts(tmp_path / "b", 40)], tmp_path / "B", tokenizer="bytes", val_fraction=0.2, workers=0).folder
    val = {"both": [str(a), str(b)], "mixed": [str(other), str(a)]}
    data = prepare(settings([source], val=val))
    held_out = {folder: documents(TokenSet(folder / "val")) for folder in (a, b)}
    texts = [path.read_bytes() for path in sorted(other.iterdir())]
    assert documents(data.val["both"]) == held_out[a] + held_out[b]
    assert documents(data.val["mixed"]) == texts + held_out[a]


def test_data_sets_of_one_tokenizer_in_several_folders_are_mixed(tmp_path, settings):
    """The second was built with the first one's tokenizer, which there has another name."""
    text = write_texts(tmp_path / "text", 30)
    a = build([text], tmp_path / "A", vocab_size=300, val_fraction=0.2, workers=0)
    b = build([text], tmp_path / "B", tokenizer=a.tokenizer, val_fraction=0.2, workers=0)
    for tokenizer in (a.tokenizer, b.tokenizer):
        data = prepare(settings([a.folder, b.folder], tokenizer=tokenizer, val={"more": [str(b.folder), str(text)]}))
        assert data.train.n_documents + data.val["val"].n_documents == 60
        assert data.val["more"].n_documents == 30 + data.val["val_B"].n_documents


def test_a_data_set_may_lie_below_the_home_folder(tmp_path, settings, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    built = build([write_texts(tmp_path / "a", 30)], tmp_path / "A", tokenizer="bytes", val_fraction=0.2, workers=0)
    assert prepare(settings(["~/A"])).train.folder == built.folder / "train"


def test_a_validation_set_takes_no_name_of_what_is_held_out(tmp_path, settings):
    """`val_a` of the user's replaced what is held out of the source a, without a word."""
    config = settings(None)
    config.source = [Weighted(write_texts(tmp_path / name, 20), 1) for name in ("a", "b")]
    for name in ("val", "val_a"):
        config.val = {name: [str(tmp_path / "b")]}
        with pytest.raises(
            DataError, match=f"data.val: the set '{name}' is what is held out of data.source; accepted: "
        ):
            prepare(config)
    config.val = {"val_c": [str(tmp_path / "b")]}
    assert sorted(prepare(config).val) == ["val", "val_a", "val_b", "val_c"]


def word_level(path: Path, vocab_size: int) -> Path:
    words = {"[UNK]": 0, "</s>": 1} | {f"w{i}": i for i in range(2, vocab_size)}
    Tokenizer(models.WordLevel(words, unk_token="[UNK]")).save(str(path))
    return path


def test_a_mix_of_several_tokenizers_is_refused(tmp_path, settings, bpe_file):
    a = prepare(settings([write_texts(tmp_path / "a", 5)])).train.folder
    b = prepare(settings([tmp_path / "a"], tokenizer=str(bpe_file))).train.folder
    other = word_level(tmp_path / "tokenizer.json", 260)
    c = prepare(settings([tmp_path / "a"], tokenizer=str(other))).train.folder
    assert TokenSet(a).vocab_size == TokenSet(c).vocab_size
    for second in (b, c):
        with pytest.raises(DataError, match="the sources have several tokenizers"):
            TokenSet(a, second)


def test_progress_goes_through_all_sources_of_a_mix(tmp_path, settings):
    config = settings(None, val={"more": [str(write_texts(tmp_path / "more", 5))]})
    config.source = [Weighted(write_texts(tmp_path / name, 20), 1) for name in ("a", "b")]
    calls: list[tuple[int, int]] = []
    prepare(config, lambda done, total: calls.append((done, total)))
    size = sum(path.stat().st_size for path in tmp_path.glob("*/*.txt"))
    assert calls == sorted(calls)
    assert {total for _, total in calls} == {size}
    assert calls[-1][0] == size
