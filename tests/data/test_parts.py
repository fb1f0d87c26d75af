"""The split into training and validation text: by whole documents, unless that would be far from what was asked for."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from hymo.data import DataError, TokenSet, build
from hymo.data.parts import near


def built(folder: Path, texts: list[str], **options) -> tuple[TokenSet, TokenSet]:
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    report = build([folder / "a.jsonl"], folder / "set", tokenizer="bytes", workers=0, **options)
    return TokenSet(report.folder / "train"), TokenSet(report.folder / "val")


def documents(one: TokenSet) -> list[bytes]:
    return [bytes(one.document(i)[:-1].astype("uint8")) for i in range(one.n_documents)]


def share(train: TokenSet, val: TokenSet) -> float:
    return val.n_bytes / (train.n_bytes + val.n_bytes)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("fraction", [0.02, 0.2])
def test_one_huge_document_is_on_both_sides(tmp_path, seed, fraction):
    small = [f"seed {seed} document {i} " + "word " * 100 for i in range(9)]
    huge = f"seed {seed}\n" + "a line of the huge one\n" * 40_000
    train, val = built(tmp_path / "x", [*small[:5], huge, *small[5:]], val_fraction=fraction)
    assert share(train, val) == pytest.approx(fraction, rel=0.1)
    heads = [text for text in documents(train) if b"huge" in text]
    tails = [text for text in documents(val) if b"huge" in text]
    assert len(heads) == len(tails) == 1
    assert (heads[0] + tails[0]).decode() == huge
    assert heads[0].endswith(b"\n")
    assert "of each document of " in train.split
    assert sorted(documents(train) + documents(val)) == sorted([*heads, *tails, *(text.encode() for text in small)])


def test_a_few_documents_of_one_size_are_each_cut(tmp_path):
    texts = [f"{i}" + " some words" * 2000 for i in range(5)]
    train, val = built(tmp_path / "x", texts)
    assert share(train, val) == pytest.approx(0.02, rel=0.1)
    assert train.n_documents == val.n_documents == 5


@pytest.mark.parametrize("seed", range(5))
def test_many_documents_stay_whole(tmp_path, seed):
    draw = random.Random(seed)
    texts = [f"{seed} {i} " + "word " * draw.randrange(20, 60) for i in range(60)]
    train, val = built(tmp_path / "x", texts)
    assert sorted(documents(train) + documents(val)) == sorted(text.encode() for text in texts)
    assert 0 < share(train, val) < 0.12
    assert train.split == val.split == "whole documents"


def test_what_is_near():
    assert near(0.011, 0.02) and near(0.1, 0.02) and near(0.4, 0.2) and near(0.9, 0.95)
    assert not near(0.0, 0.02) and not near(0.2, 0.02) and not near(0.6, 0.2) and not near(0.004, 0.02)


def test_equal_texts_are_never_on_both_sides_after_the_cut(tmp_path):
    huge = "one of two equal ones\n" * 5000
    train, val = built(tmp_path / "x", [huge, "small " * 30, huge, "other " * 30])
    assert share(train, val) == pytest.approx(0.02, rel=0.2)
    assert not set(documents(train)) & set(documents(val))


def test_a_build_that_stopped_and_went_on_is_split_like_one_that_did_not(tmp_path, monkeypatch):
    monkeypatch.setattr("hymo.data.parts.LEAST_UNIT_BYTES", 4000)
    texts = [f"document {i} " + "word " * 40 for i in range(40)] + ["one line of the huge one\n" * 8000]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    whole = build([tmp_path / "a.jsonl"], tmp_path / "whole", tokenizer="bytes", workers=0)
    (tmp_path / "a.jsonl").write_text("".join([*lines[:20], "broken\n", *lines[20:]]))
    with pytest.raises(DataError, match=r"a\.jsonl:21: not valid JSON"):
        build([tmp_path / "a.jsonl"], tmp_path / "again", tokenizer="bytes", workers=0)
    assert list((tmp_path / "again.part/journal").glob("*/*.json"))  # some of it is done
    again = build([tmp_path / "a.jsonl"], tmp_path / "again", tokenizer="bytes", workers=0, skip_bad=True)
    for name in ("train", "val"):
        one, two = TokenSet(whole.folder / name), TokenSet(again.folder / name)
        assert one.fingerprint == two.fingerprint
        assert "of each document of" in two.split


def test_processes_that_write_parts_start_without_torch():
    """Each worker of a build would load it: two seconds and 200 MB."""
    code = "import sys, hymo.data.parts, hymo.data.dataset; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
