"""``hymo eval --tasks``: tasks of EleutherAI's lm-evaluation-harness on a run, without a detour through transformers.

A task is a name of the harness, a YAML file in its form, or a JSON or JSONL file of questions in the form below. The
only file that imports ``lm_eval``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate, utils
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from hymo.data.batch import IGNORED
from hymo.distributed import reduce
from hymo.errors import HyMoError
from hymo.evaluate_lengths import label_scores
from hymo.generate import generate
from hymo.runs import OpenRun, open_run

MOST_NEW_TOKENS = 256
FILES = (".json", ".jsonl", ".yaml", ".yml")


class HarnessModel(TemplateLM):
    """A run as the harness asks it. Log-likelihoods are in nats, of the main head, in evaluation mode.

    A context that is empty is the end token, by the harness's convention; in training nothing is predicted from it.
    Of a context longer than ``training.seq_len`` the end is kept.
    """

    def __init__(self, run: OpenRun):
        super().__init__()
        self._run, self._model, self._tokenizer = run, run.model, run.tokenizer
        self.max_length = run.config.training.seq_len
        self._batch_size = run.config.training.micro_batch_size

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.end_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: Any) -> list[int]:
        return [int(i) for i in self._tokenizer.encode(string)]

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **unused: Any
    ) -> list[tuple[float, bool]]:
        """(log p of the continuation, whether it is what greedy decoding gives) of each request."""
        windows = [self._window(context, continuation) for _, context, continuation in requests]
        longest_first = sorted(range(len(windows)), key=lambda i: -len(windows[i][0]))
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(windows)
        for first in range(0, len(windows), self._batch_size):
            chosen = longest_first[first : first + self._batch_size]
            for i, answer in zip(chosen, self._score([windows[i] for i in chosen]), strict=True):
                answers[i] = answer
        return answers

    def _window(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """The tokens to read, and the continuation, which is predicted by the last of them."""
        if len(continuation) > self.max_length:
            raise HyMoError(
                f"--tasks: found a continuation of {len(continuation)} tokens; accepted: at most training.seq_len = "
                f"{self.max_length}"
            )
        return (context + continuation)[-(self.max_length + 1) :][:-1], continuation

    def _score(self, windows: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """One batch, filled up on the right: what comes after a text does not change it."""
        length = max(len(read) for read, _ in windows)
        tokens_BT = torch.zeros(len(windows), length, dtype=torch.int64)
        labels_BT = torch.full((len(windows), length), IGNORED)
        for row, (read, continuation) in enumerate(windows):
            tokens_BT[row, : len(read)] = torch.tensor(read)
            labels_BT[row, len(read) - len(continuation) : len(read)] = torch.tensor(continuation)
        hidden_BTC = self._model.forward_with_hidden(tokens_BT.to(self._run.device), depth=0)[0]
        valid_BT = labels_BT != IGNORED
        scores = label_scores(self._model, hidden_BTC[valid_BT], labels_BT[valid_BT].to(self._run.device))
        nats, greedy = (torch.cat(parts).cpu() for parts in zip(*scores, strict=True))
        sizes = [len(continuation) for _, continuation in windows]
        return [
            (-float(n.double().sum()), bool(g.all()))
            for n, g in zip(nats.split(sizes), greedy.split(sizes), strict=True)
        ]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """log p of whole texts, in windows of ``training.seq_len`` that predict every token once."""
        totals = []
        for request in requests:
            ids, end = self.tok_encode(request.args[0]), self.eot_token_id
            windows = utils.get_rolling_token_windows(
                token_list=ids, prefix_token=end, max_seq_len=self.max_length, context_len=1
            )
            pairs = [(None, *utils.make_disjoint_window(window)) for window in windows]
            totals.append(sum(value for value, _ in self._loglikelihood_tokens(pairs)))
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuations up to a stop text, the end token, or ``max_gen_toks``; greedy unless the task samples."""
        return [self._continue(*request.args) for request in requests]

    def _continue(self, context: str, settings: dict[str, Any]) -> str:
        stops = settings.get("until") or []
        stops = [stops] if isinstance(stops, str) else stops
        most = min(int(settings.get("max_gen_toks", MOST_NEW_TOKENS)), self.max_length - 1)
        prompt = self.tok_encode(context)[-(self.max_length - most) :] or [self.eot_token_id]
        temperature = float(settings.get("temperature", 0.0)) if settings.get("do_sample") else 0.0
        ids: list[int] = []
        for token in generate(
            self._model, prompt, max_tokens=most, context=self.max_length, temperature=temperature,
            top_p=float(settings.get("top_p", 1.0)), end_id=self.eot_token_id,
        ):  # fmt: skip
            ids.append(token)
            text = self._tokenizer.decode(ids)
            if any(stop in text for stop in stops):
                return min((text.split(stop)[0] for stop in stops), key=len)
        return self._tokenizer.decode(ids)


def question_task(file: Path) -> dict[str, Any]:
    """A JSON list, or JSONL, of questions as a task of the harness.

    {"question": text, "choices": [texts], "answer": index} is multiple choice: ``acc`` by the largest log-likelihood,
    ``acc_norm`` by that over the choice's bytes. {"context": text, "continuation": text} gives ``perplexity``, which is
    exp(-mean log p of a whole continuation), and ``acc``, the share that greedy decoding gives. Texts are joined as
    they are, with nothing between.
    """
    items = _read_items(file)
    task: dict[str, Any] = {
        "task": file.stem, "test_split": "test", "target_delimiter": "", "num_fewshot": 0,
        "custom_dataset": lambda **unused: {"test": _data_set(items)},
    }  # fmt: skip
    if all(item.keys() >= {"question", "choices", "answer"} for item in items):
        for i, item in enumerate(items):
            if type(item["answer"]) is not int or not 0 <= item["answer"] < len(item["choices"]):
                raise HyMoError(f"{file}: item {i} has answer {item['answer']!r}; accepted: an index into its choices")
        return task | {
            "output_type": "multiple_choice", "doc_to_text": lambda item: item["question"],
            "doc_to_choice": lambda item: item["choices"], "doc_to_target": lambda item: item["answer"],
            "metric_list": [_metric("acc"), _metric("acc_norm")],
        }  # fmt: skip
    if all(item.keys() >= {"context", "continuation"} for item in items):
        return task | {
            "output_type": "loglikelihood", "doc_to_text": lambda item: item["context"],
            "doc_to_target": lambda item: item["continuation"],
            "metric_list": [_metric("perplexity", better=False), _metric("acc")],
        }  # fmt: skip
    raise HyMoError(
        f"{file}: found items with the keys {sorted(items[0])}; accepted: question, choices, answer in all of them, or "
        "context, continuation"
    )


def _read_items(file: Path) -> list[dict[str, Any]]:
    try:
        text = file.read_text(encoding="utf-8")
        lines = text.splitlines() if file.suffix == ".jsonl" else None
        items = json.loads(text) if lines is None else [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise HyMoError(f"{file}: cannot be read ({error}); accepted: a JSON list, or JSONL") from None
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
        raise HyMoError(f"{file}: found no list of objects; accepted: a JSON list of questions, or JSONL")
    return items


def _data_set(items: list[dict[str, Any]]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(items)


def _metric(name: str, better: bool = True) -> dict[str, Any]:
    return {"metric": name, "aggregation": name if name == "perplexity" else "mean", "higher_is_better": better}


def evaluate_tasks(
    path: str, tasks: Sequence[str], overrides: Sequence[str], limit: int | None = None
) -> dict[str, Any]:
    """The harness's ``results`` of tasks on a run, by task. ``limit``: questions of each task.

    Raises HyMoError for tasks that it does not know.
    """
    for logger in ("lm_eval", "lm_eval.evaluator", "lm_eval.api.task", "lm_eval.tasks.manager"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    manager = _manager(tasks)
    loaded = [_load(name, manager) for name in tasks]
    run = open_run(path, overrides)
    if reduce.world_size() > 1:
        raise HyMoError(f"--tasks: found {reduce.world_size()} processes; accepted: one")
    done = simple_evaluate(
        model=HarnessModel(run), tasks=loaded, limit=limit, bootstrap_iters=1000, log_samples=False,
        task_manager=manager,
    )  # fmt: skip
    results: dict[str, Any] = done["results"]
    for name, counts in done.get("n-samples", {}).items():
        results.get(name, {})["n"] = counts.get("effective")
    return results


def _manager(tasks: Sequence[str]) -> TaskManager:
    """That of the harness; it looks through its thousands of tasks only where one is asked for by name."""
    return TaskManager(include_defaults=not all(Path(name).suffix in FILES for name in tasks))


def _load(name: str, manager: TaskManager) -> Any:
    """A task's name or description; what cannot be found is said before the model is opened."""
    file = Path(name)
    if file.suffix in (".json", ".jsonl"):
        return question_task(file)
    if file.suffix in (".yaml", ".yml") and not file.is_file():
        raise HyMoError(f"--tasks: {name}: no such file; accepted: a task of lm-eval, or a YAML, JSON or JSONL file")
    try:
        found = list(manager.load([name])["tasks"].values())
    except Exception as error:  # whatever a task's files and its data set's host raise
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise HyMoError(f"--tasks: {name} cannot be loaded ({first}); accepted: a task of lm-eval, or a file") from None
    return found[0] if len(found) == 1 else name


def result_table(results: dict[str, Any]) -> str:
    """The results for a terminal."""
    lines = [f"{'task':<24} {'metric':<16} {'value':>10} {'stderr':>10} {'n':>7}"]
    for task, values in results.items():
        for key, value in values.items():
            metric, _, kind = key.partition(",")
            if kind and not metric.endswith("_stderr") and isinstance(value, int | float):
                error = values.get(f"{metric}_stderr,{kind}")
                shown = f"{error:.4f}" if isinstance(error, int | float) else "-"
                lines.append(f"{task:<24} {metric:<16} {value:>10.4f} {shown:>10} {values.get('n', '-'):>7}")
    return "\n".join(lines)
