"""Batches of a few features, and a cluster whose rows are not near, for tests of passes."""

from __future__ import annotations

from typing import Any

import numpy as np

import persia
from persia.cluster import Embedded
from persia.services import Connection

IDS = 40


class Elsewhere(Embedded):
    """As if rows were in another process."""

    def connect(self, *arguments: Any) -> Connection:
        return super().connect(*arguments)._replace(near=False)


def schema(**table: Any) -> persia.Schema:
    """Two tables, the first of two features; the second feature is un-pooled."""
    tables = [persia.Table("item", dim=4, **table), persia.Table("tag", dim=3)]
    features = [
        persia.IdFeature("item", table="item"),
        persia.IdFeature("seen", table="item", pooling="mean"),
        persia.IdFeature("tag", table="tag", pooling=None, max_length=2),
    ]
    return persia.Schema(features, tables=tables, dense_features=["price"])


def batches(count: int, declared: persia.Schema, seed: int = 0, size: int = 8, ids: int = IDS) -> list[persia.Batch]:
    """Random batches of these features."""
    rng = np.random.default_rng(seed)
    return [
        persia.Batch.from_columns(
            declared,
            {
                "item": rng.integers(0, ids, size),
                "seen": [rng.integers(0, ids, rng.integers(0, 4)) for _ in range(size)],
                "tag": [rng.integers(0, ids, rng.integers(0, 4)) for _ in range(size)],
                "price": rng.random(size, np.float32),
                "label": rng.integers(0, 2, size),
            },
        )
        for _ in range(count)
    ]
