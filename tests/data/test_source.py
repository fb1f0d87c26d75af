import codecs
import json
import os
import re
import tempfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

import hymo.data.readers as readers
from hymo.config_io import load_config
from hymo.data import (
    ByteTokenizer,
    DataError,
    FileTokenizer,
    build,
    open_source,
    open_tokenizer,
    read_documents,
)
from hymo.data.dataset import open_data_set
from hymo.data.prepare import prepare
from hymo.observe.watchdog import Watchdog
from hymo.runs import absolute_path, write_config


def write_texts(folder: Path, count: int) -> Path:
    folder.mkdir(parents=True)
    for i in range(count):
        (folder / f"{i:03}.txt").write_bytes(b"text number %d" % i)
    return folder


def texts(entries) -> list[bytes]:
    return [document.text for document in open_source(entries).documents()]


def test_default_source_is_the_standard_library_sorted():
    source = open_source(None)
    names = [file.name for file in source.files]
    assert names == sorted(names)
    assert "json/decoder.py" in names
    assert not any("site-packages" in name or "__pycache__" in name for name in names)
    assert all(name.endswith(".py") for name in names)
    assert source.n_bytes > 5_000_000


def test_folder_is_walked_in_sorted_order_and_passes_over_binaries_and_hidden_files(tmp_path: Path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "z.txt").write_bytes(b"last")
    (tmp_path / "b" / "a.weird").write_bytes(b"first")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / ".git" / "config").write_bytes(b"hidden")
    (tmp_path / "empty.txt").write_bytes(b"")
    assert texts([tmp_path]) == [b"first", b"last"]


def test_linked_folders_are_followed_once(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_bytes(b"x")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    assert texts([tmp_path]) == [b"x"]


def test_invalid_utf8_is_kept_and_marks_are_handled(tmp_path: Path):
    (tmp_path / "1.txt").write_bytes(b"ok \xff\xfe\xc3 bytes")
    (tmp_path / "2.txt").write_bytes(codecs.BOM_UTF8 + "é".encode())
    (tmp_path / "3.txt").write_bytes("né".encode("utf-16"))
    assert texts([tmp_path]) == [b"ok \xff\xfe\xc3 bytes", "é".encode(), "né".encode()]


def test_jsonl_and_parquet(tmp_path: Path):
    rows = ["one", "", "zwei ü", "lone \ud800"]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": row, "id": 1}) for row in rows) + "\n\n")
    table = pyarrow.table({"text": ["p1", None, "p2"], "n": [1, 2, 3]})
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    documents = list(open_source([tmp_path]).documents())
    assert [document.text for document in documents] == [
        b"one",
        "zwei ü".encode(),
        b"lone \xed\xa0\x80",
        b"p1",
        b"p2",
    ]
    assert [document.name for document in documents] == [
        "a.jsonl@0",
        "a.jsonl@47",
        "a.jsonl@80",
        "b.parquet:1",
        "b.parquet:3",
    ]


def test_a_long_text_file_becomes_several_documents_cut_at_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(readers, "MAX_DOCUMENT_BYTES", 16)
    path = tmp_path / "long.txt"
    content = b"line one\nline two\n" + "é".encode() * 20 + b"\nend"
    path.write_bytes(content)
    documents = list(read_documents(path))
    assert b"".join(document.text for document in documents) == content
    assert documents[0].text == b"line one\n"
    assert all(len(document.text) <= 16 and document.text.decode() for document in documents)
    assert sum(document.source_bytes for document in documents) == len(content)


def test_fingerprint_follows_the_files(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"aaa")
    first = open_source([tmp_path]).fingerprint()
    assert open_source([tmp_path]).fingerprint() == first
    os.utime(tmp_path / "a.txt", ns=(1, 1))
    touched = open_source([tmp_path]).fingerprint()
    (tmp_path / "b.txt").write_bytes(b"b")
    assert len({first, touched, open_source([tmp_path]).fingerprint()}) == 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "bad.jsonl",
            b'{"text": "a"}\n{"body": "b"}\n',
            r"bad.jsonl:2: no field 'text'; found body; accepted: the one .* data.text_column .*--text-column NAME",
        ),
        ("bad.jsonl", b'{"text": "a"}\n{"te', r"bad.jsonl:2: not valid JSON"),
        ("bad.jsonl", b'{"text": 3}\n', r"bad.jsonl:1: 'text' is a number; accepted: an object with a string"),
        ("bad.jsonl", b"[1]\n", r"bad.jsonl:1: found a list"),
        ("bad.jsonl", b'{"text": "\xff"}\n', r"bad.jsonl:1: not valid JSON"),
        ("bad.parquet", b"PAR1 half written", r"bad.parquet: not a whole Parquet file"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes, message: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        texts([tmp_path])
    assert "\n" not in str(error.value)


def test_parquet_without_the_column_or_of_another_type(tmp_path: Path):
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"], "id": [7]}), tmp_path / "a.parquet")
    found = r"a.parquet: no column 'text'; found body \(string\), id \(int64\); accepted: .*--text-column NAME"
    with pytest.raises(DataError, match=found):
        texts([tmp_path])
    assert [document.text for document in open_source([tmp_path], column="body").documents()] == [b"x"]
    pyarrow.parquet.write_table(pyarrow.table({"text": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="the column 'text' is int64"):
        texts([tmp_path])


def test_bad_entries(tmp_path: Path):
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0")
    for entry, message in [
        (tmp_path, "holds no text"),
        (tmp_path / "nowhere", "does not exist"),
        ("https://example.org/x.txt", "is a URL, which is not read"),
        ("s3://bucket/x", "is a URL"),
    ]:
        with pytest.raises(DataError, match=message) as error:
            open_source([entry])
        assert str(error.value).startswith("data.source: ")
        assert re.search(re.escape(str(entry)), str(error.value))
    with pytest.raises(DataError, match="the list is empty"):
        open_source([])


def test_a_home_folder_of_nobody(settings):
    place = "~nobody-of-that-name/x"
    calls = [
        lambda: open_source([place]),
        lambda: prepare(settings([place])),
        lambda: prepare(settings(None, cache_dir=place)),
        lambda: open_tokenizer(place),
        lambda: FileTokenizer(place),
        lambda: open_data_set(place, ByteTokenizer()),
        lambda: absolute_path(place),
    ]
    for call in calls:
        with pytest.raises(DataError, match=f"^'{place}': found a ~ without a home folder; accepted: "):
            call()


def test_a_data_set_is_no_text_but_a_folder_with_a_data_json_may_be(tmp_path: Path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "data.json").write_text('[{"text": "a record"}]')
    assert texts([tmp_path / "text"]) == [b"a record"]
    build([tmp_path / "text"], tmp_path / "A", tokenizer="bytes", workers=0)
    for entries in ([tmp_path / "A"], [tmp_path / "text", tmp_path / "A"]):
        with pytest.raises(DataError, match=r"data.source: '.*A' is a data set that hymo data build made; accepted: "):
            open_source(entries)


def test_a_data_set_that_is_not_whole_is_no_text(tmp_path: Path):
    """Its tokenizer and manifests are JSON, on which a run was trained."""
    built = tmp_path / "A"
    build([write_texts(tmp_path / "text", 3)], built, tokenizer="bytes", workers=0)
    for content in (None, b"", b"\0" * 9, b'{"a": '):
        (built / "data.json").unlink() if content is None else (built / "data.json").write_bytes(content)
        for entry in (built, built / "train", built / "val"):
            with pytest.raises(DataError, match=r"'.*A.*' is a part of a data set, or one whose data.json is empty"):
                open_source([entry])
    for name in ("train", "val"):
        (built / name / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"whose data.json is empty, broken"):
        open_source([built])
    long = json.dumps([{"text": "x" * 9000}])
    for content in ("{}", '{"text": "a"}\n{"text": "b"}', long):
        (tmp_path / "text" / "data.json").write_text(content)
        open_source([tmp_path / "text"])


def test_what_hymo_itself_wrote_in_a_folder_is_no_text_of_it(tmp_path: Path, settings, monkeypatch):
    """A run below its own source changed it: the run could not be resumed, the next one read the first one's files."""
    write_texts(tmp_path / "here", 20)
    monkeypatch.chdir(tmp_path / "here")
    before = open_source(["."]).fingerprint()
    run = Path("runs/tiny-1")
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    for name in ("config.yaml", "metrics.jsonl", "samples.jsonl", "checkpoints/step-1/manifest.json"):
        (run / name).write_text('{"text": "a row"}')
    (Path("new.part") / "journal").mkdir(parents=True)
    for name in ("plan.json", ".lock", "tokenizer.json"):
        (Path("new.part") / name).write_text("{}")
    build(["."], "set", tokenizer="bytes", workers=0)
    prepare(settings(["."], cache_dir="cache"))
    assert open_source(["."]).fingerprint() == before
    assert len(texts(["."])) == 20
    assert texts([run])  # named, it is read
    Path("site").mkdir()
    for name in ("config.yaml", "config.json", "metrics.jsonl"):  # another program's
        Path("site", name).write_text('{"text": "a row"}')
    assert len(texts(["."])) == 23


def test_a_run_is_known_from_its_start_and_so_are_stacks_and_exports(tmp_path: Path):
    before = open_source([write_texts(tmp_path / "here", 2)]).fingerprint()
    write_config(tmp_path / "here" / "begun", load_config("tiny"))
    watchdog = Watchdog(tmp_path / "here" / "failed")
    watchdog._append("a start that failed", "stacks")
    export = tmp_path / "here" / "exported"
    export.mkdir()
    (export / "config.json").write_text(json.dumps({"architectures": ["HyMoForCausalLM"], "model_type": "hymo"}))
    assert open_source([tmp_path / "here"]).fingerprint() == before
    (tmp_path / "here" / "failed" / "stacks" / "notes.txt").write_text("a text")
    assert open_source([tmp_path / "here"]).fingerprint() != before


@pytest.fixture
def ordinary_user():
    """Root reads everything, so for the test it becomes somebody else."""
    if os.name == "nt":
        pytest.skip("permissions work otherwise on Windows")
    if os.geteuid() == 0:
        os.seteuid(65534)
        yield
        os.seteuid(0)
    else:
        yield


@pytest.mark.parametrize("whole_folder", [False, True])
def test_unreadable_file(tmp_path: Path, ordinary_user: None, whole_folder: bool):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "locked.txt")
        path.write_bytes(b"secret")
        path.chmod(0)
        if whole_folder:
            Path(folder).chmod(0)
        with pytest.raises(DataError, match=r"cannot read '.*locked.txt': Permission denied"):
            texts([path])
        Path(folder).chmod(0o700)
