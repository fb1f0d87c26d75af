"""The recurrence block as a whole, forward and backward, beside flash-linear-attention's gated linear attention layer.

    python benchmarks/block.py [--batch 4] [--tokens 4096] [--config hymo_750m] [--device cuda]

Norm, projections, convolution, recurrence, output norm and gate, projection, residual, at the configuration's sizes, in
bfloat16 with the parameters in float32 that training keeps so; with and without torch.compile, whole rows and packed
documents. The peer (where it is installed; it has no decay bound and its gate is a low-rank projection a channel) gets
the same width and heads. Median milliseconds with a cold cache, on CUDA of recorded CUDA graphs, that is without the
host's launches, and of forward and backward as called; the first call, which compiles, apart.
"""

import argparse
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from hymo.bench.recurrence import measure, recorded
from hymo.config import HyMoConfig, ModelConfig
from hymo.config_io import load_config
from hymo.models.model import build_hymo

KEPT_FLOAT32 = ("A_log", "dt_bias", "D", "norm.weight", "out_norm.weight")


def our_block(config: HyMoConfig, device: str, compiled: bool) -> nn.Module:
    block = build_hymo(config.model.model_copy(update={"n_layers": config.model.mla_every}), seed=0).layers[0]
    for name, parameter in block.named_parameters():
        if name not in KEPT_FLOAT32:
            parameter.data = parameter.data.bfloat16()
    block.use_compile = compiled
    return block.to(device)


def peer_layer(config: ModelConfig, device: str) -> nn.Module | None:
    try:
        from fla.layers import GatedLinearAttention
    except Exception as reason:
        print(f"flash-linear-attention: left out ({type(reason).__name__}: {reason})"[:150])
        return None
    value, key = config.gdn_heads * config.gdn_head_dim, config.gdn_heads * config.gdn_state_dim
    layer = GatedLinearAttention(
        hidden_size=config.dim,
        expand_k=key / config.dim,
        expand_v=value / config.dim,
        num_heads=config.gdn_heads,
        use_short_conv=True,
        conv_size=config.conv_size,
    )
    return layer.to(device, torch.bfloat16)


def time_both(name: str, run: Callable[[Tensor], Tensor], x: Tensor, weights: list[Tensor], device: str) -> None:
    """Print the first call and the medians of the forward pass, of forward and backward, and of these as called."""
    dy = torch.randn_like(x)

    def both() -> object:
        return torch.autograd.grad(run(x), [x, *weights], dy, allow_unused=True)

    began = time.perf_counter()
    both()
    if device == "cuda":
        torch.cuda.synchronize()
    first = time.perf_counter() - began
    record = recorded if device == "cuda" else lambda function: function
    with torch.no_grad():
        forward = measure(record(lambda: run(x)), device)
    times = [forward, measure(record(both), device)] + [measure(both, device)] * (device == "cuda")
    print(f"{name:44s} {first:9.1f} " + " ".join(f"{ms:9.3f}" for ms in times), flush=True)


def options(description: str | None) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--config", default="hymo_750m")
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--tokens", type=int, default=4096)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return p


def titles(device: str) -> str:
    """Over the columns of ``time_both``."""
    columns = ["first s", "fwd ms", "f+b ms"] + ["called"] * (device == "cuda")
    return f"{'':44s}" + "".join(f" {column:>9s}" for column in columns)


def main() -> None:
    args = options(__doc__).parse_args()
    whole = load_config(args.config)
    config = whole.model
    torch.manual_seed(0)
    x = torch.randn(args.batch, args.tokens, config.dim, device=args.device, dtype=torch.bfloat16).requires_grad_()
    documents = (torch.rand(args.batch, args.tokens, device=args.device) < 5e-4).cumsum(1).int()
    print(f"B{args.batch} T{args.tokens} on {args.device}")
    print(titles(args.device))
    for compiled in (False, True):
        block = our_block(whole, args.device, compiled)
        weights = list(block.parameters())
        for ids, rows in ((None, "whole rows"), (documents, "documents")):
            layout = SimpleNamespace(doc_ids_BT=ids)  # all that this block reads of a DocLayout
            name = f"hymo, {'compiled' if compiled else 'eager'}, {rows}"
            time_both(name, lambda x, block=block, layout=layout: block(x, layout), x, weights, args.device)
    peer = peer_layer(config, args.device)
    if peer is not None:
        weights = list(peer.parameters())
        time_both("flash-linear-attention GLA layer", lambda x: peer(x)[0], x, weights, args.device)


if __name__ == "__main__":
    main()
