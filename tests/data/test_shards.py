import contextlib
import json
import os
import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hymo.data import ByteTokenizer, DataError, TokenSet
from hymo.data.shards import MANIFEST, PartWriter, built_whole, write_manifest
from hymo.errors import HyMoError

END = ByteTokenizer.end_id


def test_exactly_one_end_token_a_document_even_for_texts_that_look_like_one(token_set):
    texts = [b"one", b"", b"<|endoftext|>", b"\xff\x00", b"five"]
    data = token_set(texts)
    tokens, documents = data.read(0, data.n_tokens)
    expected = [[*text, END] for text in texts]
    assert tokens.tolist() == [token for part in expected for token in part]
    assert documents.tolist() == [i for i, part in enumerate(expected) for _ in part]
    assert (tokens == END).sum() == data.n_documents == 5
    assert [data.document(i).tolist() for i in range(5)] == expected
    assert [data.document_bytes(i) for i in range(5)] == [len(text) for text in texts]
    assert data.document_lengths().tolist() == [len(part) for part in expected]
    assert (data.n_bytes, data.token_bytes_scale) == (sum(map(len, texts)), 1.0)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=6), min_size=1, max_size=8), st.data())
def test_read_any_slice(token_set, tmp_path_factory, texts, draw):
    data = token_set(texts, name=tmp_path_factory.mktemp("slices").name)
    whole, numbers = data.read(0, data.n_tokens)
    start = draw.draw(st.integers(0, data.n_tokens))
    stop = draw.draw(st.integers(start, data.n_tokens))
    tokens, documents = data.read(start, stop)
    assert tokens.tolist() == whole[start:stop].tolist()
    assert documents.tolist() == numbers[start:stop].tolist()


def test_slices_across_parts(token_set, tmp_path):
    texts = [b"a", b"bc", b"", b"defg", b"h"]
    one = token_set(texts)
    parts = []
    for i, group in enumerate([texts[:2], texts[2:2], texts[2:3], texts[3:]]):
        part = token_set(group, name=f"part{i}")
        for kind in ("tokens", "ends", "bytes"):
            (part.folder / f"part-00000.{kind}").rename(tmp_path / f"part-0000{i}.{kind}")
        parts.append({"name": f"part-0000{i}", "n_tokens": part.n_tokens, "n_documents": part.n_documents})
    manifest = json.loads((one.folder / MANIFEST).read_text()) | {"parts": parts}
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    many = TokenSet(tmp_path)
    for start in range(one.n_tokens + 1):
        for stop in range(start, one.n_tokens + 1):
            for a, b in zip(one.read(start, stop), many.read(start, stop), strict=True):
                assert a.tolist() == b.tolist()
    assert [many.document(i).tolist() for i in range(5)] == [one.document(i).tolist() for i in range(5)]
    assert many.document_lengths().tolist() == one.document_lengths().tolist()


@pytest.fixture
def few_files():
    """This process may open ten files more, and no others."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 10, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def many_parts(folder, count=40):
    tokenizer, parts = ByteTokenizer(), []
    for number in range(count):
        writer = PartWriter(folder, number, tokenizer)
        writer.add(tokenizer.encode(b"part %d" % number), len(b"part %d" % number), b"%016d" % number)
        parts.append(writer.close())
    write_manifest(folder, tokenizer, parts)
    return folder


def test_a_set_of_more_files_than_may_be_open(tmp_path, few_files):
    """A source of a GiB has 256 parts, each of which kept three files open where 1,024 may be."""
    name = os.fsdecode(b"caf\xe9") if sys.platform == "linux" else "text"  # other systems have names in Unicode alone
    folder = many_parts(tmp_path / name)
    sets = [TokenSet(folder) for _ in range(3)]
    for data in sets:
        texts = [bytes(data.document(i)[:-1].astype("uint8")) for i in range(40)]
        assert texts == [b"part %d" % i for i in range(40)]
        assert [data.document_bytes(i) for i in range(40)] == [len(text) for text in texts]
        with pytest.raises(ValueError, match="read-only"):
            data._parts[0].tokens[0] = 1


def test_what_a_system_sets_against_a_set_is_named(tmp_path, few_files, monkeypatch):
    folder = many_parts(tmp_path / "set")

    def refuse(*args, **options):
        raise RuntimeError("unable to mmap 14 bytes from file: Cannot allocate memory (12)")

    monkeypatch.setattr(torch, "from_file", refuse)
    named = r"set cannot be read: Too many open files; this set has 80 files to map, of all files a process may"
    with pytest.raises(HyMoError, match=named + r" have \d+ open \(ulimit -n\)") as error:
        TokenSet(folder)
    assert not isinstance(error.value, DataError)  # a cache with damage is built anew; this is none


def test_a_part_larger_than_memory(token_set):
    data = token_set([b"some text"])
    path, n_tokens = data.folder / "part-00000.tokens", 1 << 41
    with contextlib.suppress(OSError), open(path, "r+b") as file:
        file.truncate(2 * n_tokens)
    if path.stat().st_size != 2 * n_tokens:
        pytest.skip("the file system has no sparse files of 4 TiB")
    manifest = json.loads((data.folder / MANIFEST).read_text())
    manifest["n_tokens"] = manifest["parts"][0]["n_tokens"] = n_tokens
    (data.folder / MANIFEST).write_text(json.dumps(manifest))
    huge = TokenSet(data.folder)
    assert bytes(huge.document(0)[:-1].astype("uint8")) == b"some text"
    assert huge.read(n_tokens - 3, n_tokens)[0].tolist() == [0, 0, 0]


def test_reading_past_the_end_is_refused(token_set):
    data = token_set([b"ab"])
    with pytest.raises(IndexError):
        data.read(0, 4)
    with pytest.raises(IndexError):
        data.document(1)


class Wide(ByteTokenizer):
    vocab_size = 70_000
    end_id = 69_999

    def __init__(self) -> None:
        self.token_bytes = np.zeros(self.vocab_size, dtype=np.int64)


def test_element_type_follows_the_vocabulary(token_set, tmp_path):
    assert token_set([b"ab"]).dtype.itemsize == 2
    writer = PartWriter(tmp_path / "wide", 0, Wide())
    writer.add(np.array([5, 65_536], dtype=np.uint32), 2, b"")
    write_manifest(tmp_path / "wide", Wide(), [writer.close()])
    wide = TokenSet(tmp_path / "wide")
    assert wide.dtype.itemsize == 4
    assert wide.read(0, 3)[0].tolist() == [5, 65_536, 69_999]


def test_fingerprint_is_of_the_content(token_set):
    a = token_set([b"one", b"two"], name="a")
    assert token_set([b"one", b"two"], name="b").fingerprint == a.fingerprint
    assert len({a.fingerprint, *(token_set(t, name=f"c{i}").fingerprint for i, t in enumerate(OTHERS))}) == 4


OTHERS = [[b"two", b"one"], [b"onet", b"wo"], [b"one", b"twp"]]


def test_damaged_sets_are_named(token_set):
    data = token_set([b"some text"])
    path = data.folder / "part-00000.tokens"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"part-00000.tokens has 19 bytes, its manifest says 20"):
        TokenSet(data.folder)
    path.unlink()
    with pytest.raises(DataError, match=r"part-00000.tokens is missing"):
        TokenSet(data.folder)
    (data.folder / MANIFEST).write_text('{"format": "hymo token set 9"}')
    with pytest.raises(DataError, match="the format is 'hymo token set 9'; this version reads"):
        TokenSet(data.folder)
    (data.folder / MANIFEST).write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        TokenSet(data.folder)
    (data.folder / MANIFEST).unlink()
    with pytest.raises(DataError, match="is no token set"):
        TokenSet(data.folder)


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    with contextlib.suppress(RuntimeError), built_whole(tmp_path / "x") as folder:
        (folder / "half").write_bytes(b"1")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with built_whole(tmp_path / "x") as first:
        (first / "who").write_text("first")
        with built_whole(tmp_path / "x") as second:
            (second / "who").write_text("second")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x" / "who").read_text() == "second"  # it was there first; the other stood back
