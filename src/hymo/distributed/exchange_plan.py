"""Who orthogonalizes which matrix: a plan in plain Python, made before anything runs and the same on every process.

Each matrix goes to one owner. Owners are chosen by longest processing time first over all matrices, whatever their
shape, because repeated or uneven work costs more than bytes do. A matrix that a process holds whole stays there as
long as the work remains balanced. What is sent together is cut into buckets under a cap, so that memory is bounded.

A rank here is an index into the processes that share the matrices (row-major in their mesh).
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby

from hymo.optim.matrices import Block, RowBlocks, blocks_of

BUCKET_BYTES = 256 << 20
BALANCED = 1.1  # a matrix stays where it is whole while no rank works longer than this times the mean

Range = tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """How one tensor lies on a mesh: for each mesh axis the tensor dimension that it cuts, or None where it repeats.

    Cuts are those of torch.chunk (the last parts may be short or empty), mesh axes from left to right.
    """

    shape: tuple[int, ...]
    mesh: tuple[int, ...] = (1,)
    cuts: tuple[int | None, ...] = (None,)

    @cached_property
    def ranks(self) -> int:
        total = 1
        for size in self.mesh:
            total *= size
        return total

    @cached_property
    def complete(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return all(cut is None or size == 1 for cut, size in zip(self.cuts, self.mesh, strict=True))

    @cached_property
    def repeats(self) -> bool:
        """Whether several ranks hold the same part."""
        return any(cut is None and size > 1 for cut, size in zip(self.cuts, self.mesh, strict=True))

    def cuts_dimension(self, dimension: int) -> bool:
        return any(cut == dimension and size > 1 for cut, size in zip(self.cuts, self.mesh, strict=True))

    def replica(self, rank: int) -> tuple[int, ...]:
        """Coordinates on the axes where the tensor repeats: ranks that share them hold it once between them."""
        pairs = zip(_coordinates(rank, self.mesh), self.cuts, strict=True)
        return tuple(c for c, cut in pairs if cut is None)

    def is_primary(self, rank: int) -> bool:
        """Whether this rank counts in sums over the tensor (exactly one of its replicas does)."""
        return not any(self.replica(rank))

    def holders_of(self, index: tuple[int, ...]) -> list[int]:
        """The ranks that hold the element at `index`: one, or one a replica."""
        ranks = [0]
        box = [(0, size) for size in self.shape]
        for size, cut in zip(self.mesh, self.cuts, strict=True):
            if cut is None:
                ranks = [rank * size + c for rank in ranks for c in range(size)]
                continue
            low, high = box[cut]
            step = -(-(high - low) // size)
            c = (index[cut] - low) // step
            box[cut] = (low + c * step, min(low + (c + 1) * step, high))
            ranks = [rank * size + c for rank in ranks]
        return ranks

    def box(self, rank: int) -> tuple[Range, ...]:
        """The index range of each dimension that the rank holds."""
        return _box(self.shape, self.mesh, self.cuts, rank)


def _coordinates(rank: int, mesh: tuple[int, ...]) -> tuple[int, ...]:
    found = []
    for size in reversed(mesh):
        found.append(rank % size)
        rank //= size
    return tuple(reversed(found))


@lru_cache(maxsize=1 << 16)
def _box(shape: tuple[int, ...], mesh: tuple[int, ...], cuts: tuple[int | None, ...], rank: int) -> tuple[Range, ...]:
    box = [(0, size) for size in shape]
    for coordinate, parts, cut in zip(_coordinates(rank, mesh), mesh, cuts, strict=True):
        if cut is not None:
            low, high = box[cut]
            step = -(-(high - low) // parts)
            box[cut] = (min(low + coordinate * step, high), min(low + (coordinate + 1) * step, high))
    return tuple(box)


@dataclass(frozen=True)
class Tile:
    """The part of one matrix that one rank holds: rows and columns relative to the matrix."""

    rows: Range
    cols: Range

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.cols[1] - self.cols[0]

    @property
    def numel(self) -> int:
        return self.shape[0] * self.shape[1]


EMPTY = Tile((0, 0), (0, 0))


@dataclass(frozen=True)
class Matrix:
    """One matrix of one parameter. `param` and `kind` are the caller's numbers; equal kinds may be batched together."""

    param: int
    block: Block
    layout: Layout
    kind: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        return self.block.shape

    @property
    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def flops_per_step(self) -> int:
        """Of one quintic step: two products with XX^T's size and one with its square."""
        short, long = sorted(self.shape)
        return 4 * short * short * long + 2 * short**3

    def tile(self, rank: int) -> Tile:
        """What `rank` holds of it; EMPTY where that is nothing."""
        *expert, rows, cols = self.layout.box(rank)
        if expert and not expert[0][0] <= (self.block.expert or 0) < expert[0][1]:
            return EMPTY
        low, high = max(rows[0], self.block.start), min(rows[1], self.block.stop)
        if low >= high or cols[0] >= cols[1]:
            return EMPTY
        return Tile((low - self.block.start, high - self.block.start), cols)

    def tile_sizes(self) -> tuple[int, ...]:
        """Elements that each rank holds of it."""
        return _tile_sizes(self.block, self.layout)

    def sends(self, rank: int, owner: int) -> bool:
        """Whether `rank` is the one of its replicas that sends to `owner`: the one nearest to it in the mesh."""
        return self.layout.replica(rank) == self.layout.replica(owner)


@lru_cache(maxsize=1 << 10)
def _tile_sizes(block: Block, layout: Layout) -> tuple[int, ...]:
    matrix = Matrix(0, block, layout)
    return tuple(matrix.tile(rank).numel for rank in range(layout.ranks))


def matrices_of(
    param: int, shape: Sequence[int], row_blocks: RowBlocks | None, layout: Layout, kind: int = 0
) -> list[Matrix]:
    return [Matrix(param, block, layout, kind) for block in blocks_of(shape, row_blocks)]


@dataclass(frozen=True)
class ExchangePlan:
    """buckets[k][rank]: what `rank` orthogonalizes in bucket k, as indices into `matrices`, equal shapes in a row."""

    ranks: int
    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]
    buckets: tuple[tuple[tuple[int, ...], ...], ...]
    itemsize: int
    steps: int

    @cached_property
    def flops(self) -> tuple[int, ...]:
        """Floating point operations of each rank in one optimizer step."""
        totals = [0] * self.ranks
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            totals[owner] += self.steps * matrix.flops_per_step
        return tuple(totals)

    @property
    def imbalance(self) -> float:
        """The busiest rank's work over the mean."""
        return max(self.flops) * self.ranks / sum(self.flops) if self.matrices else 1.0

    @property
    def idle_ranks(self) -> tuple[int, ...]:
        return tuple(rank for rank, flops in enumerate(self.flops) if not flops)

    @cached_property
    def sent_bytes(self) -> tuple[int, ...]:
        """Bytes each rank sends to others in one step, matrices to owners and results back, scalars not counted."""
        totals = [0] * self.ranks
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            sizes = matrix.tile_sizes()
            totals[owner] += (sum(sizes) - sizes[owner]) * self.itemsize
            senders: Iterable[int] = range(self.ranks)
            if matrix.layout.repeats:
                senders = [rank for rank in senders if sizes[rank] and matrix.sends(rank, owner)]
            for rank in senders:
                if rank != owner:
                    totals[rank] += sizes[rank] * self.itemsize
        return tuple(totals)

    @cached_property
    def peak_bytes(self) -> int:
        """Most bytes of buffers on any rank at once, those of the orthogonalizer on a GPU included."""
        from hymo.distributed.exchange_memory import peak_elements

        return peak_elements(self) * self.itemsize

    def __str__(self) -> str:
        total, busiest = sum(self.flops), max(self.flops, default=0)
        lines = [
            f"{len(self.matrices)} matrices on {self.ranks} ranks in {len(self.buckets)} buckets",
            f"orthogonalization: {total / 1e9:,.1f} GFLOP a step, busiest rank {busiest / 1e9:,.1f} "
            f"({self.imbalance:.2f} x the mean)",
            f"sent by a rank: at most {max(self.sent_bytes, default=0) / 1e6:.1f} MB a step; "
            f"buffers at most {self.peak_bytes / 1e6:.1f} MB",
        ]
        if self.idle_ranks:
            largest = max(self.matrices, key=lambda matrix: matrix.flops_per_step)
            lines.append(
                f"{len(self.idle_ranks)} idle ranks ({_ranges(self.idle_ranks)}): fewer matrices than would fill them; "
                f"the time is bounded by one {largest.shape[0]} x {largest.shape[1]} matrix, "
                f"{self.steps * largest.flops_per_step / 1e9:.1f} GFLOP"
            )
        return "\n".join(lines)


def _ranges(numbers: Sequence[int]) -> str:
    """3,4,5,9 -> 3-5,9"""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def plan_exchange(
    matrices: Iterable[Matrix], ranks: int, *, itemsize: int = 2, steps: int = 5, bucket_bytes: int = BUCKET_BYTES
) -> ExchangePlan:
    """Owners and buckets for matrices whose layouts all span the same `ranks`.

    itemsize: bytes of an element on the wire; steps: of the orthogonalizer; bucket_bytes: cap on what one owner
    gathers at a time (a larger single matrix gets a bucket of its own).
    """
    matrices = tuple(matrices)
    for matrix in matrices:
        if matrix.layout.ranks != ranks:
            raise ValueError(f"plan: a matrix lies on {matrix.layout.ranks} ranks, accepted: {ranks}")
    owners = _choose_owners(matrices, ranks)
    queues: list[list[int]] = [[] for _ in range(ranks)]
    # Largest first: while a GPU works on those, the host gets ahead with launching the many small ones.
    order = sorted(range(len(matrices)), key=lambda i: (-matrices[i].numel, matrices[i].shape, matrices[i].kind, i))
    for index in order:
        queues[owners[index]].append(index)
    cut = [_cut(queue, matrices, bucket_bytes // itemsize) for queue in queues]
    depth = max((len(parts) for parts in cut), default=0)
    buckets = tuple(tuple(parts[k] if k < len(parts) else () for parts in cut) for k in range(depth))
    return ExchangePlan(ranks, matrices, owners, buckets, itemsize, steps)


def _choose_owners(matrices: tuple[Matrix, ...], ranks: int) -> tuple[int, ...]:
    if ranks == 1:
        return (0,) * len(matrices)
    holders = [_holders(matrix, ranks) for matrix in matrices]
    pinned = _longest_first(matrices, ranks, holders)
    if not any(holders):
        return pinned
    loads = [0] * ranks
    for matrix, owner in zip(matrices, pinned, strict=True):
        loads[owner] += matrix.flops_per_step
    if max(loads) * ranks <= BALANCED * sum(loads):
        return pinned
    return _longest_first(matrices, ranks, [()] * len(matrices))


def _holders(matrix: Matrix, ranks: int) -> tuple[int, ...]:
    """The ranks that hold the matrix whole; none where all do, since then any is as good."""
    if matrix.layout.complete:
        return ()
    layout = matrix.layout
    start = (matrix.block.expert or 0, matrix.block.start, 0)[3 - len(layout.shape) :]
    holders = layout.holders_of(start)
    return tuple(holders) if matrix.tile(holders[0]).numel == matrix.numel else ()


def _longest_first(matrices: tuple[Matrix, ...], ranks: int, allowed: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Give the heaviest matrix that is left to the least loaded rank; those bound to their holders come first."""
    loads, owners = [0] * ranks, [0] * len(matrices)
    order = sorted(range(len(matrices)), key=lambda i: (not allowed[i], -matrices[i].flops_per_step, i))
    heap: list[tuple[int, int]] | None = None
    for index in order:
        if allowed[index]:
            owner = min(allowed[index], key=lambda rank: (loads[rank], rank))
            loads[owner] += matrices[index].flops_per_step
        else:
            if heap is None:  # from here on every matrix is free
                heap = [(load, rank) for rank, load in enumerate(loads)]
                heapq.heapify(heap)
            load, owner = heap[0]
            heapq.heapreplace(heap, (load + matrices[index].flops_per_step, owner))
        owners[index] = owner
    return tuple(owners)


def _cut(queue: list[int], matrices: tuple[Matrix, ...], elements: int) -> list[tuple[int, ...]]:
    """Cut a queue into parts of at most `elements`, between shapes where that fits: a split batch costs launches."""
    parts: list[tuple[int, ...]] = []
    current: list[int] = []
    size = 0
    for _, group in groupby(queue, key=lambda i: (matrices[i].shape, matrices[i].kind)):
        batch = list(group)
        whole = sum(matrices[i].numel for i in batch)
        for index in batch:
            full = size + matrices[index].numel > elements
            if current and (full or (index == batch[0] and size + whole > elements >= whole)):
                parts.append(tuple(current))
                current, size = [], 0
            current.append(index)
            size += matrices[index].numel
    return [*parts, tuple(current)] if current else parts


def batches(plan: ExchangePlan, owned: Sequence[int]) -> list[list[int]]:
    """A rank's matrices of one bucket as its batched products take them: neighbours of equal shape and kind."""
    found: list[list[int]] = []
    for index in owned:
        matrix = plan.matrices[index]
        last = plan.matrices[found[-1][0]] if found else None
        if last is not None and last.shape == matrix.shape and last.kind == matrix.kind:
            found[-1].append(index)
        else:
            found.append([index])
    return found
