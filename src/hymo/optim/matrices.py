"""Which matrices a parameter holds: [m, n] is one, [E, m, n] is E, and declared row blocks split each of them by rows.

A fused projection (q|k|v, gate|up, heads) is several matrices that share storage. Orthogonalizing the slab instead of
its blocks is another algorithm, so the blocks are declared once, in rows of the *global* shape, and everything (shape
scale, statistics, norms) is taken per block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

RowBlocks = tuple[int, ...]


@dataclass(frozen=True)
class Block:
    """Rows [start, stop) of expert `expert` (None for a 2-D parameter): a matrix of (stop - start) x cols."""

    expert: int | None
    index: int  # among the row blocks
    start: int
    stop: int
    cols: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.stop - self.start, self.cols

    def of(self, tensor: Tensor) -> Tensor:
        """View of this block in a tensor laid out like the parameter (or with one column: [..., m, 1])."""
        return tensor[self.start : self.stop] if self.expert is None else tensor[self.expert, self.start : self.stop]


def check_row_blocks(shape: Sequence[int], row_blocks: RowBlocks | None, name: str) -> None:
    """Raise ValueError unless `shape` is [m, n] or [E, m, n] and the row blocks add up to m."""
    if len(shape) not in (2, 3):
        raise ValueError(f"{name}: found shape {tuple(shape)}, accepted by muon and normuon: [m, n] or [E, m, n]")
    if row_blocks is not None and (sum(row_blocks) != shape[-2] or min(row_blocks) < 1):
        raise ValueError(f"{name}: row_blocks {tuple(row_blocks)} do not add up to its {shape[-2]} rows")


def blocks_of(shape: Sequence[int], row_blocks: RowBlocks | None) -> list[Block]:
    """All matrices of a parameter of this global shape, in storage order."""
    *experts, m, n = shape
    starts, start = [], 0
    for rows in row_blocks or (m,):
        starts.append((start, start + rows))
        start += rows
    return [
        Block(expert, index, lo, hi, n)
        for expert in (range(experts[0]) if experts else (None,))
        for index, (lo, hi) in enumerate(starts)
    ]


def describe_view(shape: Sequence[int], row_blocks: RowBlocks | None) -> str:
    """One line for tables: `4 blocks 8|8|8|4 x 16`, `16 x (64|64 x 32)`, `64 x 32`."""
    *experts, m, n = shape
    rows = "|".join(str(r) for r in row_blocks) if row_blocks else str(m)
    inner = f"{rows} x {n}"
    return f"{experts[0]} x ({inner})" if experts else inner
