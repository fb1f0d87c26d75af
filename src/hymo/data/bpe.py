"""Byte-level BPE: trained with the `tokenizers` library, encoded with `tiktoken` where that is installed.

Both split text by a pattern and then merge bytes; tiktoken does it many times faster. A tokenizer file qualifies when
it is a plain byte-level BPE (one split pattern, no normaliser); the ids are the same and are compared while encoding.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from hymo.data.readers import DataError, Document

END_TOKEN = "<|endoftext|>"
# Words with one character before them, numbers of up to three digits, runs of signs, line ends, spaces.
SPLIT_PATTERN = (
    r"[^\r\n\p{L}\p{M}\p{N}]?[\p{L}\p{M}]+|\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# What ByteLevel(use_regex=True) splits by: the pattern of GPT-2.
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Merging the bytes of one word takes time that grows faster than the word: longer runs without a space, or of spaces
# alone, are cut before any encoder sees them, so that all give the same ids.
LONGEST_RUN = 1024  # characters
_RUNS = re.compile(r"\S+|\s+")
_SOFT = re.compile(r"[^\W_](?=[!-/:-@\[-^`{-~])")  # a letter or digit before a sign: no word goes on there
# Texts are given to the trainer in pieces: it holds hundreds of them at once, each at many times its size.
TRAINED_AT_ONCE = 1 << 16
LEAST_VOCABULARY = 257  # 256 bytes and the end token


def train_bpe(documents: Iterable[Document], vocab_size: int) -> str:
    """Train a byte-level BPE of `vocab_size` ids (the end token is id 0); returns the content of its file.

    Text too short for so many merges gives fewer ids.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < LEAST_VOCABULARY:
        raise DataError(f"--vocab-size: found {vocab_size}; accepted: at least {LEAST_VOCABULARY}")
    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )

    texts = (document.text.decode("utf-8", errors="replace") for document in documents)
    pieces = (piece for text in texts for piece in in_pieces(text, TRAINED_AT_ONCE))
    backend.train_from_iterator((part for piece in pieces for part in without_long_runs(piece)), trainer)
    return backend.to_str(pretty=True)


def in_pieces(text: str, most: int) -> list[str]:
    """A text in pieces of at most `most` characters, cut after line ends, else before a space, else anywhere."""
    pieces, start = [], 0
    while len(text) - start > most:
        stop = start + most
        cut = text.rfind("\n", start, stop) + 1 or max(0, text.rfind(" ", start + 1, stop)) or stop
        pieces.append(text[start:cut])
        start = cut
    return [*pieces, text[start:]]


def without_long_runs(text: str, most: int = LONGEST_RUN) -> list[str]:
    """A text in pieces whose runs of spaces, or of anything but spaces, are of at most `most` characters.

    Nearly always the text itself. A run is cut before a sign in its second half, where a word ends, else anywhere.
    """
    if len(text) <= most or not _may_have_long_run(text, most):
        return [text]
    pieces, start = [], 0
    for run in _RUNS.finditer(text):
        at, stop = run.span()
        while stop - at > most:
            soft = max((m.end() for m in _SOFT.finditer(text, at + most // 2, at + most)), default=at + most)
            pieces.append(text[start:soft])
            start = at = soft
    return [*pieces, text[start:]]


def _may_have_long_run(text: str, most: int) -> bool:
    """False where no run can be longer: one of more than `most` bytes fills an aligned block of half as many."""
    block = max(1, most // 2)
    is_space = np.frombuffer(text.encode(), np.uint8) <= 32
    blocks = is_space[: len(is_space) // block * block].reshape(-1, block)
    return bool((blocks.all(axis=1) | ~blocks.any(axis=1)).any())


def tiktoken_of(content: str) -> Any | None:
    """The tiktoken encoding of a tokenizer file's content, or None: not installed, or no plain byte-level BPE."""
    try:
        import tiktoken
    except ImportError:
        return None
    described = json.loads(content)
    pattern = _pattern_of(described)
    if pattern is None:
        return None
    bytes_of = _byte_alphabet()
    special = {token["content"]: token["id"] for token in described["added_tokens"]}
    ranks = {
        bytes(bytes_of[c] for c in spelling): token_id
        for spelling, token_id in described["model"]["vocab"].items()
        if spelling not in special
    }
    if len(set(ranks.values())) != len(ranks) or not all(bytes([b]) in ranks for b in range(256)):
        return None
    return tiktoken.Encoding("hymo", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def _pattern_of(described: dict[str, Any]) -> str | None:
    """The split pattern, if the file is a byte-level BPE and nothing more."""
    model, pre = described["model"], described["pre_tokenizer"]
    plain = (
        model["type"] == "BPE"
        and described["normalizer"] is None
        and not (model.get("dropout") or model.get("byte_fallback") or model.get("continuing_subword_prefix"))
        and all(token["special"] for token in described["added_tokens"])
        and pre is not None
    )
    if not plain or not _ranked_by_id(model):
        return None
    steps = pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    last = steps[-1]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    if len(steps) == 1:
        return _GPT2_PATTERN if last["use_regex"] else None
    first = steps[0]
    isolated = first["type"] == "Split" and first["behavior"] == "Isolated" and not first["invert"]
    if len(steps) != 2 or not isolated or last["use_regex"]:
        return None
    return first["pattern"].get("Regex")


def _ranked_by_id(model: dict[str, Any]) -> bool:
    """tiktoken merges in the order of ids, the tokenizers library in the order of its list: they must agree."""
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    ids = [model["vocab"].get(left + right, -1) for left, right in pairs]
    return ids == sorted(ids) and -1 not in ids


def _byte_alphabet() -> dict[str, int]:
    """The byte of each character of a byte-level spelling: printable ones themselves, the rest from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}
