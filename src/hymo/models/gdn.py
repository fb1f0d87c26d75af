"""The gated-recurrence block: a mixer without a feed-forward layer.

    x + out_proj(norm(recurrence(silu(conv(v, b, c)), g) + D v) * silu(z)),    [v | b | c | z] = in_proj(norm(x))

The recurrence h_t = exp(g_t A) h_{t-1} + b_t (x) v_t is gated linear attention with a rank-1 log-decay; the block's
name is that of the original design notes.

Shape suffixes: B batch, T sequence, C channels, H heads, D value size of a head, S state size of a head, K taps - 1.
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hymo.config import ModelConfig
from hymo.kernels.conv import causal_conv, causal_conv_step
from hymo.kernels.recurrence import Backend, gated_recurrence, gated_recurrence_step, resolve_backend
from hymo.models.layers import CompilableBlock, DocLayout, RMSNorm, rms_norm, wide


class GDNState(NamedTuple):
    """What generation carries: the last K inputs of the convolution [B, K, C] and the fp32 state [B, H, S, D]."""

    window_BKC: Tensor
    h_BHSD: Tensor


class GatedDeltaNetBlock(CompilableBlock):
    """Norm, projections, causal convolution, gated recurrence, gated output norm, projection, residual.

    Attributes:
        use_triton: None = by device (Triton on CUDA, chunked PyTorch elsewhere), True = Triton or an error, False =
            chunked PyTorch.
        use_compile: see ``CompilableBlock``.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        if config.gdn_erase != "none" or config.gdn_decay != "rank1":
            raise NotImplementedError(
                f"gdn_erase, gdn_decay: found {config.gdn_erase!r}, {config.gdn_decay!r}; accepted: 'none', 'rank1' "
                "(the others are not built yet)"
            )
        heads, head_dim, state_dim = config.gdn_heads, config.gdn_head_dim, config.gdn_state_dim
        self.heads, self.head_dim, self.state_dim = heads, head_dim, state_dim
        self.conv_size, self.max_decay, self.norm_eps = config.conv_size, config.gdn_max_decay, config.norm_eps
        value, key = heads * head_dim, heads * state_dim
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.in_proj = nn.Linear(config.dim, 2 * value + 2 * key, bias=False)
        self.dt_proj = nn.Linear(config.dim, heads, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads, state_dim))
        self.D = nn.Parameter(torch.empty(heads))
        taps = max(config.conv_size, 0)
        self.conv_weight = nn.Parameter(torch.empty(value + 2 * key, taps)) if taps else None
        self.out_norm = RMSNorm(head_dim, config.norm_eps)
        self.out_proj = nn.Linear(value, config.dim, bias=False)
        self.row_blocks = {"in_proj.weight": (value, key, key, value)}
        self.use_triton: bool | None = None

    def forward(self, x_BTC: Tensor, layout: DocLayout) -> Tensor:
        """[B, T, dim] -> [B, T, dim], residual included."""
        return self._run(x_BTC, layout.doc_ids_BT)

    def _compute(self, x_BTC: Tensor, doc_ids_BT: Tensor | None) -> Tensor:  # type: ignore[override]
        proj_BTP, g_BTH = self._project(self.norm(x_BTC))
        if self._has_fused_mixer(proj_BTP):
            from hymo.kernels.triton_mixer import gated_mixer

            return x_BTC + self.out_proj(
                gated_mixer(
                    proj_BTP,
                    g_BTH,
                    self._bounded_A_log(),
                    wide(self.D),
                    cast(Tensor, self.conv_weight),
                    self.out_norm.weight,
                    doc_ids_BT,
                    self.max_decay,
                    self.norm_eps,
                )
            )
        vbc_BTC, z_BTC = self._cut(proj_BTP)
        o_BTHD = gated_recurrence(
            *self._convolved(vbc_BTC, doc_ids_BT),
            g_BTH,
            self._bounded_A_log(),
            D=self.D,
            doc_ids=doc_ids_BT,
            max_log_decay=self.max_decay,
            backend=self._backend(),
        )
        return x_BTC + self._output(o_BTHD, z_BTC)

    def _has_fused_mixer(self, proj_BTP: Tensor) -> bool:
        """Whether convolution, recurrence and output gate run as one operator: the Triton form, where it fits."""
        if resolve_backend(self._backend(), proj_BTP.device) != "triton" or self.conv_weight is None:
            return False
        from hymo.kernels import triton_mixer

        return triton_mixer.supports(proj_BTP, self.conv_weight, self.head_dim, self.state_dim)

    def _project(self, n_BTC: Tensor) -> tuple[Tensor, Tensor]:
        """[v | b | c | z] and the gates, fp32 [..., H]."""
        return self.in_proj(n_BTC), torch.sigmoid(wide(self.dt_proj(n_BTC)) + wide(self.dt_bias))

    def _cut(self, proj: Tensor) -> tuple[Tensor, Tensor]:
        """[v | b | c] and z."""
        value, key, _, _ = self.row_blocks["in_proj.weight"]
        vbc, z = proj.split((value + 2 * key, value), dim=-1)
        return vbc, z

    def _convolved(self, vbc_BTC: Tensor, doc_ids_BT: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """v [B,T,H,D], b and c [B,T,H,S] after the convolution."""
        if self.conv_weight is not None:
            vbc_BTC = causal_conv(vbc_BTC, self.conv_weight, doc_ids_BT)
        return self._split_heads(vbc_BTC)

    def _split_heads(self, vbc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        value, key, _, _ = self.row_blocks["in_proj.weight"]
        v, b, c = vbc.split((value, key, key), dim=-1)
        return (
            v.unflatten(-1, (self.heads, self.head_dim)),
            b.unflatten(-1, (self.heads, self.state_dim)),
            c.unflatten(-1, (self.heads, self.state_dim)),
        )

    def _bounded_A_log(self) -> Tensor:
        A_log = wide(self.A_log)
        return A_log if self.max_decay is None else A_log.clamp(max=math.log(self.max_decay))

    def _backend(self) -> Backend:
        if self.use_triton is None:
            return "auto"
        return "triton" if self.use_triton else "torch"

    def _output(self, o: Tensor, z: Tensor) -> Tensor:
        """Per-head RMSNorm, gate and projection of o [..., H, D], z [..., H*D]."""
        normed = rms_norm(o, self.out_norm.weight, self.norm_eps).flatten(-2)
        return self.out_proj(normed * F.silu(z))

    def init_state(self, batch_size: int) -> GDNState:
        """The state before the first token."""
        value, key, _, _ = self.row_blocks["in_proj.weight"]
        device, dtype = self.in_proj.weight.device, self.in_proj.weight.dtype
        window = torch.zeros(batch_size, max(self.conv_size - 1, 0), value + 2 * key, device=device, dtype=dtype)
        h = torch.zeros(batch_size, self.heads, self.state_dim, self.head_dim, device=device)
        return GDNState(window, h)

    def prefill(self, x_BTC: Tensor) -> tuple[Tensor, GDNState]:
        """The forward pass of one document from its start, and the state after it."""
        proj_BTP, g_BTH = self._project(self.norm(x_BTC))
        vbc, z_BTC = self._cut(proj_BTP)
        window = self.init_state(x_BTC.shape[0]).window_BKC
        taps = window.shape[1]
        window = torch.cat((window, vbc), dim=1)[:, vbc.shape[1] : vbc.shape[1] + taps]
        o_BTHD, h_BHSD = gated_recurrence(
            *self._convolved(vbc, None),
            g_BTH,
            self._bounded_A_log(),
            D=self.D,
            return_state=True,
            max_log_decay=self.max_decay,
            backend=self._backend(),
        )
        return x_BTC + self._output(o_BTHD, z_BTC), GDNState(window, h_BHSD)

    def step(self, x_BC: Tensor, state: GDNState) -> tuple[Tensor, GDNState]:
        """One token: [B, dim] -> [B, dim] and the next state."""
        proj_BP, g_BH = self._project(self.norm(x_BC))
        vbc, z_BC = self._cut(proj_BP)
        window = state.window_BKC
        if self.conv_weight is not None:
            vbc, window = causal_conv_step(vbc, self.conv_weight, window)
        o_BHD, h_BHSD = gated_recurrence_step(
            *self._split_heads(vbc),
            g_BH,
            self._bounded_A_log(),
            state.h_BHSD,
            D=self.D,
            backend=self._backend(),
        )
        return x_BC + self._output(o_BHD, z_BC), GDNState(window, h_BHSD)
