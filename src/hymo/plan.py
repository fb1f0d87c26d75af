"""Before launch: parameters by part, FLOPs, the optimizer's partition, what a rank holds and sends, the rates.

What counts as a FLOP is said in `flops_per_token`; MFU everywhere uses it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from hymo.config import HyMoConfig, ModelConfig
from hymo.config_io import derived_values
from hymo.errors import HyMoError
from hymo.observe.devices import DEVICES, Device, find_device
from hymo.observe.units import count
from hymo.training.scheduler import JointWSDScheduler, Step


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters by part. ``active`` are those a token's forward uses: all but the experts it is not sent to."""

    gdn: int
    mla: int
    moe: int
    embedding: int
    head: int
    mtp: int
    norms: int
    inactive: int

    @property
    def total(self) -> int:
        return self.gdn + self.mla + self.moe + self.embedding + self.head + self.mtp + self.norms

    @property
    def active(self) -> int:
        return self.total - self.inactive


def is_mla(model: ModelConfig, layer: int) -> bool:
    """Whether block ``layer`` (from 0) is latent attention."""
    return (layer + 1) % model.mla_every == 0


def parameter_counts(model: ModelConfig) -> ParameterCounts:
    """Parameters of the model that `build_hymo` makes, from its configuration alone."""
    m = model
    n_mla = sum(is_mla(m, i) for i in range(m.n_layers))
    n_gdn = m.n_layers - n_mla
    values, keys = m.gdn_heads * m.gdn_head_dim, m.gdn_heads * m.gdn_state_dim
    gdn = m.dim * (2 * values + 2 * keys) + m.dim * m.gdn_heads  # in_proj, dt_proj
    gdn += (values + 2 * keys) * m.conv_size + keys + 2 * m.gdn_heads  # convolution, A_log, dt_bias, D
    gdn += m.gdn_head_dim + values * m.dim  # out_norm, out_proj
    gdn += m.dim * m.gdn_heads if m.gdn_erase == "beta" else 0
    qk = m.qk_nope_dim + m.qk_rope_dim
    mla = m.q_lora_rank * m.dim + m.mla_heads * qk * m.q_lora_rank
    mla += (m.kv_lora_rank + m.qk_rope_dim) * m.dim + m.mla_heads * (m.qk_nope_dim + m.v_head_dim) * m.kv_lora_rank
    mla += m.dim * m.mla_heads * m.v_head_dim
    mla_norms = m.q_lora_rank + m.kv_lora_rank + (2 * qk if m.qk_norm else 0)
    expert = 3 * m.d_ff * m.dim
    moe = (m.n_routed + m.n_shared) * expert + m.n_routed * m.dim
    mtp = m.mtp_depth * (mla + mla_norms + expert + 2 * m.dim * m.dim + 4 * m.dim)
    return ParameterCounts(
        gdn=n_gdn * gdn,
        mla=n_mla * mla,
        moe=n_mla * moe,
        embedding=m.vocab_size * m.dim,
        head=0 if m.tie_embeddings else m.vocab_size * m.dim,
        mtp=mtp,
        norms=n_gdn * m.dim + n_mla * (2 * m.dim + mla_norms) + m.dim,
        inactive=n_mla * (m.n_routed - m.top_k) * expert,
    )


def flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Floating-point operations of one token, forward and backward: the work that MFU counts.

    Matrix products at 6 a weight; the head once for each prediction (main and MTP); causal attention at half the
    square; the recurrence's state update and read-out. No recomputation, no padding, no optimizer.
    """
    return sum(part_flops(model, seq_len).values())


def part_flops(model: ModelConfig, seq_len: int) -> dict[str, float]:
    """`flops_per_token` by part of the model."""
    m, counts = model, parameter_counts(model)
    n_mla = sum(is_mla(m, i) for i in range(m.n_layers))
    attention = m.mla_heads * (m.qk_nope_dim + m.qk_rope_dim + m.v_head_dim) * seq_len / 2
    recurrence = m.gdn_heads * m.gdn_state_dim * m.gdn_head_dim * 2
    return {
        "GDN": 6 * (counts.gdn + (m.n_layers - n_mla) * recurrence),
        "attention": 6 * (counts.mla + n_mla * attention),
        "MoE": 6 * (counts.moe - counts.inactive),
        "MTP": 6 * (counts.mtp + m.mtp_depth * attention),
        "head and losses": 6 * (1 + m.mtp_depth) * m.vocab_size * m.dim,
    }


def parameter_table(config: HyMoConfig) -> Table:
    """Parameters by part."""
    counts = parameter_counts(config.model)
    table = Table("part", "parameters", "share", title="Parameters", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    parts = {
        "GDN blocks": counts.gdn,
        "MLA": counts.mla,
        "MoE (routed and shared experts, router)": counts.moe,
        "embedding": counts.embedding,
        "head": counts.head,
        "MTP": counts.mtp,
        "norms": counts.norms,
    }
    for part, number in parts.items():
        table.add_row(part, f"{number:,}", f"{number / counts.total:.1%}")
    table.add_section()
    table.add_row("total", f"{counts.total:,}", "100.0%")
    table.add_row("active for a token", f"{counts.active:,}", f"{counts.active / counts.total:.1%}")
    return table


def print_plan(
    config: HyMoConfig, *, rows: bool = False, gpus: int = 1, device: Device | None = None, mfu: float = 0.4
) -> int:
    """Print the plan of ``gpus`` ranks on a device; ``rows``: the partition (and placements) parameter by parameter."""
    import torch

    from hymo.distributed.fsdp import placements
    from hymo.models.init import describe
    from hymo.models.model import build_hymo
    from hymo.optim.build import plan_step
    from hymo.optim.partition import partition
    from hymo.planning import show
    from hymo.training.flags import resolve_cuda_graphs

    model = build_hymo(config, device="meta")
    plan = show.RankPlan(config, model, gpus, device)
    unknown = device is None and config.training.reshard == "auto"  # whether `step` fits is not
    reshard = None if config.training.fsdp is False else "step" if unknown else plan.reshard
    resolve_cuda_graphs(config, reshard, torch.device("cuda"))
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 80  # a pipe has no width of its own

    def lines(text: Iterable[str]) -> None:
        for line in text:
            console.print(line, markup=False)

    console.print(parameter_table(config))
    flops = flops_per_token(config.model, config.training.seq_len)
    lines([f"{count(flops)} FLOP a token forward and backward at {config.training.seq_len} tokens (what MFU counts)"])
    for name, value in derived_values(config).items():
        lines([f"{name.replace('_', ' ')}: {value:,}" + (f" ({count(value)})" if value >= 1e6 else "")])

    starts = Table("parameters", "number", "start", title="Initialisation", title_justify="left")
    starts.columns[0].no_wrap = True
    for pattern, number, text in describe(model):
        starts.add_row(pattern, f"{number:,}", text)
    console.print()
    console.print(starts)
    table = partition(model, config.optimizer)
    shards = gpus // config.training.replicas
    where = {name: place for name, _, place in placements(model, shards)} if gpus > 1 else {}
    lines(["\nOptimizer partition", *(show.partition_lines(table, where) if rows else [table.summary()])])

    lines([f"\nOn {gpus} GPU{'s' if gpus > 1 else ''}", show.deal_line(plan)])
    if gpus > 1:
        kinds = Counter(where.values()).most_common()
        lines(["placements: " + ", ".join(f"{n} parameters {place}" for place, n in kinds)])
        itemsize = 2 if config.training.fsdp_mixed_precision == "bfloat16" else 4
        lines(str(plan_step(table, shards, config.optimizer, itemsize, config.training.replicas)).splitlines())
    console.print(show.memory_table(plan))
    lines(show.fit_lines(plan))
    if gpus > 1:
        console.print(show.traffic_table(plan))
    lines(show.time_lines(plan, flops, mfu))
    print_rates(console, config)
    return 0


def print_rates(console: Console, config: HyMoConfig) -> None:
    """The schedule: its landmarks, and a picture."""
    scheduler = JointWSDScheduler(config.scheduler)
    rates = Table("update", "", "factor", "NorMuon", "AdamW", title="Rates", title_justify="left")
    for update, what in scheduler.landmarks():
        factor = scheduler.get_factor(Step(update))
        muon, adamw = factor * config.optimizer.muon_lr, factor * config.optimizer.adamw_lr
        rates.add_row(f"{update:,}", what, f"{factor:.4f}", f"{muon:.3e}", f"{adamw:.3e}")
    console.print()
    console.print(rates)
    console.print(scheduler.picture(), markup=False)


def plan_command(config: HyMoConfig, *, rows: bool, gpus: int, device: str | None, mfu: float, check: bool) -> int:
    """``hymo plan``. ``device`` None: the GPU of this machine, if it is a known one."""
    if check:
        from hymo.planning.check import check as run_check

        return run_check(config)
    replicas = config.training.replicas
    if gpus % replicas:
        raise HyMoError(f"training.replicas: found {replicas}; accepted with --gpus {gpus}: a divisor of it")
    return print_plan(config, rows=rows, gpus=gpus, device=_planned_device(device), mfu=mfu)


def _planned_device(name: str | None) -> Device | None:
    if name is not None:
        return find_device(name)
    import torch

    return DEVICES.get(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
