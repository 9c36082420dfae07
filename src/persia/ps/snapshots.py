"""Snapshots of the tables of a PS, read in chunks while training continues."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from persia.errors import StoreError
from persia.ps.ownership import OwnedRows
from persia.ps.row_chunks import row_chunk
from persia.services import RowChunk, SnapshotInfo
from persia.store import EmbeddingStore, Spill
from persia.types import BoolArray, RowsToWrite, WrittenPart

__all__ = ["StoreSnapshots"]

CHUNK_BYTES = 16 << 20
"""Approximate size of a chunk. The writer holds one chunk while the next is read."""

SPILL_BYTES = 8 << 20
"""Memory for old rows, over all shards."""

EVICTED_BYTES = 16 << 20
"""Memory for ids of evicted rows between two snapshots, over all shards."""


class StoreSnapshots:
    """Takes snapshots of a store, one at a time. Safe to call from several threads.

    Args:
        store: the store, with all its tables.
        tables: numbers of the tables, by name.
        owned: tells the rows that the PS owns, which alone are read.

    Attributes:
        owned: see above.
    """

    def __init__(self, store: EmbeddingStore, tables: Mapping[str, int], owned: OwnedRows) -> None:
        self._store = store
        self.owned = owned
        self._tables = tables
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._hurry = threading.Event()  # Of the current snapshot.
        self._name: str | None = None
        self._info = SnapshotInfo({}, True)
        self._buckets = owned.ownership.buckets  # As of the current snapshot.

    def begin(self, name: str, since: Mapping[str, int], directory: str, live: bool) -> SnapshotInfo:
        """Begins a snapshot; see `persia.services.EmbeddingPS.begin_snapshot`."""
        with self._lock:
            if self._name == name:
                return self._info
            return self._begin(name, since, directory, live)

    def begin_after_others(
        self, name: str, since: Mapping[str, int], directory: str, buckets: BoolArray
    ) -> SnapshotInfo | None:
        """Begins a snapshot of the rows of some buckets, bool `[BUCKETS]`, as they are when they are read.

        Returns None while there is another one.
        """
        with self._lock:
            return self._begin(name, since, directory, True, buckets) if self._name is None else None

    @property
    def reading(self) -> bool:
        """Whether there is a snapshot, during which no rows can be removed."""
        with self._lock:
            return self._name is not None

    def _begin(
        self, name: str, since: Mapping[str, int], directory: str, live: bool, buckets: BoolArray | None = None
    ) -> SnapshotInfo:
        self._end()
        self._buckets = self.owned.ownership.buckets
        known = {table: self._store.changes_since(index) for table, index in self._tables.items()}
        whole = any(not number or number != since.get(table) for table, number in known.items())
        spill = self._spill(directory, live)
        numbers: dict[str, int] = {}
        try:
            for table, index in self._tables.items():
                numbers[table] = self._store.begin_snapshot(index, 0 if whole else known[table], spill, buckets)
        except StoreError:
            self._end()
            raise
        self._name, self._info, self._hurry = name, SnapshotInfo(numbers, whole), threading.Event()
        return self._info

    def rows(self, name: str) -> Iterator[RowChunk]:
        """Yields the rows that the PS owned when the snapshot began, table by table, shard by shard, in row order."""
        return self.owned.of(self._rows(name), self._buckets)

    def _rows(self, name: str) -> Iterator[RowChunk]:
        numbers = self._checked(name).numbers
        for table, index in self._tables.items():
            config = self._store.config(index)
            most = max(1, CHUNK_BYTES // (24 + 4 * (config.dim + config.state_width)))
            for shard in range(config.resolved_shards):
                more = True
                while more:
                    self._checked(name)
                    rows, more = self._store.export_snapshot(index, shard, numbers[table], most)
                    if len(rows.ids):
                        yield row_chunk(config, shard, rows)

    def removed(self, name: str) -> Iterator[RowChunk]:
        """Yields the ids that were evicted before the snapshot."""
        info = self._checked(name)
        if info.whole:
            return
        for table, index in self._tables.items():
            for shard in range(self._store.config(index).resolved_shards):
                self._checked(name)
                ids = self._store.snapshot_evicted(index, shard, info.numbers[table])
                if len(ids):
                    yield RowChunk(table, shard, {"ids": ids})

    def write(self, name: str, order: RowsToWrite) -> Iterator[WrittenPart]:
        """Writes the rows of the snapshot to a checkpoint; see `persia.services.EmbeddingPS.write_snapshot`."""
        from persia.checkpoint.row_writing import SnapshotSource, write_snapshot  # A PS restarts faster without.

        @contextmanager
        def writing() -> Iterator[None]:
            with self._writing:
                self._checked(name)
                yield

        self._checked(name)
        return write_snapshot(
            order, SnapshotSource(lambda: self.rows(name), lambda: self.removed(name), self._hurry, writing)
        )

    def hurry(self, name: str) -> None:
        """Ends the pauses of `write` of the snapshot of this name, if it is the current one."""
        with self._lock:
            if self._name == name:
                self._hurry.set()

    def end(self, name: str) -> None:
        """Ends the snapshot of this name, if it is the current one. Waits for the file that is being written."""
        with self._lock:
            if self._name == name:
                self._end()
        with self._writing:
            pass

    def _checked(self, name: str) -> SnapshotInfo:
        with self._lock:
            if self._name == name:
                return self._info
        raise StoreError(
            f"There is no snapshot {name!r}: it was ended, or this PS has restarted. Save again.", name=name
        )

    def _end(self) -> None:
        self._name = None
        self._hurry.set()
        for index in self._tables.values():
            self._store.end_snapshot(index)

    def _spill(self, directory: str, live: bool) -> Spill:
        if not os.path.isdir(directory):
            directory = tempfile.gettempdir()
        shards = sum(self._store.config(index).resolved_shards for index in self._tables.values())
        return Spill(
            directory,
            min(1 << 20, max(32 << 10, SPILL_BYTES // shards)),
            max(1024, EVICTED_BYTES // 8 // shards),
            live,
        )
