"""Copies of rows on the device of an NN worker, which serve later batches (docs/decisions/0009-device-cache.md).

Parameter servers have the rows; a copy is never changed. It may serve a batch while it lacks no more steps than a row
that is looked up may lack. The cache is direct-mapped: an id has one slot, and the last row that was fetched has it.
That is enough, as no copy serves for longer than a few batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch

from persia import batching
from persia.errors import ConfigError, DataError
from persia.modes import Hybrid, Mode
from persia.nn.gate import LookupTime
from persia.nn.joined_tensors import together
from persia.schema import Table
from persia.telemetry.logs import get_logger
from persia.types import Ids, Int64Array, Packed

__all__ = ["CacheCounts", "CachePlan", "RowCache", "RowCopies", "leaves_time_for_copies"]

LOG = get_logger("persia.nn")

MOST_SLOTS = (1 << 31) - 2
"""Most copies of the tables of one dim: places of slots, and the spare one, are int32."""

FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""Spreads ids over slots, as in the core."""

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
    """The copies of all tables of one dim on the device.

    Args:
        capacity: number of slots.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.values: torch.Tensor | None = None
        """`[capacity + 1, dim]`; made where it is first used, in the stream that uses it.

        The last one takes rows that have lost their slot to another row of their batch.
        """


class RowCounts(NamedTuple):
    """Numbers of distinct rows of a table in a batch.

    Attributes:
        all: how many there are.
        misses: how many are looked up.
    """

    all: int
    misses: int


class _Slots(NamedTuple):
    """The slots of a table.

    Attributes:
        ids: by slot the id that has it.
        steps: by slot the number of steps that its row contains, and 1; 0 if it is empty.
        first: place of the first one among the copies of the table's dim.
    """

    ids: Ids
    steps: Int64Array
    first: int

    @classmethod
    def empty(cls, count: int, first: int) -> _Slots:
        """Returns empty slots. They take memory of the host where they are used, not here."""
        return cls(np.zeros(count, np.uint64), np.zeros(count, np.int64), first)


class CachePlan:
    """The sources of the rows of one batch.

    Args:
        copies: by dim, the copies of tables of the batch that have copies, with the numbers of rows of these tables.
        wanted: by table, bool `[unique ids]`: the rows to look up.
        places: by dim, int32: the places of `hits` and `misses` among the rows of these tables, the slots of the hits,
            and the slots `taken` by the misses.
        oldest: number of steps that the oldest copy lacks; 0 if none serves.
    """

    def __init__(
        self,
        copies: Mapping[int, tuple[_Copies, dict[str, RowCounts]]],
        wanted: Packed[np.bool_],
        places: Packed[np.int32],
        oldest: int,
    ) -> None:
        self._copies = copies
        self.wanted = wanted
        self.places = places
        self.oldest = oldest

    @torch.no_grad()
    def assemble(
        self, looked_up: Mapping[str, torch.Tensor], places: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Returns all rows, by table `[unique ids, dim]`, and copies those that were looked up into their slots.

        Call it once, in the order of the plans. Never waits for the device: all shapes are known on the host. Tables of
        one dim at once, as each operation is a kernel.

        Args:
            looked_up: rows that were looked up, by table.
            places: `self.places` on the device, as int64.

        Raises:
            DataError: a table has another number of rows than was asked for.
        """
        result = dict(looked_up)
        for dim, (copies, counts) in self._copies.items():
            for name, count in counts.items():
                if len(looked_up[name]) != count.misses:
                    raise DataError(
                        f"A lookup found {len(looked_up[name])} rows of table {name!r}; expected {count.misses}. "
                        "Give all processes of a run the same schema and version.",
                        table=name,
                    )
            rows = together([looked_up[name] for name in counts])
            if copies.values is None:
                copies.values = rows.new_empty(copies.capacity + 1, dim)
            if len(places[f"{dim}/hits"]):
                sizes = [count.all for count in counts.values()]
                whole = rows.new_empty(sum(sizes), dim)
                whole.index_copy_(0, places[f"{dim}/misses"], rows)
                whole.index_copy_(0, places[f"{dim}/hits"], copies.values.index_select(0, places[f"{dim}/hit_slots"]))
                result.update(zip(counts, whole.split(sizes), strict=True))
            copies.values.index_copy_(0, places[f"{dim}/taken"], rows)
        return result


class RowCopies:
    """Copies of rows on a device. For one thread.

    Takes memory once `allocate` was called: `4 * dim` bytes per slot on the device, and `SLOT_BYTES` on the host.

    Args:
        sizes: dim and number of slots, by table.

    Attributes:
        counts: outcome of lookups so far.
    """

    def __init__(self, sizes: Mapping[str, tuple[int, int]]) -> None:
        self._sizes = sizes
        self._copies: dict[int, _Copies] = {}
        self._slots: dict[str, _Slots] = {}
        self._pool: batching.ThreadPool | None = None
        self.counts = CacheCounts()

    def allocate(self, device: torch.device | None = None) -> None:
        """Makes empty slots; no-op if there are some.

        Args:
            device: takes the memory there now; None takes it with the first rows, in the stream that uses them.
        """
        if self._copies:
            return
        for name, (dim, count) in self._sizes.items():
            copies = self._copies.setdefault(dim, _Copies(0))
            self._slots[name] = _Slots.empty(count, copies.capacity)
            copies.capacity += count
        for dim, copies in self._copies.items():
            copies.values = None if device is None else torch.empty(copies.capacity + 1, dim, device=device)
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)  # Other streams use it.
        self._pool = batching.ThreadPool(batching.default_threads())

    def free(self) -> None:
        """Frees all memory."""
        self._copies, self._slots, self._pool = {}, {}, None

    def clear(self) -> None:
        """Discards all copies, as step numbers restart, or rows may have been set."""
        self._slots = {name: _Slots.empty(len(slots.ids), slots.first) for name, slots in self._slots.items()}

    def forget(self, table: str, ids: Ids) -> None:
        """Discards the copies of some rows of a table.

        Args:
            table: name of any table.
            ids: uint64 `[n]`.
        """
        slots = self._slots.get(table)
        if slots is None:
            return
        places = (ids * FACTOR >> np.uint64(32)) % np.uint64(len(slots.ids))
        slots.steps[places[slots.ids[places] == ids]] = 0

    def plan(self, ids: Packed[np.uint64], at: LookupTime) -> CachePlan:
        """Decides which rows of a batch to look up, and takes slots for them.

        If these rows are never assembled, call `clear`: their slots do not have them.

        Args:
            ids: distinct ids of the batch, by table.
            at: moment of the lookup.
        """
        wanted = Packed(ids.names, ids.counts, np.ones(len(ids.buffer), np.bool_))
        # By dim, as `assemble` works on all tables of a dim at once, and places are in the order of tables.
        of_dim: dict[int, dict[str, int]] = {}
        for name, count in zip(ids.names, ids.counts, strict=True):
            if name in self._slots:
                of_dim.setdefault(self._sizes[name][0], {})[name] = count
        tables: list[batching.CopiedTable] = []
        for dim, counts in of_dim.items():
            row = 0
            for name, count in counts.items():
                slots = self._slots[name]
                tables.append(
                    batching.CopiedTable(
                        ids[name], slots.ids, slots.steps, wanted[name], row, slots.first, self._copies[dim].capacity
                    )
                )
                row += count
        totals = [sum(counts.values()) for counts in of_dim.values()]
        places = np.empty(2 * sum(totals), np.int32)
        assert self._pool is not None
        served, oldest = batching.plan_copies(tables, at.step, at.applied, at.limit, places, self._pool)
        by_table = iter(served)
        counted = {
            dim: {name: RowCounts(count, count - next(by_table)) for name, count in counts.items()}
            for dim, counts in of_dim.items()
        }
        misses = [sum(count.misses for count in counts.values()) for counts in counted.values()]
        hits = [total - missed for total, missed in zip(totals, misses, strict=True)]
        kinds = ("hits", "hit_slots", "misses", "taken")
        packed = Packed([f"{dim}/{kind}" for kind in kinds for dim in of_dim], [*hits, *hits, *misses, *misses], places)
        self.counts = CacheCounts(self.counts.hits + sum(hits), self.counts.misses + sum(misses))
        return CachePlan({dim: (self._copies[dim], counted[dim]) for dim in of_dim}, wanted, packed, oldest)


class RowCache(RowCopies):
    """Copies of rows in training, which serve while the mode allows. For the lookup thread.

    Takes memory only while a pass uses it.

    Args:
        tables: all tables of the schema.
        warns: whether `open` warns if no copy can serve; one of several NN workers is enough.
    """

    def __init__(self, tables: Mapping[str, Table], *, warns: bool = True) -> None:
        self._tables = {name: table for name, table in tables.items() if table.cache_rows}
        super().__init__({name: (table.dim, table.cache_rows) for name, table in self._tables.items()})
        self._warns = warns
        self._warned: set[str] = set()

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
            self.free()
            self._warn(mode, recording)
            return False
        if not self._copies:
            self._check(free())
            self.allocate()
        self.clear()
        return True

    def _check(self, free: int) -> None:
        """Raises ConfigError if the device lacks the memory for all copies, or the tables of a dim have too many."""
        of_dim: dict[int, int] = {}
        for name, table in self._tables.items():
            of_dim[table.dim] = slots = of_dim.get(table.dim, 0) + table.cache_rows
            if slots > MOST_SLOTS:
                raise ConfigError(
                    f"Table({name!r}).cache_rows = {table.cache_rows} makes {slots:,} copies of rows of dim "
                    f"{table.dim}, of {MOST_SLOTS:,} at most. Set it to twice the distinct rows of `staleness` batches "
                    "at most, or to 0 for no copies.",
                    field=f"Table({name!r}).cache_rows",
                )
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
