"""What a rank's memory holds in a step, term by term, by arithmetic; no constant is fitted to a run.

What PyTorch's allocator counts: the CUDA context, NCCL's buffers (together 1 to 2 GB) and fragmentation come on top.

The peak is looked for at four moments: the head's forward of the last micro-batch, when every activation is there; the
backward of the heaviest block; the reduction of its gradients; the optimizer's step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from hymo.config import HyMoConfig
from hymo.data.loader import Deal
from hymo.distributed.fsdp import placement, replicated_parameters
from hymo.models.model import HyMo
from hymo.optim.build import plan_step
from hymo.optim.partition import Partition, partition
from hymo.optim.update import statistic_axis
from hymo.planning.activations import (
    Activations,
    Setting,
    activations_of,
    attention_terms,
    feed_forward_terms,
    gdn_terms,
    head_workspace,
    setting_of,
)
from hymo.planning.shards import Shards, padded_part, shards_of
from hymo.planning.traffic import reductions, wire_itemsize

FP32 = 4
Terms = dict[str, float]


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank. ``moments``: what is there beside parameters and optimizer state at each moment, by term.

    ``graph``: what a CUDA graph of a micro-batch holds reserved for its activations, beside the allocator's peak.
    """

    parameters: float
    gradients: float
    states: float
    moments: dict[str, Terms]
    tokens: int  # of a micro-batch
    activations: Activations
    graph: float = 0.0

    @property
    def peak_moment(self) -> str:
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def peak(self) -> float:
        return self.parameters + self.states + sum(self.moments[self.peak_moment].values())

    @property
    def needed(self) -> float:
        """What a GPU must have."""
        return self.peak + self.graph

    def over_states(self, *names: str) -> float:
        """The largest of these moments, over parameters, optimizer state and reduced gradients."""
        return max(sum(self.moments[name].values()) for name in names) - self.gradients

    def by_name(self) -> dict[str, float]:
        """In the terms that a run can be measured in (`planning.measure.MemoryProbe`)."""
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer state": self.states,
            "forward and backward": self.over_states(*(n for n in self.moments if n != OPTIMIZER)),
            "optimizer step": self.over_states(OPTIMIZER),
        }


FORWARD, BACKWARD, REDUCTION, OPTIMIZER = "head, forward", "heaviest block, backward", "its reduction", "optimizer step"


def memory_of(config: HyMoConfig, model: HyMo, ranks: int, reshard: str, *, device_type: str = "cuda") -> Memory:
    """What one of ``ranks`` processes holds, on the rank that holds most; ``reshard``: layer, step or never."""
    t, s = config.training, shards_of(config, model, ranks)
    n = Deal(t.global_batch_size, ranks, t.micro_batch_size).n_micro_batches
    setting, table = setting_of(config), partition(model, config.optimizer)
    held = float(FP32 * (s.held + s.replicated))
    activations = activations_of(config.model, setting)
    tokens = t.micro_batch_size * t.seq_len
    weights = _Weights(s, setting, reshard)
    # Gradients of earlier micro-batches: reduced, or whole in fp32 where they are held back.
    held_back = n > 1 and reductions(config, reshard, n) == 1
    earlier = {"unsharded gradients": float(FP32 * s.numel)} if held_back else {"gradients": held if n > 1 else 0.0}
    kept, heavy = activations.per_token * tokens, weights.heaviest
    below = kept - sum(activations.of_all(name) for name in ("MTP", "head") if name in activations.layers) * tokens
    recomputed, passing = _block_in_backward(config, setting)
    moments: dict[str, Terms] = {
        FORWARD: earlier
        | {"activations": kept, "gathered weights": weights.in_head}
        | {"head's workspace": _head(config, setting, tokens)},
        BACKWARD: earlier
        | {
            "activations": below,
            "gathered weights": weights.in_backward,
            "block in backward": (recomputed + passing) * tokens,
            "its gradients": float(setting.width * heavy),
        },
        REDUCTION: earlier
        | {
            "activations": below - weights.heaviest_activations(activations, tokens),
            "gathered weights": weights.in_backward,
            "its gradients": float(setting.width * heavy + FP32 * heavy * (1 + 1 / s.shards)),
        },
    }
    plan = plan_step(table, s.shards, config.optimizer, wire_itemsize(config, device_type), s.replicas)
    buffers = float(plan.peak_bytes) if plan.matrices else 0.0
    # The last backward of an attempt frees the gathered weights, with `step` too (`begin_micro_batch`).
    moments[OPTIMIZER] = {"gradients": held, "optimizer's buffers": buffers}
    moments = {name: {term: n for term, n in terms.items() if n > 0} for name, terms in moments.items()}
    states = float(sum(state_blocks(config, model, table, s.shards)))
    replayed = t.cuda_graphs and n > 2 and reshard == "step" and t.activation_checkpointing == "none"
    graph = kept + _head(config, setting, tokens) if replayed else 0.0
    return Memory(held, held, states, moments, tokens, activations, graph)


def state_blocks(config: HyMoConfig, model: HyMo, table: Partition, shards: int) -> Iterator[int]:
    """Bytes of each tensor of the optimizer's state on the fullest rank.

    Two moments and a counter of an AdamW parameter; of a matrix the momentum, and a second moment a row or a column.
    """
    whole = set(replicated_parameters(model))
    for row in table:
        part = row.numel if row.name in whole else padded_part(row.shape, shards)
        yield FP32 * part
        if row.algorithm == "adamw":
            yield from (FP32 * part, FP32)
        if row.algorithm == "normuon":
            *lead, m, n = row.shape
            blocks = row.row_blocks or (m,)
            axes = {statistic_axis(config.optimizer.axis, rows, n) for rows in blocks}
            if -1 in axes:
                yield FP32 * part // n
            if -2 in axes:  # whole on every rank, unless experts are what is cut
                cut = lead and placement(row.shape, shards).dim == 0
                yield FP32 * len(blocks) * n * (-(-lead[0] // shards) if cut else math.prod(lead))


@dataclass(frozen=True)
class Snapshot:
    """Memory of the host that a rank's saves in the background keep from the first on, in bytes.

    ``pinned``: what torch's allocator of pinned memory takes for the copies of a GPU's tensors: each a power of two.
    """

    copied: int
    pinned: int


def snapshot_of(config: HyMoConfig, model: HyMo, ranks: int) -> Snapshot:
    """What ``checkpoint.saver.snapshot`` holds on the fullest of ``ranks``: parameters, buffers, optimizer state."""
    shards = ranks // config.training.replicas
    whole, cut = replicated_parameters(model), dict(model.named_parameters(remove_duplicate=False))
    blocks = list(state_blocks(config, model, partition(model, config.optimizer), shards))
    for name, tensor in model.state_dict().items():  # a tied head has a copy of its own
        is_cut = name in cut and name not in whole
        blocks.append(FP32 * (padded_part(tuple(tensor.shape), shards) if is_cut else tensor.numel()))
    return Snapshot(sum(blocks), sum(1 << (block - 1).bit_length() for block in blocks))


@dataclass(frozen=True)
class _Weights:
    """Gathered weights at the moments of a step."""

    s: Shards
    setting: Setting
    reshard: str

    @property
    def heaviest(self) -> int:
        """Parameters of the heaviest block of the trunk, its experts included."""
        sizes: dict[str, int] = {}
        for unit in self.s.units:
            if unit.kind in ("gdn", "mla", "experts"):
                block = unit.name.removesuffix(".ffn")
                sizes[block] = sizes.get(block, 0) + unit.numel
        return max(sizes.values())

    @property
    def kept(self) -> float:
        """Where units are not freed after their forward: all of them."""
        return float(self.setting.width * self.s.numel) if self.reshard != "layer" else 0.0

    @property
    def in_head(self) -> float:
        """The head, and on several shards the buffer that it was gathered in, which FSDP2 frees after the next one."""
        head = max((u.numel for u in self.s.units if u.kind in ("head", "root")), default=0)
        copies = 2 if self.s.shards > 1 else 1
        return self.kept + self.setting.width * head * (copies - (self.reshard != "layer"))

    @property
    def in_backward(self) -> float:
        """The heaviest block and its neighbour, fetched ahead."""
        if self.reshard != "layer":
            return self.kept
        neighbour = max((u.numel for u in self.s.units if u.kind == "gdn"), default=0)
        return float(self.setting.width * (self.heaviest + neighbour))

    def heaviest_activations(self, activations: Activations, tokens: int) -> float:
        layers = activations.layers
        names = [name for name in layers if name in ("MLA", "MoE", "dense")] or list(layers)[:1]
        return sum(activations.of_layer(name) for name in names) * tokens


def _block_in_backward(config: HyMoConfig, setting: Setting) -> tuple[float, float]:
    """Bytes a token of the heaviest block: what is computed again, and gradients that pass through its widest part."""
    m, whole = config.model, Setting(setting.width, "none", setting.compiled)
    kinds = [(gdn_terms(m, whole), gdn_terms(m, setting))]
    passing = setting.width * 2 * m.gdn_heads * (m.gdn_head_dim + m.gdn_state_dim)
    if m.n_layers >= m.mla_every:
        full, kept = (attention_terms(m, s) | feed_forward_terms(m, s) for s in (whole, setting))
        kinds.append((full, kept))
        passing = max(passing, setting.width * (m.top_k or m.n_shared) * 2 * m.d_ff)
    again = max(sum(full.values()) - sum(kept.values()) for full, kept in kinds)
    return again, float(passing)


def _head(config: HyMoConfig, setting: Setting, tokens: int) -> float:
    """The head's workspace, and its normed inputs, which last as long as its forward."""
    m = config.model
    return head_workspace(m, setting, tokens) + (1 + m.mtp_depth) * setting.width * m.dim * tokens
