"""The reference implementation of a store: plain Python, one row at a time, for tests.

Eviction order, admission, start values and updates agree with `NativeStore` to the last bit.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from persia.errors import ConfigError, StoreError
from persia.store.protocol import EmbeddingStore, RowChanges, Rows, ShardState, Spill
from persia.store.table_config import TableConfig, check_spill
from persia.types import UpdateCounts
from persia.types.half_floats import words_of
from support.twins.batching import bucket as bucket_of
from support.twins.random_rows import shard_of
from support.twins.shard import COUNTERS, KEPT_MARKS, TIER_COUNTS, ReferenceRow, ReferenceShard
from support.twins.values import as_words

__all__ = ["ReferenceStore"]

S = TypeVar("S", bound="ReferenceStore")
P = ParamSpec("P")
T = TypeVar("T")


def _locked(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Runs a method under the lock of the store."""

    @functools.wraps(method)
    def run(store: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with store._lock:
            return method(store, *args, **kwargs)

    return run


class ReferenceStore(EmbeddingStore):
    """A store in plain Python. One lock guards all its tables, and it remembers every push.

    Args:
        pool: not used. A PS gives its threads to each store that it makes.
    """

    def __init__(self, pool: object = None) -> None:
        self._lock = threading.RLock()
        self._tables: list[tuple[TableConfig, list[ReferenceShard]]] = []

    @_locked
    def create_table(
        self, config: TableConfig, files: str | None = None, attach: bool = False, spill: str | None = None
    ) -> int:
        """See `EmbeddingStore.create_table`. Rows cannot be kept in files; see `_cold_rows` for those on disk."""
        if files is not None:
            raise StoreError(
                f"table {config.name!r}: the reference store keeps rows in memory only; use no `regions`",
                table=config.name,
            )
        if config.eviction != "lru":
            raise StoreError(
                f"table {config.name!r}: the reference store evicts the least recently used row only; use NativeStore "
                f"for eviction = {config.eviction!r}",
                table=config.name,
            )
        if any(config.name == other.name for other, _ in self._tables):
            raise ConfigError(f"table {config.name!r} already exists: give each table its own name", table=config.name)
        check_spill(config, spill)
        count = config.resolved_shards
        shards = []
        for number in range(count):
            capacity, memory_rows = (
                rows // count + (number < rows % count) for rows in (config.capacity, config.memory_rows)
            )
            if spill is None:
                shards.append(ReferenceShard(config, capacity))
            else:
                cold = self._cold_rows(config, f"{spill}.{number}")
                shards.append(ReferenceShard(config, capacity, memory_rows, cold))
        self._tables.append((config, shards))
        return len(self._tables) - 1

    def _cold_rows(self, config: TableConfig, path: str) -> MutableMapping[int, ReferenceRow]:
        """Returns what keeps rows on disk: this store keeps them in memory, too."""
        return {}

    def recovery(self, table: int) -> dict[str, int]:
        """See `EmbeddingStore.recovery`. There are no files to attach to."""
        raise StoreError(f"table {self.config(table).name!r} is not attached to files", table=table)

    @_locked
    def config(self, table: int) -> TableConfig:
        """See `EmbeddingStore.config`."""
        if not 0 <= table < len(self._tables):
            raise StoreError(f"there is no table {table}: the store has {len(self._tables)}", table=table)
        return self._tables[table][0]

    @_locked
    def lookup_packed(
        self,
        tables: Sequence[int],
        counts: Sequence[int],
        ids: NDArray[np.uint64],
        out: NDArray[np.float32],
        train: bool,
    ) -> None:
        """See `EmbeddingStore.lookup_packed`."""
        widths = [self.config(table).row_words for table in tables]
        for table, keys, rows in self._unpack(tables, counts, ids, out, widths):
            config = self.config(table)
            for shard, positions in self._by_shard(table, keys):
                shard.clock += train
                for position in positions:
                    id_ = int(keys[position])
                    if train:
                        rows[position] = as_words(shard.lookup(id_), config)
                    else:
                        row = shard.find(id_)
                        rows[position] = 0 if row is None else as_words(row.embedding, config)

    @_locked
    def read_packed(
        self, tables: Sequence[int], counts: Sequence[int], ids: NDArray[np.uint64], out: NDArray[np.float32]
    ) -> NDArray[np.bool_]:
        """See `EmbeddingStore.read_packed`."""
        self.lookup_packed(tables, counts, ids, out, False)
        ends = np.cumsum(counts)
        found = np.empty(len(ids), np.bool_)
        for table, end, count in zip(tables, ends, counts, strict=True):
            found[end - count : end] = self.contains(table, ids[end - count : end])
        return found

    @_locked
    def update_packed(
        self,
        tables: Sequence[int],
        counts: Sequence[int],
        ids: NDArray[np.uint64],
        gradients: NDArray[np.float32],
        lrs: Sequence[float],
        step: int,
        client: int = 0,
        sequence: int = 0,
    ) -> list[UpdateCounts]:
        """See `EmbeddingStore.update_packed`."""
        if len(lrs) != len(tables):
            raise StoreError("there must be one learning rate per table")
        push = (client, sequence)
        dims = [self.config(table).dim for table in tables]
        result = []
        for (table, keys, values), lr in zip(self._unpack(tables, counts, ids, gradients, dims), lrs, strict=True):
            outcomes = dict.fromkeys(("applied", "absent", "nonfinite", "duplicates"), 0)
            for shard, positions in self._by_shard(table, keys):
                repeated = push in shard.applied
                shard.clock += not repeated
                if all(push) and not repeated:
                    shard.applied.add(push)
                    shard.pushes += 1
                for position in positions:
                    id_, gradient = int(keys[position]), values[position]
                    outcome = "duplicates" if repeated else shard.update(id_, gradient, lr, step)
                    outcomes[outcome] += 1
                    shard.counters[outcome] += 1
            result.append(UpdateCounts(*outcomes.values()))
        return result

    @_locked
    def advance_clock(self, table: int, by: int) -> None:
        """See `EmbeddingStore.advance_clock`."""
        for shard in self._shards(table):
            shard.pass_time(by)

    @_locked
    def keep_last_steps(self, table: int) -> None:
        """See `EmbeddingStore.keep_last_steps`."""
        for shard in self._shards(table):
            shard.keeps_last_steps = True

    @_locked
    def last_steps(self, table: int, ids: NDArray[np.uint64]) -> NDArray[np.uint32]:
        """See `EmbeddingStore.last_steps`."""
        return self.peek(table, ids)[1].last_step

    @_locked
    def peek(self, table: int, ids: NDArray[np.uint64]) -> tuple[NDArray[np.bool_], Rows]:
        """See `EmbeddingStore.peek`."""
        config = self.config(table)
        rows: list[ReferenceRow | None] = [None] * len(ids)
        for shard, positions in self._by_shard(table, ids):
            for position in positions:
                rows[position] = shard.find(int(ids[position]))
        absent = ReferenceRow(0, np.zeros(config.dim, np.float32), np.zeros(config.state_width, np.float32))
        columns = _columns(config, [row or absent for row in rows])
        return np.array([row is not None for row in rows], np.bool_), columns._replace(ids=ids.copy())

    @_locked
    def size(self, table: int) -> int:
        """See `EmbeddingStore.size`."""
        return sum(shard.size for shard in self._shards(table))

    @_locked
    def memory_bytes(self, table: int) -> int:
        """See `EmbeddingStore.memory_bytes`. Counts the arrays only."""
        found = 0
        for shard in self._shards(table):
            found += shard.sketch.counters.nbytes if shard.sketch is not None else 0
            words = shard.config.row_words + words_of(shard.config.state_dtype, shard.config.state_width)
            found += 4 * words * len(shard.rows)
        return found

    @_locked
    def statistics(self, table: int) -> dict[str, int]:
        """See `EmbeddingStore.statistics`."""
        return {name: sum(shard.counters[name] for shard in self._shards(table)) for name in COUNTERS}

    @_locked
    def tier_counts(self, table: int) -> dict[str, int]:
        """See `EmbeddingStore.tier_counts`. There are no files."""
        shards = self._shards(table)
        cold = sum(len(shard.cold or ()) for shard in shards)
        counts = {name: sum(shard.tier_counts[name] for shard in shards) for name in TIER_COUNTS}
        return {"rows": cold, "disk_bytes": 0, **counts, "unreadable": 0}

    def iterate_rows(self, table: int, *, max_rows: int = 65536) -> Iterator[tuple[int, Rows]]:
        """See `EmbeddingStore.iterate_rows`."""
        config = self.config(table)
        for number, shard in enumerate(self._shards(table)):
            for start in itertools.count(0, max_rows):
                with self._lock:
                    cold = shard.cold.values() if shard.cold is not None else ()
                    part = list(itertools.islice(itertools.chain(shard.rows, cold), start, start + max_rows))
                    rows = _columns(config, [row for row in part if not shard.has_left(row)])
                if not part:
                    break
                if len(rows.ids):
                    yield number, rows

    @_locked
    def import_rows(self, table: int, rows: Rows) -> None:
        """See `EmbeddingStore.import_rows`."""
        _check(self.config(table), rows)
        for shard, positions in self._by_shard(table, rows.ids):
            shard.clock = max(shard.clock, *(int(rows.stamp[position]) for position in positions))
            for position in positions:
                id_, embedding, state, *numbers = (column[position] for column in rows)
                shard.put(ReferenceRow(int(id_), embedding.copy(), state.copy(), *map(int, numbers)))

    @_locked
    def end_import(self, table: int) -> None:
        """See `EmbeddingStore.end_import`. The reference looks for the oldest row at each eviction."""
        self._shards(table)

    @_locked
    def remove_rows(self, table: int, ids: NDArray[np.uint64]) -> int:
        """See `EmbeddingStore.remove_rows`."""
        return sum(
            shard.remove_ids([int(ids[position]) for position in positions])
            for shard, positions in self._by_shard(table, ids)
        )

    @_locked
    def remove_buckets(self, table: int, shard: int, buckets: NDArray[np.bool_]) -> int:
        """See `EmbeddingStore.remove_buckets`."""
        name = self.config(table).name
        return self._shards(table)[shard].remove(lambda id_: bool(buckets[bucket_of(name, id_)]))

    @_locked
    def export_state(self, table: int, shard: int) -> ShardState:
        """See `EmbeddingStore.export_state`."""
        found = self._shards(table)[shard]
        sketch = found.sketch.counters.flatten() if found.sketch is not None else np.empty(0, np.uint16)
        return {
            "clocks": np.array([found.clock, found.epoch, found.pushes], np.uint64),
            "clients": np.array(sorted(found.applied), np.uint64).reshape(-1, 2),
            "counters": np.array(list(found.counters.values()), np.uint64),
            "sketch": sketch,
            "ages": _ages(found),
        }

    @_locked
    def import_state(self, table: int, shard: int, state: ShardState) -> None:
        """See `EmbeddingStore.import_state`."""
        found = self._shards(table)[shard]
        found.check_idle()
        for name, mine in self.export_state(table, shard).items():
            if name not in state:
                raise StoreError(f"the shard state lacks {name!r}", table=table, shard=shard)
            if name != "clients" and state[name].shape != mine.shape:
                raise StoreError(
                    f"the state has {name!r} of shape {state[name].shape}, the shard of {mine.shape}: use the same "
                    "capacity, shards and admission",
                    table=table,
                    shard=shard,
                )
        _set_ages(found, state["ages"], int(state["clocks"][0]))
        clock, found.epoch, found.pushes = map(int, state["clocks"])
        found.clock = max([clock, *(row.stamp for row in found.rows)])
        found.applied = {(int(client), int(sequence)) for client, sequence in state["clients"]}
        found.counters = dict(zip(COUNTERS, map(int, state["counters"]), strict=True))
        if found.sketch is not None:
            found.sketch.counters = state["sketch"].reshape(found.sketch.counters.shape).astype(np.uint16)
        found.forget_changes()
        found.end_changes()

    @_locked
    def changes_since(self, table: int) -> int:
        """See `EmbeddingStore.changes_since`."""
        known = {shard.changes_since for shard in self._shards(table)}
        return known.pop() if len(known) == 1 else 0

    @_locked
    def begin_snapshot(self, table: int, since: int, spill: Spill, buckets: NDArray[np.bool_] | None = None) -> int:
        """See `EmbeddingStore.begin_snapshot`. Copies all rows, in memory."""
        name = self.config(table).name

        def taken(id_: int) -> bool:
            return buckets is None or bool(buckets[bucket_of(name, id_)])

        epoch = 1 + max(shard.epoch for shard in self._shards(table))
        for shard in self._shards(table):
            shard.check_snapshot(since)
        for shard in self._shards(table):
            shard.begin_snapshot(epoch, since, spill, taken)
        return epoch

    @_locked
    def export_snapshot(self, table: int, shard: int, epoch: int, max_rows: int = 65536) -> tuple[Rows, bool]:
        """See `EmbeddingStore.export_snapshot`."""
        rows = list(itertools.islice(self._shards(table)[shard].snapshot_of(epoch).rows, max_rows))
        return _columns(self.config(table), rows), len(rows) == max_rows

    @_locked
    def snapshot_evicted(self, table: int, shard: int, epoch: int) -> NDArray[np.uint64]:
        """See `EmbeddingStore.snapshot_evicted`."""
        return np.array(self._shards(table)[shard].snapshot_of(epoch).evicted, np.uint64)

    @_locked
    def end_snapshot(self, table: int) -> None:
        """See `EmbeddingStore.end_snapshot`."""
        for shard in self._shards(table):
            shard.snapshot = None

    @_locked
    def begin_changes(self, table: int, whole: bool, removed_limit: int = 1 << 17) -> bool:
        """See `EmbeddingStore.begin_changes`. Copies all rows, in memory."""
        return all(shard.begin_changes(whole, removed_limit) for shard in self._shards(table))

    @_locked
    def take_changes(self, table: int, shard: int, max_rows: int = 65536) -> tuple[RowChanges, bool]:
        """See `EmbeddingStore.take_changes`."""
        found = self._shards(table)[shard]
        removed, rows = found.take_changes(max_rows)
        embeddings = np.array([row for _, row in rows], np.float32).reshape(-1, self.config(table).dim)
        ids = np.array([id_ for id_, _ in rows], np.uint64)
        return RowChanges(np.array(removed, np.uint64), ids, embeddings), len(rows) == max_rows

    @_locked
    def end_changes(self, table: int) -> None:
        """See `EmbeddingStore.end_changes`."""
        for shard in self._shards(table):
            shard.end_changes()

    def _shards(self, table: int) -> list[ReferenceShard]:
        self.config(table)
        return self._tables[table][1]

    def _by_shard(self, table: int, ids: NDArray[np.uint64]) -> list[tuple[ReferenceShard, list[int]]]:
        """Returns the positions of ids by shard, without shards that have none."""
        shards = self._shards(table)
        positions: list[list[int]] = [[] for _ in shards]
        for position, id_ in enumerate(ids):
            positions[shard_of(int(id_), len(shards))].append(position)
        return [(shard, mine) for shard, mine in zip(shards, positions, strict=True) if mine]

    def _unpack(
        self,
        tables: Sequence[int],
        counts: Sequence[int],
        ids: NDArray[np.uint64],
        floats: NDArray[np.float32],
        widths: Sequence[int],
    ) -> list[tuple[int, NDArray[np.uint64], NDArray[np.float32]]]:
        """Returns the views of each table: its number, ids `[n]` and floats `[n, width]`."""
        for name, array, dtype in (("ids", ids, np.uint64), ("out or gradients", floats, np.float32)):
            if array.dtype != dtype or array.ndim != 1 or not array.flags.c_contiguous:
                raise StoreError(f"{name} must be a contiguous array [n] of {np.dtype(dtype)}")
        sizes = [count * width for width, count in zip(widths, counts, strict=False)]
        if (
            not len(set(tables)) == len(tables) == len(counts)
            or min(counts, default=0) < 0
            or (sum(counts), sum(sizes)) != (len(ids), len(floats))
        ):
            raise StoreError(
                f"tables {list(tables)} with {list(counts)} ids make {sum(counts)} ids and {sum(sizes)} floats; got "
                f"{len(ids)} and {len(floats)}. Name each table once."
            )
        found = []
        for table, count, width in zip(tables, counts, widths, strict=True):
            size = count * width
            found.append((table, ids[:count], floats[:size].reshape(count, width)))
            ids, floats = ids[count:], floats[size:]
        return found


def _ages(shard: ReferenceShard) -> NDArray[np.uint64]:
    ages = np.zeros(4 + 2 * KEPT_MARKS, np.uint64)
    ages[:4] = shard.age, shard.marks_made, shard.left_before, shard.age_unit
    for place, mark in zip(_mark_places(shard.marks_made), shard.marks, strict=True):
        ages[place : place + 2] = mark
    return ages


def _set_ages(shard: ReferenceShard, ages: NDArray[np.generic], clock: int) -> None:
    age, made, left_before, unit = map(int, ages[:4])
    marks = [(int(ages[place]), int(ages[place + 1])) for place in _mark_places(made)]
    late = [mark for mark in marks if mark[0] > age or mark[1] > clock]
    if late or left_before > clock + 1 or unit >= 2**32:
        raise StoreError("the ages of the state contradict each other or its clock")
    shard.age, shard.marks_made, shard.left_before, shard.age_unit, shard.marks = age, made, left_before, unit, marks
    shard.sweep = shard.sweep_places = 0
    shard.left = []


def _mark_places(made: int) -> list[int]:
    """Places of the marks that are kept, the oldest first."""
    return [4 + 2 * (number % KEPT_MARKS) for number in range(max(0, made - KEPT_MARKS), made)]


def _columns(config: TableConfig, rows: Sequence[ReferenceRow]) -> Rows:
    return Rows(
        np.array([row.id for row in rows], np.uint64),
        np.array([row.embedding for row in rows], np.float32).reshape(len(rows), config.dim),
        np.array([row.state for row in rows], np.float32).reshape(len(rows), config.state_width),
        np.array([row.update_count for row in rows], np.uint32),
        np.array([row.last_step for row in rows], np.uint32),
        np.array([row.stamp for row in rows], np.uint32),
    )


def _check(config: TableConfig, rows: Rows) -> None:
    count = len(rows.ids)
    if rows.embeddings.shape != (count, config.dim):
        raise StoreError(
            f"table {config.name!r}: embeddings must have shape {[count, config.dim]}, not "
            f"{list(rows.embeddings.shape)}",
            table=config.name,
        )
    if rows.state.shape != (count, config.state_width):
        raise StoreError(
            f"table {config.name!r}: states must have {config.state_width} columns: were the rows written with "
            "another optimizer?",
            table=config.name,
        )
    if any(len(column) != count for column in rows):
        raise StoreError(f"table {config.name!r}: the columns differ in length", table=config.name)
