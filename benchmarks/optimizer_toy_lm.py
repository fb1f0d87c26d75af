"""A toy language model trained by several optimizers, each at five rates and three random seeds, on one CPU core.

    python benchmarks/optimizer_toy_lm.py [--steps 150] [--seeds 0 1 2] [--methods adamw normuon ...]

Two attention layers of width 96 on bytes of the standard library's sources. The method updates the hidden matrices;
the embedding, the head and the norms take AdamW at 3e-3 (for `adamw` everything takes the grid's rate). A direction,
not a benchmark of language models: 150 steps of 16 x 64 bytes. Prints the validation loss (nats a byte) at each rate,
then the best of each method and seed.
"""

import argparse
import statistics
import sysconfig
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hymo.optim.cautious_adamw import CautiousAdamW
from hymo.optim.normuon import NorMuon

WIDTH, LAYERS, HEADS, BATCH, LENGTH = 96, 2, 4, 16, 64
REST_RATE = 3e-3

MUON_RATES = (0.005, 0.01, 0.02, 0.04, 0.08)
# name -> (settings of NorMuon, rates); None = AdamW alone, "split" = AdamW with a rate of its own for the matrices
METHODS: dict[str, tuple[dict | str | None, tuple[float, ...]]] = {
    "adamw": (None, (3e-4, 1e-3, 2e-3, 4e-3, 1e-2)),
    "adamw, two rates": ("split", (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)),
    "normuon": ({}, MUON_RATES),
    "muon": ({"normalize": False}, MUON_RATES),
    "muon quintic": ({"normalize": False, "orthogonalize": "quintic"}, MUON_RATES),
    "muon cubic": ({"normalize": False, "orthogonalize": "cubic"}, (0.00125, 0.0025, 0.005, 0.01, 0.02)),
    "cubic_frobenius": ({"preset": "cubic_frobenius"}, (0.002, 0.005, 0.02, 0.05, 0.2)),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.relu(self.up(self.norm2(x))).square())


class ToyLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02 if p.shape[0] in (256, LENGTH) else p.shape[1] ** -0.5 / 2)

    def loss(self, x: Tensor) -> Tensor:
        h = self.embedding(x[:, :-1]) + self.position.weight
        return F.cross_entropy(self.head(self.norm(self.blocks(h))).flatten(0, 1).float(), x[:, 1:].flatten())


def text() -> Tensor:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"\0".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def batch(data: Tensor, generator: torch.Generator) -> Tensor:
    starts = torch.randint(0, len(data) - LENGTH - 1, (BATCH,), generator=generator)
    return torch.stack([data[s : s + LENGTH + 1] for s in starts]).long()


def optimizers(model: ToyLM, settings: Any, rate: float) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    if settings is None:
        return [CautiousAdamW(model.parameters(), lr=rate)]
    held = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in held]
    if settings == "split":
        return [CautiousAdamW(matrices, lr=rate), CautiousAdamW(rest, lr=REST_RATE)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [NorMuon(matrices, lr=rate, **settings), CautiousAdamW(rest, lr=REST_RATE)]


def train(settings: Any, rate: float, seed: int, steps: int, data: Tensor, held_out: list[Tensor]) -> float:
    """Validation loss after `steps` updates with a linear decay over the last 40 %."""
    torch.manual_seed(seed)
    model = ToyLM()
    generator = torch.Generator().manual_seed(seed + 100)
    optimizer = optimizers(model, settings, rate)
    for step in range(1, steps + 1):
        for o in optimizer:
            o.zero_grad()
        model.loss(batch(data, generator)).backward()
        factor = min(1.0, step / 10, (steps + 1 - step) / (0.4 * steps))
        for o in optimizer:
            o.set_factor(factor)
            o.step()
    with torch.no_grad():
        return sum(float(model.loss(x)) for x in held_out) / len(held_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = text()
    split = int(0.95 * len(data))
    generator = torch.Generator().manual_seed(7)
    held_out = [batch(data[split:], generator) for _ in range(20)]
    best: dict[str, list[tuple[float, float]]] = {}
    for method in args.methods:
        settings, rates = METHODS[method]
        for seed in args.seeds:
            start = time.perf_counter()
            losses = {rate: train(settings, rate, seed, args.steps, data[:split], held_out) for rate in rates}
            loss, rate = min((loss, rate) for rate, loss in losses.items())
            best.setdefault(method, []).append((loss, rate))
            took = (time.perf_counter() - start) / len(rates)
            cells = "  ".join(f"{rate:g}: {loss:.3f}" for rate, loss in losses.items())
            print(f"{method:16} seed {seed}  {cells}  ({took:.1f} s a run)", flush=True)
    print("\n| method | " + " | ".join(f"seed {s}" for s in args.seeds) + " | mean | best rate |")
    print("|---|" + "---|" * (len(args.seeds) + 2))
    for method, found in best.items():
        rates = "/".join(f"{rate:g}" for rate in dict.fromkeys(r for _, r in found))
        cells = " | ".join(f"{loss:.3f}" for loss, _ in found)
        print(f"| {method} | {cells} | {statistics.mean(loss for loss, _ in found):.3f} | {rates} |")


if __name__ == "__main__":
    main()
