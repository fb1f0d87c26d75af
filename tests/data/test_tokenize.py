import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hymo.config_io import build_config
from hymo.data import ByteTokenizer, DataError, FileTokenizer, open_tokenizer
from hymo.data.tokenize import copy_tokenizer, file_and_end
from hymo.runs import tokenizer_of


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_bytes_round_trip(data: bytes):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(data)
    assert ids.tolist() == list(data)
    assert tokenizer.decode(ids) == data.decode("utf-8", errors="replace")


def test_byte_decode_never_fails_and_drops_special_ids():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.end_id) == (260, 256)
    assert tokenizer.decode([72, 105, 256, 257, 258, 259, -1, 9999]) == "Hi"
    assert tokenizer.decode([0xFF, 0xC3]) == "\ufffd\ufffd"
    assert tokenizer.decode(np.array([], dtype=np.int64)) == ""
    assert tokenizer.encode("lone \ud800").tolist() == list(b"lone \xed\xa0\x80")


def test_file_tokenizer_round_trip_and_bytes(bpe_file: Path):
    tokenizer = open_tokenizer(str(bpe_file))
    text = "def f(x):\n    return x  # é 漢 🎉\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())
    assert [a.tolist() for a in tokenizer.encode_batch([text, b"x"])] == [ids.tolist(), tokenizer.encode("x").tolist()]
    assert open_tokenizer(str(bpe_file.parent)).fingerprint == tokenizer.fingerprint


def test_the_end_token_spelled_in_a_text_is_text(bpe_file: Path):
    tokenizer = open_tokenizer(str(bpe_file))
    ids = tokenizer.encode("a <|endoftext|> b")
    assert tokenizer.end_id not in ids.tolist()
    assert tokenizer.decode(ids) == "a <|endoftext|> b"


def test_invalid_bytes_become_replacement_characters(bpe_file: Path):
    tokenizer = open_tokenizer(str(bpe_file))
    assert tokenizer.decode(tokenizer.encode(b"a\xffb")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"


def word_level(path: Path, *special: str) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(path))
    return path


def test_end_token_by_name(tmp_path: Path):
    path = word_level(tmp_path / "words.json", "<stop>")
    with pytest.raises(DataError, match=r"words.json' has none of .*; name its end token as .*words.json#TOKEN"):
        open_tokenizer(str(path))
    assert open_tokenizer(f"{path}#<stop>").end_id == 2
    with pytest.raises(DataError, match="has no token '<nix>'"):
        open_tokenizer(f"{path}#<nix>")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<stop>"}}')
    assert open_tokenizer(str(path)).end_id == 2


def test_a_path_may_hold_the_sign_that_begins_an_end_token(tmp_path: Path):
    plain, odd = tmp_path / "plain", tmp_path / "c#" / "d#e"
    for folder in (plain, odd):
        folder.mkdir(parents=True)
        word_level(folder / "tokenizer.json", "<stop>", "</s>", "#end#")
    for folder in (plain, odd):
        file = folder / "tokenizer.json"
        for place in (folder, file):
            assert file_and_end(str(place)) == (file, None)
            for end in ("<stop>", "</s>", "#end#"):
                assert file_and_end(f"{place}#{end}") == (file, end)
                assert open_tokenizer(f"{place}#{end}").end_id == ["<stop>", "</s>", "#end#"].index(end) + 2
    absent = tmp_path / "gone#" / "tokenizer.json"
    assert file_and_end(str(absent)) == (absent, None)
    assert file_and_end(f"{absent}#</s>") == (absent, "</s>")
    assert file_and_end(str(plain / "nix.json")) == (plain / "nix.json", None)


def test_a_copy_has_the_end_token_of_what_was_copied(tmp_path: Path):
    file = word_level(tmp_path / "words.json", "<|endoftext|>", "<stop>")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    (tmp_path / "copy").mkdir()
    copy_tokenizer(file, tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    original, copied = open_tokenizer(str(file)), open_tokenizer(str(tmp_path / "copy"))
    assert original.end_id == copied.end_id == 3
    assert original.fingerprint == copied.fingerprint
    (tmp_path / "tokenizer_config.json").unlink()
    copy_tokenizer(file, tmp_path / "copy")
    assert open_tokenizer(str(tmp_path / "copy")).end_id == open_tokenizer(str(file)).end_id == 2


def test_a_copy_of_before_without_its_settings_has_the_end_token_of_the_original(tmp_path: Path):
    original = word_level(tmp_path / "words.json", "<|endoftext|>", "<stop>")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    checkpoint = tmp_path / "run" / "checkpoints" / "step-1"
    checkpoint.mkdir(parents=True)
    copy = Path(shutil.copyfile(original, tmp_path / "run" / "tokenizer.json"))
    config = build_config({"data": {"tokenizer": str(original)}})
    assert open_tokenizer(tokenizer_of(checkpoint, config)).end_id == open_tokenizer(str(original)).end_id == 3
    named = build_config({"data": {"tokenizer": f"{original}#<|endoftext|>"}})
    assert tokenizer_of(checkpoint, named) == f"{copy}#<|endoftext|>"
    word_level(original, "<stop>")  # another one by now
    assert tokenizer_of(checkpoint, config) == str(copy)
    original.unlink()
    assert tokenizer_of(checkpoint, config) == str(copy)


@pytest.mark.parametrize("settings", ["{", "[]", '{"eos_token": {}}'])
def test_settings_that_are_none_are_named(tmp_path: Path, settings: str):
    (tmp_path / "tokenizer_config.json").write_text(settings)
    with pytest.raises(DataError, match=r"data.tokenizer: .*tokenizer_config.json' is no settings of a tokenizer"):
        open_tokenizer(str(word_level(tmp_path / "words.json", "</s>")))


def test_bad_tokenizer_files(tmp_path: Path):
    with pytest.raises(DataError, match=r"data.tokenizer: cannot read .*nowhere.json.*accepted: 'bytes'"):
        open_tokenizer(str(tmp_path / "nowhere.json"))
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(DataError, match=r"x.json' is no tokenizers file"):
        FileTokenizer(tmp_path / "x.json")
