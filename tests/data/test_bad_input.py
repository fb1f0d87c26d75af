"""What users give by mistake is one clear line, or is read as far as can be; memory does not grow with the source."""

import gzip
import json
import os
import random
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import zstandard

from hymo.cli import main
from hymo.data import DataError, TokenSet, build
from hymo.observe.metrics import read_metrics


def build_bytes(source: Path, out: Path, **options) -> int:
    report = build([source], out, tokenizer="bytes", workers=0, **options)
    return sum(TokenSet(report.folder / name).n_documents for name in ("train", "val"))


@pytest.mark.parametrize("damage", ["half", "holes"])
def test_a_damaged_parquet_file_is_named(tmp_path, damage):
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"text": [f"row {i} " * 50 for i in range(3000)]}), path, row_group_size=300)
    whole = path.read_bytes()
    third = len(whole) // 3
    path.write_bytes(whole[:third] if damage == "half" else whole[:third] + bytes(2000) + whole[third + 2000 :])
    with pytest.raises(DataError, match=r"a\.parquet") as fault:
        build_bytes(path, tmp_path / "out")
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize("unit_bytes", [1000, 4 << 20])
def test_skip_bad_counts_torn_and_damaged_files_beside_good_ones(tmp_path, monkeypatch, capsys, unit_bytes):
    """Of a damaged row group what cannot be read, of a file that is cut off all; in units of any size the same."""
    monkeypatch.setattr("hymo.data.parts.LEAST_UNIT_BYTES", unit_bytes)
    monkeypatch.setattr("hymo.data.parts.MOST_UNITS", 64)
    rows = [f"{'abcdefghij'[i // 300]} row {i} of it" for i in range(3000)]
    good, half, holes = (tmp_path / f"{name}.parquet" for name in ("good", "half", "holes"))
    parquet.write_table(arrow.table({"text": rows}), good, row_group_size=300)
    whole = good.read_bytes()
    column = parquet.ParquetFile(good).metadata.row_group(4).column(0)
    at = column.dictionary_page_offset or column.data_page_offset
    half.write_bytes(whole[: len(whole) // 2])
    holes.write_bytes(whole[:at] + b"\xff" * 300 + whole[at + 300 :])
    (tmp_path / "cut.json").write_text('["one text", "another one", "a thi')
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "packed"}\n' * 9)[:-6])
    names = [str(path) for path in (half, good, holes, tmp_path / "cut.json", tmp_path / "cut.jsonl.gz")]
    command = ["data", "build", *names, "--out", str(tmp_path / "out"), "--tokenizer", "bytes", "--workers", "0"]
    assert main(command) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert f"{half}: not a whole Parquet file (" in said[0]
    assert len(said[0]) < 200 + len(str(half))
    assert main([*command, "--skip-bad"]) == 0
    out = capsys.readouterr().out
    assert "broken lines, records or files passed over: 4, the first " in out
    for name in (
        "half.parquet: not a",
        "holes.parquet, row 1201 and the rest",
        "cut.json: not valid",
        "cut.jsonl.gz': it ends",
    ):
        assert f"{name}" in "".join(line for line in out.splitlines() if line.startswith("passed over: "))
    found = sum(TokenSet(tmp_path / "out" / name).n_documents for name in ("train", "val"))
    assert found == 3000 + 2700 + 2 + 9


def test_skip_bad_passes_over_damaged_packed_files_of_a_folder(tmp_path, capsys):
    """A folder's files are looked into before they are read: there, damage ended the build."""
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("some text\n" * 50)
    (folder / "misnamed.txt.gz").write_text("not packed at all " * 20)
    packed = gzip.compress(json.dumps([{"text": f"record {i}"} for i in range(2000)]).encode())
    (folder / "cut.json.gz").write_bytes(packed[: len(packed) // 2])
    (folder / "empty.txt.gz").write_bytes(b"")
    (folder / "hole.json.gz").write_bytes(packed[:40] + bytes(40) + packed[80:])
    (folder / "hole.txt.zst").write_bytes(zstandard.compress(b"some text " * 999)[:20] + b"\xff" * 40)
    with pytest.raises(DataError, match=r"cannot read '.*\.(gz|zst)': it"):
        build_bytes(folder, tmp_path / "out")
    command = ["data", "build", str(folder), "--out", str(tmp_path / "out"), "--tokenizer", "bytes", "--workers", "0"]
    assert main([*command, "--skip-bad"]) == 0
    out = capsys.readouterr().out
    assert "broken lines, records or files passed over: 4, the first " in out
    for name in ("misnamed.txt.gz", "cut.json.gz", "hole.json.gz", "hole.txt.zst"):
        assert name in "".join(line for line in out.splitlines() if line.startswith("passed over: "))
    found = sum(TokenSet(tmp_path / "out" / name).n_documents for name in ("train", "val"))
    assert found == 2  # the good file, cut into two


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have names in Unicode alone")
def test_names_that_are_no_text_are_printed_somehow(tmp_path):
    """They ended a build in UnicodeEncodeError after it was made."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    (folder / os.fsdecode(b"\xe9.bin")).write_bytes(bytes(9))
    (folder / os.fsdecode(b"\xe9.txt")).write_bytes(b"Latin-1: \xe9\n" * 50)
    command = [
        sys.executable,
        "-m",
        "hymo",
        "data",
        "build",
        str(folder),
        "--out",
        str(folder / "out"),
        "--workers",
        "0",
    ]
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    for words in ([*command, "--tokenizer", "bytes"], [*command[:4], "inspect", str(folder / "out")]):
        done = subprocess.run(words, env=strict, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert r"caf\udce9/\udce9.txt, byte 9" in done.stdout


def test_a_build_of_nothing_leaves_nothing_and_other_files_are_said_in_words(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": ""}\n' * 3)
    for tokenizer in ("bytes", "bpe"):
        with pytest.raises(DataError, match="holds no text"):
            build([path], tmp_path / "out", tokenizer=tokenizer, vocab_size=300, workers=0)
        assert not (tmp_path / "out.part").exists()
    path.write_text('{"text": "mended"}\n' * 3 + "broken\n")
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(DataError, match="not valid JSON"):
        build([tmp_path / "b.txt", path], tmp_path / "out", vocab_size=300, tokenizer="bytes", workers=0)
    (tmp_path / "out.part/journal/x").mkdir(parents=True)
    (tmp_path / "out.part/plan.json").write_text(json.dumps({"source": "0f"}))
    with pytest.raises(DataError, match="its source was other files, or they have changed since") as fault:
        build([tmp_path / "b.txt"], tmp_path / "out", tokenizer="bytes", workers=0)
    assert "0f'" not in str(fault.value)


def test_a_broken_line_then_the_same_command_with_skip_bad(tmp_path, capsys):
    lines = [json.dumps({"text": f"line {i}"}) for i in range(30)]
    lines[7], lines[20] = '{"text": "torn', '{"text": 5}'
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    command = ["data", "build", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out"), "--tokenizer", "bytes"]
    assert main([*command, "--workers", "0"]) == 2
    assert "a.jsonl:8: not valid JSON" in capsys.readouterr().err
    assert main([*command, "--workers", "0", "--skip-bad"]) == 0
    assert "broken lines, records or files passed over: 2, the first " in capsys.readouterr().out
    assert sum(TokenSet(tmp_path / "out" / name).n_documents for name in ("train", "val")) == 28


def test_empty_documents_are_passed_over_and_nothing_but_them_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in ("", "one", "", "two")))
    assert build_bytes(tmp_path / "a.jsonl", tmp_path / "out") == 2
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n' * 3)
    with pytest.raises(DataError, match=r"b\.jsonl holds no text: every document is empty"):
        build_bytes(tmp_path / "b.jsonl", tmp_path / "none")


def test_mixed_encodings(tmp_path):
    latin, utf8 = "grüße ".encode("latin-1") * 20, "grüße ".encode() * 20
    (tmp_path / "mixed.txt").write_bytes(latin + utf8)
    (tmp_path / "utf16.txt").write_bytes(("grüße " * 20).encode("utf-16"))
    assert build_bytes(tmp_path, tmp_path / "out", val_fraction=0.0) == 2
    one = TokenSet(tmp_path / "out/train")
    assert {bytes(one.document(i)[:-1].tolist()) for i in range(2)} == {latin + utf8, utf8}
    (tmp_path / "mixed.jsonl").write_bytes(b'{"text": "gr\xfc\xdfe"}\n')
    with pytest.raises(DataError, match=r"mixed\.jsonl:1: not valid JSON \('utf-8' codec can't decode byte 0xfc"):
        build_bytes(tmp_path / "mixed.jsonl", tmp_path / "none")


def test_a_huge_line_is_cut_into_documents_with_every_byte_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("hymo.data.readers.MAX_DOCUMENT_BYTES", 1 << 16)
    (tmp_path / "a.txt").write_text("word " * 60_000)
    assert build_bytes(tmp_path / "a.txt", tmp_path / "out", val_fraction=0.0) == 5
    assert TokenSet(tmp_path / "out/train").n_bytes == 300_000


@pytest.fixture
def text(tmp_path) -> Path:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"some words {i} " * 9}) + "\n" for i in range(80)))
    return tmp_path / "a.jsonl"


def test_a_tokenizer_larger_than_the_model(tmp_path, text, small_flags, capsys):
    build([text], tmp_path / "set", vocab_size=290, workers=0)
    flags = [flag for flag in small_flags if "--data.source" not in flag]
    here = ["--data.source", str(tmp_path / "set"), "--run-dir", str(tmp_path / "run")]
    assert main(["train", *flags, *here, "--data.tokenizer", str(tmp_path / "set/tokenizer.json")]) == 2
    found = capsys.readouterr().err
    assert "model.vocab_size: found 260; accepted: at least 290, the size of data.tokenizer set" in found
    assert main(["train", *flags, *here]) == 2
    assert "data.tokenizer: found 'bytes'; accepted: " in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_data_set_that_was_built_again_is_refused_by_resume_and_said_by_eval(tmp_path, text, small_flags, capsys):
    build([text], tmp_path / "set", tokenizer="bytes", workers=0)
    flags = [flag for flag in small_flags if "--data.source" not in flag]
    run = str(tmp_path / "run")
    assert main(["train", *flags, "--data.source", str(tmp_path / "set"), "--run-dir", run]) == 0
    assert main(["eval", run]) == 0
    assert "data.source is not the text" not in capsys.readouterr().out
    shutil.rmtree(tmp_path / "set")
    text.write_text(text.read_text().replace("words", "other words"))
    build([text], tmp_path / "set", tokenizer="bytes", workers=0)
    assert main(["train", "--run-dir", run, "--resume"]) == 2
    assert "the run read other text (fingerprint " in capsys.readouterr().err
    assert main(["eval", run]) == 0
    assert "data.source is not the text that the run was trained on" in capsys.readouterr().out


def test_a_run_and_its_data_set_that_were_moved_go_on_bitwise(tmp_path, text, small_flags, capsys):
    """By the content's fingerprint; other text is refused as ever, and without the option the message names it."""
    flags = [flag for flag in small_flags if "--data.source" not in flag]
    flags += ["--model.vocab_size=290", "--checkpoint.every=3", "--checkpoint.keep=9", "--logging.every=1"]
    old, new = tmp_path / "old", tmp_path / "new"
    build([text], old / "set", vocab_size=290, workers=0)
    here = ["--data.source", str(old / "set"), "--data.tokenizer", str(old / "set/tokenizer.json")]
    assert main(["train", *flags, *here, "--run-dir", str(old / "run")]) == 0
    whole = [row["loss"] for row in read_metrics(old / "run/metrics.jsonl") if "loss" in row]
    shutil.rmtree(old / "run/checkpoints/step-6")
    old.rename(new)
    capsys.readouterr()
    resume = ["train", "--run-dir", str(new / "run"), "--resume"]
    there = ["--data.source", str(new / "set"), "--data.tokenizer", str(new / "set/tokenizer.json")]

    for words in (resume, ["branch", str(new / "run"), "--at", "3", "--decay", "2"]):
        assert main(words) == 2
        message = capsys.readouterr().err
        assert "is not there any more; accepted: --data.source PATH" in message
        assert "is not there any more; accepted: --data.tokenizer FILE" in message
    assert [path.name for path in new.iterdir() if path.name.startswith("run")] == ["run"]
    assert main(["eval", str(new / "run")]) == 2
    message = capsys.readouterr().err
    assert "accepted: --data PATH, other text to evaluate, or --data.source PATH, where it is now" in message
    assert main(["eval", str(new / "run"), "--data.source", str(new / "set")]) == 0
    assert main(["generate", str(new / "run"), "so", "--max-tokens", "2"]) == 0  # the run has a copy of the tokenizer

    text.write_text(text.read_text().replace("words", "other words"))
    build([text], new / "other", tokenizer=str(new / "set/tokenizer.json"), workers=0)
    before = (new / "run/config.yaml").read_text()
    other = ["--data.source", str(new / "other"), "--data.tokenizer", str(new / "other/tokenizer.json")]
    assert main([*resume, *other]) == 2
    assert "the run read other text (fingerprint " in capsys.readouterr().err
    assert (new / "run/config.yaml").read_text() == before

    assert main([*resume, *there]) == 0
    out = capsys.readouterr().out
    assert out.count("data.source: from now on") == out.count("data.tokenizer: from now on") == 1
    assert "resume: bitwise" in out
    assert [row["loss"] for row in read_metrics(new / "run/metrics.jsonl") if "loss" in row] == whole
    assert main(resume) == 0  # the new places are the run's now
    assert "from now on" not in capsys.readouterr().out
    checkpoints = [str(new / f"run/checkpoints/step-{step}") for step in (3, 6)]  # of both places
    assert main(["average", *checkpoints, "--out", str(new / "mean")]) == 0


MEASURE = """
    import resource, sys
    import hymo.data.readers as readers
    from hymo.data import build

    readers.MAX_DOCUMENT_BYTES = 1 << 20
    build([sys.argv[1]], sys.argv[2], vocab_size=400, workers=0, bpe_bytes=1 << 20)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is KiB on Linux alone")
def test_memory_does_not_grow_with_the_source(tmp_path):
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshr", k=draw.randint(2, 9))) for _ in range(500)]
    lines = [" ".join(draw.choices(words, k=20)) + f" {i}\n" for i in range(8000)]  # 1 MB
    peaks = []
    for megabytes in (3, 18):
        folder = tmp_path / f"{megabytes}"
        folder.mkdir()
        with open(folder / "a.jsonl", "w") as rows, open(folder / "b.txt", "w") as one:
            for k in range(megabytes // 3):
                rows.writelines(json.dumps({"text": f"{k} {line}"}) + "\n" for line in lines)
                one.writelines(f"{k} {line}" for line in lines)
        command = [sys.executable, "-c", textwrap.dedent(MEASURE), str(folder), str(tmp_path / f"out-{megabytes}")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout.splitlines()[-1]) / 1024)
    assert peaks[1] < peaks[0] + 25, (
        peaks
    )  # MiB, for 15 MB more of text; reading it whole would take several times that


def test_jsonl_in_utf16_is_called_that(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"line {i}"}) for i in range(5)), encoding="utf-16")
    with pytest.raises(DataError, match=r"a\.jsonl:1: not UTF-8, it looks like UTF-16; accepted: .*in UTF-8"):
        build_bytes(path, tmp_path / "out")
