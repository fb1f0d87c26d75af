"""Text that is no UTF-8 is never trained on without a word."""

import codecs
import io
import json
import random
import subprocess
from pathlib import Path

import pytest

from hymo.cli import main
from hymo.data import TokenSet, build, read_documents
from hymo.data.encodings import as_utf8, not_utf8, utf16_without_mark

WORDS = "grüße aus köln\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"plain", (0, -1)),
        ("grüße 漢 🎉 \U0001f4a9".encode(), (0, -1)),
        (b"ab\xfcc\xff", (2, 2)),
        (b"a\0b\0", (2, 1)),
        (b"\xfc\0", (2, 0)),
        ("é".encode()[:1], (1, 0)),
        (b"\xed\xa0\x80", (3, 0)),  # a surrogate, spelled out
    ],
)
def test_bytes_that_are_not_utf8_are_counted(text, expected):
    assert not_utf8(text) == expected


@pytest.mark.parametrize("text", ["plain ASCII words\n", "Привет, мир. Как дела?\n", "日本語の文章です 一二三。\n"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf16_without_a_mark_is_known(text, encoding):
    name = encoding.upper().replace("-16-", "-16")
    whole = (text * 500).encode(encoding)
    for head in (whole[:8192], whole[:8191], text.encode(encoding)):
        assert utf16_without_mark(head) == name


def test_other_files_with_zero_bytes_are_not_taken_for_utf16():
    import numpy as np

    draw = random.Random(0)
    wave = np.array([draw.randrange(-300, 300) for _ in range(2000)], "<i2").tobytes()
    for data in (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" * 9, wave, bytes(4096), draw.randbytes(8192), b"name\0value\0" * 90,
                 np.arange(2000, dtype="<i4").tobytes(), b"plain text", b"a\0b\0"):  # fmt: skip
        assert utf16_without_mark(data) is None


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_a_mark_is_believed_also_in_files_that_are_cut(tmp_path: Path, monkeypatch, encoding):
    monkeypatch.setattr("hymo.data.readers.MAX_DOCUMENT_BYTES", 1 << 10)
    text = "grüße 漢 🎉 line\n" * 300
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    documents = list(read_documents(tmp_path / "a.txt"))
    assert b"".join(document.text for document in documents).decode() == text
    assert len(documents) > 5
    assert as_utf8(io.BytesIO(codecs.BOM_UTF16_BE + "x\n".encode("utf-16-be"))).read() == b"x\n"


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_latin1_is_counted_and_named_by_build_and_inspect(tmp_path: Path, capsys, tokenizer):
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(9):
        (folder / f"{i}.txt").write_text(f"{i} {WORDS}" * 50)
    latin = (WORDS * 60).encode("latin-1")  # three such letters a line
    (folder / "5b.txt").write_bytes(latin)
    words = ["data", "build", str(folder), "--out", str(tmp_path / "set"), "--tokenizer", tokenizer, "--workers", "0"]
    assert main([*words, "--vocab-size", "300"]) == 0
    became = "kept as they are" if tokenizer == "bytes" else "read as U+FFFD each"
    share = f"{180 / sum(path.stat().st_size for path in folder.iterdir()):.2%}"
    for printed in (
        capsys.readouterr().out,
        main(["data", "inspect", str(tmp_path / "set")]) or capsys.readouterr().out,
    ):
        (line,) = [line for line in printed.splitlines() if "not UTF-8" in line]
        assert line.startswith(f"warning: bytes that are not UTF-8 text: 180 ({share}; {became}")
        assert f"in 1 of 10 documents, the first {folder / '5b.txt'}, byte 2; " in line


def test_the_byte_is_that_of_the_file_where_it_is_cut(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("hymo.data.readers.MAX_DOCUMENT_BYTES", 1 << 10)
    content = b"a line of text\n" * 300
    (tmp_path / "a.txt").write_bytes(content[:3000] + b"\xe9" + content[3000:])
    report = build([tmp_path / "a.txt"], tmp_path / "set", tokenizer="bytes", workers=0)
    (note,) = TokenSet(report.folder / "train").notes
    assert f"{tmp_path / 'a.txt'}, byte 3000;" in note


def test_utf16_without_a_mark_is_refused_by_name_or_counted(tmp_path: Path, capsys):
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(9):
        (folder / f"{i}.txt").write_text(f"{i} {WORDS}" * 50)
    bad = folder / "5 b.txt"
    bad.write_bytes((WORDS * 60).encode("utf-16-le"))
    command = ["data", "build", str(folder), "--out", str(tmp_path / "set"), "--tokenizer", "bytes", "--workers", "0"]
    assert main(command) == 2
    remedy = f"iconv -f UTF-16LE -t UTF-8 '{bad}' > NEW"
    assert (
        f"hymo: data.source: {bad}: it is UTF-16LE without a mark; accepted: UTF-8 ({remedy})"
        in capsys.readouterr().err
    )
    assert main([*command, "--skip-bad"]) == 0
    assert f"broken lines, records or files passed over: 1, the first {bad}: it is UTF-16LE" in capsys.readouterr().out
    assert sum(TokenSet(tmp_path / "set" / name).n_documents for name in ("train", "val")) >= 9
    done = subprocess.run(["bash", "-c", remedy.replace("NEW", str(tmp_path / "new.txt"))], capture_output=True)
    if done.returncode == 0:  # iconv is there
        assert (tmp_path / "new.txt").read_text() == WORDS * 60


def test_train_says_it_too(tmp_path: Path, small_flags, capsys):
    (tmp_path / "a.txt").write_bytes((WORDS * 300).encode("latin-1"))
    flags = [flag for flag in small_flags if "--data.source" not in flag]
    command = ["train", *flags, "--data.source", str(tmp_path / "a.txt"), "--run-dir", str(tmp_path / "run")]
    assert main(command) == 0
    assert "warning: data: bytes that are not UTF-8 text: 900 (" in capsys.readouterr().out
    assert main(["eval", str(tmp_path / "run"), "--data", str(tmp_path / "a.txt")]) == 0
    assert "warning: data: bytes that are not UTF-8 text: 900 (" in capsys.readouterr().out


def test_null_texts_are_passed_over_counted_and_named(tmp_path: Path):
    import pyarrow
    import pyarrow.parquet

    rows = [None if i in (4, 7) else f"some text {i} " * 9 for i in range(30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    (tmp_path / "a.json").write_text(json.dumps([{"text": row} for row in rows]))
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "a.parquet")
    for name, place in (("a.jsonl", ":5"), ("a.json", ", record 5"), ("a.parquet", ", row 5")):
        report = build([tmp_path / name], tmp_path / f"set-{name}", tokenizer="bytes", workers=0)
        notes = TokenSet(report.folder / "train").notes
        assert notes == [f"records without text (null) passed over: 2, the first {tmp_path / name}{place}"]


def test_parquet_strings_that_are_not_utf8_are_counted(tmp_path: Path):
    import pyarrow
    import pyarrow.parquet

    raw = pyarrow.array([b"fine " * 20, b"gr\xfc\xdfe " * 20] * 9, pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": raw}), tmp_path / "a.parquet")
    report = build([tmp_path / "a.parquet"], tmp_path / "set", tokenizer="bytes", workers=0)
    (note,) = TokenSet(report.folder / "train").notes
    assert note.startswith("bytes that are not UTF-8 text: 360 (") and "in 9 of 18 documents" in note
