"""What the buffers of an exchange take at most: `Exchange.run`, walked through by arithmetic.

Two buckets are on their way to their owners while a third is orthogonalized and the one before it goes back. Counted
are tensors as long as something refers to them; on one rank nothing is sent or copied.
"""

from __future__ import annotations

from dataclasses import dataclass

from hymo.distributed.exchange_plan import ExchangePlan, batches

PRODUCTS = 3  # square products that are there at once: X X^T and the bracket before, and the next X X^T


@dataclass
class Bucket:
    """Elements of one bucket on one rank: its parts sent, tiles gathered, results returned, results of its parts."""

    sent: int = 0
    gathered: int = 0
    returned: int = 0
    results: int = 0
    work: int = 0  # what orthogonalizing takes beside these


def peak_elements(plan: ExchangePlan) -> int:
    """Most elements on any rank at once."""
    most = 0
    # Norms of cut matrices are summed over ranks before any result is used: all results are kept until then.
    sums = plan.ranks > 1 and not all(matrix.layout.complete for matrix in plan.matrices)
    for buckets in _buckets(plan):
        landed = 0  # results that the update still holds
        for k, here in enumerate(buckets):
            following = [bucket.sent + bucket.gathered for bucket in buckets[k + 1 : k + 3]]
            before = buckets[k - 1].returned + buckets[k - 1].results if k else 0
            held = landed + before + here.gathered + here.returned
            while_working = held + here.work + sum(following[:1])
            while_returning = held + here.results + sum(following)
            most = max(most, while_working, while_returning)
            if k:
                own = buckets[k - 1].results if plan.ranks > 1 else buckets[k - 1].returned
                landed = landed + own if sums else own
    return most


def _buckets(plan: ExchangePlan) -> list[list[Bucket]]:
    """[rank][bucket]."""
    layouts = {matrix.layout for matrix in plan.matrices}
    replicas = {layout: [layout.replica(rank) for rank in range(plan.ranks)] for layout in layouts}
    found = [[Bucket() for _ in plan.buckets] for _ in range(plan.ranks)]
    for k, owners in enumerate(plan.buckets):
        for owner, indices in enumerate(owners):
            here = found[owner][k]
            here.work = _work(plan, batches(plan, indices))
            for index in indices:
                matrix = plan.matrices[index]
                nearest = replicas[matrix.layout]  # as `Matrix.sends`
                for rank, n in enumerate(matrix.tile_sizes()):
                    found[rank][k].results += n
                    here.returned += n
                    if nearest[rank] == nearest[owner]:
                        found[rank][k].sent += n
                        here.gathered += n
    if plan.ranks == 1:  # what is packed is what is orthogonalized, and its result is the result
        for bucket in found[0]:
            bucket.sent = bucket.results = 0
    return found


def _work(plan: ExchangePlan, batches: list[list[int]]) -> int:
    """Of a rank's batches one after the other: products, and on several ranks each batch's input and output in copies,
    which are there until the next ones are."""
    most = before = 0
    for batch in batches:
        rows, cols = plan.matrices[batch[0]].shape
        copy = len(batch) * rows * cols if plan.ranks > 1 else 0
        most = max(most, 2 * before + copy, before + 2 * copy, 2 * copy + len(batch) * PRODUCTS * min(rows, cols) ** 2)
        before = copy
    return most
