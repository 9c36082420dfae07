"""The work that each feature causes in a batch."""

from __future__ import annotations

import time

from persia.nn.pooling import Expander
from persia.nn.prepared import PreparedBatch
from persia.schema import Schema
from persia.telemetry.run_record import FeatureCost

__all__ = ["feature_costs"]

REPETITIONS = 3
"""Measurements of a feature; the shortest counts."""


def feature_costs(schema: Schema, expander: Expander, batch: PreparedBatch) -> list[FeatureCost]:
    """Measures how long each feature of a batch takes to pool, one by one; most expensive first. Blocks for that.

    Args:
        schema: the features.
        expander: pools them.
        batch: a batch that has been trained.
    """
    rows = {table: part.detach() for table, part in batch.rows.items()}
    index = expander.index(batch.inverse, batch.offsets, batch.id_weights)

    def seconds(name: str) -> float:
        began = time.perf_counter()
        expander.pool_one(name, rows, *index)
        return time.perf_counter() - began

    costs = [
        FeatureCost(
            feature.name,
            feature.table_name,
            len(batch.inverse[feature.name]),
            len(batch),
            min(seconds(feature.name) for _ in range(REPETITIONS)),
        )
        for feature in schema.id_features
    ]
    return sorted(costs, key=lambda cost: -cost.seconds)
