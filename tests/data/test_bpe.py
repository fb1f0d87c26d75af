import json
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from hymo.data import DataError, Document, FileTokenizer, open_source
from hymo.data.bpe import LONGEST_RUN, tiktoken_of, train_bpe, without_long_runs

pytest.importorskip("tiktoken")


def documents(count: int = 60) -> list[Document]:
    source = open_source([Path(json.__file__).parent, Path(json.__file__).parent.parent / "email"])
    return list(source.documents())[:count]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    path.write_text(train_bpe(documents(), 1000))
    return path


def test_training_gives_the_size_asked_for_and_is_deterministic(trained: Path):
    tokenizer = FileTokenizer(trained)
    assert (tokenizer.vocab_size, tokenizer.end_id, tokenizer.fast) == (1000, 0, False)
    assert trained.read_text() == train_bpe(documents(), 1000)
    with pytest.raises(DataError, match="--vocab-size: found 256; accepted: at least 257"):
        train_bpe([], 256)


def test_tiktoken_gives_the_ids_of_tokenizers_on_real_text(trained: Path):
    slow, fast = FileTokenizer(trained), FileTokenizer(trained, fast=True)
    assert fast.fast
    texts = [document.text for document in documents()]
    for a, b in zip(slow.encode_batch(texts), fast.encode_batch(texts), strict=True):
        assert a.tolist() == b.tolist()


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from("ab 9\n\t\r'\"_=-é漢🎉\u0301\u00a0\u2028ǅ<|endoftext|>"), max_size=40))
def test_tiktoken_gives_the_ids_of_tokenizers_on_odd_text(trained: Path, text: str):
    if not hasattr(test_tiktoken_gives_the_ids_of_tokenizers_on_odd_text, "pair"):
        pair = (FileTokenizer(trained), FileTokenizer(trained, fast=True))
        test_tiktoken_gives_the_ids_of_tokenizers_on_odd_text.pair = pair  # type: ignore[attr-defined]
    slow, fast = test_tiktoken_gives_the_ids_of_tokenizers_on_odd_text.pair  # type: ignore[attr-defined]
    assert slow.encode(text).tolist() == fast.encode(text).tolist()
    assert fast.decode(fast.encode(text)) == text


def test_runs_of_spaces_that_tiktoken_cannot_take(trained: Path):
    slow, fast = FileTokenizer(trained), FileTokenizer(trained, fast=True)
    text = "x" + " " * 1_040_000
    with pytest.raises(ValueError, match="stack"):
        fast._tiktoken.encode(text)
    assert fast.encode(text).tolist() == slow.encode(text).tolist()


def test_a_difference_is_an_error_not_other_ids(trained: Path, tmp_path: Path):
    fast = FileTokenizer(trained, fast=True)
    changed = json.loads(trained.read_text())
    vocabulary = changed["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    fast._tiktoken = tiktoken_of(json.dumps(changed))
    with pytest.raises(DataError, match=r"give different ids .* accepted: --encoder tokenizers"):
        fast.encode("abc")


def test_a_gpt2_style_file_qualifies(bpe_file: Path):
    slow, fast = FileTokenizer(bpe_file), FileTokenizer(bpe_file, fast=True)
    assert fast.fast
    for document in documents(20):
        assert slow.encode(document.text).tolist() == fast.encode(document.text).tolist()


def other_kinds() -> dict[str, Tokenizer]:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    normalised = Tokenizer(models.BPE())
    normalised.normalizer, normalised.pre_tokenizer = normalizers.NFC(), byte_level
    prefixed = Tokenizer(models.BPE())
    prefixed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    metaspace = Tokenizer(models.BPE(byte_fallback=True))
    metaspace.pre_tokenizer, metaspace.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    small = Tokenizer(models.BPE())
    small.pre_tokenizer = byte_level
    return {"normalised": normalised, "prefixed": prefixed, "metaspace": metaspace, "small alphabet": small}


@pytest.mark.parametrize("kind", ["normalised", "prefixed", "metaspace", "small alphabet"])
def test_what_is_no_plain_byte_level_bpe_is_left_to_tokenizers(kind: str, tmp_path: Path):
    tokenizer = other_kinds()[kind]
    alphabet = [] if kind in ("small alphabet", "metaspace") else pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["some text of words"] * 10, trainer)
    tokenizer.save(str(tmp_path / "t.json"))
    assert not FileTokenizer(tmp_path / "t.json", fast=True).fast


def test_a_huge_text_is_encoded_in_pieces(trained: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hymo.data.tokenize.MOST_AT_ONCE", 64)
    tokenizer = FileTokenizer(trained)
    for text in ["word " * 100, "x" * 500, "line\n" * 100, "é" * 300, "a" * 64, "", "漢字 " * 90]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    monkeypatch.undo()
    lines = "def f(x):\n    return x\n" * 20
    whole = tokenizer.encode(lines).tolist()
    monkeypatch.setattr("hymo.data.tokenize.MOST_AT_ONCE", 64)
    assert len(tokenizer.encode(lines)) <= len(whole) * 1.1


RUNS = {
    "letters": "a" * 5000,
    "random letters": "".join(random.Random(0).choices("etaoinshr", k=5000)),
    "marks": "e\u0301" * 3000,
    "digits": "7" * 5000,
    "signs": "=-" * 3000,
    "spaces": "x" + " " * 5000 + "x",
    "line ends": "\r\n" * 3000,
    "wide spaces": "\u3000" * 3000,
    "ideographs": "漢字" * 3000,
}


@pytest.mark.parametrize("kind", RUNS)
def test_long_runs_are_cut_alike_for_both_encoders(trained: Path, bpe_file: Path, kind: str):
    text = f"def f(x):\n    {RUNS[kind]} and on\n"
    pieces = without_long_runs(text)
    assert "".join(pieces) == text
    assert len(pieces) > 2
    longest = max(len(run) for piece in pieces for run in re.findall(r"\S+|\s+", piece))
    assert longest <= LONGEST_RUN
    for path in (trained, bpe_file):
        slow, fast = FileTokenizer(path), FileTokenizer(path, fast=True)
        assert fast.fast
        assert slow.encode(text).tolist() == fast.encode(text).tolist()
        assert fast.decode(fast.encode(text)) == text


def test_code_without_spaces_is_cut_where_words_end(trained: Path, bpe_file: Path):
    text = "if(a1==b){call_it(x.y,[z]);}" * 400
    assert len(without_long_runs(text)) > 5
    for path in (trained, bpe_file):
        tokenizer = FileTokenizer(path)
        whole = tokenizer.backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text).tolist() == whole  # no id is another than without the cuts


def test_ordinary_text_is_not_cut():
    assert all(len(without_long_runs(d.text.decode("utf-8", "replace"))) == 1 for d in documents(60))
    assert without_long_runs("ab" * 10, 20) == ["ab" * 10]
    assert without_long_runs("ab" * 10 + "c", 20) == ["ab" * 10, "c"]


def test_neither_encoder_nor_the_trainer_sees_a_huge_word(trained: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[str] = []
    encode = FileTokenizer._encode
    monkeypatch.setattr(FileTokenizer, "_encode", lambda self, texts: seen.extend(texts) or encode(self, texts))
    tokenizer = FileTokenizer(trained, fast=True)
    assert tokenizer.decode(tokenizer.encode("a" * 200_000)) == "a" * 200_000
    assert max(map(len, seen)) == LONGEST_RUN
    content = json.loads(train_bpe([Document("a", b"a" * 300_000, 1)], 400))
    assert max(map(len, content["model"]["vocab"])) == LONGEST_RUN  # else a token of 65,536 letters
