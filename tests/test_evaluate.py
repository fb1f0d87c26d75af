"""Evaluation: the main prediction alone, and `hymo eval` on held-out text, on given text, and where there is none."""

import re

import pytest
import torch

from hymo.cli import main
from hymo.data.loader import EvalBatches
from hymo.data.prepare import prepare
from hymo.evaluate import evaluate
from hymo.models.model import build_hymo
from hymo.training.trainer import Trainer


def test_no_look_ahead_is_computed_and_the_loss_is_the_same(small_config):
    model = build_hymo(small_config)
    data = prepare(small_config.data)
    t, depth = small_config.training, small_config.model.mtp_depth
    batches = EvalBatches(
        data.val["val"], data.tokenizer.token_bytes, seq_len=t.seq_len, mtp_depth=depth, batch_size=2, max_tokens=128
    )
    assert depth > 0
    with torch.no_grad():
        whole = sum(
            model.eval()(b.tokens_BL, doc_ids_BL=b.doc_ids_BL, labels_KBT=b.labels_KBT).ce_sum_K[0].double()
            for b in batches
        )

    def refuse(*_):
        raise AssertionError("a look-ahead was computed")

    for link in model.mtp.depths:
        link.register_forward_pre_hook(refuse)
    result = evaluate(model.train(), batches, torch.device("cpu"))
    assert result.val_loss == pytest.approx(float(whole) / batches.n_labels, rel=1e-6)
    assert model.training


@pytest.fixture
def texts(tmp_path):
    """Three documents of 900 bytes in all."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(3):
        (folder / f"{i}.txt").write_text(f"abcdefgh{i}\n" * 30)
    return folder


def run_eval(*words, capsys, code=0):
    assert main(["eval", *words]) == code
    return capsys.readouterr()


def test_given_text_is_evaluated_whole_and_as_one(small_config, tmp_path, texts, capsys):
    Trainer(small_config, run_dir=tmp_path / "run").train()
    capsys.readouterr()
    out = run_eval(str(tmp_path / "run"), "--data", str(texts), capsys=capsys).out
    assert re.fullmatch(
        r"data: val_loss \S+ \| val_bpb \S+ \| perplexity \S+ \| 900 tokens, 897 bytes \| step 6\n(  .*\n)+", out
    )
    parts = [str(path) for path in sorted(texts.iterdir())]
    assert run_eval(str(tmp_path / "run"), "--data", *parts, capsys=capsys).out == out

    # The same documents as a data set, some of them held out, or one of the files beside it.
    assert main(["data", "build", str(texts), "--out", str(tmp_path / "set"), "--tokenizer", "bytes",
                 "--val-fraction", "0.4", "--workers", "1"]) == 0  # fmt: skip
    capsys.readouterr()
    assert (
        "900 tokens, 897 bytes" in run_eval(str(tmp_path / "run"), "--data", str(tmp_path / "set"), capsys=capsys).out
    )
    one = run_eval(str(tmp_path / "run"), "--data", parts[0], capsys=capsys).out
    assert "300 tokens, 299 bytes" in one
    both = run_eval(str(tmp_path / "run"), "--data", str(tmp_path / "set"), parts[0], capsys=capsys).out
    assert "1.2k tokens, 1.2k bytes" in both
    refused = run_eval(str(tmp_path / "run"), "--data", str(tmp_path / "none"), capsys=capsys, code=2)
    assert len(refused.err.splitlines()) == 1


def test_a_run_without_held_out_documents_says_what_to_do(small_flags, tmp_path, texts, capsys):
    folder = tmp_path / "set"
    assert main(["data", "build", str(texts), "--out", str(folder), "--tokenizer", "bytes", "--val-fraction", "0",
                 "--workers", "1"]) == 0  # fmt: skip
    run = str(tmp_path / "run")
    flags = [flag for flag in small_flags if not flag.startswith("--data.source")]
    assert main(["train", *flags, f"--data.source={folder}", "--run-dir", run]) == 0
    capsys.readouterr()
    refused = run_eval(run, capsys=capsys, code=2)
    assert "its data has no held-out documents; accepted: --data PATH" in refused.err
    assert "900 tokens, 897 bytes" in run_eval(run, "--data", str(folder), capsys=capsys).out
