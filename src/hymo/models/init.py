"""Explicit initialisation, the same at any world size.

A parameter is drawn on the CPU in blocks of rows (its leading axes flattened). Each block has a generator of its own,
keyed by a hash of (seed, name, block), so a rank that holds a shard draws only the blocks that the shard touches, and
the shards of any partition put together are bitwise the whole tensor. Philox (numpy) is counter-based: its generators
cost little to make, a 128-bit key gives every block its own stream, and no draw depends on vector instructions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hymo.config import ModelConfig
from hymo.cores import own_cores
from hymo.models.gdn import GatedDeltaNetBlock
from hymo.models.layers import RMSNorm, SwiGLU
from hymo.models.mla import LatentAttention
from hymo.models.moe import DeepSeekMoE

STD = 0.02
ROUTER_STD = 0.006
DECAY_RANGE = (0.25, 4.0)
STEP_RANGE = (1e-3, 1e-1)
BLOCK_ELEMENTS = 1 << 16


class Rule(NamedTuple):
    """How a parameter starts: ``kind`` and its two numbers.

    constant (a) | normal (std a) | uniform (a to b) | log_of_log_uniform (log of a log-uniform value in a to b) |
    logit_of_log_uniform (logit of one) | log_of_row (log(1 + row))
    """

    kind: str
    a: float = 0.0
    b: float = 0.0

    def __str__(self) -> str:
        texts = {
            "constant": f"{self.a:g}",
            "normal": f"normal, std {self.a:.3g}",
            "uniform": f"uniform, {self.a:.3g} to {self.b:.3g}",
            "log_of_log_uniform": f"log x, x log-uniform in {self.a:g} to {self.b:g}",
            "logit_of_log_uniform": f"logit x, x log-uniform in {self.a:g} to {self.b:g}",
            "log_of_row": "log of 1, 2, 3, ... by head",
        }
        return texts[self.kind]


def init_rules(model: nn.Module) -> dict[str, Rule]:
    """The rule of every parameter of a HyMo, by name. A tied head is listed once, as the embedding.

    Raises:
        ValueError: ``gdn_init: log_heads`` with a bounded decay.
        KeyError: a parameter that no rule names.
    """
    config: ModelConfig = model.config  # type: ignore[assignment]
    if config.gdn_init == "log_heads" and config.gdn_max_decay is not None:
        raise ValueError(
            f"model.gdn_init: found log_heads with model.gdn_max_decay {config.gdn_max_decay}; accepted: log_heads "
            "needs gdn_max_decay null"
        )
    output = Rule("normal", STD / math.sqrt(2 * config.n_layers))
    rules = {}
    modules = dict(model.named_modules())
    for name, param in model.named_parameters():
        prefix, _, leaf = name.rpartition(".")
        module = modules[prefix]
        parent = modules[prefix.rpartition(".")[0]] if prefix else model
        rules[name] = _rule(module, parent, prefix.rpartition(".")[2], leaf, param, config.gdn_init, output)
    return rules


def _rule(module: nn.Module, parent: nn.Module, child: str, leaf: str, param, gdn_init: str, output: Rule) -> Rule:
    if isinstance(module, RMSNorm):
        return Rule("constant", 1.0)
    if isinstance(module, GatedDeltaNetBlock):
        bound = 1 / math.sqrt(max(module.conv_size, 1))
        spread = gdn_init == "default"
        return {
            "A_log": Rule("log_of_log_uniform", *DECAY_RANGE) if spread else Rule("log_of_row"),
            "dt_bias": Rule("logit_of_log_uniform", *STEP_RANGE) if spread else Rule("constant", 0.0),
            "D": Rule("constant", 1.0),
            "conv_weight": Rule("uniform", -bound, bound),  # normal 0.02 would leave the recurrence dead at the start
        }[leaf]
    if isinstance(module, DeepSeekMoE):
        return output if leaf in ("w_out", "shared_out") else Rule("normal", STD)
    if isinstance(parent, DeepSeekMoE) and child == "router":
        return Rule("normal", ROUTER_STD)
    into_residual = (GatedDeltaNetBlock, "out_proj"), (LatentAttention, "o"), (SwiGLU, "w_out")
    if any(isinstance(parent, owner) and child == attribute for owner, attribute in into_residual):
        return output
    if param.dim() == 2 and leaf == "weight":
        return Rule("normal", STD)
    raise KeyError(f"no initialisation rule for {child}.{leaf} of {type(parent).__name__}")


def _draw_block(rule: Rule, generator: np.random.Generator, first_row: int, rows: int, width: int) -> np.ndarray:
    shape = (rows, width)
    if rule.kind == "constant":
        return np.full(shape, rule.a, np.float32)
    if rule.kind == "log_of_row":
        return np.log(np.arange(first_row + 1, first_row + rows + 1, dtype=np.float32))[:, None].repeat(width, 1)
    if rule.kind == "normal":
        rows_drawn = generator.standard_normal(shape, np.float32)
        rows_drawn *= np.float32(rule.a)
        return rows_drawn
    if rule.kind == "uniform":
        return rule.a + (rule.b - rule.a) * generator.random(shape, np.float32)
    log_x = math.log(rule.a) + (math.log(rule.b) - math.log(rule.a)) * generator.random(shape)
    if rule.kind == "log_of_log_uniform":
        return log_x.astype(np.float32)
    return (log_x - np.log1p(-np.exp(log_x))).astype(np.float32)


def draw_rows(rule: Rule, seed: int, name: str, shape: tuple[int, ...], start: int, stop: int) -> Tensor:
    """Rows ``start`` to ``stop`` of a parameter, fp32 [stop - start, width].

    A matrix is drawn as rows of its last axis, all leading axes flattened; a vector as rows of one number.
    """
    width = shape[-1] if len(shape) > 1 else 1
    total = math.prod(shape) // width if width else 0
    step = max(1, BLOCK_ELEMENTS // max(width, 1))
    out = np.empty((stop - start, width), np.float32)

    def fill(block: int) -> None:
        first = block * step
        key = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=16).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
        rows = _draw_block(rule, generator, first, min(step, total - first), width)
        low, high = max(start, first), min(stop, first + len(rows))
        out[low - start : high - start] = rows[low - first : high - first]

    blocks = range(start // step, -(-stop // step))
    if len(blocks) < 16:
        for block in blocks:
            fill(block)
    else:  # numpy draws without the interpreter's lock, and no block depends on another
        with ThreadPoolExecutor(own_cores()) as pool:
            list(pool.map(fill, blocks))
    return torch.from_numpy(out)


def draw_shard(rule: Rule, seed: int, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> Tensor:
    """The part ``start:stop`` of axis ``dim`` of a parameter, bitwise as in the whole, drawing only what it needs.

    ``dim`` is any axis but the last of a matrix or stack (0 for a vector): those that FSDP2 shards here.
    """
    if len(shape) > 1 and not 0 <= dim < len(shape) - 1:
        raise ValueError(f"dim: found {dim}; accepted: 0 to {len(shape) - 2} for shape {tuple(shape)}")
    outer, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 : -1])
    stride = shape[dim] * inner
    parts = [
        draw_rows(rule, seed, name, shape, o * stride + start * inner, o * stride + stop * inner) for o in range(outer)
    ]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole.view(*shape[:dim], stop - start, *shape[dim + 1 :])


Place = tuple[Tensor, int, int, int]
"""Where a rank's part of a parameter goes: the local tensor, and (dim, start, stop) of it in the whole."""


def _whole(param: Tensor) -> list[Place]:
    return [(param, 0, 0, param.shape[0])]


@torch.no_grad()
def initialize_(model: nn.Module, seed: int, places: Callable[[Tensor], list[Place]] = _whole) -> None:
    """Draw every parameter of a HyMo in place and zero the buffers.

    ``places`` tells which parts of a parameter are held here (for sharded parameters); the whole by default.
    """
    for name, param, rule in _named(model):
        for local, dim, start, stop in places(param):
            if local.numel():
                local.copy_(draw_shard(rule, seed, name, tuple(param.shape), dim, start, stop))
    for buffer in model.buffers():
        buffer.zero_()


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor, Rule]]:
    rules = init_rules(model)
    for name, param in model.named_parameters():
        yield name, param, rules[name]


def describe(model: nn.Module) -> list[tuple[str, int, str]]:
    """(pattern of names, parameters, how they start) for ``hymo plan``; layer numbers are written as ``*``."""
    table: dict[tuple[str, str], int] = {}
    for name, param, rule in _named(model):
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        table[pattern, str(rule)] = table.get((pattern, str(rule)), 0) + param.numel()
    return [(pattern, count, text) for (pattern, text), count in table.items()]
