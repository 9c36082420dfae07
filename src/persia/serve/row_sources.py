"""Sources of the rows of a version: tables of this process, or row servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np

from persia import batching
from persia.services import FoundRows
from persia.store.served import ServedTable, lookup_packed
from persia.types import BucketMap, Ids, Int64Array, Packed

__all__ = ["LocalRows", "RowLookup", "Rows", "ServerRows"]

Rows: TypeAlias = Mapping[str, ServedTable]
"""The rows of one PS, by table."""


class RowLookup(Protocol):
    """The rows of one epoch of the log. Thread-safe. Equal sources share a view."""

    @property
    def buckets(self) -> BucketMap:
        """The source of each bucket of ids: a PS, or a row server."""

    @property
    def whole(self) -> Rows | None:
        """All rows, if they are in tables of one PS in this process."""

    def read(self, ids: Packed[np.uint64], bounds: Int64Array, rows: Packed[np.float32]) -> None:
        """Reads the rows of ids that are sorted by `buckets`.

        Args:
            ids: by table.
            bounds: bounds of each table and source, as in `batching.RoutedBatch`.
            rows: rows by table, float32 `[n, dim]` to write to; zeros where there is no row.

        Raises:
            DeadlineError: a row server did not answer in time.
            PublishError: a row server does not have these rows.
        """

    def lookup(self, ids: Packed[np.uint64]) -> FoundRows:
        """Returns the rows of ids in any order. Raises as `read` does."""

    def steps(self) -> dict[int, int]:
        """Returns the minimum number of global steps that the rows contain, by PS or by row server that has them."""

    def time(self) -> float:
        """Returns the time of the oldest rows, in seconds since 1970; minus infinity if it is not known."""

    def __len__(self) -> int:
        """Returns the number of rows."""


class ServerRows:
    """The rows of one PS. The thread of updates changes them, and never reverts them to an earlier state.

    Args:
        tables: tables by name.
        step: minimum number of global steps that the rows contain.
        time: time of the rows, in seconds since 1970.
    """

    def __init__(self, tables: Rows, step: int, time: float) -> None:
        self.tables = tables
        self.step = step
        self.time = time


class LocalRows:
    """Rows in tables of this process.

    Args:
        servers: rows by PS.
        buckets: the PS of each bucket of ids.

    Attributes:
        buckets: see above.
    """

    def __init__(self, servers: Sequence[ServerRows], buckets: BucketMap) -> None:
        self._servers = tuple(servers)
        self.buckets = buckets
        self._tables = tuple(server.tables for server in servers)

    @property
    def whole(self) -> Rows | None:
        """See `RowLookup`."""
        return self._tables[0] if len(self._tables) == 1 else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LocalRows) and other._servers == self._servers

    def __hash__(self) -> int:
        return hash(self._servers)

    def read(self, ids: Packed[np.uint64], bounds: Int64Array, rows: Packed[np.float32]) -> None:
        """See `RowLookup`."""
        tables = [tables[name] for name in ids.names for tables in self._tables]
        counts: list[int] = np.diff(bounds).reshape(-1).tolist()
        lookup_packed(tables, counts, ids.buffer, rows.buffer)

    def ids(self, table: str) -> Ids:
        """Returns the ids that have a row in a table, uint64 `[n]`, in any order."""
        return np.concatenate([tables[table].ids() for tables in self._tables])

    def lookup(self, ids: Packed[np.uint64]) -> FoundRows:
        """See `RowLookup`."""
        widths = [self._tables[0][name].dim for name in ids.names]
        total = sum(count * width for count, width in zip(ids.counts, widths, strict=True))
        found = Packed(ids.names, ids.counts, np.zeros(len(ids.buffer), np.bool_))
        rows = Packed(ids.names, ids.counts, np.zeros(total, np.float32), widths)
        if self.whole is not None:
            lookup_packed([self.whole[name] for name in ids.names], ids.counts, ids.buffer, rows.buffer, found.buffer)
            return FoundRows(found, rows)
        for name, table_ids in ids.items():
            owners = batching.owners(name, table_ids, self.buckets)
            for number, tables in enumerate(self._tables):
                places = np.flatnonzero(owners == number)
                hits, values = np.zeros(len(places), np.bool_), np.empty((len(places), tables[name].dim), np.float32)
                tables[name].lookup(table_ids[places], values, hits)
                found[name][places], rows[name][places] = hits, values
        return FoundRows(found, rows)

    def steps(self) -> dict[int, int]:
        """See `RowLookup`."""
        return {number: server.step for number, server in enumerate(self._servers)}

    def time(self) -> float:
        """See `RowLookup`."""
        return min(server.time for server in self._servers)

    def __len__(self) -> int:
        return sum(len(table) for tables in self._tables for table in tables.values())
