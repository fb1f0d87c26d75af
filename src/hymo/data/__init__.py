"""Text to batches: sources, tokenizers, token shards, the order of samples, and streams of batches."""

from hymo.data.batch import IGNORED, Batch, DocLayout, count_samples, left_over_tokens, make_batch
from hymo.data.loader import BatchStream, Deal, EvalBatches, bits_per_byte
from hymo.data.order import SampleOrder
from hymo.data.prepare import TokenData, cache_folder, prepare
from hymo.data.shards import TokenSet
from hymo.data.source import DataError, Document, Source, open_source, read_documents
from hymo.data.tokenize import ByteTokenizer, FileTokenizer, Tokenizer, open_tokenizer

__all__ = [
    "IGNORED",
    "Batch",
    "BatchStream",
    "ByteTokenizer",
    "DataError",
    "Deal",
    "DocLayout",
    "Document",
    "EvalBatches",
    "FileTokenizer",
    "SampleOrder",
    "Source",
    "TokenData",
    "TokenSet",
    "Tokenizer",
    "bits_per_byte",
    "cache_folder",
    "count_samples",
    "left_over_tokens",
    "make_batch",
    "open_source",
    "open_tokenizer",
    "prepare",
    "read_documents",
]
