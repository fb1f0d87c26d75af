"""Matrices to their owners and results back, by the plan: the collectives of the optimizer.

One packed all-to-all a bucket carries tiles to owners, another carries results back. Two buckets are in flight, so that
sending one overlaps orthogonalizing the other. Bytes travel in the orthogonalizer's dtype.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hymo.distributed.exchange_plan import ExchangePlan, Layout, Tile, batches

Orthogonalize = Callable[[int, Tensor, Tensor], None]
Pack = Callable[[int, Tensor], None]


def world() -> tuple[int, int]:
    """(rank, processes) of this process; (0, 1) where torch.distributed is not in use."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def layout_of(tensor: Tensor, share_replicas: bool, name: str) -> tuple[tuple[int, ...], Layout]:
    """(the processes that share the tensor, by their global ranks; its layout on them).

    Placements are read off a DTensor. A plain tensor counts as a replica on all processes, or with share_replicas=False
    as this process's own.
    """
    rank, processes = world()
    shape = tuple(tensor.shape)
    if not hasattr(tensor, "device_mesh"):
        if share_replicas and processes > 1:
            return tuple(range(processes)), Layout(shape, (processes,), (None,))
        return (rank,), Layout(shape)
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    cuts: list[int | None] = []
    for placement in placements:
        if placement.is_replicate():
            cuts.append(None)
        elif placement.is_shard() and not type(placement).__name__.startswith("_Strided"):
            cuts.append(placement.dim % len(shape))
        else:
            raise NotImplementedError(f"{name}: placement {placement} is not supported, accepted: Shard and Replicate")
    return tuple(mesh.mesh.flatten().tolist()), Layout(shape, tuple(mesh.mesh.shape), tuple(cuts))


def statistic_like(param: Tensor, shape: tuple[int, ...], averaged: int, dtype: torch.dtype) -> Tensor:
    """Zeros of `shape`, which has the parameter's dimensions but for `averaged` (counted from the end, so negative).

    On a DTensor's mesh it is cut as the parameter is, and repeats where the parameter's `averaged` dimension is cut.
    """
    if not hasattr(param, "device_mesh"):
        return torch.zeros(shape, dtype=dtype, device=param.device)
    from torch.distributed.tensor import DTensor, Replicate

    ranks, layout = layout_of(param, True, "statistic")
    dropped = averaged % len(shape)
    cuts = tuple(None if cut == dropped else cut for cut in layout.cuts)
    own: Any = param
    placements = [Replicate() if cut is None else p for cut, p in zip(cuts, own.placements, strict=True)]
    box = Layout(shape, layout.mesh, cuts).box(ranks.index(world()[0]))
    part = torch.zeros([high - low for low, high in box], dtype=dtype, device=param.device)
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, own.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
    )


_GROUPS: dict[tuple[int, ...], tuple[Any, Any]] = {}


def process_group(ranks: tuple[int, ...]) -> Any:
    """The group of these processes, made once; every one of them must ask for it."""
    if len(ranks) == 1:
        return None
    ranks = tuple(sorted(ranks))  # as torch orders a group, whatever the order of a mesh
    if ranks == tuple(range(world()[1])):
        return dist.group.WORLD
    whole, group = _GROUPS.get(ranks, (None, None))
    if whole is not dist.group.WORLD:  # none yet, or of a job that was ended in this process
        group = dist.new_group(list(ranks), use_local_synchronization=True)
        _GROUPS[ranks] = (dist.group.WORLD, group)
    return group


@dataclass(frozen=True)
class Piece:
    """A tile of matrix `matrix` at `offset` (elements) of a buffer."""

    matrix: int
    tile: Tile
    offset: int


@dataclass(frozen=True)
class Route:
    """What one rank does in one bucket: sizes in elements by peer, and the tiles of each buffer in order.

    Peers are in the order of the process group.
    """

    send_sizes: tuple[int, ...]
    gather_sizes: tuple[int, ...]
    return_sizes: tuple[int, ...]
    result_sizes: tuple[int, ...]
    sent: tuple[Piece, ...]  # own tiles, by owner
    gathered: tuple[tuple[Piece, ...], ...]  # tiles of owned matrices, by sender
    returned: tuple[tuple[Piece, ...], ...]  # results of owned matrices, by receiver
    results: tuple[Piece, ...]  # results of own tiles, by owner
    owned: tuple[int, ...]  # matrices to orthogonalize


def route(plan: ExchangePlan, bucket: tuple[tuple[int, ...], ...], rank: int, peers: Sequence[int]) -> Route:
    """``rank`` and ``peers`` are places in the mesh; ``peers`` all of them, in the order of the process group."""
    sent, send_sizes = _pieces(plan, [(o, rank) for o in peers], bucket, senders_only=True)
    results, result_sizes = _pieces(plan, [(o, rank) for o in peers], bucket, senders_only=False)
    gathered, gather_sizes = _pieces(plan, [(rank, r) for r in peers], bucket, senders_only=True)
    returned, return_sizes = _pieces(plan, [(rank, r) for r in peers], bucket, senders_only=False)
    return Route(
        send_sizes,
        gather_sizes,
        return_sizes,
        result_sizes,
        tuple(p for peer in sent for p in peer),
        gathered,
        returned,
        tuple(p for peer in results for p in peer),
        bucket[rank],
    )


def _pieces(
    plan: ExchangePlan, pairs: list[tuple[int, int]], bucket: tuple[tuple[int, ...], ...], senders_only: bool
) -> tuple[tuple[tuple[Piece, ...], ...], tuple[int, ...]]:
    """For each (owner, holder): the holder's tiles of the owner's matrices, laid end to end."""
    found, sizes, offset = [], [], 0
    for owner, holder in pairs:
        start, pieces = offset, []
        for index in bucket[owner]:
            matrix = plan.matrices[index]
            tile = matrix.tile(holder)
            if tile.numel and (not senders_only or matrix.sends(holder, owner)):
                pieces.append(Piece(index, tile, offset))
                offset += tile.numel
        found.append(tuple(pieces))
        sizes.append(offset - start)
    return tuple(found), tuple(sizes)


class Exchange:
    """Runs a plan on this process. `sent_bytes` counts what the last step sent to others."""

    def __init__(self, plan: ExchangePlan, ranks: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        self.plan, self.dtype, self.device = plan, dtype, device
        self.group = process_group(ranks)
        self.rank = ranks.index(world()[0])
        peers = sorted(range(len(ranks)), key=ranks.__getitem__)
        self.place = peers.index(self.rank)  # in the process group
        self.routes = [route(plan, bucket, self.rank, peers) for bucket in plan.buckets]
        self.batches = [batches(plan, r.owned) for r in self.routes]
        self.sent_bytes = 0

    def run(self, pack: Pack, orthogonalize: Orthogonalize) -> Iterator[tuple[int, Tensor]]:
        """Yield (bucket, flat results of this rank's tiles, in the order of `route.results`).

        pack(bucket, buffer) fills a flat buffer with this rank's tiles in the order of `route.sent`;
        orthogonalize(kind, x [N, m, n], out) writes the results of equal matrices; it may overwrite x.
        """
        self.sent_bytes = 0
        flying = [self._send(k, pack) for k in range(min(2, len(self.routes)))]
        returning: tuple[int, Tensor, Any] | None = None
        for k in range(len(self.routes)):
            gathered, work = flying.pop(0)
            if work is not None:
                work.wait()
            back, work = self._return(k, self._orthogonalize(k, gathered, orthogonalize))
            if k + 2 < len(self.routes):
                flying.append(self._send(k + 2, pack))
            if returning is not None:
                yield self._landed(returning)
            returning = (k, back, work)
        if returning is not None:
            yield self._landed(returning)

    def _landed(self, returning: tuple[int, Tensor, Any]) -> tuple[int, Tensor]:
        k, buffer, work = returning
        if work is not None:
            work.wait()
        return k, buffer

    def _send(self, k: int, pack: Pack) -> tuple[Tensor, Any]:
        r = self.routes[k]
        buffer = torch.empty(sum(r.send_sizes), dtype=self.dtype, device=self.device)
        pack(k, buffer)
        return self._all_to_all(buffer, r.send_sizes, r.gather_sizes)

    def _return(self, k: int, buffer: Tensor) -> tuple[Tensor, Any]:
        r = self.routes[k]
        return self._all_to_all(buffer, r.return_sizes, r.result_sizes)

    def _all_to_all(self, buffer: Tensor, send: tuple[int, ...], receive: tuple[int, ...]) -> tuple[Tensor, Any]:
        if self.group is None:
            return buffer, None
        size = buffer.element_size()
        self.sent_bytes += size * (sum(send) - send[self.place])
        out = torch.empty(sum(receive), dtype=self.dtype, device=self.device)
        # As bytes: every backend carries those.
        work = dist.all_to_all_single(
            out.view(torch.uint8),
            buffer.view(torch.uint8),
            [n * size for n in receive],
            [n * size for n in send],
            group=self.group,
            async_op=True,
        )
        return out, _Holding(work, buffer)

    def _orthogonalize(self, k: int, gathered: Tensor, orthogonalize: Orthogonalize) -> Tensor:
        r, matrices = self.routes[k], self.plan.matrices
        back = torch.empty(sum(r.return_sizes), dtype=self.dtype, device=self.device)
        offset = 0
        for indices in self.batches[k]:
            (m, n), kind, count = matrices[indices[0]].shape, matrices[indices[0]].kind, len(indices)
            if self.group is None:  # one rank: buffers are the matrices themselves, end to end
                span = slice(offset, offset + count * m * n)
                orthogonalize(kind, gathered[span].view(count, m, n), back[span].view(count, m, n))
                offset = span.stop
                continue
            x_Nmn = torch.empty(count, m, n, dtype=self.dtype, device=self.device)
            place = {index: i for i, index in enumerate(indices)}
            for pieces in r.gathered:
                for first, run in _neighbours(pieces, place):
                    _tile_of(x_Nmn, place[first.matrix], run, first.tile).copy_(_span(gathered, first, run))
            o_Nmn = torch.empty_like(x_Nmn)
            orthogonalize(kind, x_Nmn, o_Nmn)
            for pieces in r.returned:
                for first, run in _neighbours(pieces, place):
                    _span(back, first, run).copy_(_tile_of(o_Nmn, place[first.matrix], run, first.tile))
        return back

    def all_reduce(self, values: Tensor) -> None:
        """Sum over the processes, in place."""
        if self.group is not None:
            dist.all_reduce(values, group=self.group)


@dataclass
class _Holding:
    """A running collective and the buffer that it reads, kept alive until it is done; gloo's holds both its buffers."""

    work: Any
    buffer: Tensor | None

    def wait(self) -> None:
        self.work.wait()
        self.work = self.buffer = None


def _neighbours(pieces: tuple[Piece, ...], place: dict[int, int]) -> Iterator[tuple[Piece, int]]:
    """(first, count) of pieces with the same tile that lie end to end in buffer and batch: one copy each."""
    chosen = [p for p in pieces if p.matrix in place]
    start = 0
    for i in range(1, len(chosen) + 1):
        first = chosen[start]
        if (
            i == len(chosen)
            or chosen[i].tile != first.tile
            or place[chosen[i].matrix] != place[first.matrix] + i - start
        ):
            yield first, i - start
            start = i


def _span(flat: Tensor, first: Piece, count: int) -> Tensor:
    rows, cols = first.tile.shape
    return flat[first.offset : first.offset + count * rows * cols].view(count, rows, cols)


def _tile_of(x_Nmn: Tensor, start: int, count: int, tile: Tile) -> Tensor:
    return x_Nmn[start : start + count, slice(*tile.rows), slice(*tile.cols)]
