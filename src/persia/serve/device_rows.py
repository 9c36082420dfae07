"""Copies of served rows on the device of the network: rows that requests have used before do not cross to it again."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from persia.errors import ConfigError
from persia.nn.gate import LookupTime
from persia.nn.row_cache import MOST_SLOTS, CacheCounts, CachePlan, RowCopies
from persia.publish import Change
from persia.serve.row_sources import RowLookup
from persia.types import BoolArray, Int64Array, Packed

__all__ = ["DeviceRows", "missing_bounds"]

ANY_TIME = LookupTime(0, 0, 0)
"""Copies serve until their row changes."""


class DeviceRows:
    """Copies of the rows of an epoch. Thread-safe.

    A copy has the values of its row: the thread of updates discards the copies of rows that it has changed before a
    request sees a network that needs them. Direct-mapped: a row takes the slot of another that was used before. One
    request at a time uses the copies, from their choice to their use; others read all of their rows meanwhile.

    Args:
        dims: dimensions of all tables, by name.
        slots: maximum number of copies of each table.
        free: free bytes of the device.
        device: the device, whose memory is taken now.

    Raises:
        ConfigError: the copies do not fit.
    """

    def __init__(self, dims: Mapping[str, int], slots: int, free: int, device: torch.device) -> None:
        needed = sum(4 * dim * slots for dim in dims.values())
        if needed > free:
            raise ConfigError(
                f"ServeOptions.device_rows = {slots} needs {needed:,} bytes on the device for {len(dims)} tables, and "
                f"{free:,} are free. Set it to {int(free * slots / needed):,} or less, or to 0 for no copies.",
                field="device_rows",
            )
        by_dim = Counter(dims.values())
        if by_dim and (most := max(by_dim.values()) * slots) > MOST_SLOTS:
            raise ConfigError(
                f"ServeOptions.device_rows = {slots} makes {most:,} copies of rows of one dim, of {MOST_SLOTS:,} at "
                f"most. Set it to {MOST_SLOTS // max(by_dim.values()):,} or less.",
                field="device_rows",
            )
        self._copies = RowCopies({name: (dim, slots) for name, dim in dims.items()})
        self._copies.allocate(device)
        self._source: RowLookup | None = None
        self._lock = threading.Lock()

    @property
    def counts(self) -> CacheCounts:
        """Outcome of the requests that have used copies, in distinct rows."""
        return self._copies.counts

    def begin(self, source: RowLookup) -> None:
        """Discards all copies; from now on they are of these rows."""
        with self._lock:
            self._source = source
            self._copies.clear()

    def forget(self, changes: Sequence[Change]) -> None:
        """Discards the copies of rows that have changed. Blocks while a request uses copies."""
        with self._lock:
            for change in changes:
                self._copies.forget(change.table, change.ids)
                self._copies.forget(change.table, change.removed)

    @contextlib.contextmanager
    def planned(self, ids: Packed[np.uint64], source: RowLookup) -> Iterator[CachePlan | None]:
        """Plans which rows of a request to look up; the copies are used until the end of the block.

        Args:
            ids: distinct ids by table.
            source: source of the rows.

        Yields:
            The plan, which the block has to carry out; None if all rows are to be read: another request uses the
            copies, or they are of other rows.
        """
        held = self._lock.acquire(blocking=False)
        if held and source != self._source:
            self._lock.release()
            held = False
        if not held:
            yield None
            return
        try:
            yield self._copies.plan(ids, ANY_TIME)
        except BaseException:
            self._copies.clear()  # Slots were taken for rows that may not have come.
            raise
        finally:
            self._lock.release()


def missing_bounds(counts: Sequence[int], bounds: Int64Array, wanted: BoolArray) -> Int64Array:
    """Returns the bounds of each table and source among the ids that are to be looked up.

    Args:
        counts: number of ids by table.
        bounds: among all ids of each table, as in `batching.RoutedBatch`.
        wanted: whether each id is to be looked up, bool `[n]`.
    """
    before = np.zeros(len(wanted) + 1, np.int64)
    np.cumsum(wanted, out=before[1:])
    starts = np.cumsum([0, *counts])[:-1, None]
    result: Int64Array = before[bounds + starts] - before[starts]
    return result
