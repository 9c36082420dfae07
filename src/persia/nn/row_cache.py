"""Copies of rows on the device of an NN worker, which serve later batches (docs/decisions/0009-device-cache.md).

Parameter servers have the rows; a copy is never changed. It may serve a batch while it lacks no more steps than a row
that is looked up may lack. The cache is direct-mapped: an id has one slot, and the last row that was fetched has it.
That is enough, as no copy serves for longer than a few batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch

from persia.errors import ConfigError
from persia.modes import Hybrid, Mode
from persia.nn.gate import LookupTime
from persia.schema import Table
from persia.types import Packed

__all__ = ["CacheCounts", "CachePlan", "RowCache", "leaves_time_for_copies"]

LOG = logging.getLogger("persia.nn")

FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""Spreads ids over slots, whatever they are (Fibonacci hashing)."""

SLOT_BYTES = 16
"""Host memory of a slot that is in use: its id and the steps that its row contains."""


def leaves_time_for_copies(mode: Mode) -> bool:
    """Returns whether a mode lets rows lack steps that lookups do not need for running ahead.

    Sync allows none, `Hybrid("auto")` as few as lookups need, and other modes set no limit in steps.
    """
    return isinstance(mode, Hybrid) and isinstance(mode.staleness, int) and mode.staleness >= 2


class CacheCounts(NamedTuple):
    """Outcome of lookups of tables with `cache_rows`, in distinct rows of batches.

    Attributes:
        hits: rows that were copied on the device.
        misses: rows that were looked up.
    """

    hits: int = 0
    misses: int = 0


class _Copies:
    """The copies of one table on the device.

    Args:
        capacity: number of slots.
        first: place of the first one among the slots of all tables.
    """

    def __init__(self, capacity: int, first: int) -> None:
        self.capacity = capacity
        self.first = first
        self.values: torch.Tensor | None = None
        """`[capacity + 1, dim]`; made where it is first used, in the stream that uses it.

        The last one takes rows that have lost their slot to another row of their batch.
        """


class CachePlan:
    """The sources of the rows of one batch.

    Args:
        tables: copies of the tables that have them, with the number of rows.
        wanted: by table, bool `[unique ids]`: the rows to look up.
        places: of each of these tables, int32: the places of `hits` and `misses` in the batch, the slots of the hits,
            and the slots `taken` by the misses.
        oldest: number of steps that the oldest copy lacks; 0 if none serves.
    """

    def __init__(
        self,
        tables: dict[str, tuple[_Copies, int]],
        wanted: Packed[np.bool_],
        places: Packed[np.int32],
        oldest: int,
    ) -> None:
        self._tables = tables
        self.wanted = wanted
        self.places = places
        self.oldest = oldest

    @torch.no_grad()
    def assemble(
        self, found: Mapping[str, torch.Tensor], places: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Returns all rows, by table `[unique ids, dim]`, and copies those that were looked up into their slots.

        Call it once, in the order of the plans. Never waits for the device: all shapes are known on the host.

        Args:
            found: rows that were looked up, by table.
            places: `self.places` on the device, as int64.
        """
        result = dict(found)
        for name, (copies, count) in self._tables.items():
            rows = found[name]
            if copies.values is None:
                copies.values = rows.new_empty(copies.capacity + 1, rows.shape[1])
            if len(rows) < count:
                whole = rows.new_empty(count, rows.shape[1])
                whole.index_copy_(0, places[f"{name}/misses"], rows)
                whole.index_copy_(0, places[f"{name}/hits"], copies.values.index_select(0, places[f"{name}/hit_slots"]))
                result[name] = whole
            copies.values.index_copy_(0, places[f"{name}/taken"], rows)
        return result


class RowCache:
    """Copies of rows of the tables that have `cache_rows`. For the lookup thread.

    Takes memory only while a pass uses it: `4 * dim` bytes per slot on the device, and `SLOT_BYTES` on the host.

    Args:
        tables: all tables of the schema.
        warns: whether `open` warns if no copy can serve; one of several NN workers is enough.

    Attributes:
        counts: outcome of lookups so far.
    """

    def __init__(self, tables: Mapping[str, Table], *, warns: bool = True) -> None:
        self._tables = {name: table for name, table in tables.items() if table.cache_rows}
        self._warns = warns
        self._warned: set[str] = set()
        self._copies: dict[str, _Copies] = {}
        self._ids = np.empty(0, np.uint64)
        self._counts = np.empty(0, np.int64)
        """By slot the number of steps that its row contained, and 1; 0 if it is empty."""
        self.counts = CacheCounts()

    def open(self, mode: Mode, free: Callable[[], int], *, recording: bool = False) -> bool:
        """Prepares a pass, without copies of rows. Returns whether copies may serve in it; if not, frees all memory.

        Args:
            mode: of the pass.
            free: returns the free bytes of the device.
            recording: whether a schedule is recorded, which has the versions of lookups only.

        Raises:
            ConfigError: the copies do not fit; the error names the table.
        """
        if not self._tables:
            return False
        if recording or not leaves_time_for_copies(mode):
            self._copies = {}
            self.clear()
            self._warn(mode, recording)
            return False
        if not self._copies:
            self._check(free())
            slots = 0
            for name, table in self._tables.items():
                self._copies[name] = _Copies(table.cache_rows, slots)
                slots += table.cache_rows
        self.clear()
        return True

    def clear(self) -> None:
        """Discards all copies. Needed at the start of a pass: step numbers restart, and rows may have been set."""
        slots = sum(copies.capacity for copies in self._copies.values())
        # Memory of the host is taken where slots are used, not here.
        self._ids, self._counts = np.zeros(slots, np.uint64), np.zeros(slots, np.int64)

    def _check(self, free: int) -> None:
        """Raises ConfigError if the device lacks the memory for all copies."""
        for name, table in self._tables.items():
            size = 4 * table.cache_rows * table.dim
            if size > free:
                raise ConfigError(
                    f"Table({name!r}).cache_rows = {table.cache_rows} needs {size:,} bytes on the device, which has "
                    f"{free:,} left for it. Set it to twice the distinct rows of `staleness` batches at most, or to 0 "
                    "for no copies.",
                    field=f"Table({name!r}).cache_rows",
                )
            free -= size

    def _warn(self, mode: Mode, recording: bool) -> None:
        """Warns that no copy serves, once for each reason."""
        if recording:
            text = "cache_rows has no effect while a schedule is recorded."
        else:
            text = (
                f"cache_rows has no effect in {mode}, which leaves no time for copies of rows to serve. It needs "
                "Hybrid with a staleness of 2 or more."
            )
        if self._warns and text not in self._warned:
            self._warned.add(text)
            LOG.warning("%s", text)

    def plan(self, ids: Packed[np.uint64], at: LookupTime) -> CachePlan:
        """Decides which rows of a batch to look up, and takes slots for them.

        If these rows are never assembled, call `clear`: their slots do not have them.

        Args:
            ids: distinct ids of the batch, by table.
            at: moment of the lookup.
        """
        # All tables at once, as each numpy call has a fixed cost.
        tables = {
            n: (self._copies[n], count) for n, count in zip(ids.names, ids.counts, strict=True) if n in self._copies
        }
        cached = np.repeat([name in tables for name in ids.names], ids.counts).astype(np.bool_)
        mine = ids.buffer[cached]
        counts = np.array([count for _, count in tables.values()], np.int64)
        capacity = np.repeat(np.array([copies.capacity for copies, _ in tables.values()], np.uint64), counts)
        slots = ((mine * FACTOR >> np.uint64(32)) % capacity).astype(np.int64)
        everywhere = slots + np.repeat(np.array([copies.first for copies, _ in tables.values()], np.int64), counts)
        contained = self._counts[everywhere]
        lacking = at.step + 1 - contained
        hit = (contained > 0) & (self._ids[everywhere] == mine) & (lacking <= at.limit)
        missed = ~hit
        fetched, taken = mine[missed], everywhere[missed]
        self._ids[taken], self._counts[taken] = fetched, at.applied + 1
        lost = self._ids[taken] != fetched  # Of several in one slot the last one has it.
        ends = np.cumsum(counts)
        place = np.arange(len(mine)) - np.repeat(ends - counts, counts)
        before = np.concatenate(([0], np.cumsum(hit)))
        hits = before[ends] - before[ends - counts]
        arrays = [
            place[hit],
            slots[hit],
            place[missed],
            np.where(lost, capacity[missed].astype(np.int64), slots[missed]),
        ]
        places = Packed(
            [f"{name}/{kind}" for kind in ("hits", "hit_slots", "misses", "taken") for name in tables],
            np.concatenate([hits, hits, counts - hits, counts - hits]).tolist(),
            np.concatenate(arrays).astype(np.int32),
        )
        wanted = np.ones(len(ids.buffer), np.bool_)
        wanted[cached] = missed
        self.counts = CacheCounts(self.counts.hits + int(hits.sum()), self.counts.misses + len(fetched))
        return CachePlan(tables, Packed(ids.names, ids.counts, wanted), places, int(lacking[hit].max(initial=0)))
