"""Text from a trained model: the recurrent state of the GDN blocks and the latent cache of the MLA blocks.

B: sequences, V: vocabulary.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hymo.data.tokenize import Tokenizer
from hymo.errors import HyMoError
from hymo.models.model import HyMo


def sample(logits_BV: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> Tensor:
    """One token a row, int64 [B]: greedy at temperature 0, else from the smallest set with probability ``top_p``."""
    if temperature == 0:
        return logits_BV.argmax(-1)
    probability_BV = torch.softmax(logits_BV.float() / temperature, -1)
    sorted_BV, order_BV = probability_BV.sort(-1, descending=True)
    before_BV = sorted_BV.cumsum(-1) - sorted_BV
    sorted_BV = sorted_BV.masked_fill(before_BV >= top_p, 0.0)  # the most likely token always stays
    picked_B1 = torch.multinomial(sorted_BV.cpu(), 1, generator=generator).to(order_BV.device)
    return order_BV.gather(-1, picked_B1)[:, 0]


@torch.no_grad()
def generate(
    model: HyMo,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    context: int,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
    end_id: int | None = None,
) -> Iterator[int]:
    """Continue ``prompt`` token by token until ``max_tokens``, the end token, or ``context`` tokens in all.

    The prompt is read at once; every further token costs one step of the recurrence and one row of latent attention.
    """
    check_sampling(temperature, top_p, max_tokens, seed)
    if not prompt:
        raise HyMoError("prompt: found no tokens; accepted: at least one")
    if len(prompt) >= context:
        raise HyMoError(f"prompt: found {len(prompt)} tokens; accepted: fewer than the model's context of {context}")
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    room = min(max_tokens, context - len(prompt))
    cache = model.init_cache(1, len(prompt) + room)
    logits_BV = model.prefill(torch.tensor([list(prompt)], device=device), cache)
    for i in range(room):
        token_B = sample(logits_BV, temperature, top_p, generator)
        token = int(token_B)
        if token == end_id:
            return
        yield token
        if i + 1 < room:
            logits_BV = model.decode(token_B.to(device), cache)


def check_sampling(temperature: float, top_p: float, max_tokens: int, seed: int) -> None:
    """Refuse what cannot be sampled with, in one line."""
    if temperature != 0 and not 1e-3 <= temperature <= 1e3:
        raise HyMoError(f"--temperature: found {temperature}; accepted: 0 (greedy), or from 0.001 to 1000")
    if not 0 <= seed < 2**63:
        raise HyMoError(f"--seed: found {seed}; accepted: a whole number from 0, below 2^63")
    if not 0 < top_p <= 1:
        raise HyMoError(f"--top-p: found {top_p}; accepted: a number above 0 and at most 1")
    if max_tokens < 1:
        raise HyMoError(f"--max-tokens: found {max_tokens}; accepted: a whole number >= 1")


class TextStream:
    """Turns tokens into text as they come; holds back bytes of a character that is not whole yet."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._ids = list(prompt)
        self._shown = len(tokenizer.decode(self._ids))

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        whole = len(text) - (1 if text.endswith("�") and len(text) > self._shown else 0)
        piece, self._shown = text[self._shown : whole], max(self._shown, whole)
        return piece

    def rest(self) -> str:
        """What was held back."""
        text = self._tokenizer.decode(self._ids)
        piece, self._shown = text[self._shown :], len(text)
        return piece


def generate_text(
    path: str,
    prompt: str,
    overrides: Sequence[str] = (),
    *,
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
) -> int:
    """``hymo generate``: stream a continuation of ``prompt`` and print tokens a second."""
    from hymo.runs import open_run

    check_sampling(temperature, top_p, max_tokens, seed)
    run = open_run(path, overrides)
    ids = [int(i) for i in run.tokenizer.encode(prompt)]
    stream = TextStream(run.tokenizer, ids)
    shown = prompt.encode("utf-8", "replace").decode("utf-8")  # what came in as other bytes cannot be printed
    began, n = time.perf_counter(), 0
    tokens = generate(
        run.model, ids, max_tokens=max_tokens, context=run.config.training.seq_len, temperature=temperature,
        top_p=top_p, seed=seed, end_id=run.tokenizer.end_id,
    )  # fmt: skip
    for token in tokens:
        if n == 0:  # only now is it sure that the prompt is accepted
            print(shown, end="", flush=True)
        n += 1
        print(stream.push(token), end="", flush=True)
    seconds = time.perf_counter() - began
    print(stream.rest())
    print(f"[{n} tokens in {seconds:.2f} s, {n / max(seconds, 1e-9):.1f} tokens/s]", file=sys.stderr)
    return 0
