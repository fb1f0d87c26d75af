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
from hymo.distributed.exchange_plan import ExchangePlan, Layout, Matrix, Tile, matrices_of, plan_exchange
from hymo.optim.base import Group, gradient, group_name, local, runs_triton, target
from hymo.optim.batched import orthogonalize_batch
from hymo.optim.orthogonalize import Orthogonalizer, get_orthogonalizer, wire_dtype
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


def address_tables(step: "MatrixStep", device: torch.device) -> Any:
    """What the Triton form of a step needs, or None where it does not apply."""
    if not runs_triton(device):
        return None
    try:
        from hymo.optim import triton_step
    except ImportError:
        return None
    return triton_step.AddressTables(step) if triton_step.supports(step) else None


class MatrixStep:
    """A prepared step over parameters that share their processes, orthogonalizer dtype and device."""

    def __init__(
        self, entries: list[tuple[Tensor, Group, str]], ranks: tuple[int, ...], layouts: list[Layout], bucket: int
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
        self.indices: dict[Run, Tensor] = {}
        self.tables = address_tables(self, first.device)  # None: plain tensor operations

    def run(self, states: dict[Tensor, dict[str, Tensor]]) -> None:
        """One update of every parameter of the step."""
        parts: Parts = Parts(self, states) if self.tables is None else self.tables.begin(states)
        kept: list[tuple[int, Tensor]] = []
        for k, results in self.exchange.run(parts.pack, self._orthogonalize):
            for run in self.result_runs[k]:
                parts.add(run, results[run.span])
            if self.sums:
                kept.append((k, results))
            else:
                parts.finish(self.result_runs[k], results)
        if self.sums:
            parts.sum_over_processes()
            for k, results in kept:
                parts.finish(self.result_runs[k], results)
        parts.end()

    def _orthogonalize(self, kind: int, x_Nmn: Tensor, out_Nmn: Tensor) -> None:
        orthogonalize_batch(x_Nmn, self.records[kind], out_Nmn)

    def axis(self, matrix: Matrix) -> int:
        """Dimension that the matrix's second moment averages over, -1 or -2."""
        return statistic_axis(self.groups[matrix.kind]["axis"], *matrix.shape)

    def normalizes(self, matrix: Matrix) -> bool:
        return self.groups[matrix.kind]["algorithm"] == "normuon"

    def _statistic_is_cut(self, matrix: Matrix) -> bool:
        """Whether the axis that the statistic averages over is divided among processes."""
        return self.normalizes(matrix) and matrix.layout.cuts_dimension(len(matrix.layout.shape) + self.axis(matrix))


class Parts:
    """The work on this process's parts in one step, by plain tensor operations.

    The second moment of a row averages over its columns. A process that has the whole row updates it as soon as the
    row is there; where columns are cut, partial sums of all such rows go through one all-reduce first. Norms of cut
    matrices go through a second one.
    """

    def __init__(self, step: MatrixStep, states: dict[Tensor, dict[str, Tensor]]):
        self.step, self.plan, self.rank = step, step.plan, step.rank
        self.held = [self._hold(param, group, name, states[param]) for param, group, name in step.entries]
        self.device = self.held[0].weight.device
        _momentum(self.held)
        self.squares: dict[Run, Tensor] = {}
        self.inverse: dict[Run, Tensor] = {}
        # Of each run float64 [3, N]: squared norm before and after the second moment, and of the gradient.
        self.totals: dict[Run, Tensor] = {}
        self.slots: dict[int, slice] = {}
        offset = 0
        for index in step.cut_statistics:
            m, n = self.plan.matrices[index].shape
            length = m if step.axis(self.plan.matrices[index]) == -1 else n
            self.slots[index] = slice(offset, offset + length)
            offset += length
        self.partial = torch.zeros(offset, dtype=torch.float64, device=self.device)

    def _hold(self, param: Tensor, group: Group, name: str, state: dict[str, Tensor]) -> Held:
        weight = target(param, state)
        grad = gradient(param, weight.dtype)
        return Held(param, state, group, name, weight, grad, grad)

    def _view(self, key: str, index: int, tile: Tile) -> Tensor:
        matrix = self.plan.matrices[index]
        return self.held[matrix.param].view(key, matrix, tile, self.rank)

    def _views(self, key: str, run: Run) -> list[Tensor]:
        return [self._view(key, i, run.tile) for i in run.matrices]

    def _first(self, run: Run) -> tuple[Matrix, Group]:
        matrix = self.plan.matrices[run.matrices[0]]
        return matrix, self.step.groups[matrix.kind]

    # ---- in the order of the step ----

    def pack(self, k: int, buffer: Tensor) -> None:
        """Round this process's parts of bucket k into the buffer."""
        for run in self.step.send_runs[k]:
            parts = self._views("update", run)
            torch._foreach_copy_(list(buffer[run.span].view(len(parts), *run.tile.shape).unbind()), parts)

    def add(self, run: Run, results: Tensor) -> None:
        """Take in the flat results of a run: sums of squares, and the second moment where its rows are whole."""
        matrix, group = self._first(run)
        axis = self.step.axis(matrix)
        o_Nrc = self._results(run, results)
        squares = self.squares[run] = o_Nrc.square().sum(axis, keepdim=True)
        if run.matrices[0] in self.slots:
            low, high = run.tile.rows if axis == -1 else run.tile.cols
            for i, values in zip(run.matrices, squares.flatten(1), strict=True):
                if self.plan.matrices[i].layout.is_primary(self.rank):
                    start = self.slots[i].start
                    self.partial[start + low : start + high] += values
        elif self.step.normalizes(matrix):
            moments = [self._moment(i, run.tile) for i in run.matrices]
            self._update_moments(moments, squares, matrix, axis)
            self.inverse[run] = inverse_root(torch.stack(moments), group["eps"])
        self._total(run)

    def _total(self, run: Run) -> None:
        squares = self.squares[run].double()
        before = after = squares.sum((1, 2))
        if run in self.inverse:
            after = (squares * self.inverse[run].double().square()).sum((1, 2))
        grad = torch.zeros_like(before)
        if self._first(run)[1]["scale"] == "grad_norm":
            grad = torch.stack([g.double().square().sum() for g in self._views("grad", run)])
        self.totals[run] = torch.stack([before, after, grad])

    def sum_over_processes(self) -> None:
        """Make statistics and norms those of whole matrices."""
        if self.slots:
            self.step.exchange.all_reduce(self.partial)
            for index, slot in self.slots.items():
                self._update_cut_moment(index, self.partial[slot])
            for run in [run for run in self.totals if run.matrices[0] in self.slots]:
                moments = [self._moment(i, run.tile) for i in run.matrices]
                self.inverse[run] = inverse_root(torch.stack(moments), self._first(run)[1]["eps"])
                self._total(run)
        whole = torch.zeros(3, len(self.plan.matrices), dtype=torch.float64, device=self.device)
        for run, totals in self.totals.items():
            if self.plan.matrices[run.matrices[0]].layout.is_primary(self.rank):
                whole.index_add_(1, self._indices(run), totals)
        self.step.exchange.all_reduce(whole)
        for run in self.totals:
            self.totals[run] = whole[:, self._indices(run)]

    def _indices(self, run: Run) -> Tensor:
        """The run's matrices as a tensor, made once: a copy to the device would make the host wait."""
        cache = self.step.indices
        if run not in cache:
            cache[run] = torch.tensor(run.matrices, device=self.device)
        return cache[run]

    def finish(self, runs: Iterable[Run], results: Tensor) -> None:
        """Update the parts of these runs."""
        for run in runs:
            matrix, group = self._first(run)
            u_Nrc = self._results(run, results[run.span])
            if u_Nrc.dtype == results.dtype:
                u_Nrc = u_Nrc.clone()
            if run in self.inverse:
                u_Nrc.mul_(self.inverse[run])
            before, after, grad = self.totals[run].sqrt()
            shape = shape_scale(group["scale"], *matrix.shape)
            factor = rescale_factor(group["scale"], shape, before, after, grad)
            u_Nrc.mul_(factor.to(u_Nrc.dtype)[:, None, None])
            self._apply(run, u_Nrc, group)

    def end(self) -> None:
        """Round the full-precision copies into half-precision parameters."""
        for h in self.held:
            if "master" in h.state:
                local(h.param).copy_(h.weight)

    # ---- their parts ----

    def _results(self, run: Run, results: Tensor) -> Tensor:
        """[N, r, c] in the dtype of the weights."""
        weight = self.held[self.plan.matrices[run.matrices[0]].param].weight
        return results.view(len(run.matrices), *run.tile.shape).to(weight.dtype)

    def _apply(self, run: Run, u_Nrc: Tensor, group: Group) -> None:
        weights = self._views("weight", run)
        w_Nrc = torch.stack(weights)
        lr = group["lr"]
        decay = group["weight_decay"] * (lr if group["decay"] == "lr_squared" else 1.0)
        source = None
        if group["cautious_wd"]:
            source = u_Nrc if group["mask"] == "update" else torch.stack(self._views(group["mask"], run))
        apply_update(w_Nrc, u_Nrc, lr, decay, source)
        torch._foreach_copy_(weights, list(w_Nrc.unbind()))

    def _moment(self, index: int, tile: Tile) -> Tensor:
        key = "second_moment" if self.step.axis(self.plan.matrices[index]) == -1 else "second_moment_columns"
        return self._view(key, index, tile)

    def _update_moments(self, moments: list[Tensor], squares: Tensor, matrix: Matrix, axis: int) -> None:
        v = torch.stack(moments)
        lerp_second_moment(v, squares, matrix.shape[axis], self.step.groups[matrix.kind]["betas"][1])
        torch._foreach_copy_(moments, list(v.unbind()))

    def _update_cut_moment(self, index: int, sums: Tensor) -> None:
        """Every process that holds values of this second moment updates them, also one without a tile."""
        matrix = self.plan.matrices[index]
        axis = self.step.axis(matrix)
        *expert, rows, cols = matrix.layout.box(self.rank)
        if expert and not expert[0][0] <= (matrix.block.expert or 0) < expert[0][1]:
            return
        low = max(rows[0], matrix.block.start) - matrix.block.start
        high = max(low, min(rows[1], matrix.block.stop) - matrix.block.start)
        span = (low, high) if axis == -1 else cols
        if span[0] < span[1]:
            moment = self._moment(index, Tile((low, high), cols))
            self._update_moments([moment], sums[slice(*span)].reshape(moment.shape)[None], matrix, axis)


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
