"""The typed configuration: one frozen pydantic model per section, and the checks across sections.

A key's docstring is its description in ``hymo keys``, in the documentation and in the shipped YAML files.
Reading files and flags is in ``config_io.py``. Nothing here imports torch, so that ``hymo --help`` answers at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from hymo.errors import HyMoError
from hymo.training.scheduler import resolve_phases, steps_for_tokens

AutoBool = Literal["auto", True, False]


class ConfigError(HyMoError):
    """All faults of one configuration, one line each, in ``faults``."""

    def __init__(self, faults: Sequence[str]):
        self.faults = list(faults)
        super().__init__("\n".join(self.faults))


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, (str, dict)) else value


Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Beta, Beta], BeforeValidator(_as_tuple)]
Weights = Annotated[tuple[float, ...], BeforeValidator(_as_tuple)]


class ModelConfig(Section):
    """Shape of the model. The defaults are the production shape, 1,133.7 M parameters of which 440.1 M are active."""

    dim: int = Field(896, ge=1, le=1_000_000)
    """width of the residual stream"""
    n_layers: int = Field(32, ge=1, le=10_000)
    """blocks of the trunk"""
    vocab_size: int = Field(65536, ge=2, le=2**31)
    """rows of the embedding and of the head; at least the tokenizer's"""
    tie_embeddings: bool = False
    """the head uses the embedding's weight"""
    norm_eps: float = Field(1e-6, gt=0)
    """epsilon of every RMSNorm"""
    mla_every: int = Field(4, ge=1)
    """every n-th block is latent attention (MLA), the others are gated recurrences (GDN): 4 = three GDN to one MLA"""

    gdn_heads: int = Field(40, ge=1)
    """heads H of a GDN block"""
    gdn_head_dim: int = Field(32, ge=1, le=128)
    """value size D of a head"""
    gdn_state_dim: int = Field(32, ge=1, le=128)
    """key size S of a head: the state of a head is S x D"""
    conv_size: int = Field(4, ge=0)
    """taps of the causal depthwise convolution on v, b and c; 0 = none"""
    gdn_max_decay: float | None = Field(5.0, gt=0)
    """largest |A|, so that a step decays by at most exp(-this); null = unbounded"""
    gdn_init: Literal["default", "log_heads"] = "default"
    """how A_log and dt_bias start: spread over time scales, or A_log = log(1..H) with dt_bias 0"""
    gdn_erase: Literal["none", "beta"] = "none"
    """none: gated linear attention; beta: the gated delta rule"""
    gdn_decay: Literal["rank1", "scalar", "channel"] = "rank1"
    """decay of a step: gate(head) x A(channel), one number a head, or one gate a channel"""

    mla_heads: int = Field(14, ge=1)
    """heads of the latent attention"""
    q_lora_rank: int = Field(224, ge=1)
    """size of the query latent"""
    kv_lora_rank: int = Field(224, ge=1)
    """size of the key-value latent, which is what generation caches"""
    qk_nope_dim: int = Field(64, ge=1)
    """size of a query/key head without position"""
    qk_rope_dim: int = Field(32, ge=2)
    """size of the rotary part of a query/key head (even); its key is shared by all heads"""
    v_head_dim: int = Field(64, ge=1)
    """size of a value head"""
    rope_theta: float = Field(10000.0, gt=0)
    """base of the rotary frequencies"""
    qk_norm: bool = False
    """RMSNorm on each query and key head"""

    n_routed: int = Field(16, ge=0)
    """routed experts of a mixture-of-experts layer; 0 (with top_k 0) = dense layers of n_shared x d_ff"""
    n_shared: int = Field(1, ge=0)
    """experts that every token passes"""
    top_k: int = Field(2, ge=0)
    """routed experts a token goes to"""
    d_ff: int = Field(2304, ge=1)
    """inner size of an expert (SwiGLU) and of the dense layer in an MTP block"""
    capacity_factor: float | None = Field(None, gt=0)
    """null = dropless; else an expert takes at most this times the mean load of a micro-batch"""
    drop: Literal["weight", "first"] = "weight"
    """what goes when an expert is over capacity: the lowest weights, or by position as the original design notes do"""
    balance: Literal["ema", "sign"] = "ema"
    """rule of the gate bias: moving average with a dead band of 5 %, or the plain sign of the load"""
    moe_ema_alpha: float = Field(0.02, gt=0, le=1)
    """weight of the newest counts in the moving average"""
    gate_bias_speed: float = Field(0.001, ge=0)
    """step of the gate bias an update"""

    mtp_depth: int = Field(2, ge=0)
    """how many tokens beyond the next one are predicted as well"""
    mtp_weights: Weights = (0.3, 0.1)
    """weight of each depth in the loss"""
    z_loss: float = Field(0.0, ge=0)
    """weight of mean(logsumexp(logits)^2) in the loss"""


class OptimizerConfig(Section):
    """NorMuon for the matrices, cautious AdamW for the rest."""

    muon_lr: float = Field(0.02, ge=0)
    """peak rate of NorMuon; 0.02 belongs to scale: original"""
    adamw_lr: float = Field(3e-4, ge=0)
    """peak rate of AdamW"""
    momentum: float = Field(0.95, ge=0, lt=1)
    """momentum of NorMuon; must equal betas[0]"""
    betas: Betas = (0.95, 0.95)
    """NorMuon: momentum, and the moving average of the rows' second moment"""
    adamw_betas: Betas = (0.9, 0.95)
    """AdamW's moving averages"""
    eps: float = Field(1e-8, gt=0)
    """added to the root of the second moment"""
    weight_decay: float = Field(0.1, ge=0)
    """decoupled decay, times the rate"""
    embed_weight_decay: float = Field(0.0, ge=0)
    """decay of the embedding alone"""
    cautious_wd: bool = True
    """decay only where update and weight have the same sign (arXiv 2510.12402)"""
    mask: Literal["update", "momentum", "grad"] = "update"
    """what the cautious mask looks at"""
    ns_iterations: int = Field(5, ge=1, le=100)
    """steps of the orthogonalizer (deepseek_v4 and exact have none to choose)"""
    nesterov: bool = True
    """look one momentum step ahead"""
    orthogonalize: Literal["polar_express", "quintic", "you", "cubic", "deepseek_v4", "gram", "exact"] = "polar_express"
    """polynomial family; see docs/optimizers.md for the error of each"""
    scale: Literal["original", "match_rms_adamw", "spectral", "grad_norm"] = "original"
    """size of an update by the matrix's shape; match_rms_adamw needs its own muon_lr"""
    normalize: bool = True
    """the row-wise second moment of NorMuon; false = plain Muon"""
    axis: Literal["row", "long"] = "row"
    """which axis the second moment keeps: rows (the paper), or the longer one; with normalize alone"""
    experts: Literal["adamw", "muon"] = "adamw"
    """who updates the experts' matrices"""
    qk_clip: float | None = Field(None, gt=0)
    """rescale the query and key projections of a head whose largest attention logit exceeds this; null = off"""


class SchedulerConfig(Section):
    """Warm-up, stable, decay. Whole numbers: S = N - W - D."""

    total_steps: int | None = Field(None, ge=1, le=10**12)
    """updates N of the run (57,220 where neither this nor total_tokens is given)"""
    total_tokens: int | None = Field(None, ge=1)
    """instead of total_steps: the tokens of the run"""
    warmup_frac: float = Field(0.02, ge=0, le=1)
    """W = floor(N x this)"""
    stable_frac: float | None = Field(None, ge=0, le=1)
    """null = what is left; given, the three must sum to 1"""
    decay_frac: float = Field(0.15, ge=0, le=1)
    """D = floor(N x this)"""
    warmup_steps: int | None = Field(None, ge=0)
    """W itself, instead of warmup_frac"""
    decay_steps: int | None = Field(None, ge=0)
    """D itself, instead of decay_frac"""
    min_lr_ratio: float = Field(0.05, ge=0, le=1)
    """factor of the last update"""
    decay: Literal["linear", "cosine", "sqrt", "one_minus_sqrt"] = "linear"
    """shape of the decay"""

    @model_validator(mode="after")
    def _resolve(self) -> SchedulerConfig:
        """Once N is known, the phases read back as whole numbers (frozen only after this)."""
        if self.total_steps is None:
            if self.total_tokens is not None:
                return self  # resolved by HyMoConfig, which knows the tokens of a step
            object.__setattr__(self, "total_steps", 57220)
        phases = resolve_phases(
            self.total_steps or 0,
            self.warmup_frac,
            self.stable_frac,
            self.decay_frac,
            self.warmup_steps,
            self.decay_steps,
        )
        object.__setattr__(self, "warmup_steps", phases[0])
        object.__setattr__(self, "decay_steps", phases[2])
        return self

    @property
    def stable_steps(self) -> int:
        """S = N - W - D."""
        assert self.total_steps is not None and self.warmup_steps is not None and self.decay_steps is not None
        return self.total_steps - self.warmup_steps - self.decay_steps


class TrainingConfig(Section):
    """One step and where it runs."""

    seq_len: int = Field(4096, ge=2)
    """tokens of a sequence"""
    global_batch_size: int = Field(128, ge=1)
    """sequences of an update, over all ranks and micro-batches"""
    micro_batch_size: int = Field(4, ge=1)
    """sequences of one forward and backward on one rank"""
    gradient_accumulation_steps: int | None = Field(None, ge=1)
    """null = ceil(ceil(global_batch_size / ranks) / micro_batch_size); given, it is checked against that"""
    init_from: str | None = None
    """a run, checkpoint or exported folder whose weights this run starts from (--init-from); null = drawn anew"""
    seed: int = Field(0, ge=0, lt=2**63)
    """of the parameters and of the data order"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto = cuda where there is one"""
    fsdp: AutoBool = "auto"
    """FSDP2: auto = on under torchrun or on CUDA, off for one CPU process"""
    reshard: Literal["auto", "layer", "step", "never"] = "auto"
    """gathered weights: layer = freed after each forward; never = kept to the micro-batch's backward; step = kept with
    their gradients through all micro-batches; auto = step where it fits, else layer; with fsdp alone"""
    replicas: int = Field(1, ge=1)
    """copies of the model that FSDP2 keeps (HSDP): each is sharded over ranks / replicas"""
    reduce_each_micro_batch: bool = True
    """reduce gradients after each micro-batch (less memory), or only after the last (less traffic); with fsdp alone"""
    fsdp_mixed_precision: Literal["bfloat16", "float32"] = "bfloat16"
    """dtype of the computation; parameters, gradients and state are float32"""
    fused_gdn: AutoBool = "auto"
    """the recurrence as a Triton kernel: auto = on CUDA; true without a GPU is an error"""
    moe_mixed_precision: bool = True
    """experts compute in fsdp_mixed_precision; false = in float32"""
    torch_compile_gdn: AutoBool = "auto"
    """torch.compile of the blocks: auto = on CUDA"""
    cuda_graphs: bool = False
    """on a GPU: of three and more micro-batches those between the first and the last repeat the second's launches as a
    CUDA graph; needs reshard step and memory for one micro-batch more"""
    activation_checkpointing: Literal["none", "block", "selective"] = "none"
    """recompute blocks in the backward pass: whole ones, or all but matrix products, attention and recurrence"""
    grad_clip: float = Field(1.0, gt=0)
    """largest norm of the whole gradient"""
    loss_nan_skip: bool = True
    """skip an attempt whose loss or gradient is not finite, on all ranks; false = stop"""
    consecutive_nan_limit: int = Field(5, ge=1)
    """stop after this many skips in a row (exit code 3)"""
    spike_guard: Literal["off", "skip", "rewind"] = "off"
    """a loss above mean + 6 sigma of the last 128: skip that attempt, or rewind to the last checkpoint past its data"""
    eval_every: int = Field(500, ge=0)
    """updates between evaluations; 0 = only at the end"""
    eval_tokens: int | None = Field(None, ge=1)
    """validation tokens of an evaluation; null = all"""
    deterministic: bool = False
    """bitwise repeatable on GPUs, slower"""
    max_hours: float | None = Field(None, gt=0)
    """save and stop after this long; null = no limit"""
    patience_s: float = Field(20.0, gt=0)
    """a rank that gives no sign of life for this long has died: the job ends, with stacks of all ranks"""
    timeout_s: float = Field(300.0, gt=0)
    """a collective that waits for longer ends the job, from the second attempt on (before it, 600 at least)"""


class SourceConfig(Section):
    """One source of a mix."""

    path: str
    """a file, a folder, or a data set that `hymo data build` made"""
    weight: float = Field(gt=0, allow_inf_nan=False)
    """share of the samples, next to the weights of the others"""


# A path, or one entry of a mix: told apart before they are checked, so that a fault is said once.
SourceEntry = Annotated[
    Annotated[str, Tag("path")] | Annotated[SourceConfig, Tag("mix")],
    Discriminator(lambda entry: "mix" if isinstance(entry, (dict, SourceConfig)) else "path"),
]


class DataConfig(Section):
    """Text and tokens."""

    source: Annotated[list[SourceEntry], BeforeValidator(_as_list)] | None = None
    """files and folders of text, JSONL, JSON or Parquet, data sets that `hymo data build` made, or a mix: entries
    {path: P, weight: W}; null = the standard-library source of the Python that runs"""
    text_column: str = "text"
    """the field or column of JSONL, JSON and Parquet records that is their text"""
    tokenizer: str = "bytes"
    """bytes, or a tokenizer file of the `tokenizers` library (FILE#TOKEN names its end token)"""
    val_fraction: float = Field(0.02, gt=0, lt=1)
    """share of the documents of text that is held out (a built data set has its own)"""
    val: dict[str, list[str]] | None = None
    """further validation sets by name: {NAME: [paths]}"""
    cache_dir: str | None = None
    """where token shards are built; null = $HYMO_CACHE, or ~/.cache/hymo"""
    workers: int = Field(1, ge=0)
    """threads that make batches ahead, in any number the same ones; 0 = each is made when it is asked for"""


class CheckpointConfig(Section):
    """What is saved, and how long it stays."""

    every: int = Field(1000, ge=0)
    """updates between checkpoints; 0 = only where the decay starts and at the end"""
    keep: int = Field(3, ge=1)
    """newest checkpoints that stay"""
    keep_every: int | None = Field(None, ge=1)
    """checkpoints at multiples of this stay for good"""
    asynchronous: bool = False
    """copy the state, then write it while training goes on (memory on the host for one copy)"""
    grace_s: float = Field(25.0, gt=0)
    """seconds after SIGTERM or SIGINT in which a last checkpoint must be written"""


class LoggingConfig(Section):
    """What is printed and written."""

    every: int = Field(10, ge=1)
    """updates between printed lines (metrics.jsonl has every attempt)"""
    trackers: Annotated[list[Literal["tensorboard", "wandb", "trackio"]], BeforeValidator(_as_list)] = []
    """where the numbers go beside metrics.jsonl: tensorboard, wandb (offline unless WANDB_MODE says otherwise), trackio
    (on this machine)"""
    sample_tokens: int = Field(200, ge=0)
    """tokens of the sample printed at the end; 0 = none"""
    sample_prompt: str = "def "
    """what the sample starts from"""


class HyMoConfig(Section):
    """A whole run."""

    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    training: TrainingConfig = TrainingConfig()
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _resolve_total_tokens(self) -> HyMoConfig:
        s = self.scheduler
        if s.total_tokens is None:
            return self
        steps = steps_for_tokens(s.total_tokens, self.tokens_per_step)
        if s.total_steps not in (None, steps):
            raise ValueError(
                f"scheduler.total_steps: found {s.total_steps} beside scheduler.total_tokens = {s.total_tokens}, which "
                f"is {steps} steps of {self.tokens_per_step} tokens; accepted: one of the two"
            )
        if s.total_steps is None:
            given = s.model_dump(exclude_none=True, exclude={"total_tokens"})
            object.__setattr__(self, "scheduler", SchedulerConfig(**given, total_steps=steps))
        return self

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one update, over all ranks."""
        return self.training.global_batch_size * self.training.seq_len


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation  # type: ignore[misc]
    for name, field in HyMoConfig.model_fields.items()
}


def faults_across(config: HyMoConfig) -> list[str]:
    """Combinations that no single key can be blamed for."""
    m, o, t = config.model, config.optimizer, config.training
    fields, faults = OptimizerConfig.model_fields, []

    def fault(bad: bool, line: str) -> None:
        if bad:
            faults.append(line)

    fault(m.top_k > m.n_routed, f"model.top_k: found {m.top_k}; accepted: at most model.n_routed = {m.n_routed}")
    fault(m.top_k == 0 < m.n_routed, f"model.top_k: found 0; accepted: from 1 to model.n_routed = {m.n_routed}")
    fault(
        m.n_routed == m.n_shared == 0,
        "model.n_shared: found 0; accepted: at least 1 without routed experts (model.n_routed 0)",
    )
    fault(m.qk_rope_dim % 2 == 1, f"model.qk_rope_dim: found {m.qk_rope_dim}; accepted: an even number")
    fault(
        len(m.mtp_weights) != m.mtp_depth,
        f"model.mtp_weights: found {list(m.mtp_weights)}; accepted: one weight for each of "
        f"model.mtp_depth = {m.mtp_depth}",
    )
    fault(any(w < 0 for w in m.mtp_weights), f"model.mtp_weights: found {list(m.mtp_weights)}; accepted: numbers >= 0")
    fault(
        config.data.val is not None and "val" in config.data.val,
        "data.val: found a set named val; accepted: other names, val is what is held out of data.source",
    )
    fault(m.gdn_erase != "none", f"model.gdn_erase: found {m.gdn_erase}; accepted: none (beta is not built yet)")
    fault(
        m.gdn_decay != "rank1", f"model.gdn_decay: found {m.gdn_decay}; accepted: rank1 (the others are not built yet)"
    )
    fault(
        o.qk_clip is not None and m.qk_norm,
        f"optimizer.qk_clip: found {o.qk_clip} with model.qk_norm; accepted: null, since the norm undoes any rescaling",
    )
    fault(
        m.gdn_init == "log_heads" and m.gdn_max_decay is not None,
        f"model.gdn_init: found log_heads with model.gdn_max_decay {m.gdn_max_decay}; accepted: log_heads needs "
        "gdn_max_decay: null, since it starts heads at decays up to model.gdn_heads",
    )
    fault(
        o.momentum != o.betas[0],
        f"optimizer.betas: found betas[0] = {o.betas[0]} beside optimizer.momentum = {o.momentum}; accepted: equal "
        "numbers, both are the momentum",
    )
    fault(
        o.scale == "match_rms_adamw" and o.muon_lr == fields["muon_lr"].default,
        f"optimizer.scale: found match_rms_adamw with optimizer.muon_lr {o.muon_lr}; accepted: this scale needs a rate "
        "of AdamW's size, set optimizer.muon_lr",
    )
    if t.micro_batch_size > t.global_batch_size:
        faults.append(
            f"training.micro_batch_size: found {t.micro_batch_size}; accepted: at most training.global_batch_size = "
            f"{t.global_batch_size}"
        )
    return faults


def refuse_without_effect(config: HyMoConfig) -> None:
    """Raise ConfigError for what would change nothing. For new runs alone: one that was made with it stays usable."""
    o, s, fields, faults = config.optimizer, config.scheduler, OptimizerConfig.model_fields, []
    if o.orthogonalize in ("deepseek_v4", "exact") and o.ns_iterations != fields["ns_iterations"].default:
        faults.append(
            f"optimizer.ns_iterations: found {o.ns_iterations} with optimizer.orthogonalize {o.orthogonalize}; "
            f"accepted: left at {fields['ns_iterations'].default}, this one has no number of steps"
        )
    if o.axis != fields["axis"].default and not o.normalize:
        faults.append(
            f"optimizer.axis: found {o.axis} with optimizer.normalize false; accepted: {fields['axis'].default}, there "
            "is no second moment"
        )
    if s.stable_frac is not None and s.total_steps is not None:
        W, _, D = resolve_phases(s.total_steps, s.warmup_frac, None, s.decay_frac)
        if (s.warmup_steps, s.decay_steps) != (W, D):
            faults.append(
                f"scheduler.stable_frac: found {s.stable_frac} beside warmup_steps {s.warmup_steps} and decay_steps "
                f"{s.decay_steps}; accepted: null, or the {W} and {D} steps of the fractions"
            )
    if faults:
        raise ConfigError(faults)
