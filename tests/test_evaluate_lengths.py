"""`hymo eval` by length of document: every predicted token counted once, in its document's bucket."""

import re

import numpy as np
import pytest
import torch

from hymo.cli import main
from hymo.data.loader import EvalBatches
from hymo.data.prepare import prepare_whole
from hymo.evaluate import evaluate
from hymo.evaluate_lengths import MOST_LOGITS, evaluate_by_length, table, token_nats
from hymo.runs import open_run


@pytest.fixture
def documents(tmp_path):
    """Texts of 5, 6, 30, 100 and 300 bytes; each has one token more."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for size in (5, 6, 30, 100, 300):
        (folder / f"{size}.txt").write_text(("import os; " * 40)[:size])
    return folder


@pytest.fixture
def opened(trained_run):
    return open_run(trained_run)


def by_length(run, documents, batch_size=2):
    token_set = prepare_whole([str(documents)], run.config.data)
    batches = EvalBatches(token_set, run.tokenizer.token_bytes, seq_len=64, mtp_depth=0, batch_size=batch_size)
    return token_set, batches, *evaluate_by_length(run.model, batches, token_set, run.tokenizer.token_bytes, run.device)


def test_buckets_are_documents_by_powers_of_two_and_add_up(opened, documents):
    _, batches, whole, rows = by_length(opened, documents)
    assert [(row.shortest, row.longest, row.documents) for row in rows] == [
        (4, 7, 2), (16, 31, 1), (64, 127, 1), (256, 511, 1),
    ]  # fmt: skip
    # Each document's first token is never predicted, and its end token spells no byte.
    assert [row.result.tokens for row in rows] == [5 + 6, 30, 100, 300]
    assert [row.result.text_bytes for row in rows] == [4 + 5, 29, 99, 299]
    nats = sum(row.result.val_loss * row.result.tokens for row in rows)
    assert whole.val_loss == pytest.approx(nats / sum(row.result.tokens for row in rows), rel=1e-12)
    assert (whole.tokens, whole.text_bytes) == (batches.n_labels, batches.n_bytes)


def test_it_is_the_loss_of_the_evaluation_in_training(opened, documents, monkeypatch):
    _, batches, whole, rows = by_length(opened, documents)
    result = evaluate(opened.model, batches, opened.device)
    assert whole.val_loss == pytest.approx(result.val_loss, rel=1e-6)
    assert whole.val_bpb == pytest.approx(result.val_bpb, rel=1e-6)
    monkeypatch.setattr("hymo.evaluate_lengths.MOST_LOGITS", 260 * 7)  # pieces of seven tokens
    pieces = by_length(opened, documents, batch_size=3)[2:]
    assert MOST_LOGITS > 260 * 7
    assert pieces[0].val_loss == pytest.approx(whole.val_loss, rel=1e-6)
    assert [row.result.tokens for row in pieces[1]] == [row.result.tokens for row in rows]


def test_a_bucket_is_what_its_documents_alone_give(opened, documents):
    for size in (5, 100, 300):  # those that stay lie in one window
        (documents / f"{size}.txt").unlink()
    _, _, _, rows = by_length(opened, documents)
    ids = torch.tensor([[*(documents / "30.txt").read_bytes(), 256]])
    nats = token_nats(opened.model, ids[:, :-1], None, ids[:, 1:])
    logits = opened.model(ids[:, :-1]).double()
    exact = torch.nn.functional.cross_entropy(logits[0], ids[0, 1:], reduction="none")
    assert np.allclose(nats.numpy(), exact.detach().numpy(), rtol=1e-5)
    assert rows[1].result.val_loss == pytest.approx(float(nats.mean()), rel=1e-5)


def test_the_verb_prints_the_table_under_the_line(trained_run, documents, capsys):
    assert main(["eval", str(trained_run), "--data", str(documents)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"data: val_loss \S+ \| val_bpb \S+ \| perplexity \S+ \| 441 tokens, 436 bytes \| step 6", lines[0])
    assert lines[1].split() == ["document", "length", "documents", "tokens", "loss", "bpb", "perplexity"]
    assert [line.split()[:3] for line in lines[2:]] == [
        ["4-7", "2", "11"], ["16-31", "1", "30"], ["64-127", "1", "100"], ["256-511", "1", "300"],
    ]  # fmt: skip
    assert table([]).count("\n") == 0
