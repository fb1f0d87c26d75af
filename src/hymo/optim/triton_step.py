"""The optimizer's element-wise passes on a GPU: few launches over all parts of a shape, each tensor touched once.

The tensors are named to the kernels by a table of addresses, made on the host and copied once a step without waiting.
"""

from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from hymo.optim import triton_kernels as kernels
from hymo.optim.base import Group, gradient, local, target
from hymo.optim.matrix_step import MatrixStep, Parts, Run
from hymo.optim.update import shape_scale

States = dict[Tensor, dict[str, Tensor]]
ADAMW_BLOCK = 2048


def supports(step: MatrixStep) -> bool:
    """Whether the kernels can run this step: values in one piece, whole rows, no scale by the gradient's norm."""
    rows_only = all(step.axis(m) == -1 for m in step.plan.matrices if step.normalizes(m))
    values = [local(param) for param, _, _ in step.entries]
    return (
        rows_only
        and not step.cut_statistics
        and all(group["scale"] != "grad_norm" for group in step.groups)
        and all(v.is_contiguous() and v.dtype != torch.float64 and v.numel() < 1 << 31 for v in values)
    )


class AddressTables:
    """Where the parts of a prepared step lie: rows (gradient, momentum, weight, second moment) for each run."""

    def __init__(self, step: MatrixStep):
        self.step = step
        self.unsent = [_without(results, sent) for results, sent in zip(step.result_runs, step.send_runs, strict=True)]
        self.first_row: dict[Run, int] = {}
        owners: list[int] = []
        offsets: list[int] = []
        rows: list[int] = []
        for runs in (*step.send_runs, *step.result_runs, *self.unsent):
            for run in runs:
                if run in self.first_row:
                    continue
                self.first_row[run] = len(owners)
                for index in run.matrices:
                    matrix = step.plan.matrices[index]
                    *expert, held_rows, cols = matrix.layout.box(step.rank)
                    row = matrix.block.start + run.tile.rows[0] - held_rows[0]
                    if expert:
                        row += ((matrix.block.expert or 0) - expert[0][0]) * (held_rows[1] - held_rows[0])
                    owners.append(matrix.param)
                    rows.append(row)
                    offsets.append(row * (cols[1] - cols[0]))
        self.owners = np.array(owners, dtype=np.int64)
        self.bytes = np.array(offsets, dtype=np.int64) * 4
        self.row_bytes = np.array(rows, dtype=np.int64) * 4
        self.fixed: np.ndarray | None = None  # addresses of momenta, weights, second moments
        self.seen: list[int] = []

    def begin(self, states: States) -> "TritonParts":
        """Addresses of this step, on their way to the device."""
        params = [param for param, _, _ in self.step.entries]
        weights = [local(param).data_ptr() for param in params]
        if self.fixed is None or weights != self.seen:
            self.fixed, self.seen = self._addresses(params, states), weights
        grads = flat_gradients(params)
        first = np.array([g.data_ptr() for g in grads], dtype=np.int64)[self.owners] + self.bytes
        table = np.concatenate([first[:, None], self.fixed], 1)
        return TritonParts(self, states, grads, table)

    def _addresses(self, params: list[Tensor], states: States) -> np.ndarray:
        def column(values: list[int], byte_offsets: np.ndarray) -> np.ndarray:
            return np.array(values, dtype=np.int64)[self.owners] + byte_offsets

        momenta = [local(states[p]["momentum"]).data_ptr() for p in params]
        weights = [target(p, states[p]).data_ptr() for p in params]
        moments = [local(states[p]["second_moment"]).data_ptr() if "second_moment" in states[p] else 0 for p in params]
        columns = [column(momenta, self.bytes), column(weights, self.bytes), column(moments, self.row_bytes)]
        return np.stack(columns, 1)


def _without(results: tuple[Run, ...], sent: tuple[Run, ...]) -> tuple[Run, ...]:
    """Result runs of which nothing is sent (a replica sends for them): their momentum moves all the same."""
    gone = {index for run in sent for index in run.matrices}
    return tuple(Run((index,), run.tile, 0) for run in results for index in run.matrices if index not in gone)


class TritonParts(Parts):
    """`Parts` by the kernels."""

    def __init__(self, tables: AddressTables, states: States, grads: list[Tensor], table: np.ndarray):
        step = tables.step
        self.step, self.plan, self.rank, self.tables, self.states = step, step.plan, step.rank, tables, states
        self.grads = grads  # kept until the kernels have been launched
        self.device = grads[0].device
        self.aligned = (table[:, :3] & 15 == 0).all(1)
        self.all_aligned = bool(self.aligned.all())
        self.table = to_device(table, self.device)
        self.slots = {}
        self.squares, self.inverse, self.totals = {}, {}, {}

    def _rows(self, run: Run) -> tuple[Tensor, bool]:
        """(the run's rows of the table, whether every address is a multiple of 16)."""
        rows = slice(self.tables.first_row[run], self.tables.first_row[run] + len(run.matrices))
        return self.table[rows], self.all_aligned or bool(self.aligned[rows].all())

    def pack(self, k: int, buffer: Tensor) -> None:
        for run in self.step.send_runs[k]:
            self._momentum(run, buffer[run.span], write=True)
        for run in self.tables.unsent[k]:
            self._momentum(run, buffer, write=False)

    def _momentum(self, run: Run, out: Tensor, write: bool) -> None:
        _, group = self._first(run)
        table, aligned = self._rows(run)
        grid = (triton.cdiv(run.tile.numel, kernels.FLAT_BLOCK), len(run.matrices))
        kernels.momentum_kernel[grid](
            table,
            out,
            run.tile.numel,
            group["momentum"],
            NESTEROV=group["nesterov"],
            WRITE=write,
            ALIGNED=aligned,
            BLOCK=kernels.FLAT_BLOCK,
            num_warps=8,
        )

    def add(self, run: Run, results: Tensor) -> None:
        matrix, group = self._first(run)
        normalize, count, (rows, cols) = self.step.normalizes(matrix), len(run.matrices), run.tile.shape
        squares = torch.empty(2, count, rows, dtype=torch.float32, device=self.device)
        self.totals[run] = torch.zeros(3, count, dtype=torch.float64, device=self.device)
        kernels.row_statistics_kernel[(triton.cdiv(rows, kernels.ROWS), count)](
            self._rows(run)[0],
            results,
            squares[0],
            squares[1],
            rows,
            cols,
            group["betas"][1],
            group["eps"],
            R=kernels.ROWS,
            C=kernels.COLUMNS,
            NORMALIZE=normalize,
        )
        kernels.norms_kernel[(count,)](
            squares[0], squares[1], self.totals[run], rows, count, NORMALIZE=normalize, BLOCK=1024
        )
        self.inverse[run] = squares[1]

    def finish(self, runs: Any, results: Tensor) -> None:
        for run in runs:
            matrix, group = self._first(run)
            table, aligned = self._rows(run)
            grid = (triton.cdiv(run.tile.numel, kernels.FLAT_BLOCK), len(run.matrices))
            kernels.apply_kernel[grid](
                table,
                results[run.span],
                self.inverse[run],
                self.totals[run],
                rate_tensor(group, self.device),
                run.tile.numel,
                run.tile.shape[1],
                len(run.matrices),
                shape_scale(group["scale"], *matrix.shape),
                float(group["weight_decay"]),
                RESCALE="fixed" if group["scale"] == "fixed_rms" else "keep",
                NORMALIZE=self.step.normalizes(matrix),
                MASK=mask_name(group),
                SQUARED=group["decay"] == "lr_squared",
                ALIGNED=aligned,
                BLOCK=kernels.FLAT_BLOCK,
                num_warps=8,
            )

    def end(self) -> None:
        round_masters([param for param, _, _ in self.step.entries], self.states)


class AdamWTables:
    """A prepared AdamW step over parameters of one group, whose sizes are multiples of `unit`."""

    def __init__(self, params: list[Tensor], device: torch.device, unit: int):
        self.params, self.unit = params, unit
        sizes = np.array([local(p).numel() for p in params], dtype=np.int64)
        blocks = -(-sizes // ADAMW_BLOCK)
        tensor = np.repeat(np.arange(len(params)), blocks)
        block = np.arange(blocks.sum()) - np.repeat(np.cumsum(blocks) - blocks, blocks)
        self.count = int(blocks.sum())
        self.sizes = to_device((sizes // unit).astype(np.int32), device)
        self.programs = to_device(np.stack([tensor, block], 1).astype(np.int32), device)

    def run(self, states: States, group: Group, weight_decay: float) -> None:
        """One update; the parameters' step counters were advanced before."""
        beta1, beta2 = group["betas"]
        held = [states[p] for p in self.params]
        grads = flat_gradients(self.params)
        columns = [
            grads,
            [local(s["exp_avg"]) for s in held],
            [target(p, s) for p, s in zip(self.params, held, strict=True)],
            [local(s["exp_avg_sq"]) for s in held],
        ]
        table = np.array([[t.data_ptr() for t in column] for column in columns], dtype=np.int64).T.copy()
        steps = np.array([float(s["step"]) for s in held])
        corrections = np.stack([1 / (1 - beta1**steps), 1 / (1 - beta2**steps)], 1).astype(np.float32)
        device = grads[0].device
        if self.count:
            kernels.adamw_kernel[(self.count,)](
                to_device(table, device),
                to_device(corrections, device),
                self.sizes,
                self.programs,
                rate_tensor(group, device),
                beta1,
                beta2,
                group["eps"],
                weight_decay,
                MASK=mask_name(group),
                ALIGNED=bool((table % 16 == 0).all()),
                UNIT=self.unit,
                BLOCK=ADAMW_BLOCK,
                num_warps=4,
            )
        round_masters(self.params, states)


def flat_gradients(params: list[Tensor]) -> list[Tensor]:
    """Local gradients in float32 and in one piece; copies only of those that are not (this runs before any launch)."""
    grads: list[Any] = [param.grad for param in params]
    return [
        g
        if type(g) is Tensor and g.dtype is torch.float32 and g.is_contiguous()
        else gradient(param, torch.float32).contiguous()
        for g, param in zip(grads, params, strict=True)
    ]


def round_masters(params: list[Tensor], states: States) -> None:
    """Round the full-precision copies into the half-precision parameters that have one."""
    pairs = [(local(p), local(states[p]["master"])) for p in params if "master" in states[p]]
    if pairs:
        torch._foreach_copy_([p for p, _ in pairs], [master for _, master in pairs])


def adamw_tables(params: list[Tensor]) -> list[AdamWTables]:
    """Tables for all of these parameters; none where a value is float64 or not in one piece."""
    if not all(local(p).is_contiguous() and p.dtype != torch.float64 for p in params):
        return []
    fours = [p for p in params if local(p).numel() % 4 == 0]
    rest = [p for p in params if local(p).numel() % 4]
    device = local(params[0]).device
    return [AdamWTables(some, device, unit) for some, unit in ((fours, 4), (rest, 1)) if some]


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy on the device that the host does not wait for."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def mask_name(group: Group) -> str:
    return group["mask"] if group["cautious_wd"] else "none"


def rate_tensor(group: Group, device: torch.device) -> Tensor:
    """The group's rate as a scalar on the device."""
    lr = group["lr"]
    return lr.to(device) if isinstance(lr, Tensor) else torch.full((), lr, dtype=torch.float64, device=device)
