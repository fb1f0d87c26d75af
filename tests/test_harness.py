"""`hymo eval --tasks`: what the harness reports is what the model's own log-likelihoods say; offline, local files."""

import json
import math
import types

import pytest
import torch

pytest.importorskip("lm_eval")
from hymo.cli import main
from hymo.errors import HyMoError
from hymo.harness import HarnessModel, evaluate_tasks, question_task
from hymo.runs import open_run

QUESTIONS = [
    {"question": "import ", "choices": ["os", "sys", "json"], "answer": 0},
    {"question": "def f(", "choices": ["x):\n", "1"], "answer": 1},
    {"question": "for i", "choices": [" in range", " of", "!"], "answer": 2},
    {"question": "", "choices": ["class A:", "\n\n"], "answer": 0},
]


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")


@pytest.fixture(scope="module")
def opened(trained_run):
    return open_run(trained_run)


def log_p(model, context, continuation):
    """From the logits of one text alone, in float64; and whether greedy decoding gives the continuation."""
    ids, n = [*(context.encode() or (256,)), *continuation.encode()], len(continuation.encode())
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]]))[0, -n:].double()
    wanted = torch.tensor(ids[-n:])
    return float(torch.log_softmax(logits, -1).gather(1, wanted[:, None]).sum()), bool(
        (logits.argmax(-1) == wanted).all()
    )


def test_multiple_choice_is_the_largest_log_likelihood(trained_run, opened, tmp_path, capsys):
    file = tmp_path / "questions.json"
    file.write_text(json.dumps(QUESTIONS))
    assert main(["eval", str(trained_run), "--tasks", str(file), "--json", str(tmp_path / "out.json")]) == 0
    printed = capsys.readouterr().out
    right = right_by_byte = 0
    for item in QUESTIONS:
        scores = [log_p(opened.model, item["question"], choice)[0] for choice in item["choices"]]
        by_byte = [score / len(choice) for score, choice in zip(scores, item["choices"], strict=True)]
        right += scores.index(max(scores)) == item["answer"]
        right_by_byte += by_byte.index(max(by_byte)) == item["answer"]
    results = json.loads((tmp_path / "out.json").read_text())["questions"]
    assert results["n"] == 4
    assert results["acc,none"] == pytest.approx(right / 4)
    assert results["acc_norm,none"] == pytest.approx(right_by_byte / 4)
    assert f"{right / 4:.4f}" in printed.splitlines()[1]


def test_log_likelihoods_are_those_of_the_definition(trained_run, opened, tmp_path):
    pairs = [("import ", "os"), ("", "def f(x): return x"), ("x = 1\ny = ", "2"), ("a" * 90, "bcd")]
    requests = [types.SimpleNamespace(args=pair) for pair in pairs]
    harness = HarnessModel(opened)
    found = harness.loglikelihood(requests, disable_tqdm=True)
    # A context's last spaces are counted with the continuation by the harness; a long context is cut to seq_len 64.
    expected_pairs = [("import", " os"), pairs[1], ("x = 1\ny =", " 2"), ("a" * 62, "bcd")]
    for (value, greedy), pair in zip(found, expected_pairs, strict=True):
        exact, exact_greedy = log_p(opened.model, *pair)
        assert value == pytest.approx(exact, abs=1e-4)
        assert greedy == exact_greedy
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(json.dumps({"context": c, "continuation": t}) for c, t in expected_pairs))
    results = evaluate_tasks(str(trained_run), [str(file)], [])["pairs"]
    mean = sum(log_p(opened.model, *pair)[0] for pair in expected_pairs) / len(pairs)
    assert math.log(results["perplexity,none"]) == pytest.approx(-mean, rel=1e-5)


def test_rolling_log_likelihood_predicts_every_token_once(opened):
    text = "import os, sys\n" * 10  # 150 tokens in windows of 64
    (found,) = HarnessModel(opened).loglikelihood_rolling([types.SimpleNamespace(args=(text,))])
    ids, exact = [256, *text.encode()], 0.0
    with torch.no_grad():
        for start, stop in ((1, 65), (65, 129)):
            p = torch.log_softmax(opened.model(torch.tensor([ids[start - 1 : stop - 1]]))[0].double(), -1)
            exact += float(p.gather(1, torch.tensor(ids[start:stop])[:, None]).sum())
        p = torch.log_softmax(opened.model(torch.tensor([ids[86:150]]))[0].double(), -1)  # the last window reaches back
        exact += float(p.gather(1, torch.tensor(ids[87:151])[:, None])[-22:].sum())
    assert found == pytest.approx(exact, rel=1e-6)


def test_generation_stops_at_its_stop_text(opened):
    from hymo.generate import generate

    prompt = "def f("
    whole = opened.tokenizer.decode(
        list(generate(opened.model, list(prompt.encode()), max_tokens=12, context=64, temperature=0))
    )
    ask = lambda **settings: HarnessModel(opened).generate_until(  # noqa: E731
        [types.SimpleNamespace(args=(prompt, {"max_gen_toks": 12, **settings}))]
    )[0]
    assert ask() == whole
    stop = whole[5:7]
    assert ask(until=[stop, "\0never"]) == whole[: whole.index(stop)]


def test_a_file_in_the_form_of_the_harness(trained_run, tmp_path, monkeypatch):
    (tmp_path / "questions.json").write_text(json.dumps(QUESTIONS[:3]))
    (tmp_path / "mine.yaml").write_text(
        f"task: mine\ndataset_path: json\ndataset_kwargs:\n  data_files: {{test: {tmp_path}/questions.json}}\n"
        f"  cache_dir: {tmp_path}/cache\n"
        "test_split: test\noutput_type: multiple_choice\ntarget_delimiter: ''\n"
        "doc_to_text: '{{question}}'\ndoc_to_choice: '{{choices}}'\ndoc_to_target: answer\n"
        "metric_list:\n  - {metric: acc, aggregation: mean, higher_is_better: true}\n"
    )
    results = evaluate_tasks(str(trained_run), [str(tmp_path / "mine.yaml"), str(tmp_path / "questions.json")], [])
    assert results["mine"]["acc,none"] == results["questions"]["acc,none"]
    assert evaluate_tasks(str(trained_run), [str(tmp_path / "questions.json")], [], limit=2)["questions"]["n"] == 2


def test_what_cannot_be_asked_is_one_line(trained_run, tmp_path, capsys):
    bad = tmp_path / "bad.json"
    for content, message in [
        ("[", "cannot be read"), ("[]", "found no list of objects"), ('[{"a": 1}]', "found items with the keys ['a']"),
        ('[{"question": "q", "choices": ["a"], "answer": 1}]', "item 0 has answer 1"),
    ]:  # fmt: skip
        bad.write_text(content)
        with pytest.raises(HyMoError, match=message.replace("[", r"\[").replace("]", r"\]")):
            question_task(bad)
    run = str(trained_run)
    for words, message in [
        (["--tasks", "no_such.yaml"], "no_such.yaml: no such file"),
        (["--tasks", str(bad), "--data", "x"], "found beside --data"),
        (["--tasks", str(bad), "--limit", "0"], "--limit: found 0"),
        (["--limit", "3"], "found without --tasks"),
    ]:
        assert main(["eval", run, *words]) == 2
        assert message in capsys.readouterr().err
