"""The slow, readable twin of :mod:`persia.ps.reduction`: the same numbers, bit by bit. Used by tests; read it first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from persia.modes import Reduction
from persia.ps.held import Arrived
from persia.types import Floats

__all__ = ["average_step"]


def average_step(arrived: Sequence[Arrived], reduction: Reduction) -> dict[str, dict[int, Floats]]:
    """The average gradient of a step, by table and id, as :func:`persia.ps.reduction.average_step` computes it."""
    weights: dict[int, int] = defaultdict(int)
    sums: dict[str, dict[int, dict[int, Floats]]] = {}  # table, id, rank: the sum of the rank's parts
    for header, gradients in arrived:
        weights[header.rank] += header.weight
        for table, (ids, values) in gradients.items():
            for id_, value in zip(ids.tolist(), values, strict=True):
                ranks = sums.setdefault(table, {}).setdefault(id_, {})
                ranks[header.rank] = ranks[header.rank] + value if header.rank in ranks else value
    result: dict[str, dict[int, Floats]] = {}
    for table, of_table in sums.items():
        for id_, ranks in of_table.items():
            having = [rank for rank in ranks if weights[rank] > 0]
            divisor = float(sum(weights[rank] for rank in (weights if reduction == "global" else having)))
            average = np.zeros(len(next(iter(ranks.values()))), np.float32)
            for rank in having:
                average += np.float32(weights[rank] / divisor) * ranks[rank]
            if having:
                result.setdefault(table, {})[id_] = average
    return result
