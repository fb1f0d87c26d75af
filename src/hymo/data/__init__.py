"""Text to batches: sources, tokenizers, token shards, the order of samples, and streams of batches.

Public names are imported on first use, so that processes which only encode text do not load torch. What a run needs
comes from `hymo.data.prepare.prepare`.
"""

import importlib
from typing import Any

_HOMES = {
    "hymo.data.batch": (
        "IGNORED", "Batch", "count_samples", "left_over_tokens", "make_batch", "sample_order"
    ),
    "hymo.data.dataset": ("BuildReport", "build"),
    "hymo.data.overview": ("build_command", "inspect", "inspect_command"),
    "hymo.data.loader": ("BatchStream", "Deal", "EvalBatches", "bits_per_byte"),
    "hymo.data.order": ("MixOrder", "SampleOrder"),
    "hymo.data.prepare": ("TokenData", "cache_folder"),
    "hymo.data.readers": ("DataError", "Document", "read_documents"),
    "hymo.data.shards": ("TokenSet",),
    "hymo.data.source": ("Source", "open_source"),
    "hymo.data.tokenize": ("ByteTokenizer", "FileTokenizer", "Tokenizer", "open_tokenizer"),
}  # fmt: skip
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'hymo.data' has no attribute {name!r}")
