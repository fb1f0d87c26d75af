"""Attention's back ends with and without documents; the mixture of experts beside loops over experts and a dense layer.

    python benchmarks/layers.py [--batch 4] [--tokens 4096] [--config hymo_750m] [--device cuda] [--only attention]

In bfloat16 at the configuration's sizes, random inputs, a document's start in 2,000 tokens. Median milliseconds with a
cold cache, on CUDA of recorded CUDA graphs, that is without the host's launches, and of forward and backward as called;
the first call, which compiles, apart. Errors of the outputs: RMS over RMS, of the first row, against float32. What asks
the device for numbers cannot be recorded and is timed as called.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from block import options, time_both, titles
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hymo.config import ModelConfig
from hymo.config_io import load_config
from hymo.kernels import grouped
from hymo.kernels.attention import attention, build_mask
from hymo.models.model import build_hymo

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def varlen(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float) -> Tensor:
    """Flash attention over documents one after the other; v is padded to the size of q. [B,T,H,V]."""
    from torch.nn.attention.varlen import varlen_attn

    padded = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
    flat = (x.flatten(0, 1) for x in (q, k, padded))
    out = varlen_attn(*flat, starts, starts, longest, longest, scale=scale, window_size=(-1, 0))
    assert isinstance(out, Tensor)
    return out.view(*q.shape[:3], -1)[..., : v.shape[-1]]


def by_sdpa(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend, mask: Tensor | None, scale: float) -> Tensor:
    """One of SDPA's back ends, or an error; flash attention wants v as wide as q."""
    wide = F.pad(v, (0, q.shape[-1] - v.shape[-1])) if backend == SDPBackend.FLASH_ATTENTION else v
    q, k, wide = (x.transpose(1, 2) for x in (q, k, wide))
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(q, k, wide, attn_mask=mask, is_causal=mask is None, scale=scale)
    return out.transpose(1, 2)[..., : v.shape[-1]]


def dense_mask(doc_ids_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """[B,1,T,T]: 0 where a query may look, -inf elsewhere."""
    allowed = (doc_ids_BT[:, :, None] == doc_ids_BT[:, None, :]).tril()
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -torch.inf)[:, None]


def attention_ops(documents: Tensor, scale: float, dtype: torch.dtype) -> dict[str, tuple[Attend, bool]]:
    """Name -> (function of q, k, v; whether it keeps documents apart)."""
    B, T = documents.shape
    rows = documents + torch.arange(B, device=documents.device)[:, None] * (T + 1)  # a row's start is a document's too
    lengths = rows.flatten().unique_consecutive(return_counts=True)[1]
    starts = F.pad(lengths.cumsum(0), (1, 0)).int()
    packed, mask = build_mask(documents), dense_mask(documents, dtype)
    found: dict[str, tuple[Attend, bool]] = {
        "hymo, documents": (partial(attention, mask=packed, scale=scale), True),
        "flash varlen, v padded, documents": (
            partial(varlen, starts=starts, longest=int(lengths.max()), scale=scale),
            True,
        ),
        "efficient, dense mask, documents": (
            partial(by_sdpa, backend=SDPBackend.EFFICIENT_ATTENTION, mask=mask, scale=scale),
            True,
        ),
        "hymo, one document": (partial(attention, mask=None, scale=scale), False),
    }
    for name, backend in (
        ("cuDNN", SDPBackend.CUDNN_ATTENTION),
        ("flash, v padded", SDPBackend.FLASH_ATTENTION),
        ("efficient", SDPBackend.EFFICIENT_ATTENTION),
    ):
        found[f"{name}, one document"] = (partial(by_sdpa, backend=backend, mask=None, scale=scale), False)
    return found


def time_attention(config: ModelConfig, B: int, T: int, documents: Tensor, device: str) -> None:
    size, H = config.qk_nope_dim + config.qk_rope_dim, config.mla_heads
    q, k, v = (
        torch.randn(B, T, H, n, device=device, dtype=torch.bfloat16).requires_grad_()
        for n in (size, size, config.v_head_dim)
    )
    print(f"\nattention: {H} heads, queries and keys of {size}, values of {config.v_head_dim}")
    exact = {}
    for apart, mask in ((True, dense_mask(documents[:1], torch.float32)), (False, None)):
        row = (x[:1].detach().float() for x in (q, k, v))
        exact[apart] = by_sdpa(*row, SDPBackend.MATH, mask, size**-0.5)
    for name, (op, apart) in attention_ops(documents, size**-0.5, q.dtype).items():
        try:
            with torch.no_grad():
                out = op(q, k, v)[:1].float()
            error = float((out - exact[apart]).norm() / exact[apart].norm())
            time_both(f"{name} ({error:.1e})", lambda q, op=op: op(q, k, v), q, [k, v], device)
        except (RuntimeError, ImportError) as reason:
            print(f"{name}: not here ({str(reason).splitlines()[0][:90]})", flush=True)


class Layer(torch.nn.Module):
    """A feed-forward part: experts whose routed products are as asked (grouped, loop, definition), or dense."""

    def __init__(self, ffn: Any, way: str):
        super().__init__()
        self.ffn, self.way = ffn, way

    def forward(self, x: Tensor) -> Tensor:
        return self.ffn(x) if self.way == "dense" else self.ffn(x)[0]


def time_experts(config: ModelConfig, x: Tensor, device: str) -> None:
    def make(config: ModelConfig, way: str, compiled: bool) -> Layer:
        config = config.model_copy(update={"n_layers": config.mla_every, "vocab_size": 64, "mtp_depth": 0})
        ffn = build_hymo(config, seed=0).layers[-1].ffn
        for name, parameter in ffn.named_parameters():
            if name != "router.weight":
                parameter.data = parameter.data.bfloat16()
        if way == "definition":
            ffn._routed = ffn._routed_loop
        layer = Layer(ffn.to(device), way)
        if compiled:
            layer.compile(dynamic=False)
        return layer

    active = config.top_k + config.n_shared
    print(
        f"\nexperts: a token takes {config.top_k} of {config.n_routed} and {config.n_shared} shared; d_ff {config.d_ff}"
    )
    dense = config.model_copy(update={"n_routed": 0, "top_k": 0, "n_shared": active})
    rows = [
        ("hymo, compiled", config, "grouped", True),
        ("hymo, eager", config, "grouped", False),
        ("expert by expert on sorted rows", config, "loop", False),
        ("expert by expert, by the definition", config, "definition", False),
        (f"dense, {active} experts wide, compiled", dense, "dense", True),
    ]
    for name, sizes, way, compiled in rows:
        layer = make(sizes, way, compiled)
        weights = [p for p in layer.parameters() if p.numel()]
        backend = (lambda rows: "loop") if way == "loop" else grouped.choose_backend
        with mock.patch.object(grouped, "choose_backend", backend):
            time_both(name, layer, x, weights, device)


def main() -> None:
    p = options(__doc__)
    p.add_argument("--only", nargs="+", choices=("attention", "experts"), default=["attention", "experts"])
    args = p.parse_args()
    config, shape = load_config(args.config).model, (args.batch, args.tokens)
    torch.manual_seed(0)
    documents = (torch.rand(shape, device=args.device) < 5e-4).cumsum(1).int()
    starts = args.batch + int((documents[:, -1] - documents[:, 0]).sum())
    print(f"B{args.batch} T{args.tokens} on {args.device}, {starts} documents in {args.batch} rows")
    print(titles(args.device))
    if "attention" in args.only:
        time_attention(config, *shape, documents, args.device)
    if "experts" in args.only:
        x = torch.randn(*shape, config.dim, device=args.device, dtype=torch.bfloat16).requires_grad_()
        time_experts(config, x, args.device)


if __name__ == "__main__":
    main()
