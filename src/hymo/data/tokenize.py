"""Tokenizers: bytes (built in) and any file of the `tokenizers` library.

Neither ever produces its end token from text, even where the text spells it: the shard writer appends exactly one to
each document.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hymo.data.bpe import in_pieces, tiktoken_of, without_long_runs
from hymo.data.readers import DataError, expanded

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"  # the second may name the end token
Ids = npt.NDArray[np.uint32]
MOST_AT_ONCE = 1 << 20
CHECKED_EVERY, MOST_CHECKED = 256, 1 << 14
END_NAMES = (
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<EOS>", "[EOS]",
    "<|end▁of▁sentence|>", "<|eot_id|>",
)  # fmt: skip


class Tokenizer(Protocol):
    """What the rest of the package needs of a tokenizer. Ids are < vocab_size; `end_id` closes a document."""

    name: str
    vocab_size: int
    end_id: int
    fingerprint: str  # of the tokenizer's content
    token_bytes: npt.NDArray[np.int64]  # [vocab_size]: UTF-8 bytes that each token stands for, 0 for special ones

    def encode(self, text: str | bytes) -> Ids: ...
    def encode_batch(self, texts: Sequence[str | bytes]) -> list[Ids]: ...
    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str: ...


class ByteTokenizer:
    """One token a byte: 256 bytes, then end (256), pad (257) and two reserved ids. `decode` never fails."""

    name = "bytes"
    vocab_size = 260
    end_id = 256
    pad_id = 257
    fingerprint = "bytes-260"

    def __init__(self) -> None:
        self.token_bytes = np.array([1] * 256 + [0] * 4, dtype=np.int64)

    def encode(self, text: str | bytes) -> Ids:
        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        return np.frombuffer(data, dtype=np.uint8).astype(np.uint32)

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[Ids]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        array = np.asarray(ids, dtype=np.int64)
        return array[(array >= 0) & (array < 256)].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class FileTokenizer:
    """A tokenizer file of the `tokenizers` library. Bytes that are not UTF-8 become U+FFFD before encoding.

    Texts over MOST_AT_ONCE characters are encoded in pieces, cut after line ends (else before a space), so that a huge
    text takes no huge memory; runs of over LONGEST_RUN characters without a space are cut, so that none takes a huge
    time. fast: encode with tiktoken where it is installed and the file is a plain byte-level BPE (`fast` then reads
    True); one text in CHECKED_EVERY is encoded both ways and compared.
    """

    def __init__(self, path: str | Path, end_token: str | None = None, *, fast: bool = False):
        from tokenizers import Tokenizer as Backend

        self.path = expanded(path)
        if self.path.is_dir():
            self.path = self.path / TOKENIZER
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise DataError(
                f"data.tokenizer: cannot read {str(self.path)!r}: {error.strerror}; accepted: 'bytes' or a file"
            ) from None
        try:
            self.backend = Backend.from_buffer(content)
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"data.tokenizer: {str(self.path)!r} is no tokenizers file ({error})") from None
        self.backend.encode_special_tokens = True  # "<|endoftext|>" in a text is text, not the end of a document
        self.backend.no_padding()
        self.backend.no_truncation()
        self.name = self.path.stem
        if self.name == "tokenizer":  # that of a data set is named like it, while it is built too
            self.name = self.path.absolute().parent.name.removesuffix(".part")
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_id = _find_end(self.path, vocabulary, end_token)
        self.fingerprint = hashlib.blake2b(content + f"\0{self.end_id}".encode(), digest_size=16).hexdigest()
        self.token_bytes = _token_bytes(self.backend, vocabulary, self.vocab_size)
        self._tiktoken = tiktoken_of(content.decode()) if fast else None
        self.fast = self._tiktoken is not None
        self._n_encoded = 0

    def encode(self, text: str | bytes) -> Ids:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[Ids]:
        pieces = [
            [part for piece in in_pieces(_as_text(text), MOST_AT_ONCE) for part in without_long_runs(piece)]
            for text in texts
        ]
        flat = iter(self._encode([piece for group in pieces for piece in group]))
        return [next(flat) if len(group) == 1 else np.concatenate([next(flat) for _ in group]) for group in pieces]

    def _encode(self, texts: list[str]) -> list[Ids]:
        if self._tiktoken is None:
            encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
            return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]
        results = [self._encode_fast(text) for text in texts]
        for text, ids in zip(texts, results, strict=True):
            if self._n_encoded % CHECKED_EVERY == 0 and len(text) <= MOST_CHECKED:
                self._check(text, ids)
            self._n_encoded += 1
        return results

    def _encode_fast(self, text: str) -> Ids:
        try:
            return self._tiktoken.encode_to_numpy(text, disallowed_special=())  # type: ignore[union-attr]
        except ValueError:  # its regular expressions have a stack that very long runs of spaces exceed
            return np.array(self.backend.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def _check(self, text: str, ids: Ids) -> None:
        if self.backend.encode(text, add_special_tokens=False).ids != ids.tolist():
            raise DataError(
                f"data.tokenizer: tiktoken and tokenizers give different ids with {str(self.path)!r} for the text that"
                f" begins {text[:40]!r}; accepted: --encoder tokenizers"
            )

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)


def open_tokenizer(choice: str, *, fast: bool = False) -> Tokenizer:
    """What `data.tokenizer` names: "bytes", or FILE, or FILE#END_TOKEN where the end token has a rare name."""
    if choice == "bytes":
        return ByteTokenizer()
    path, end_token = file_and_end(choice)
    return FileTokenizer(path, end_token, fast=fast)


def file_and_end(choice: str) -> tuple[Path, str | None]:
    """The file that FILE, FILE#END_TOKEN or a folder in the place of FILE stands for, and the end token if it is named.

    A # may be part of either: what exists is the file, and where nothing does, all before the last # (a file's name
    after it aside).
    """
    marks = [at for at, sign in enumerate(choice) if sign == "#" and at]
    places = [len(choice), *reversed(marks)]
    missing = marks[-1] if marks and not choice.endswith(".json") else len(choice)
    at = next((at for at in places if expanded(choice[:at]).exists()), missing)
    path = expanded(choice[:at])
    return path / TOKENIZER if path.is_dir() else path, choice[at + 1 :] or None


def copy_tokenizer(file: Path, folder: Path) -> None:
    """Copy a tokenizer file, as tokenizer.json, with the file beside it that may name its end token; the first last.

    What an earlier copy left there goes, the settings too: they may name another end token than the one in use.
    """
    for source, name in ((file.with_name(SETTINGS), SETTINGS), (file, TOKENIZER)):
        if name == SETTINGS and not source.is_file():
            (folder / name).unlink(missing_ok=True)
        else:
            shutil.copyfile(source, folder / f".{name}.part")
            os.replace(folder / f".{name}.part", folder / name)


def _as_text(text: str | bytes) -> str:
    if isinstance(text, bytes):
        return text.decode("utf-8", errors="replace")
    return text.encode("utf-8", "replace").decode()  # the library refuses lone surrogates


def _find_end(path: Path, vocabulary: dict[str, int], wanted: str | None) -> int:
    names: Sequence[str] = END_NAMES
    if wanted is not None:
        names = (wanted,)
    else:
        beside = path.with_name(SETTINGS)
        if beside.is_file():
            try:
                named = json.loads(beside.read_text(encoding="utf-8")).get("eos_token")
                names = (named["content"] if isinstance(named, dict) else named, *END_NAMES)
            except (OSError, ValueError, KeyError, AttributeError) as error:
                raise DataError(f"data.tokenizer: {str(beside)!r} is no settings of a tokenizer ({error!r})") from None
    for name in names:
        if name in vocabulary:
            return vocabulary[name]
    found = "has none of " + " ".join(END_NAMES) if wanted is None else f"has no token {wanted!r}"
    raise DataError(f"data.tokenizer: {str(path)!r} {found}; name its end token as {path}#TOKEN")


def _token_bytes(backend: Any, vocabulary: dict[str, int], vocab_size: int) -> npt.NDArray[np.int64]:
    """Bytes of a token, from its spelling: byte-level alphabets have one a character, <0xAB> is one."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    described = json.loads(backend.to_str())
    byte_level = "ByteLevel" in json.dumps([described["pre_tokenizer"], described["decoder"]])
    sizes = np.zeros(vocab_size, dtype=np.int64)
    for spelling, token_id in vocabulary.items():
        if spelling in special:
            continue
        if byte_level and spelling not in added:
            sizes[token_id] = len(spelling)
        elif len(spelling) == 6 and spelling.startswith("<0x") and spelling.endswith(">"):
            sizes[token_id] = 1
        else:
            sizes[token_id] = len(spelling.replace("▁", " ").encode("utf-8", "surrogatepass"))
    return sizes
