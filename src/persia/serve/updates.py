"""Applies updates of the log of changes to the rows of an epoch."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from persia import batching
from persia.errors import ClosedError, PublishError
from persia.publish import Change, RowsUpdate
from persia.publish.epoch_reader import Update
from persia.schema import Schema
from persia.serve.cache import SnapshotCache, SnapshotKey
from persia.serve.row_sources import LocalRows, ServerRows
from persia.store.served import ServedTable
from persia.types import BucketMap

__all__ = ["EpochRows", "RowPart", "RowReading"]


class RowPart(NamedTuple):
    """A part of all ids: the ids that one embedding PS would own by the first map of `parts` PSs.

    Attributes:
        part: number of the part.
        parts: number of parts.
    """

    part: int
    parts: int

    def of(self, change: Change) -> Change:
        """Returns the changes of the ids of this part."""
        if self.parts == 1:
            return change
        buckets = self.buckets
        own = batching.owners(change.table, change.ids, buckets) == self.part
        own_removed = batching.owners(change.table, change.removed, buckets) == self.part
        return change._replace(ids=change.ids[own], values=change.values[own], removed=change.removed[own_removed])

    def meets(self, server: int, buckets: BucketMap) -> bool:
        """Returns whether a PS of a map can have ids of this part."""
        return bool((self.buckets.owners[buckets.owners == server] == self.part).any())

    @property
    def buckets(self) -> BucketMap:
        """The part of each bucket of ids."""
        return BucketMap.even(self.parts)


class RowReading(NamedTuple):
    """Options of reading the rows of epochs.

    Attributes:
        cache: cache of snapshots as files; None for no cache.
        stop: once set, reading raises ClosedError.
        partition: part of the ids to read.
    """

    cache: SnapshotCache | None
    stop: threading.Event
    partition: RowPart = RowPart(0, 1)

    def check_open(self) -> None:
        """Raises ClosedError if `stop` is set."""
        if self.stop.is_set():
            raise ClosedError("Reading a snapshot ended, as its reader was closed.")


class EpochRows:
    """The rows of an epoch, by PS. One thread applies updates; any number of threads reads the rows.

    Args:
        run: random identifier of the epoch.
        update: any update of the epoch.
        schema: schema of the epoch.
        reading: options of reading its rows.

    Attributes:
        run: random identifier of the epoch.
        number: number of the epoch.
        buckets: the PS of each bucket of ids.
        dims: dimensions of the tables, by name.
    """

    def __init__(self, run: str, update: Update, schema: Schema, reading: RowReading) -> None:
        self.run = run
        self.number = update.epoch
        self.dims = {name: table.dim for name, table in schema.resolved_tables().items()}
        self.buckets = update.buckets
        self._reading = reading
        self._servers: dict[int, ServerRows] = {}

    def contained(self) -> int | None:
        """Returns the minimum number of global steps that all rows contain; None while rows of a PS are missing."""
        if len(self._servers) < self.buckets.servers:
            return None
        return min(server.step for server in self._servers.values())

    def source(self, _step: int = 0) -> LocalRows:
        """Returns the rows of all PSs, which stay up to date until a whole update replaces the rows of a PS."""
        servers = [self._servers[number] for number in range(self.buckets.servers)]
        return LocalRows(servers, self.buckets)

    def apply(self, update: Update) -> list[Change] | None:
        """See `EpochState.apply`. The rows of a whole update go to new tables, which then replace its PS's tables.

        Raises:
            PublishError: the update is damaged, does not fit the schema, or has a row that is not finite. No row has
                changed.
            ClosedError: the reader was closed.
        """
        if not isinstance(update, RowsUpdate):
            return []
        if update.whole:
            cache = self._reading.cache
            tables = self._read(update) if cache is None else self._cached(cache, update)
            self._servers[update.server] = ServerRows(tables, update.step, update.time)
            return None
        served = self._servers[update.server]
        changes = list(update.changes)  # In memory anyway. All changes are checked before any is applied.
        for change in changes:
            self._check(change)
        changes = _without_readmitted(changes)
        for change in map(self._reading.partition.of, changes):
            served.tables[change.table].remove(change.removed)
            served.tables[change.table].set(change.ids, change.values)
        served.step, served.time = max(served.step, update.step), update.time
        return changes

    def _read(self, update: RowsUpdate) -> dict[str, ServedTable]:
        """Returns new tables with the rows of a whole update."""
        tables = {name: ServedTable(dim) for name, dim in self.dims.items()}
        partition = self._reading.partition
        if not partition.meets(update.server, self.buckets):
            update.changes.skip()
            return tables
        for change in update.changes:
            self._reading.check_open()
            self._check(change)
            own_rows = partition.of(change)
            tables[change.table].set(own_rows.ids, own_rows.values)
        return tables

    def _cached(self, cache: SnapshotCache, update: RowsUpdate) -> dict[str, ServedTable]:
        """Returns the same tables, in files that are shared with other processes of this host."""
        key = SnapshotKey(self.run, self.number, update.server, update.sequence, self.buckets.servers)
        with cache.locked(update.server, self._reading.check_open):
            cached = cache.open(key, self.dims)
            if cached is not None:
                update.changes.skip()
                return cached
            tables = self._read(update)
            return cache.keep(key, tables) or tables

    def _check(self, change: Change) -> None:
        """Raises PublishError if a change does not fit the schema, or is not finite."""
        dim = self.dims.get(change.table)
        if dim is None or change.values.shape[1] != dim:
            has = "is unknown to" if dim is None else f"has dim {change.values.shape[1]}, not {dim}, as in"
            raise PublishError(f"Table {change.table!r} {has} the schema of epoch {self.number}.", table=change.table)
        if not np.isfinite(change.values).all():
            place = int(np.isfinite(change.values).all(axis=1).argmin())
            raise PublishError(
                f"Table {change.table!r} has a row that is not finite at step {change.step}, of id "
                f"{change.ids[place]}: training has diverged, or the log is damaged. The previous rows are served "
                "until a finite snapshot is published.",
                table=change.table,
                id=int(change.ids[place]),
            )


def _without_readmitted(changes: list[Change]) -> list[Change]:
    """Drops removals of rows that later changes set again: requests would miss the rows in between."""
    later: dict[str, list[NDArray[np.uint64]]] = {}
    result = []
    for change in reversed(changes):
        later.setdefault(change.table, []).append(change.ids)
        if len(change.removed):
            stays_removed = np.isin(change.removed, np.concatenate(later[change.table]), invert=True)
            change = change._replace(removed=change.removed[stays_removed])
        result.append(change)
    return result[::-1]
