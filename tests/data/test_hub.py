"""Data sets by the `datasets` library, without a network: a local folder, the offline cache, what cannot be read."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hymo.cli import main
from hymo.data import DataError, TokenSet, build
from hymo.data.source import open_source

pytest.importorskip("datasets")
TEXTS = [f"document {i}: " + "words of it " * (i % 7) for i in range(60)]


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A data set of three files and a test split, as one lies on the hub."""
    folder = tmp_path / "toy"
    folder.mkdir()
    for k in range(3):
        rows = [{"text": text, "id": i} for i, text in enumerate(TEXTS[20 * k : 20 * k + 20])]
        (folder / f"train-{k}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "test.jsonl").write_text(json.dumps({"text": "held out", "id": 0}) + "\n")
    return folder


def texts_of(folder: Path) -> list[str]:
    sets = [TokenSet(folder / name) for name in ("train", "val")]
    return sorted(bytes(one.document(i)[:-1].tolist()).decode() for one in sets for i in range(one.n_documents))


def test_streamed_rows_are_those_of_the_files_in_any_number_of_processes(toy, tmp_path, monkeypatch):
    monkeypatch.setattr("hymo.data.hub.SHARD_BYTES", 4 << 20)  # a unit each
    source = open_source([f"hf://{toy}"], hub=True)
    assert [file.n_shards for file in source.files] == [3]
    for workers in (0, 2):
        report = build([f"hf://{toy}"], tmp_path / f"out-{workers}", tokenizer="bytes", workers=workers)
        assert texts_of(report.folder) == sorted(TEXTS)
    assert len(list((tmp_path / "out-0/train").glob("*.tokens"))) == 3
    described = json.loads((tmp_path / "out-2/data.json").read_text())
    assert described["source_bytes"] == sum(len(text) for text in TEXTS)
    one, two = (TokenSet(tmp_path / name / "train").fingerprint for name in ("out-0", "out-2"))
    assert one == two


def test_a_split_by_name_and_a_bpe(toy, tmp_path):
    build([f"hf://{toy}#test"], tmp_path / "test", tokenizer="bytes", val_fraction=0.0, workers=0)
    assert texts_of(tmp_path / "test") == ["held out"]
    report = build([f"hf://{toy}"], tmp_path / "bpe", vocab_size=300, workers=0)
    assert (report.vocab_size, report.n_bad) == (300, 0)


def test_another_column_and_rows_without_text(tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    rows = [{"body": None if i in (3, 9) else text, "id": i} for i, text in enumerate(TEXTS)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["data", "build", f"hf://{folder}", "--out", str(tmp_path / "out"), "--tokenizer", "bytes"]
    assert main([*command, "--workers", "0", "--text-column", "body"]) == 0
    assert texts_of(tmp_path / "out") == sorted(row["body"] for row in rows if row["body"] is not None)
    (note,) = TokenSet(tmp_path / "out/train").notes
    assert note.startswith("records without text (null) passed over: 2, the first hf://") and note.endswith("/0:3")


OFFLINE = """
    import sys
    from hymo.cli import main

    for spec, out in zip(sys.argv[1::2], sys.argv[2::2]):
        print(main(["data", "build", spec, "--out", out, "--tokenizer", "bytes", "--workers", "0"]))
"""


def test_offline_the_cache_is_read_and_what_is_not_there_is_one_line(toy, tmp_path):
    import textwrap

    import datasets

    cache = tmp_path / "home/datasets"
    datasets.load_dataset(str(toy), split="train", cache_dir=str(cache))
    shutil.move(cache / "toy", cache / "org___toy")  # as if it had come from the hub
    env = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    wanted = ["hf://org/toy", str(tmp_path / "out"), "hf://org/absent", str(tmp_path / "none")]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(OFFLINE), *wanted], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines()[-1] == "2", done.stderr
    assert texts_of(tmp_path / "out") == sorted(TEXTS)
    (fault,) = [line for line in done.stderr.splitlines() if line.startswith("hymo: ")]
    assert "hf://org/absent cannot be read" in fault and "HF_HUB_OFFLINE=1" in fault
    assert not (tmp_path / "none").exists() and "Traceback" not in done.stderr


def test_faults(toy, tmp_path, monkeypatch, capsys):
    with pytest.raises(DataError, match=r"found 'hf://a b#c d'; accepted: hf://NAME"):
        open_source(["hf://a b#c d"], hub=True)
    with pytest.raises(DataError, match="is a data set of the hub; accepted: hymo data build hf://a/b --out DIR"):
        open_source(["hf://a/b"])
    (tmp_path / "other").mkdir()
    (tmp_path / "other/a.jsonl").write_text('{"content": "x"}\n')
    with pytest.raises(DataError, match=r"no column 'text'; found content; accepted: .*--text-column NAME"):
        open_source([f"hf://{tmp_path}/other"], hub=True)
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert main(["data", "build", f"hf://{toy}", "--out", str(tmp_path / "out")]) == 2
    assert "needs the datasets package: pip install 'hymo[hub]'" in capsys.readouterr().err
