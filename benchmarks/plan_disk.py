"""Plans of tables with rows on SSD, for `benchmarks/plan.py`: their bytes, and a run that the disk limits."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.ssd import ssd
from benchmarks.store import ids_of, resident_bytes
from persia import IdColumn, IdFeature, Schema
from persia.cli.run_config import RunConfig
from persia.data import Synthetic
from persia.plan import TableBytes, bytes_of, planned_tables
from persia.schema import Adagrad, Table
from persia.store import NativeStore, TableConfig

BATCH = 16_384
DIM = 16
KEPT = 4
"""Rows for each row in memory."""


def spilled_bytes(rows: int, servers: int) -> tuple[TableBytes, dict[str, float]]:
    """Returns the predicted bytes of a table with a quarter of its rows in memory, and those that it takes.

    Rows move until compaction has as much to do as it will always have: as many come back as there are.
    """
    schema = Schema(
        [IdFeature("item")], tables=[Table("item", DIM, capacity=rows, spill="/", memory_rows=rows // KEPT)]
    )
    (planned,) = planned_tables(schema, Adagrad(0.05), {}, False)
    expected = bytes_of(planned, servers, rows // KEPT)
    ids = ids_of(np.arange(rows))
    owners = np.random.default_rng(0).integers(0, servers, rows)
    parts = [ids[owners == owner] for owner in range(servers)]
    out = np.empty((BATCH, DIM), np.float32)
    gc.collect()
    with ssd() as path:
        before, stores = resident_bytes(), []
        for number, part_ids in enumerate(parts):
            store = NativeStore(1)
            capacity = len(part_ids) + len(part_ids) // 100  # Hashes do not divide ids equally.
            store.create_table(
                TableConfig("item", DIM, capacity=capacity, memory_rows=len(part_ids) // KEPT),
                spill=str(path / f"{number}"),
            )
            for order in (part_ids, np.random.default_rng(1).permutation(part_ids)):
                for start in range(0, len(order), BATCH):
                    part = order[start : start + BATCH]
                    store.lookup([0], [part], True, [out[: len(part)]])
            stores.append(store)
        taken = {
            "resident": float(resident_bytes() - before),
            "memory": float(sum(store.memory_bytes(0) for store in stores)),
            "disk": float(sum(store.tier_counts(0)["disk_bytes"] for store in stores)),
        }
        del store, stores
    return expected, taken


@dataclasses.dataclass(frozen=True)
class SpilledClicks(Synthetic):
    """Generated clicks whose tables have rows on SSD."""

    spill: str = ""
    memory_rows: int = 1

    @cached_property
    def schema(self) -> Schema:
        plain = super().schema
        assert isinstance(self.ids_per_feature, int)
        capacity = self.ids_per_feature + 1000
        tables = [
            Table(f.name, self.dim, capacity=capacity, spill=self.spill, memory_rows=self.memory_rows)
            for f in plain.id_features
        ]
        return Schema(plain.id_features, plain.dense_features, plain.labels, tables=tables)


class SpilledRun(RunConfig, frozen=True):
    """A run on generated clicks, with rows on SSD.

    Attributes:
        spill: directory.
        memory_rows: of each table.
    """

    spill: str = ""
    memory_rows: int = 1

    def reader(self) -> Any:
        plain = super().reader()
        fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
        return SpilledClicks(**fields, spill=self.spill, memory_rows=self.memory_rows)


def spilled(run: RunConfig, directory: Path, shrink: int, part: int) -> SpilledRun:
    """Returns a run with rows on SSD.

    Args:
        run: whose rows are in memory.
        directory: on the SSD.
        shrink: divides the number of its ids.
        part: rows for each row in memory.
    """
    fields = {name: getattr(run, name) for name in msgspec.structs.asdict(run)}
    ids = run.data.options["ids_per_feature"] // shrink
    fields["data"] = msgspec.structs.replace(run.data, options={**run.data.options, "ids_per_feature": ids})
    return SpilledRun(**fields, spill=str(directory), memory_rows=ids // part)


def move_rows(trainer: Any, ids_per_feature: int) -> None:
    """Makes all rows, in order, then brings each back to memory once: what is on disk is as after a long time."""
    worker, names = trainer.embeddings.connection.worker, [f.name for f in trainer.schema.id_features]
    orders = (np.arange(ids_per_feature), np.random.default_rng(1).permutation(ids_per_feature))
    for ids in _parts(orders, BATCH // len(names)):
        number = worker.register({name: IdColumn(ids.astype(np.uint64)) for name in names})
        worker.lookup(number)
        worker.release(number)


def _parts(orders: tuple[np.ndarray, ...], size: int) -> Iterator[np.ndarray]:
    for order in orders:
        for start in range(0, len(order), size):
            yield order[start : start + size]
