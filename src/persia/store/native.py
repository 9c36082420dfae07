"""The native store: tables of embedding rows in memory, in files and on disk, processed by the C++ core."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia.errors import ConfigError, StoreError
from persia.store.core_errors import StoreErrors
from persia.store.protocol import EmbeddingStore, RowChanges, Rows, ShardState, Spill
from persia.store.table_config import TTL_UNITS, TableConfig, check_spill
from persia.types import UpdateCounts

__all__ = ["NativeStore"]

LOCK_SECONDS = 10.0
"""Maximum wait for a killed process to release its regions, as the kernel tears down their mapping."""

_core: Any = importlib.import_module("persia._core")

_store_errors = StoreErrors(full=_core.RegionFull)


def _native_config(config: TableConfig) -> Any:
    native = _core.TableConfig()
    for name in ("name", "dim", "dtype", "capacity", "seed", "admission_value", "ttl"):
        setattr(native, name, getattr(config, name))
    native.shards = config.resolved_shards
    native.ttl_unit = TTL_UNITS[config.ttl_unit]
    native.admission = getattr(_core.Admission, config.admission)
    native.eviction = getattr(_core.Eviction, config.eviction)
    optimizer = _core.OptimizerConfig()
    optimizer.kind = config.optimizer
    for name, value in config.with_defaults().items():
        setattr(optimizer, name, value)
    optimizer.bound = config.stored_bound
    native.optimizer = optimizer
    initializer = _core.InitializerConfig()
    kind = "uniform" if config.initializer == "rsqrt_dim" else config.initializer
    initializer.kind = getattr(_core.Initializer, kind)
    initializer.a, initializer.b = config.initial_range
    native.initializer = initializer
    return native


class NativeStore(EmbeddingStore):
    """A store in C++. Its methods run without the interpreter lock.

    A forked child must not use the store: each method raises there.

    Args:
        threads: threads that share the work of a call, over tables and their shards; or a native
            `ThreadPool` to share with others. The caller is one of the threads.
    """

    def __init__(self, threads: int | object = 1) -> None:
        pool = _core.ThreadPool(threads) if isinstance(threads, int) else threads
        self._native = _core.Store(pool)
        self._configs: list[TableConfig] = []

    def create_table(
        self, config: TableConfig, files: str | None = None, attach: bool = False, spill: str | None = None
    ) -> int:
        """See `EmbeddingStore.create_table`."""
        if any(config.name == other.name for other in self._configs):
            raise ConfigError(f"table {config.name!r} already exists: give each table its own name", table=config.name)
        check_spill(config, spill)
        native = _native_config(config)
        if spill is not None:
            tier = _core.TierFiles()
            tier.path, tier.memory_rows = spill, config.memory_rows
            native.tier = tier
        if files is not None:
            regions = _core.RegionFiles()
            regions.path, regions.attach, regions.lock_seconds = files, attach, LOCK_SECONDS
            native.files = regions
        with _store_errors:
            index: int = self._native.create_table(native)
        self._configs.append(config)
        return index

    def recovery(self, table: int) -> dict[str, int]:
        """See `EmbeddingStore.recovery`."""
        with _store_errors:
            conditions: dict[str, int] = self._native.recovery(table)
        return conditions

    def config(self, table: int) -> TableConfig:
        """See `EmbeddingStore.config`."""
        if not 0 <= table < len(self._configs):
            raise StoreError(f"there is no table {table}: the store has {len(self._configs)}", table=table)
        return self._configs[table]

    def lookup(
        self,
        tables: Sequence[int],
        ids: Sequence[NDArray[np.uint64]],
        train: bool,
        out: Sequence[NDArray[np.float32]] | None = None,
    ) -> list[NDArray[np.float32]]:
        """Returns the embeddings of ids, by table: `lookup_packed` with separate arrays for each table.

        Args:
            tables: numbers of the tables, each at most once.
            ids: per table, uint64 [n], contiguous.
            train: whether to admit missing ids, and count the lookup as a use of the rows.
            out: per table, float32 [n, row_words] to write to, instead of new arrays.

        Returns:
            Per table, rows as stored, float32 [n, row_words]: see `persia.types.half_floats`.
        """
        if out is None:
            out = [np.empty((len(i), self.config(t).row_words), np.float32) for t, i in zip(tables, ids, strict=False)]
        result = list(out)
        with _store_errors:
            self._native.lookup(list(tables), list(ids), result, train)
        return result

    def update(
        self,
        tables: Sequence[int],
        ids: Sequence[NDArray[np.uint64]],
        gradients: Sequence[NDArray[np.float32]],
        lrs: Sequence[float],
        step: int,
        client: int = 0,
        sequence: int = 0,
    ) -> list[UpdateCounts]:
        """Applies gradients to rows, in order: `update_packed` with separate arrays for each table.

        A shard remembers the last 65 sequence numbers of each of its 256 most recent clients.

        Args:
            tables: numbers of the tables, each at most once.
            ids: per table, uint64 [n], contiguous.
            gradients: per table, float32 [n, dim], contiguous.
            lrs: per table, the learning rate.
            step: global step or token; see `keep_last_steps`.
            client: identity of the sender; 0 is not tracked.
            sequence: number of the push of this client, increasing from 1; 0 is not tracked.

        Returns:
            Per table, the outcome of its gradients.
        """
        with _store_errors:
            counts = self._native.update(list(tables), list(ids), list(gradients), list(lrs), step, client, sequence)
        return [UpdateCounts(*count) for count in counts]

    def lookup_packed(
        self,
        tables: Sequence[int],
        counts: Sequence[int],
        ids: NDArray[np.uint64],
        out: NDArray[np.float32],
        train: bool,
    ) -> None:
        """See `EmbeddingStore.lookup_packed`."""
        with _store_errors:
            _core.packed.lookup(self._native, tables, counts, ids, out, train)

    def read_packed(
        self,
        tables: Sequence[int],
        counts: Sequence[int],
        ids: NDArray[np.uint64],
        out: NDArray[np.float32],
    ) -> NDArray[np.bool_]:
        """See `EmbeddingStore.read_packed`."""
        found = np.empty(len(ids), np.uint8)
        with _store_errors:
            _core.packed.read(self._native, tables, counts, ids, out, found)
        return found.view(np.bool_)

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
        with _store_errors:
            outcomes = _core.packed.update(self._native, tables, counts, ids, gradients, lrs, step, client, sequence)
        return [UpdateCounts(*count) for count in outcomes]

    def peek(self, table: int, ids: NDArray[np.uint64]) -> tuple[NDArray[np.bool_], Rows]:
        """See `EmbeddingStore.peek`."""
        with _store_errors:
            exists, rows = self._native.peek(table, ids)
        return exists.astype(np.bool_), Rows(*rows)

    def advance_clock(self, table: int, by: int) -> None:
        """See `EmbeddingStore.advance_clock`."""
        with _store_errors:
            self._native.advance_clock(table, by)

    def keep_last_steps(self, table: int) -> None:
        """See `EmbeddingStore.keep_last_steps`."""
        with _store_errors:
            self._native.keep_last_steps(table)

    def last_steps(self, table: int, ids: NDArray[np.uint64]) -> NDArray[np.uint32]:
        """See `EmbeddingStore.last_steps`."""
        with _store_errors:
            steps: NDArray[np.uint32] = self._native.last_steps(table, ids)
        return steps

    def export_rows(self, table: int, shard: int, start: int = 0, max_rows: int = 65536) -> tuple[Rows, int | None]:
        """Returns up to `max_rows` rows of a shard from row number `start` on, in row order; each row is consistent.

        Rows on disk come last.

        Args:
            table: number of the table.
            shard: 0 to `config(table).resolved_shards - 1`.
            start: 0, then the row number that the previous call returned.
            max_rows: bounds the time for which the shard is locked.

        Returns:
            The rows and the row number to continue with, None at the end. Rows evicted between two calls may be missing
            or replaced.
        """
        with _store_errors:
            rows, following = self._native.export_rows(table, shard, start, max_rows)
        return Rows(*rows), following

    def iterate_rows(self, table: int, *, max_rows: int = 65536) -> Iterator[tuple[int, Rows]]:
        """See `EmbeddingStore.iterate_rows`."""
        for shard in range(self.config(table).resolved_shards):
            start: int | None = 0
            while start is not None:
                rows, start = self.export_rows(table, shard, start, max_rows)
                if len(rows.ids):
                    yield shard, rows

    def begin_snapshot(self, table: int, since: int, spill: Spill, buckets: NDArray[np.bool_] | None = None) -> int:
        """See `EmbeddingStore.begin_snapshot`."""
        shards = range(self.config(table).resolved_shards)
        epoch = 1 + max(int(self.export_state(table, shard)["clocks"][1]) for shard in shards)
        with _store_errors:
            self._native.begin_snapshot(table, epoch, since, *spill, buckets)
        return epoch

    def changes_since(self, table: int) -> int:
        """See `EmbeddingStore.changes_since`."""
        with _store_errors:
            return int(self._native.changes_since(table))

    def export_snapshot(self, table: int, shard: int, epoch: int, max_rows: int = 65536) -> tuple[Rows, bool]:
        """See `EmbeddingStore.export_snapshot`."""
        with _store_errors:
            rows, more = self._native.export_snapshot(table, shard, epoch, max_rows)
        return Rows(*rows), more

    def snapshot_evicted(self, table: int, shard: int, epoch: int) -> NDArray[np.uint64]:
        """See `EmbeddingStore.snapshot_evicted`."""
        with _store_errors:
            ids: NDArray[np.uint64] = self._native.snapshot_evicted(table, shard, epoch)
        return ids

    def end_snapshot(self, table: int) -> None:
        """See `EmbeddingStore.end_snapshot`."""
        with _store_errors:
            self._native.end_snapshot(table)

    def begin_changes(self, table: int, whole: bool, removed_limit: int = 1 << 17) -> bool:
        """See `EmbeddingStore.begin_changes`."""
        with _store_errors:
            return bool(self._native.begin_changes(table, whole, removed_limit))

    def take_changes(self, table: int, shard: int, max_rows: int = 65536) -> tuple[RowChanges, bool]:
        """See `EmbeddingStore.take_changes`."""
        with _store_errors:
            changes, more = self._native.take_changes(table, shard, max_rows)
        return RowChanges(*changes), more

    def end_changes(self, table: int) -> None:
        """See `EmbeddingStore.end_changes`."""
        with _store_errors:
            self._native.end_changes(table)

    def import_rows(self, table: int, rows: Rows) -> None:
        """See `EmbeddingStore.import_rows`."""
        with _store_errors:
            self._native.import_rows(table, *rows)

    def end_import(self, table: int) -> None:
        """See `EmbeddingStore.end_import`."""
        with _store_errors:
            self._native.end_import(table)

    def remove_rows(self, table: int, ids: NDArray[np.uint64]) -> int:
        """See `EmbeddingStore.remove_rows`."""
        with _store_errors:
            return int(self._native.remove_rows(table, ids))

    def remove_buckets(self, table: int, shard: int, buckets: NDArray[np.bool_]) -> int:
        """See `EmbeddingStore.remove_buckets`."""
        with _store_errors:
            return int(self._native.remove_buckets(table, shard, buckets))

    def export_state(self, table: int, shard: int) -> ShardState:
        """See `EmbeddingStore.export_state`."""
        with _store_errors:
            state: ShardState = self._native.export_state(table, shard)
        return state

    def import_state(self, table: int, shard: int, state: ShardState) -> None:
        """See `EmbeddingStore.import_state`."""
        try:
            with _store_errors:
                self._native.import_state(table, shard, state)
        except KeyError as error:
            raise StoreError(f"the shard state lacks {error}", table=table, shard=shard) from error

    def size(self, table: int) -> int:
        """See `EmbeddingStore.size`."""
        with _store_errors:
            return int(self._native.size(table))

    def memory_bytes(self, table: int) -> int:
        """See `EmbeddingStore.memory_bytes`."""
        with _store_errors:
            return int(self._native.memory_bytes(table))

    def statistics(self, table: int) -> dict[str, int]:
        """See `EmbeddingStore.statistics`."""
        with _store_errors:
            counts: dict[str, int] = self._native.statistics(table)
        return counts

    def tier_counts(self, table: int) -> dict[str, int]:
        """See `EmbeddingStore.tier_counts`."""
        with _store_errors:
            counts: dict[str, int] = self._native.tier_counts(table)
        return counts

    def clear(self, table: int) -> None:
        """Removes all rows and frees their memory. Client sequences remain."""
        with _store_errors:
            self._native.clear(table)
