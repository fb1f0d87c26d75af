"""What a checkpoint of a run holds, and how a run goes on from one: after a stop, as a branch, after a loss spike."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import hymo
from hymo.checkpoint import store
from hymo.checkpoint.branch import Branch, read_branch
from hymo.checkpoint.manifest import Manifest, refuse_weights_only
from hymo.config import HyMoConfig
from hymo.config_io import build_config, load_config, merge, parse_overrides, read_yaml, to_dict
from hymo.data.shards import TokenSet
from hymo.distributed import reduce
from hymo.errors import HyMoError
from hymo.models.model import HyMo
from hymo.optim.build import Optimizers
from hymo.runs import CONFIG, refuse_absent_text, with_absolute_paths

SPIKE_WINDOW, SPIKE_SIGMAS = 128, 6.0


@dataclass
class Progress:
    """Where a run stands.

    ``step``: updates done. ``attempt``: attempts made, unique in a run. ``position``: samples dealt from the data's
    order. ``tokens``: tokens of all attempts. ``losses``: total losses of the latest updates, for the spike guard.
    """

    step: int = 0
    attempt: int = 0
    position: int = 0
    tokens: int = 0
    skips_in_a_row: int = 0
    spikes_in_a_row: int = 0
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=SPIKE_WINDOW))

    @property
    def moment(self) -> tuple[int, int]:
        return self.step, self.attempt

    def spike_limit(self) -> float | None:
        """The total loss from which an attempt is a spike: mean + 6 sigma of the last 128 (None before that)."""
        if len(self.losses) < SPIKE_WINDOW:
            return None
        return statistics.fmean(self.losses) + SPIKE_SIGMAS * statistics.pstdev(self.losses)

    def note(self, total_loss: float, *, is_update: bool, spike: bool) -> None:
        """Count the attempt just made; a loss that is not finite never enters the window."""
        self.step += is_update
        self.spikes_in_a_row = self.spikes_in_a_row + 1 if spike else 0
        self.skips_in_a_row = 0 if is_update or spike else self.skips_in_a_row + 1
        if is_update and math.isfinite(total_loss):
            self.losses.append(total_loss)


def tensors(model: HyMo, optimizers: Optimizers) -> dict[str, Any]:
    """The tensors of a checkpoint: parameters and buffers, and the optimizer's state by parameter."""
    return {"model": model.state_dict(), "optimizer": optimizers.named_state()}


def meta(
    config: HyMoConfig, progress: Progress, train: TokenSet, optimizers: Optimizers, device: torch.device
) -> dict[str, Any]:
    """All else of a checkpoint, as JSON values."""
    return {
        "config": to_dict(config),
        "position": progress.position,
        "tokens": progress.tokens,
        "losses": list(progress.losses),
        "data_fingerprint": train.fingerprint,
        "optimizer_settings": optimizers.settings(),
        "rng": torch.get_rng_state().numpy().tobytes().hex(),
        **surroundings(device),
    }


def surroundings(device: torch.device) -> dict[str, Any]:
    """What must be equal for a resumed run to repeat the bits."""
    return {
        "world_size": reduce.world_size(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "versions": {"hymo": hymo.__version__, "torch": torch.__version__},
    }


# What a resumed run may change: where and how often things happen, not the mathematics.
FREE_KEYS = {
    "training": {
        "micro_batch_size", "gradient_accumulation_steps", "device", "fsdp", "reshard", "replicas",
        "reduce_each_micro_batch", "fused_gdn", "torch_compile_gdn", "cuda_graphs",
        "consecutive_nan_limit", "eval_every", "eval_tokens", "deterministic", "max_hours",
        "spike_guard", "loss_nan_skip", "activation_checkpointing", "patience_s", "timeout_s",
    },
    "data": {"cache_dir", "val", "workers"},
}  # fmt: skip
FREE_SECTIONS = ("checkpoint", "logging")
MOVABLE = ("data.source", "data.tokenizer")
"""Keys that name places: the checkpoint's fingerprint says whether what lies there now is the same."""


def resumed_config(
    run_dir: Path, path: Path | None, overrides: Sequence[str]
) -> tuple[HyMoConfig, dict[str, tuple[Any, Any]]]:
    """The configuration a run goes on with, and what differs of the keys that may.

    Without a file, the run's own with the overrides on top. A key that changes the mathematics must be what the
    checkpoint says, which no hand edits; at the point where the run was branched off, what its own file says. Where
    text and tokenizer lie may be another place, if there is a checkpoint, whose fingerprint is compared when they are
    read (`restore`).
    """
    before = base = load_config(run_dir / CONFIG)
    newest = store.latest(run_dir)
    if newest is not None:  # before any text is read
        manifest = store.read_manifest(newest)
        refuse_weights_only(newest, manifest)
        if branched_at(run_dir, manifest) is None:
            before = build_config(manifest.meta["config"])
    asked = merge(to_dict(base) if path is None else read_yaml(path), parse_overrides(overrides))
    if not (asked.get("training") or {}).get("init_from"):  # where it began stays known
        asked = merge(asked, {"training": {"init_from": before.training.init_from}})
    after = with_absolute_paths(build_config(asked))
    differing = changed_keys(before, after)
    places = MOVABLE if newest is not None else ()
    changed = {key: values for key, values in differing.items() if not _is_free(key) and key not in places}
    if changed:
        lines = [f"{key}: the run has {old!r}, found {new!r}" for key, (old, new) in changed.items()]
        if any(key.startswith("scheduler.") for key in changed):
            lines.append("a longer run or another decay is a new run: hymo branch RUN --extend TOTAL, or --at STEP")
        raise HyMoError("\n".join([*lines, f"--resume {run_dir}: accepted: the values the run began with"]))
    refuse_absent_text(after)
    return after, differing


def changed_keys(before: HyMoConfig, after: HyMoConfig) -> dict[str, tuple[Any, Any]]:
    """Keys that differ: key -> (before, after)."""
    old, new = to_dict(before), to_dict(after)
    return {
        f"{section}.{key}": (old[section][key], new[section][key])
        for section in old
        for key in old[section]
        if old[section][key] != new[section][key]
    }


def _is_free(key: str) -> bool:
    """Whether a resumed run may change a key: it does not touch the mathematics."""
    section, _, leaf = key.partition(".")
    return section in FREE_SECTIONS or leaf in FREE_KEYS.get(section, ())


def restore(
    checkpoint: Path, model: HyMo, optimizers: Optimizers, train: TokenSet, run_dir: Path | None, *, moved: bool = False
) -> tuple[Progress, Manifest]:
    """Fill model and optimizer from a checkpoint, in place, and say where the run stands.

    At the point where a run was branched off, other data (read from its start) and other optimizer settings are what
    the branch is for; anywhere else they are refused. moved: the text is named by another path than the run's, so that
    its fingerprint alone says that it is the same: other text is refused there too.
    """
    manifest = store.read_manifest(checkpoint)
    refuse_weights_only(checkpoint, manifest)
    before = manifest.meta
    at_branch = branched_at(run_dir, manifest) is not None
    if not at_branch:
        try:
            optimizers.check_settings(before["optimizer_settings"])
        except ValueError as error:
            raise HyMoError(f"{checkpoint}: {error}") from None
    same_data = before["data_fingerprint"] == train.fingerprint
    if not same_data and (moved or not at_branch):
        raise HyMoError(
            f"{checkpoint}: the run read other text (fingerprint {before['data_fingerprint'][:12]}, found "
            f"{train.fingerprint[:12]}); accepted: the same data.source and data.tokenizer"
        )
    store.load(checkpoint, tensors(model, optimizers))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(before["rng"]), dtype=torch.uint8))
    progress = Progress(manifest.step, manifest.attempt, before["position"] if same_data else 0, before["tokens"])
    progress.losses.extend(before["losses"] if same_data else [])
    return progress, manifest


def branched_at(run_dir: Path | None, manifest: Manifest) -> Branch | None:
    """What a run says of its branching, if this checkpoint is the one that it began from."""
    branch = read_branch(run_dir) if run_dir is not None else None
    return branch if branch and (branch.step, branch.attempt) == (manifest.step, manifest.attempt) else None


def rewind(checkpoint: Path, model: HyMo, optimizers: Optimizers, progress: Progress) -> None:
    """Back to a checkpoint after a spike, leaving out the data read since: attempts and data position go on."""
    manifest = store.load(checkpoint, tensors(model, optimizers))
    progress.step = manifest.step
    progress.losses.clear()
    progress.losses.extend(manifest.meta["losses"])


ROUNDING_KEYS = (
    "micro_batch_size", "fsdp", "reshard", "replicas", "reduce_each_micro_batch", "fused_gdn", "torch_compile_gdn",
    "activation_checkpointing",
)  # fmt: skip
"""Keys of ``training`` that a resumed run may change and that change the order of sums."""


def said_of_branch(branch: Branch, *, same_data: bool) -> str:
    """What a run that begins at its branch goes on with."""
    changed = [key for key in branch.differences if not key.startswith(("scheduler.", "data."))]
    new = ["another schedule", *([] if same_data else ["other text, from its start"]), *changed]
    return f"branch: weights and optimizer state of {branch.parent}, {', '.join(new)}"


def said_of_bits(before: Mapping[str, Any], config: HyMoConfig, device: torch.device) -> str:
    """Whether what follows repeats the run bit for bit, and if not, why."""
    now = surroundings(device)
    differing = [key for key in now if now[key] != before[key]]
    old, new = before["config"]["training"], to_dict(config)["training"]
    differing += [f"training.{key}" for key in ROUNDING_KEYS if old.get(key) != new[key]]
    if device.type == "cuda" and not config.training.deterministic:
        differing.append("training.deterministic is false")
    return "resume: bitwise" if not differing else f"resume: not bitwise ({', '.join(differing)})"
