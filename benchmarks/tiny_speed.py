"""Tokens a second of the tiny hybrid against a plain causal-attention model of equal size, in one process.

    python benchmarks/tiny_speed.py

The plain model: rotary attention and SwiGLU blocks, RMSNorm, byte vocabulary, the same number of parameters within 3 %,
the same batch, cross entropy of the next token alone. Both are timed over whole steps: forward, backward, optimizer.
"""

import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hymo.config import HyMoConfig
from hymo.config_io import load_config
from hymo.data.batch import count_samples, make_batch
from hymo.data.order import SampleOrder
from hymo.data.prepare import prepare
from hymo.models.layers import RMSNorm, rotary_angles, rotate
from hymo.models.model import build_hymo
from hymo.optim.build import build_optimizers
from hymo.training.loss import PretrainingLoss
from hymo.training.step import attempt_update


class PlainBlock(nn.Module):
    def __init__(self, dim: int, heads: int, d_ff: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = RMSNorm(dim, 1e-6), RMSNorm(dim, 1e-6)
        self.qkv, self.o = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 2 * d_ff, bias=False), nn.Linear(d_ff, dim, bias=False)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k = rotate(q, *angles), rotate(k, *angles)
        a = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Plain(nn.Module):
    """A plain decoder of about ``parameters`` parameters at the hybrid's width."""

    def __init__(self, vocab: int, dim: int, parameters: int, heads: int = 4, layers: int = 4):
        super().__init__()
        d_ff = round(((parameters - 2 * vocab * dim) / layers - 4 * dim * dim) / (3 * dim))
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(PlainBlock(dim, heads, d_ff) for _ in range(layers))
        self.norm, self.head = RMSNorm(dim, 1e-6), nn.Linear(dim, vocab, bias=False)
        self.head_dim = dim // heads
        for module in self.modules():
            if isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        angles = rotary_angles(torch.arange(tokens.shape[1])[None], self.head_dim, 10000.0)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, angles)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten(), ignore_index=-100)


def batches(config: HyMoConfig, n: int) -> list:
    t, depth = config.training, config.model.mtp_depth
    data = prepare(config.data)
    order = SampleOrder(count_samples(data.train, t.seq_len, depth), 0, data.train.fingerprint)
    size = t.global_batch_size
    return [make_batch(data.train, order, list(range(i * size, (i + 1) * size)), t.seq_len, depth) for i in range(n)]


def main() -> None:
    steps, warm = 20, 4
    config = load_config("tiny")
    data = batches(config, steps)
    hybrid = build_hymo(config)
    size = sum(p.numel() for p in hybrid.parameters())
    plain = Plain(config.model.vocab_size, config.model.dim, size)
    plain_size = sum(p.numel() for p in plain.parameters())
    optimizers = build_optimizers(hybrid, config.optimizer)
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    loss = PretrainingLoss(config.model.mtp_weights)

    def hybrid_step(b) -> None:  # type: ignore[no-untyped-def]
        attempt_update(hybrid, optimizers, [b], loss, factor=0.1, grad_clip=1.0)

    def plain_step(b) -> None:  # type: ignore[no-untyped-def]
        length = config.training.seq_len
        plain(b.tokens_BL[:, :length], b.labels_KBT[0]).backward()
        adamw.step()
        adamw.zero_grad()

    times: dict[str, list[float]] = {"hybrid": [], "plain": []}
    for i, b in enumerate(data):  # in turn, so that both see the machine as it is
        for name, step in (("hybrid", hybrid_step), ("plain", plain_step)):
            began = time.perf_counter()
            step(b)
            if i >= warm:
                times[name].append(time.perf_counter() - began)
    tokens = config.tokens_per_step
    speed = {name: tokens / statistics.median(seconds) for name, seconds in times.items()}
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, Python {sys.version.split()[0]}")
    print(f"hybrid ({size:,} parameters): {speed['hybrid']:,.0f} tokens/s")
    print(f"plain attention ({plain_size:,} parameters): {speed['plain']:,.0f} tokens/s")
    print(f"ratio {speed['hybrid'] / speed['plain']:.2f} (at least 0.5)")


if __name__ == "__main__":
    main()
