"""What each written-out form gains on a CPU: steps of the tiny model with one of them at a time in its plain form.

    OMP_NUM_THREADS=1 python benchmarks/tiny_gains.py [--rounds 3]

Processor time of whole training steps on real text, one thread; the forms take turns, and the least of the rounds is
what other work on the machine has disturbed least. The plain forms compute the same, by operations that PyTorch
differentiates itself; before the clock starts their cross entropies are compared.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from hymo.config_io import load_config
from hymo.kernels import attention
from hymo.kernels.recurrence import gated_recurrence
from hymo.models import gdn, layers, mla, model, moe
from hymo.training.trainer import Trainer


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    rest, first, second = x.split((x.shape[-1] - 2 * half, half, half), dim=-1)
    return torch.cat((rest, first * cos - second * sin, second * cos + first * sin), dim=-1)


def causal_conv(x_BTC: Tensor, w_CK: Tensor, doc_ids_BT: Tensor | None = None) -> Tensor:
    """Tap by tap over a padded copy, zero where a tap would reach into another document."""
    taps, length = w_CK.shape[1], x_BTC.shape[1]
    padded = F.pad(x_BTC, (0, 0, taps - 1, 0))
    y = x_BTC * w_CK[:, -1]
    for j in range(1, taps):
        reached = padded[:, taps - 1 - j : taps - 1 - j + length]
        if doc_ids_BT is not None:
            before = F.pad(doc_ids_BT, (j, 0), value=-1)[:, :length]
            reached = torch.where((before == doc_ids_BT)[..., None], reached, 0)
        y = y + reached * w_CK[:, -1 - j]
    return F.silu(y)


def cross_entropy(hidden, weight, labels, *, term_weights_K=None, z_weight=None):
    """All logits at once."""
    sums = [
        F.cross_entropy(h @ weight.t(), y, ignore_index=-100, reduction="sum")
        for h, y in zip(hidden, labels, strict=True)
    ]
    return torch.stack(sums), torch.zeros(())


def any_decay(*args, max_log_decay=None, **kwargs):
    return gated_recurrence(*args, **kwargs)


def loop(*args, backend=None, **kwargs):
    return gated_recurrence(*args, **kwargs, backend="loop")


# Name: (owner, attribute, its plain form).
FORMS = {
    "as it is": [],
    "RMSNorm": [(layers, "rms_norm", rms_norm), (gdn, "rms_norm", rms_norm)],
    "SwiGLU": [(layers, "swiglu", swiglu), (moe, "swiglu", swiglu)],
    "rotary embedding": [(mla, "rotate", rotate)],
    "convolution": [(gdn, "causal_conv", causal_conv)],
    "attention at equal head sizes": [(attention, "_padded", lambda x, size: x)],
    "experts by grouped products: one by one": [(moe.DeepSeekMoE, "_routed", moe.DeepSeekMoE._routed_loop)],
    "cross entropy in chunks: all logits": [(model, "linear_cross_entropy", cross_entropy)],
    "recurrence, bound on decay: any decay": [(gdn, "gated_recurrence", any_decay)],
    "recurrence in chunks: a loop": [(gdn, "gated_recurrence", loop)],
}


@contextmanager
def plain(changes: list) -> Iterator[None]:
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, form in changes:
        setattr(owner, name, form)
    try:
        yield
    finally:
        for owner, name, form in kept:
            setattr(owner, name, form)


@torch.no_grad()
def check_forms(trainer: Trainer) -> None:
    """Every form gives the sums of cross entropy that the others give."""
    (batch,) = next(trainer.stream())
    sums = {}
    for name, changes in FORMS.items():
        with plain(changes):
            out = trainer.model(batch.tokens_BL, doc_ids_BL=batch.doc_ids_BL, labels_KBT=batch.labels_KBT)
        sums[name] = out.ce_sum_K
        torch.testing.assert_close(sums[name], sums["as it is"], rtol=1e-5, atol=0, msg=name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    trainer = Trainer(load_config("tiny", ["--training.device=cpu", "--data.workers=0", "--checkpoint.every=0"]))
    trainer.train_step()
    check_forms(trainer)
    seconds: dict[str, list[float]] = {name: [] for name in FORMS}
    for _ in range(args.rounds):
        for name, changes in FORMS.items():
            with plain(changes):
                began = time.process_time()
                trainer.train_step()
                seconds[name].append(time.process_time() - began)
    trainer.stream().close()
    base = [of(seconds["as it is"]) for of in (statistics.median, min)]
    print(f"torch {torch.__version__}, one thread; a step of {trainer.config.tokens_per_step:,} tokens")
    print(f"{'in its plain form':42s} {'median, ms':>13s} {'least, ms':>15s}")
    for name, values in seconds.items():
        median, least = statistics.median(values), min(values)
        print(f"{name:42s} {median * 1e3:7,.0f} {median / base[0]:5.2f} {least * 1e3:9,.0f} {least / base[1]:5.2f}")


if __name__ == "__main__":
    main()
