"""From the gradients of all NN workers of a step to one update (docs/reference/protocol.md, section 5).

A mean over rows is not a mean over workers: each NN worker's gradient is of its own mean loss, so it weighs as much as
it has rows. GBA (arXiv 2205.11048, appendix B, Algorithm 2) divides an id's sum by the workers that have the id.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from persia import batching
from persia.modes import Reduction
from persia.pushes.step_barrier import ArrivedPush
from persia.types import Gradients

__all__ = ["average_step"]


def average_step(
    arrived: Sequence[ArrivedPush], reduction: Reduction, pool: batching.ThreadPool, scratch: batching.Scratch
) -> dict[str, Gradients]:
    """The average gradient of a step, by table; :func:`persia.pushes.reference.average_step` is its readable twin.

    Args:
        arrived: what has come, by (rank, part). Parts of a rank are summed, ranks are averaged by their rows.
        reduction: what the weighted sum is divided by.
        pool: threads to run on.
        scratch: memory kept from call to call.
    """
    ranks = [list(parts) for _, parts in groupby(arrived, key=lambda a: a.header.rank)]
    weights = [sum(part.header.weight for part in parts) for parts in ranks]
    total = float(sum(weights)) if reduction == "global" else None
    result: dict[str, Gradients] = {}
    for table in dict.fromkeys(name for one in arrived for name in one.gradients):
        found: list[Gradients] = []
        found_weights: list[float] = []
        for parts, weight in zip(ranks, weights, strict=True):
            mine = [part.gradients[table] for part in parts if table in part.gradients]
            if mine and weight > 0:
                found.append(mine[0] if len(mine) == 1 else Gradients(*batching.merge_gradients(mine, pool, scratch)))
                found_weights.append(weight)
        if found:
            result[table] = Gradients(*batching.average_gradients(found, found_weights, total, pool, scratch))
    return result
