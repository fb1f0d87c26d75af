"""Mixture of experts with a shared expert and balancing without an auxiliary loss (arXiv 2401.06066, 2408.15664).

The router is fp32 from end to end. The gate bias chooses experts and does nothing else: it changes no weight and gets
no gradient. Nothing is counted inside the module: the forward pass returns the counts, so that evaluation and
recomputation cannot count.

Shape suffixes: B batch, T sequence, N tokens (B*T), C width, F inner width, E experts, K experts of a token, M rows
(N*K, sorted by expert).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from hymo.config import ModelConfig
from hymo.kernels.grouped import grouped_linear
from hymo.kernels.operators import register_operator
from hymo.models.layers import CompilableBlock, swiglu, wide, wide_dtype


class MoEStats(NamedTuple):
    """Of the real tokens of one forward pass (filler rows excluded); no gradients.

    counts_E: int64, assignments by expert as routed, before any drop. dropped: int64, how many of them were over
    capacity. entropy: fp32 mean entropy of the router's distribution in nats.
    """

    counts_E: Tensor
    dropped: Tensor
    entropy: Tensor


class Routing(NamedTuple):
    """Experts of each token, int64 [N, K], and their weights, fp32 [N, K]; a dropped assignment has weight 0."""

    ids_NK: Tensor
    weights_NK: Tensor


class _Dispatch(torch.autograd.Function):
    """rows = x[order // K]. The gradient is a gather and a sum over K: deterministic, no atomic additions."""

    @staticmethod
    def forward(ctx, x_NC, order_M, inverse_M, k):
        ctx.save_for_backward(inverse_M)
        ctx.k = k
        return x_NC.index_select(0, order_M // k)

    @staticmethod
    def backward(ctx, grad_MC):
        (inverse_M,) = ctx.saved_tensors
        return grad_MC.index_select(0, inverse_M).unflatten(0, (-1, ctx.k)).sum(1), None, None, None


class _Combine(torch.autograd.Function):
    """y[n] = sum_k weights[n, k] * rows[inverse[n*K + k]], summed in fp32, in the rows' dtype; deterministic."""

    @staticmethod
    def forward(ctx, rows_MC, weights_NK, order_M, inverse_M):
        ctx.save_for_backward(rows_MC, weights_NK, order_M, inverse_M)
        rows_NKC = rows_MC.index_select(0, inverse_M).unflatten(0, weights_NK.shape)
        if rows_MC.is_cuda:  # one fused pass; a product of a row and a matrix for each token takes three times as long
            return (wide(rows_NKC) * weights_NK[..., None]).sum(1).to(rows_MC.dtype)
        return torch.bmm(weights_NK[:, None].to(rows_MC.dtype), rows_NKC)[:, 0]

    @staticmethod
    def backward(ctx, grad_NC):
        rows_MC, weights_NK, order_M, inverse_M = ctx.saved_tensors
        k = weights_NK.shape[1]
        grad_MC = grad_NC.index_select(0, order_M // k)
        grad_weights_M = (wide(grad_MC) * wide(rows_MC)).sum(-1)
        grad_rows = grad_MC * weights_NK.flatten().index_select(0, order_M)[:, None].to(grad_MC.dtype)
        return grad_rows, grad_weights_M.index_select(0, inverse_M).view_as(weights_NK), None, None


class DeepSeekMoE(CompilableBlock):
    """Top-k routed experts, stacked as [E, ...] parameters, plus shared experts that see every token.

    It is compiled and checkpointed with the block that holds it, or by itself where it is sharded apart from it
    (``MLABlock.experts_apart``).

    Attributes:
        use_mixed_precision: True = experts compute in their weights' dtype; False = in float32.
        gate_bias, ema_expert_counts: persistent fp32 buffers [E], changed by ``update_gate_bias`` alone.
    """

    gate_bias: Tensor
    ema_expert_counts: Tensor

    def __init__(self, config: ModelConfig):
        super().__init__()
        n, dim, d_ff = config.n_routed, config.dim, config.d_ff
        self.n_routed, self.top_k = n, config.top_k
        self.capacity_factor, self.drop = config.capacity_factor, config.drop
        self.balance, self.ema_alpha = config.balance, config.moe_ema_alpha
        self.use_mixed_precision = True
        self.router = nn.Linear(dim, n, bias=False)
        self.w_in = nn.Parameter(torch.empty(n, 2 * d_ff, dim))
        self.w_out = nn.Parameter(torch.empty(n, dim, d_ff))
        shared = config.n_shared
        self.shared_in = nn.Parameter(torch.empty(shared, 2 * d_ff, dim)) if shared else None
        self.shared_out = nn.Parameter(torch.empty(shared, dim, d_ff)) if shared else None
        self.row_blocks = {"w_in": (d_ff, d_ff)} | ({"shared_in": (d_ff, d_ff)} if shared else {})
        self.register_buffer("gate_bias", torch.zeros(n, dtype=torch.float32))
        self.register_buffer("ema_expert_counts", torch.zeros(n, dtype=torch.float32))

    def forward(self, x_BTC: Tensor, real_B: Tensor | None = None) -> tuple[Tensor, MoEStats]:
        """[B, T, dim] -> [B, T, dim] (no residual) and the statistics; ``real_B`` False marks filler rows."""
        return self._run(x_BTC, real_B)

    def _compute(self, x_BTC: Tensor, real_B: Tensor | None) -> tuple[Tensor, MoEStats]:  # type: ignore[override]
        x_NC = x_BTC.flatten(0, -2)
        real_N = None if real_B is None else real_B[:, None].expand(x_BTC.shape[:2]).flatten()
        logits_NE = self.gate_forward(x_NC)
        routing = self.route(logits_NE)
        counts_E = self._count(routing.ids_NK, real_N)
        dropped = counts_E.new_zeros(())
        if self.capacity_factor is not None and self.training:
            routing, dropped = self._limit(routing, self.capacity_factor, real_N)
        # The sum is taken in the outer shape: FSDP2's hooks want an output that is no view.
        y_BTC = self._routed(x_NC, routing).view_as(x_BTC) + self._shared(x_NC).view_as(x_BTC)
        return y_BTC, MoEStats(counts_E, dropped, _entropy(logits_NE.detach(), real_N))

    def gate_forward(self, x_NC: Tensor) -> Tensor:
        """The router's logits, fp32 [N, E], whatever the dtype of x and of the weight; without the gate bias."""
        with torch.autocast(x_NC.device.type, enabled=False):
            return nn.functional.linear(wide(x_NC), self.router.weight.to(wide_dtype(x_NC)))

    def route(self, logits_NE: Tensor) -> Routing:
        """The K experts with the largest logit + gate_bias (ties: the lower id), weighted by softmax of the logits.

        Renormalised over the chosen, softmax over all experts is softmax over the chosen logits.
        """
        ids_NK = choose_experts(logits_NE.detach() + self.gate_bias, self.top_k)
        return Routing(ids_NK, torch.softmax(logits_NE.gather(1, ids_NK), dim=-1))

    def _count(self, ids_NK: Tensor, real_N: Tensor | None) -> Tensor:
        if real_N is not None:
            ids_NK = torch.where(real_N[:, None], ids_NK, self.n_routed)
        return (ids_NK.flatten()[:, None] == torch.arange(self.n_routed, device=ids_NK.device)).sum(0)

    def _limit(self, routing: Routing, factor: float, real_N: Tensor | None) -> tuple[Routing, Tensor]:
        """Set the weight of assignments over an expert's capacity to 0; also the number of dropped real ones.

        An expert keeps max(int(capacity_factor * N * K / E), 1) assignments: those of the largest weight, or with
        ``drop: first`` those that come first in the batch (the original notes' rule). Filler tokens never displace
        real ones.
        """
        ids, weights = routing.ids_NK.flatten(), routing.weights_NK.flatten().detach()
        capacity = max(int(factor * ids.numel() / self.n_routed), 1)
        real = torch.ones_like(ids, dtype=torch.bool)
        if real_N is not None:
            real = real_N[:, None].expand_as(routing.ids_NK).flatten()
        urgency = weights if self.drop == "weight" else torch.ones_like(weights)
        order = torch.argsort(torch.where(real, urgency, -1.0), descending=True, stable=True)
        order = order[torch.argsort(ids[order], stable=True)]  # by expert, then urgency, then position
        ends = self._count(routing.ids_NK, None).cumsum(0)
        starts = torch.cat((ends.new_zeros(1), ends[:-1]))
        rank = torch.arange(ids.numel(), device=ids.device) - starts[ids[order]]
        kept = torch.empty_like(real).scatter_(0, order, rank < capacity)
        return Routing(routing.ids_NK, routing.weights_NK * kept.view_as(routing.ids_NK)), (real & ~kept).sum()

    def _routed(self, x_NC: Tensor, routing: Routing) -> Tensor:
        """Sort the assignments by expert, two grouped products, weighted sum back in token order."""
        dtype = self._compute_dtype()
        ids = routing.ids_NK.flatten()
        order = torch.argsort(ids, stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(ids.numel(), device=ids.device))
        counts_E = self._count(routing.ids_NK, None)
        rows = _Dispatch.apply(x_NC.to(dtype), order, inverse, self.top_k)
        rows = swiglu(grouped_linear(rows, self.w_in.to(dtype), counts_E))
        rows = grouped_linear(rows, self.w_out.to(dtype), counts_E)
        return _Combine.apply(rows, routing.weights_NK, order, inverse).to(x_NC.dtype)

    def _routed_loop(self, x_NC: Tensor, routing: Routing) -> Tensor:
        """The same by the definition, expert by expert: the reference for tests."""
        dtype = self._compute_dtype()
        y_NC = torch.zeros_like(wide(x_NC))
        for e in range(self.n_routed):
            token, slot = (routing.ids_NK == e).nonzero(as_tuple=True)
            out = swiglu(x_NC[token].to(dtype) @ self.w_in[e].to(dtype).t()) @ self.w_out[e].to(dtype).t()
            y_NC = y_NC.index_add(0, token, wide(out) * routing.weights_NK[token, slot, None])
        return y_NC.to(x_NC.dtype)

    def _shared(self, x_NC: Tensor) -> Tensor:
        if self.shared_in is None or self.shared_out is None:
            return torch.zeros_like(x_NC)
        dtype = self._compute_dtype()
        rows = x_NC.to(dtype)
        outs = [
            swiglu(rows @ a.to(dtype).t()) @ b.to(dtype).t()
            for a, b in zip(self.shared_in, self.shared_out, strict=True)
        ]
        return sum(outs[1:], outs[0]).to(x_NC.dtype)

    def _compute_dtype(self) -> torch.dtype:
        return self.w_in.dtype if self.use_mixed_precision else wide_dtype(self.w_in)

    @torch.no_grad()
    def update_gate_bias(self, counts: Tensor, speed: float = 0.001) -> None:
        """Once an update: move the bias against the load, from the assignments [E] of the whole step on all ranks.

        ``balance: ema`` keeps a moving average of the counts (started from the first ones) and moves the bias by
        ``speed`` where the average is outside of 5 % of its mean; ``sign`` moves it by speed * sign(mean - count). Then
        the mean of the bias is subtracted, without which it drifts.
        """
        counts = counts.to(self.gate_bias)
        if self.balance == "sign":
            move = torch.sign(counts.mean() - counts)
        else:
            ema = self.ema_expert_counts
            ema.copy_(torch.where(ema.any(), torch.lerp(ema, counts, self.ema_alpha), counts))
            mean = ema.mean()
            move = (ema < 0.95 * mean).float() - (ema > 1.05 * mean).float()
        self.gate_bias.add_(move, alpha=speed)
        self.gate_bias.sub_(self.gate_bias.mean())


def _choose_experts(scores_NE: Tensor, k: int) -> Tensor:
    """Ids of the k largest scores of each row, int64 [N, k], largest first; of equal scores the lower id."""
    return torch.sort(scores_NE, dim=-1, descending=True, stable=True).indices[:, :k].contiguous()


def _chosen_shape(scores_NE, k):
    return scores_NE.new_empty((scores_NE.shape[0], k), dtype=torch.int64)


# An operator of its own, so that activation checkpointing can keep its result (`layers.kept_operators`).
choose_experts = register_operator("choose_experts", _choose_experts, _chosen_shape)


def _entropy(logits_NE: Tensor, real_N: Tensor | None) -> Tensor:
    log_p = torch.log_softmax(logits_NE, dim=-1)
    entropy_N = -(log_p.exp() * log_p).sum(-1)
    if real_N is None:
        return entropy_N.mean()
    return torch.where(real_N, entropy_N, 0).sum() / real_N.sum().clamp(min=1)
