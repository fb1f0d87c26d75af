"""Small data sets on disk for the tests of the data path."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from hymo.data import ByteTokenizer, TokenSet
from hymo.data.parts import digests
from hymo.data.shards import PartWriter, write_manifest


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    """Data settings with a cache of the test's own."""
    monkeypatch.delenv("HYMO_CACHE", raising=False)

    def make(source: Sequence[str | Path] | None, **changes: object) -> SimpleNamespace:
        values = {"tokenizer": "bytes", "val_fraction": 0.2, "cache_dir": str(tmp_path / "cache")} | changes
        return SimpleNamespace(source=source if source is None else [str(entry) for entry in source], **values)

    return make


@pytest.fixture
def token_set(tmp_path: Path) -> Callable[..., TokenSet]:
    """A token set of the given texts, in this order, by the byte tokenizer."""

    def make(texts: Sequence[bytes], name: str = "set") -> TokenSet:
        tokenizer = ByteTokenizer()
        writer = PartWriter(tmp_path / name, 0, tokenizer)
        for text in texts:
            writer.add(tokenizer.encode(text), len(text), digests(text)[0])
        write_manifest(tmp_path / name, tokenizer, [writer.close()])
        return TokenSet(tmp_path / name)

    return make


@pytest.fixture(scope="session")
def bpe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of 400 tokens, trained here."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["def f(x):\n    return x + 1\n", "for i in range(10): print(i)\n"] * 50, trainer)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return path
