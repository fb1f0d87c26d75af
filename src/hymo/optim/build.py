"""From a model and an OptimizerConfig to one optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hymo.distributed.exchange_plan import ExchangePlan, Layout, matrices_of, plan_exchange
from hymo.optim import cautious_adamw, normuon
from hymo.optim.base import Group, GroupedOptimizer
from hymo.optim.partition import Partition, Row, clean_name, partition
from hymo.optim.qk_clip import clip_qk


@dataclass(frozen=True)
class GroupView:
    """The groups of one kind of an `Optimizers`; the same dictionaries, so a change shows on both sides."""

    param_groups: list[Group]

    @property
    def parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]


class Optimizers(GroupedOptimizer):
    """One torch optimizer for a whole model: NorMuon (or Muon) groups and cautious AdamW groups.

    partition: the table it was built from; qk_clip: the threshold of the attention logits, or None.
    """

    kept = (*GroupedOptimizer.kept, "partition", "qk_clip")

    def __init__(self, groups: list[Group], table: Partition, qk_clip: float | None = None):
        self.partition = table
        self.qk_clip = qk_clip
        super().__init__(groups, {})

    @property
    def nor_muon(self) -> GroupView:
        return GroupView([g for g in self.param_groups if g["algorithm"] != "adamw"])

    @property
    def adamw(self) -> GroupView:
        return GroupView([g for g in self.param_groups if g["algorithm"] == "adamw"])

    @property
    def peak_rates(self) -> tuple[float, float]:
        """(NorMuon's, AdamW's) rate at factor 1; 0 where a kind has no parameters."""
        muon, adamw = ([g["base_lr"] for g in view.param_groups] for view in (self.nor_muon, self.adamw))
        return (muon or [0.0])[0], (adamw or [0.0])[0]

    def named_state(self) -> dict[str, dict[str, Tensor]]:
        """State tensors by parameter and name: what a checkpoint holds."""
        return {
            name: self.state[param]
            for group in self.param_groups
            for name, param in zip(group["param_names"], group["params"], strict=True)
        }

    def parameters_by_algorithm(self) -> dict[str, list[Tensor]]:
        """Parameters under `normuon` (or `muon`) and `adamw`, for norms and reports by kind."""
        found: dict[str, list[Tensor]] = {}
        for group in self.param_groups:
            found.setdefault(group["algorithm"], []).extend(group["params"])
        return found

    def clip_qk(self, model: nn.Module, logit_max_LH: Any) -> None:
        """Rescale the heads whose largest logit passed `qk_clip`, if it is set; call after `step`."""
        if self.qk_clip is not None:
            masters = {param: state["master"] for param, state in self.state.items() if "master" in state}
            clip_qk(model, logit_max_LH, self.qk_clip, masters)


def build_optimizers(model: nn.Module, config: Any, overrides: Mapping[str, str] | None = None) -> Optimizers:
    """`Optimizers` of a model by `partition(model, config, overrides)`; config: an OptimizerConfig.

    Parameters that share algorithm, decay and row blocks share a group, in the model's order.
    """
    table = partition(model, config, overrides)
    named = {clean_name(name): param for name, param in model.named_parameters()}
    groups: dict[tuple[Any, ...], Group] = {}
    for row in table:
        key = (row.algorithm, row.weight_decay, row.embedding, row.row_blocks)
        group = groups.setdefault(key, _settings(row, config) | {"params": []})
        group["params"].append((row.name, named[row.name]))
    return Optimizers(list(groups.values()), table, config.qk_clip)


def plan_step(table: Partition, ranks: int, config: Any, itemsize: int = 2, replicas: int = 1) -> ExchangePlan:
    """What a step of `table`'s matrices would cost under the cuts of `wrap_model_with_fsdp`.

    Arithmetic only, before any process exists. ranks: processes that share one copy of the model; replicas: copies.
    itemsize: bytes of an element on the wire (2 on GPUs, 4 on CPU).
    """
    mesh, repeats = ((ranks,), ()) if replicas == 1 else ((replicas, ranks), (None,))
    from hymo.distributed.fsdp import placement

    matrices = []
    for index, row in enumerate(row for row in table if row.algorithm != "adamw"):
        layout = Layout(row.shape, mesh, (*repeats, placement(row.shape, ranks).dim))
        matrices += matrices_of(index, row.shape, row.row_blocks, layout)
    return plan_exchange(matrices, ranks * replicas, itemsize=itemsize, steps=config.ns_iterations)


def _settings(row: Row, config: Any) -> Group:
    if row.algorithm == "adamw":
        return dict(
            cautious_adamw.DEFAULTS,
            algorithm="adamw",
            lr=row.lr,
            betas=config.adamw_betas,
            eps=config.eps,
            weight_decay=row.weight_decay,
            embed_weight_decay=config.embed_weight_decay,
            embedding=row.embedding,
            cautious_wd=config.cautious_wd,
            mask=config.mask,
        )
    taken = (
        "momentum",
        "betas",
        "eps",
        "cautious_wd",
        "ns_iterations",
        "nesterov",
        "orthogonalize",
        "scale",
        "axis",
        "mask",
    )
    return (
        normuon.DEFAULTS
        | {key: getattr(config, key) for key in taken}
        | {
            "algorithm": row.algorithm,
            "lr": row.lr,
            "weight_decay": row.weight_decay,
            "normalize": row.algorithm == "normuon",
            "row_blocks": row.row_blocks,
        }
    )
