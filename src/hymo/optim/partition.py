"""Which algorithm updates which parameter, and why: a frozen table, made from module types and names.

Matrices that map activations to activations (attention, recurrence, feed-forward projections) go to NorMuon; what is
looked up or read out by rows (embedding, head), routes, scales or convolves goes to AdamW. The shape alone never
decides, and neither does a part of a class's name: an embedding is a matrix too. A parameter that no rule knows is an
error that names it, because a matrix that silently fell to the wrong algorithm would train, only worse.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from hymo.optim.matrices import RowBlocks, check_row_blocks, describe_view

EXPERTS = ("w_in", "w_out", "shared_in", "shared_out")
VECTORS = ("dt_bias", "D", "A_log", "bias")  # A_log [H, S] holds H x S scalars, it maps nothing
GATES = ("router", "dt_proj", "beta_proj")
CONVOLUTIONS = ("conv_weight",)
HEADS = ("head", "lm_head")
TORCH_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
HOW_TO_SAY = "accepted: a name in partition(..., overrides={pattern: 'normuon' | 'adamw'})"


@dataclass(frozen=True)
class Row:
    """One parameter: its name without wrappers, global shape, the matrices in it, who updates it, and why."""

    name: str
    shape: tuple[int, ...]
    view: str
    algorithm: str
    lr: float
    weight_decay: float
    reason: str
    row_blocks: RowBlocks | None = None
    embedding: bool = False

    @property
    def numel(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total

    @property
    def matrices(self) -> int:
        """How many matrices are orthogonalized (0 for AdamW)."""
        if self.algorithm == "adamw":
            return 0
        experts = self.shape[0] if len(self.shape) == 3 else 1
        return experts * len(self.row_blocks or (1,))


@dataclass(frozen=True)
class Partition:
    """The table; `rows` in the order of `model.named_parameters()`. `str()` prints it, `summary()` its totals."""

    rows: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> Row:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    def count(self, algorithm: str) -> tuple[int, int]:
        """(matrices, parameters) of an algorithm."""
        rows = [row for row in self.rows if row.algorithm == algorithm]
        return sum(row.matrices for row in rows), sum(row.numel for row in rows)

    def summary(self) -> str:
        """One line for each (algorithm, reason) and a total for each algorithm."""
        lines = []
        for algorithm in sorted({row.algorithm for row in self.rows}, reverse=True):
            matrices, numel = self.count(algorithm)
            held = f"{matrices} matrices, " if algorithm != "adamw" else ""
            lines.append(f"{algorithm}: {held}{numel:,} parameters")
            totals: Counter[str] = Counter()
            for row in self.rows:
                if row.algorithm == algorithm:
                    totals[row.reason] += row.numel
            lines += [f"  {numel:>15,}  {reason}" for reason, numel in totals.most_common()]
        return "\n".join(lines)

    def __str__(self) -> str:
        head = ("name", "shape", "view", "algorithm", "lr", "decay", "reason")
        cells = [head] + [
            (r.name, "x".join(map(str, r.shape)), r.view, r.algorithm, f"{r.lr:g}", f"{r.weight_decay:g}", r.reason)
            for r in self.rows
        ]
        widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        return "\n".join([*lines, "", self.summary()])


def clean_name(name: str) -> str:
    """A parameter's name without what torch.compile and activation checkpointing put into it."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def partition(model: nn.Module, config: Any, overrides: Mapping[str, str] | None = None) -> Partition:
    """Assign every trainable parameter of `model` (any device, meta too) by the rules of this module.

    config: an OptimizerConfig. overrides: name pattern (`fnmatch`) -> `normuon` or `adamw`, consulted first.
    Raises ValueError that names the first parameter that no rule or two rules with different answers claim, and the
    first pattern that no parameter has.
    """
    rows = []
    every = [name for _, names, _, _ in _parameters(model) for name, _ in names]
    for pattern in overrides or {}:
        if not any(fnmatchcase(name, pattern) for name in every):
            raise ValueError(f"overrides: no parameter is named like {pattern!r}; the first names: {every[:4]}")
    modules = {clean_name(name + ".").rstrip("."): module for name, module in model.named_modules()}
    for name, names, param, module in _parameters(model):
        if not param.requires_grad:
            continue
        algorithm, reason = _decide(name, names, param, module, config, overrides or {})
        row_blocks = _row_blocks(modules, name) if algorithm != "adamw" else None
        rows.append(_row(name, param, algorithm, reason, row_blocks, config))
    if not rows:
        raise ValueError("partition: the model has no trainable parameter")
    return Partition(tuple(rows))


def _parameters(model: nn.Module) -> Iterator[tuple[str, list[tuple[str, nn.Module]], Tensor, nn.Module]]:
    """(name, every (name, owning module) it has, parameter, first owning module), each parameter once."""
    owners: dict[Tensor, list[tuple[str, nn.Module]]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for leaf, param in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(param, []).append((clean_name(f"{prefix}.{leaf}" if prefix else leaf), module))
    for param, names in owners.items():
        yield names[0][0], names, param, names[0][1]


def _decide(
    name: str,
    names: list[tuple[str, nn.Module]],
    param: Tensor,
    module: nn.Module,
    config: Any,
    overrides: Mapping[str, str],
) -> tuple[str, str]:
    """(algorithm, reason)."""
    matched = {overrides[pattern] for pattern in overrides if any(fnmatchcase(n, pattern) for n, _ in names)}
    if len(matched) > 1:
        raise ValueError(f"{name}: overrides give {' and '.join(sorted(matched))}, accepted: one algorithm")
    if matched:
        return _muon_name(matched.pop(), config), "override"
    if any("_flat_param" in n for n, _ in names):
        raise ValueError(f"{name}: is flattened by FSDP1, which hides its matrix; accepted: FSDP2 (fully_shard)")
    answers = {_rule(n, param, m, config) for n, m in names}
    if any(reason == "embedding" for _, reason in answers):  # a tied head follows the embedding
        return "adamw", "embedding" if len(names) == 1 else "embedding, tied"
    if len(answers) > 1:
        found = " and ".join(sorted(f"{algorithm} ({reason})" for algorithm, reason in answers))
        raise ValueError(f"{name}: tied under {', '.join(n for n, _ in names)}, whose rules say {found}")
    return answers.pop()


def _rule(name: str, param: Tensor, module: nn.Module, config: Any) -> tuple[str, str]:
    parts = name.split(".")
    leaf, owner = parts[-1], parts[-2] if len(parts) > 1 else ""
    linear = isinstance(module, nn.Linear)
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "adamw", "embedding"
    if linear and leaf == "weight" and param.ndim != 2:
        raise ValueError(f"{name}: found shape {tuple(param.shape)} for a Linear weight (flattened?), accepted: [m, n]")
    if isinstance(module, TORCH_NORMS) or (not linear and param.ndim < 2 and _is_norm(module, owner)):
        return "adamw", "norm"
    if leaf in VECTORS and (param.ndim < 2 or leaf == "A_log"):
        return "adamw", "scalars and biases"
    if leaf in CONVOLUTIONS or isinstance(module, nn.modules.conv._ConvNd):
        return "adamw", "convolution"
    if leaf == "weight" and (owner in HEADS or "LMHead" in _class_names(module)):
        return "adamw", "head"
    if owner in GATES or leaf in GATES:
        return "adamw", "router and gates"
    if "gate" in (owner, leaf):
        raise ValueError(f"{name}: may be a router (adamw) or half of a gated layer (normuon); {HOW_TO_SAY}")
    if param.ndim == 3 and leaf in EXPERTS:
        experts = getattr(config, "experts", "adamw")
        return (_muon_name("normuon", config) if experts == "muon" else "adamw"), "experts"
    if linear and leaf == "weight":
        if min(param.shape) == 1:
            return "adamw", "single row or column"
        return _muon_name("normuon", config), "matrix"
    raise ValueError(
        f"{name}: no rule knows this parameter (shape {tuple(param.shape)} in a {type(module).__name__}); {HOW_TO_SAY}"
    )


def _class_names(module: nn.Module) -> list[str]:
    """The names of a module's classes (FSDP2 puts a class of its own before them)."""
    return [kind.__name__ for kind in type(module).__mro__]


def _is_norm(module: nn.Module, owner: str) -> bool:
    """Whether a module is a norm by its or its class's name; its vectors are then scales and shifts."""
    return any(name.lower().endswith("norm") for name in (owner, *_class_names(module)))


def _muon_name(algorithm: str, config: Any) -> str:
    """`muon` for `normuon` where the second moment is switched off."""
    if algorithm not in ("normuon", "muon", "adamw"):
        raise ValueError(f"overrides: found {algorithm!r}, accepted: normuon, muon, adamw")
    return "muon" if algorithm == "normuon" and not getattr(config, "normalize", True) else algorithm


def _row_blocks(modules: Mapping[str, nn.Module], name: str) -> RowBlocks | None:
    """The blocks that the nearest enclosing module declares in its `row_blocks`, by the parameter's name in it."""
    path, local_name = name, ""
    while path:
        path, _, last = path.rpartition(".")
        local_name = f"{last}.{local_name}" if local_name else last
        blocks = getattr(modules.get(path), "row_blocks", {}).get(local_name)
        if blocks is not None:
            return tuple(blocks)
    return None


def _row(name: str, param: Tensor, algorithm: str, reason: str, row_blocks: RowBlocks | None, config: Any) -> Row:
    shape = tuple(param.shape)
    if algorithm == "adamw":
        embedding = reason.startswith("embedding")
        undecayed = reason in ("norm", "scalars and biases")
        decay = config.embed_weight_decay if embedding else 0.0 if undecayed else config.weight_decay
        view = "x".join(map(str, shape)) or "scalar"
        return Row(name, shape, view, algorithm, config.adamw_lr, decay, reason, None, embedding)
    check_row_blocks(shape, row_blocks, name)
    return Row(
        name,
        shape,
        describe_view(shape, row_blocks),
        algorithm,
        config.muon_lr,
        config.weight_decay,
        reason,
        row_blocks,
    )
