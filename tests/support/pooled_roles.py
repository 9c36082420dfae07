"""Roles in this process as if they were on several hosts, so that embedding workers pool features; and batches."""

from collections.abc import Mapping
from typing import Any

import numpy as np

import persia
from persia import IdColumn, IdFeature, Schema, Table
from persia.modes import Mode
from persia.services import Connection
from persia.types import LookedUp
from persia.worker import Worker, WorkerOptions
from support.several_ps import several_servers

SCHEMA = Schema(
    [
        IdFeature("user", dim=4),
        IdFeature("tags", dim=4, table="word", pooling="mean"),
        IdFeature("title", dim=4, table="word", pooling="sum", weights="weight"),
        IdFeature("seen", dim=2, table="item", pooling="sqrtn"),
        IdFeature("halves", dim=3, table="half", pooling="sum"),
        IdFeature("given", dim=2, table="given", pooling="mean"),
        IdFeature("history", dim=2, table="page", pooling=None, max_length=3),
        IdFeature("page", dim=2, table="page"),
    ],
    tables=[Table("half", 3, dtype="float16"), Table("given", 2, trainable=False)],
)
SINGLE = ("user", "page")
POOLABLE = {"user", "word", "item", "half", "given"}
WIDTH = 4 * 3 + 2 + 3 + 2 + 3 * 2 + 2
"""Values of all features of a sample."""


def batch_of(seed: int, size: int, most: int, ids: int) -> persia.Batch:
    rng = np.random.default_rng(seed)
    columns = {}
    for feature in SCHEMA.id_features:
        lengths = np.ones(size, np.int64) if feature.name in SINGLE else rng.integers(0, most + 1, size)
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        values = rng.integers(0, ids, offsets[-1]).astype(np.uint64)
        weights = rng.random(len(values), np.float32) if feature.name == "title" else None
        columns[feature.name] = IdColumn(values, None if feature.name in SINGLE else offsets, weights)
    labels = rng.integers(0, 2, (size, 1)).astype(np.float32)
    return persia.Batch(columns, np.zeros((size, 0), np.float32), labels)


class Watched(Worker):
    """Keeps the rows that it has sent."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.answers: list[LookedUp] = []

    def lookup(self, batch_id: int, train: bool = True, pool: bool = False) -> LookedUp:
        self.answers.append(super().lookup(batch_id, train, pool))
        return self.answers[-1]

    def lookup_ahead(self, batch_id: int, pool: bool = False, recent: int = 0) -> LookedUp:
        self.answers.append(super().lookup_ahead(batch_id, pool, recent))
        return self.answers[-1]

    def evaluate(self, id_features: Mapping[str, IdColumn], pool: bool = False) -> LookedUp:
        self.answers.append(super().evaluate(id_features, pool))
        return self.answers[-1]


class Cluster:
    """Roles in this process, as if they were on several hosts."""

    def __init__(self, pool_at: Any, servers: int = 2, compression: Any = "none", nn_workers: int = 1) -> None:
        self.options, self.count, self.nn_workers = WorkerOptions(compression, pool_at), servers, nn_workers

    def connect(self, schema: Schema, optimizer: Any, mode: Mode, seed: int) -> Connection:
        tables = schema.resolved_tables()
        self.servers = several_servers(self.count, tables, optimizer, mode, seed, nn_workers=self.nn_workers)
        self.worker = Watched(schema, self.servers, options=self.options)
        return Connection(self.worker, self.servers, pools=True)

    def stored(self) -> dict[str, list[float]]:
        """Returns all rows by table and id: values, optimizer state, number of updates, step of the last one."""
        stored: dict[str, list[float]] = {}
        for server in self.servers:
            for chunk in server.export_rows():
                columns = [chunk.arrays[name] for name in ("embeddings", "state", "update_count", "last_step")]
                for number, *row in zip(chunk.arrays["ids"].tolist(), *columns, strict=True):
                    stored[f"{chunk.table} {number}"] = np.hstack(row).tolist()
        return stored
