"""One step of Muon and NorMuon over every matrix of an optimizer, wherever its parts lie.

    momentum on the own parts -> matrices to their owners -> orthogonalize whole, batched -> results back
    -> statistics of the own parts, summed over processes where a matrix is cut -> update of the own parts

On one process the same steps run without the sending. The statistics are summed in float64, so the update is that of
one process up to the rounding of the orthogonalizer's products. A step is prepared once for a set of parameters with
gradients (a plan, buffers' layouts) and run many times; every process must have gradients for the same parameters.

N = matrices in a batch, m, n = a matrix's rows and columns, r, c = those of the part held here.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hymo.distributed.exchange import Exchange, layout_of
from hymo.distributed.exchange_plan import ExchangePlan, Matrix, Tile, matrices_of, plan_exchange
from hymo.optim.base import Group, gradient, group_name, local, target
from hymo.optim.orthogonalize import Orthogonalizer, get_orthogonalizer, orthogonalize, wire_dtype
from hymo.optim.update import (
    apply_update,
    inverse_root,
    lerp_second_moment,
    rescale_factor,
    shape_scale,
    statistic_axis,
)


def group_orthogonalizer(group: Group) -> Orthogonalizer:
    """The record of a group's settings."""
    dtype = None if group["dtype"] == "auto" else group["dtype"]
    return get_orthogonalizer(group["orthogonalize"], group["ns_iterations"], dtype)


@dataclass
class Held:
    """A parameter with a gradient: its tensors (this process's part of them) in this step."""

    param: Tensor
    state: dict[str, Tensor]
    group: Group
    name: str
    weight: Tensor
    grad: Tensor
    update: Tensor  # momentum after Nesterov

    def view(self, key: str, matrix: Matrix, tile: Tile, rank: int) -> Tensor:
        """The [r, c] part of a tensor laid out like the parameter, or the statistic's [r, 1] or [1, c]."""
        *expert, rows, _ = matrix.layout.box(rank)
        tensor = getattr(self, key) if key in ("weight", "grad", "update") else local(self.state[key])
        if expert:
            tensor = tensor[(matrix.block.expert or 0) - expert[0][0]]
        if key == "second_moment_columns":
            return tensor[matrix.block.index : matrix.block.index + 1]
        start = matrix.block.start - rows[0]
        return tensor[start + tile.rows[0] : start + tile.rows[1]]


@dataclass(frozen=True)
class Run:
    """Neighbours in a buffer that are handled together: equal matrices, equal tiles, one group."""

    matrices: tuple[int, ...]
    tile: Tile
    offset: int

    @property
    def span(self) -> slice:
        return slice(self.offset, self.offset + len(self.matrices) * self.tile.numel)


def _runs(pieces: Iterable[Any], plan: ExchangePlan) -> tuple[Run, ...]:
    found: list[list[Any]] = []
    for piece in pieces:
        last = found[-1][0] if found else None
        same = False
        if last is not None:
            here, there = plan.matrices[piece.matrix], plan.matrices[last.matrix]
            same = last.tile == piece.tile and there.shape == here.shape and there.kind == here.kind
        if same:
            found[-1].append(piece)
        else:
            found.append([piece])
    return tuple(Run(tuple(p.matrix for p in run), run[0].tile, run[0].offset) for run in found)


class MatrixStep:
    """A prepared step over parameters that share their processes, orthogonalizer dtype and device."""

    def __init__(
        self, entries: list[tuple[Tensor, Group, str]], ranks: tuple[int, ...], layouts: list[Any], bucket: int
    ):
        """entries: (parameter, group, name); layouts: of each. Matrices of different groups get different kinds."""
        self.entries = entries
        groups = {id(group): group for _, group, _ in entries}
        self.groups = list(groups.values())
        kinds = {key: kind for kind, key in enumerate(groups)}
        self.records = [group_orthogonalizer(group) for group in self.groups]
        first = local(entries[0][0])
        dtype = wire_dtype(self.records[0], first if first.dtype == torch.float64 else first.float())
        matrices = [
            matrix
            for i, ((param, group, _), layout) in enumerate(zip(entries, layouts, strict=True))
            for matrix in matrices_of(i, param.shape, group["row_blocks"], layout, kinds[id(group)])
        ]
        steps = max(record.steps for record in self.records)
        self.plan = plan_exchange(
            matrices, len(ranks), itemsize=dtype.itemsize, steps=max(steps, 1), bucket_bytes=bucket
        )
        self.exchange = Exchange(self.plan, ranks, dtype, first.device)
        self.rank = self.exchange.rank
        self.send_runs = [_runs(r.sent, self.plan) for r in self.exchange.routes]
        self.result_runs = [_runs(r.results, self.plan) for r in self.exchange.routes]
        self.sums = len(ranks) > 1 and not all(m.layout.complete for m in matrices)
        self.cut_statistics = [i for i, m in enumerate(matrices) if self._statistic_is_cut(m)]

    # ---- the step ----

    def run(self, states: dict[Tensor, dict[str, Tensor]]) -> None:
        held = [self._held(param, group, name, states[param]) for param, group, name in self.entries]
        _momentum(held)
        statistics = _Statistics(self, held)
        kept: list[tuple[int, Tensor]] = []
        for k, results in self.exchange.run(lambda k, buffer: self._pack(held, k, buffer), self._orthogonalize):
            for run in self.result_runs[k]:
                statistics.add(run, self._results(results, run, held))
            if self.sums:
                kept.append((k, results))
            else:
                self._finish(held, k, results, statistics)
        if self.sums:
            statistics.sum_over_processes()
            for k, results in kept:
                self._finish(held, k, results, statistics)
        for h in held:
            if "master" in h.state:
                local(h.param).copy_(h.weight)

    def _held(self, param: Tensor, group: Group, name: str, state: dict[str, Tensor]) -> Held:
        weight = target(param, state)
        grad = gradient(param, weight.dtype)
        return Held(param, state, group, name, weight, grad, grad)

    def _pack(self, held: list[Held], k: int, buffer: Tensor) -> None:
        for run in self.send_runs[k]:
            parts = [self._view(held, "update", i, run.tile) for i in run.matrices]
            torch._foreach_copy_(list(buffer[run.span].view(len(parts), *run.tile.shape).unbind()), parts)

    def _orthogonalize(self, kind: int, x_Nmn: Tensor) -> Tensor:
        return orthogonalize(x_Nmn, self.records[kind])

    def _view(self, held: list[Held], key: str, index: int, tile: Tile) -> Tensor:
        matrix = self.plan.matrices[index]
        return held[matrix.param].view(key, matrix, tile, self.rank)

    def _results(self, results: Tensor, run: Run, held: list[Held]) -> Tensor:
        """[N, r, c] in the dtype of the weights."""
        weight = held[self.plan.matrices[run.matrices[0]].param].weight
        return results[run.span].view(len(run.matrices), *run.tile.shape).to(weight.dtype)

    def _finish(self, held: list[Held], k: int, results: Tensor, statistics: "_Statistics") -> None:
        for run in self.result_runs[k]:
            matrix = self.plan.matrices[run.matrices[0]]
            group, (m, n) = self.groups[matrix.kind], matrix.shape
            u_Nrc = self._results(results, run, held)
            if u_Nrc.data_ptr() == results[run.span].data_ptr():
                u_Nrc = u_Nrc.clone()
            inverse = statistics.inverse.get(run)
            if inverse is not None:
                u_Nrc.mul_(inverse)
            before, after, grad_norm = statistics.norms(run)
            factor = rescale_factor(
                group["scale"],
                shape_scale(group["scale"], m, n),
                before,
                after,
                grad_norm if group["scale"] == "grad_norm" else None,
            )
            u_Nrc.mul_(factor.to(u_Nrc.dtype)[:, None, None])
            self._apply(held, run, u_Nrc, group)

    def _apply(self, held: list[Held], run: Run, u_Nrc: Tensor, group: Group) -> None:
        weights = [self._view(held, "weight", i, run.tile) for i in run.matrices]
        w_Nrc = torch.stack(weights)
        lr = group["lr"]
        decay = group["weight_decay"] * (lr if group["decay"] == "lr_squared" else 1.0)
        source = None
        if group["cautious_wd"]:
            key = {"momentum": "momentum", "grad": "grad"}.get(group["mask"])
            source = u_Nrc if key is None else torch.stack([self._view(held, key, i, run.tile) for i in run.matrices])
        apply_update(w_Nrc, u_Nrc, lr, decay, source)
        torch._foreach_copy_(weights, list(w_Nrc.unbind()))

    # ---- layout of statistics ----

    def axis(self, matrix: Matrix) -> int:
        return statistic_axis(self.groups[matrix.kind]["axis"], *matrix.shape)

    def normalizes(self, matrix: Matrix) -> bool:
        return self.groups[matrix.kind]["algorithm"] == "normuon"

    def _statistic_is_cut(self, matrix: Matrix) -> bool:
        """Whether the axis that the statistic averages over is divided among processes."""
        return self.normalizes(matrix) and matrix.layout.cuts_dimension(len(matrix.layout.shape) + self.axis(matrix))


def _momentum(held: list[Held]) -> None:
    """M <- bM + (1 - b)G in place; the update is M, or (1 - b)G + bM with Nesterov."""
    by_group: dict[int, list[Held]] = {}
    for h in held:
        by_group.setdefault(id(h.group), []).append(h)
    for members in by_group.values():
        group = members[0].group
        beta, grads = group["momentum"], [h.grad for h in members]
        momenta = [local(h.state["momentum"]) for h in members]
        torch._foreach_lerp_(momenta, grads, 1.0 - beta)
        updates = torch._foreach_lerp(grads, momenta, beta) if group["nesterov"] else momenta
        for h, update in zip(members, updates, strict=True):
            h.update = update


class _Statistics:
    """Sums of squares of the results, and what follows from them.

    The second moment of a row averages over its columns. If a process has the whole row, it updates the second moment
    as soon as the row is there; if columns are cut, partial sums of all such rows go through one all-reduce first.
    Norms of cut matrices go through a second one.
    """

    def __init__(self, step: MatrixStep, held: list[Held]):
        self.step, self.held, self.rank = step, held, step.rank
        device = held[0].weight.device
        # Rows of `totals`: squared norm before and after the second moment, and of the gradient.
        self.totals = torch.zeros(3, len(step.plan.matrices), dtype=torch.float64, device=device)
        self.squares: dict[Run, Tensor] = {}
        self.inverse: dict[Run, Tensor] = {}
        self.slots: dict[int, slice] = {}
        offset = 0
        for index in step.cut_statistics:
            m, n = step.plan.matrices[index].shape
            length = m if step.axis(step.plan.matrices[index]) == -1 else n
            self.slots[index] = slice(offset, offset + length)
            offset += length
        self.partial = torch.zeros(offset, dtype=torch.float64, device=device)

    def add(self, run: Run, o_Nrc: Tensor) -> None:
        """Take in the results of a run."""
        matrix = self.step.plan.matrices[run.matrices[0]]
        axis = self.step.axis(matrix)
        squares = o_Nrc.square().sum(axis, keepdim=True)
        self.squares[run] = squares
        if run.matrices[0] in self.slots:
            tile_range = run.tile.rows if axis == -1 else run.tile.cols
            for i, values in zip(run.matrices, squares.flatten(1), strict=True):
                if self._counts(i):
                    start = self.slots[i].start
                    self.partial[start + tile_range[0] : start + tile_range[1]] += values
        elif self.step.normalizes(matrix):
            moments = [self._moment(i, run.tile) for i in run.matrices]
            self._update(moments, squares, matrix, axis)
            self._invert(run, moments, matrix)
        self._norms(run, matrix)

    def _counts(self, index: int) -> bool:
        return self.step.plan.matrices[index].layout.is_primary(self.rank) or not self.step.sums

    def _moment(self, index: int, tile: Tile) -> Tensor:
        matrix = self.step.plan.matrices[index]
        key = "second_moment" if self.step.axis(matrix) == -1 else "second_moment_columns"
        return self.held[matrix.param].view(key, matrix, tile, self.rank)

    def _update(self, moments: list[Tensor], squares: Tensor, matrix: Matrix, axis: int) -> None:
        v = torch.stack(moments)
        lerp_second_moment(v, squares, matrix.shape[axis], self.step.groups[matrix.kind]["betas"][1])
        torch._foreach_copy_(moments, list(v.unbind()))

    def _invert(self, run: Run, moments: list[Tensor], matrix: Matrix) -> None:
        self.inverse[run] = inverse_root(torch.stack(moments), self.step.groups[matrix.kind]["eps"])

    def _norms(self, run: Run, matrix: Matrix) -> None:
        """Squared norms of this process's tiles; those of a cut second moment follow after its sums."""
        indices = [i for i in run.matrices if self._counts(i)]
        if len(indices) != len(run.matrices):
            return  # replicas of one parameter are alike, so a run counts as a whole or not at all
        squares = self.squares[run].double()
        where = slice(run.matrices[0], run.matrices[0] + len(indices))
        if list(run.matrices) != list(range(where.start, where.stop)):
            where = list(run.matrices)  # type: ignore[assignment]
        self.totals[0, where] += squares.sum((1, 2))
        if run in self.inverse:
            self.totals[1, where] += (squares * self.inverse[run].double().square()).sum((1, 2))
        if self.step.groups[matrix.kind]["scale"] == "grad_norm":
            parts = [self.step._view(self.held, "grad", i, run.tile) for i in run.matrices]
            self.totals[2, where] += torch.stack([p.double().square().sum() for p in parts])

    def sum_over_processes(self) -> None:
        if self.slots:
            self.step.exchange.all_reduce(self.partial)
            for index, slot in self.slots.items():
                self._update_cut(index, self.partial[slot])
            for run in self.squares:
                if run.matrices[0] in self.slots:
                    self._finish_cut(run)
        self.step.exchange.all_reduce(self.totals)

    def _update_cut(self, index: int, sums: Tensor) -> None:
        """Every process that holds values of this second moment updates them, also one without a tile."""
        matrix = self.step.plan.matrices[index]
        axis = self.step.axis(matrix)
        *expert, rows, cols = matrix.layout.box(self.rank)
        if expert and not expert[0][0] <= (matrix.block.expert or 0) < expert[0][1]:
            return
        low = max(rows[0], matrix.block.start) - matrix.block.start
        high = min(rows[1], matrix.block.stop) - matrix.block.start
        span = (low, max(low, high)) if axis == -1 else cols
        if span[0] >= span[1]:
            return
        moment = self._moment(index, Tile((low, max(low, high)), cols))
        part = sums[span[0] : span[1]].reshape(moment.shape)
        self._update([moment], part[None], matrix, axis)

    def _finish_cut(self, run: Run) -> None:
        matrix = self.step.plan.matrices[run.matrices[0]]
        self._invert(run, [self._moment(i, run.tile) for i in run.matrices], matrix)
        if all(self._counts(i) for i in run.matrices):
            after = (self.squares[run].double() * self.inverse[run].double().square()).sum((1, 2))
            self.totals[1, list(run.matrices)] += after

    def norms(self, run: Run) -> tuple[Tensor, Tensor, Tensor]:
        """Frobenius norms [N] of whole matrices: before, after the second moment, of the gradient."""
        before, after, grad = self.totals[:, list(run.matrices)].sqrt()
        return before, after if run in self.inverse else before, grad


def prepare(
    groups: list[Group], share_replicas: bool, bucket_bytes: int, only: set[Tensor] | None = None
) -> list[MatrixStep]:
    """Prepared steps for all parameters of these groups (those in `only`), one for each set of processes and dtype."""
    found: dict[tuple[Any, ...], tuple[list[Any], list[Any]]] = {}
    for group in groups:
        for i, param in enumerate(group["params"]):
            if (only is not None and param not in only) or not param.numel():
                continue
            name = group_name(group, i)
            ranks, layout = layout_of(param, share_replicas, name)
            values = local(param)
            wire = wire_dtype(group_orthogonalizer(group), values if values.dtype == torch.float64 else values.float())
            entries, layouts = found.setdefault((ranks, wire, values.device), ([], []))
            entries.append((param, group, name))
            layouts.append(layout)
    return [MatrixStep(entries, ranks, layouts, bucket_bytes) for (ranks, _, _), (entries, layouts) in found.items()]
