"""A tokenizer of a run as the files that ``AutoTokenizer`` reads; the ids it gives are exactly ours."""

from __future__ import annotations

import json
from typing import Any

from hymo.data.tokenize import ByteTokenizer, FileTokenizer, Tokenizer

BYTE_SPECIALS = {256: "<|end|>", 257: "<|pad|>", 258: "<|reserved_258|>", 259: "<|reserved_259|>"}


def tokenizer_files(tokenizer: Tokenizer, context: int) -> tuple[dict[str, Any], int]:
    """The contents of tokenizer.json and tokenizer_config.json, and the id that fills up short texts.

    As in training, text never becomes a special token, even where it spells one, and nothing is put before or after it.
    """
    if isinstance(tokenizer, FileTokenizer):
        described = json.loads(tokenizer.path.read_text(encoding="utf-8"))
        described |= {"padding": None, "truncation": None}
        if (described.get("post_processor") or {}).get("type") != "ByteLevel":  # that of ByteLevel adds no token
            described["post_processor"] = None
        end = tokenizer.backend.id_to_token(tokenizer.end_id)
        pad, pad_id = end, tokenizer.end_id
    else:
        described, pad_id = byte_tokenizer(), ByteTokenizer.pad_id
        end, pad = BYTE_SPECIALS[ByteTokenizer.end_id], BYTE_SPECIALS[pad_id]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "pad_token": pad,
        "padding_side": "left",
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    return {"tokenizer.json": described, "tokenizer_config.json": settings}, pad_id


def byte_tokenizer() -> dict[str, Any]:
    """The byte tokenizer in the form of the `tokenizers` library: byte-level, each byte its own id, no merges."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
            for number, content in BYTE_SPECIALS.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {character: byte for byte, character in enumerate(byte_alphabet())}, "merges": [],
        },
    }  # fmt: skip


def byte_alphabet() -> list[str]:
    """The character that the byte-level alphabet (of GPT-2) has for each byte: printable ones stand for themselves."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
