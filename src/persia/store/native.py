"""The store: many tables of embedding rows in native memory."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia.errors import ConfigError, StoreError, StoreFullError
from persia.store.config import TableConfig
from persia.store.rows import Rows, ShardState, Spill
from persia.types import UpdateCounts

__all__ = ["EmbeddingStore"]

LOCK_SECONDS = 10.0
"""How long a process that was killed may take to let go of its regions: it has to tear down their mapping."""

_core: Any = importlib.import_module("persia._core")


@contextmanager
def _store_errors() -> Iterator[None]:
    try:
        yield
    except _core.RegionFull as error:
        raise StoreFullError(str(error)) from error
    except (ValueError, RuntimeError, TypeError, IndexError) as error:
        raise StoreError(str(error)) from error


def _native_config(config: TableConfig) -> Any:
    native = _core.TableConfig()
    for name in ("name", "dim", "capacity", "seed", "admission_value"):
        setattr(native, name, getattr(config, name))
    native.shards = config.resolved_shards
    native.admission = getattr(_core.Admission, config.admission)
    optimizer = _core.OptimizerConfig()
    optimizer.kind = config.optimizer
    for name, value in config.with_defaults().items():
        setattr(optimizer, name, value)
    optimizer.bound = config.value_bound
    native.optimizer = optimizer
    initializer = _core.InitializerConfig()
    kind = "uniform" if config.initializer == "rsqrt_dim" else config.initializer
    initializer.kind = getattr(_core.Initializer, kind)
    initializer.a, initializer.b = config.initial_range
    native.initializer = initializer
    return native


class EmbeddingStore:
    """Hash tables from id to embedding row, bounded by least-recently-used eviction.

    Tables are numbered in the order of creation. Every method may be called from any thread; it blocks while another
    thread works on the same shard, and runs without the interpreter lock. A forked child must not use the store: each
    method raises there.

    Args:
        threads: threads that share the work of a call, over tables and their shards; or a native
            `ThreadPool` to share with others. The caller is one of the threads.
    """

    def __init__(self, threads: int | object = 1) -> None:
        pool = _core.ThreadPool(threads) if isinstance(threads, int) else threads
        self._native = _core.Store(pool)
        self._configs: list[TableConfig] = []

    def create_table(self, config: TableConfig, files: str | None = None, attach: bool = False) -> int:
        """Adds a table and returns its number.

        Address space is reserved for the whole capacity, memory is used as rows arrive.

        Args:
            config: of the table.
            files: None keeps rows in the memory of this process. A path keeps them in the files path.0, path.1, ...,
                one for each shard, on whatever file system that is. They outlive the process, however it ends: no row
                but those being written at that moment differs, and those are as before. One process has them at a
                time.
            attach: go on with the rows of these files, instead of making new ones. Blocks for about a second per 10 M
                rows if a process died while it inserted.

        Raises:
            ConfigError: the name is in use.
            StoreError: the address space cannot be reserved; the files are in use, damaged, or of another table.
            StoreFullError: there is no room for the files.
        """
        if any(config.name == other.name for other in self._configs):
            raise ConfigError(f"table {config.name!r} exists already: give each table its own name", table=config.name)
        native = _native_config(config)
        if files is not None:
            regions = _core.RegionFiles()
            regions.path, regions.attach, regions.lock_seconds = files, attach, LOCK_SECONDS
            native.files = regions
        with _store_errors():
            index: int = self._native.create_table(native)
        self._configs.append(config)
        return index

    def recovery(self, table: int) -> dict[str, int]:
        """How a table was found that was attached to: its `shards`, and how many of them were what.

        `busy`: in work when the process died. `undone`: a half written row is as before. `open`: a push was
        interrupted, and goes on where it was when it is repeated. `rebuilt`: the index was made anew from the rows.
        """
        with _store_errors():
            found: dict[str, int] = self._native.recovery(table)
        return found

    @property
    def configs(self) -> Sequence[TableConfig]:
        """The tables, by number."""
        return tuple(self._configs)

    def config(self, table: int) -> TableConfig:
        """The configuration of a table. Raises `StoreError` for an unknown number."""
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
        """Embeddings of ids, for many tables at once.

        In training a missing id is admitted (or not) and initialised, and every row found becomes recently used. In
        evaluation nothing changes. Ids without a row get zeros. Repeated ids are allowed. Within a shard, ids are
        served in order: if the batch exceeds the capacity, later ids may evict earlier ones, whose values stay right.

        Args:
            tables: numbers of the tables, each at most once.
            ids: per table, uint64 [n], contiguous.
            train: see above.
            out: per table, float32 [n, dim] to write to, instead of new arrays.

        Returns:
            Per table, float32 [n, dim].

        Raises:
            StoreError: an argument does not fit; the message names the table. Nothing has been changed.
            StoreFullError: the files of the table cannot grow. Some of the ids may have got rows; the call may be
                repeated when there is room.
        """
        if out is None:
            out = [np.empty((len(i), self.config(t).dim), np.float32) for t, i in zip(tables, ids, strict=False)]
        result = list(out)
        with _store_errors():
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
        """Applies gradients to rows, in order; a repeated id is updated once per occurrence.

        With `client` and `sequence` (both above 0) each shard applies the push exactly once, however often it is sent.
        A shard remembers the last 65 sequence numbers of each of its 256 most recent clients.

        Args:
            tables: numbers of the tables, each at most once.
            ids: per table, uint64 [n], contiguous.
            gradients: per table, float32 [n, dim], contiguous.
            lrs: per table, the learning rate.
            step: global step or token, kept as `last_step` of each row.
            client: who pushes; 0 is not tracked.
            sequence: number of the push at that client, rising from 1; 0 is not tracked.

        Returns:
            Per table, what became of the gradients.

        Raises:
            StoreError: an argument does not fit; the message names the table. Nothing has been changed.
        """
        with _store_errors():
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
        """`lookup` with the ids of all tables, and their rows, one table after another.

        Args:
            tables: numbers of the tables, each at most once.
            counts: per table, how many ids.
            ids: uint64 [sum of counts], contiguous.
            out: float32 [sum of count * dim] to write to, contiguous.
            train: see `lookup`.

        Raises:
            StoreError: an argument does not fit. Nothing has been changed.
            StoreFullError: as in `lookup`.
        """
        with _store_errors():
            _core.packed.lookup(self._native, tables, counts, ids, out, train)

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
        """`update` with the ids and gradients of all tables one table after another; `counts` says how many of each."""
        with _store_errors():
            found = _core.packed.update(self._native, tables, counts, ids, gradients, lrs, step, client, sequence)
        return [UpdateCounts(*count) for count in found]

    def peek(self, table: int, ids: NDArray[np.uint64]) -> tuple[NDArray[np.bool_], Rows]:
        """Whole rows without touching them: (found [n], rows [n]); columns of ids without a row are zero."""
        with _store_errors():
            found, rows = self._native.peek(table, ids)
        return found.astype(np.bool_), Rows(*rows)

    def last_steps(self, table: int, ids: NDArray[np.uint64]) -> NDArray[np.uint32]:
        """In which step each id's row was last changed, uint32 [n]; 0 for a new row and for none. Touches nothing."""
        with _store_errors():
            steps: NDArray[np.uint32] = self._native.last_steps(table, ids)
        return steps

    def contains(self, table: int, ids: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which ids have a row: bool [n]."""
        return self.peek(table, ids)[0]

    def export_rows(
        self, table: int, shard: int, start: int = 0, max_rows: int = 65536, since_epoch: int = 0
    ) -> tuple[Rows, int | None]:
        """Up to `max_rows` rows of a shard from row number `start` on, in row order, each as of one moment.

        Args:
            table: number of the table.
            shard: 0 to `config(table).resolved_shards - 1`.
            start: 0, then what the previous call returned.
            max_rows: bounds the time for which the shard is locked.
            since_epoch: leaves out rows that have not changed in this dirty epoch or later; 0 takes all.

        Returns:
            The rows and where to go on, or None at the end. Rows evicted between two calls may be missing or replaced.
        """
        with _store_errors():
            rows, following = self._native.export_rows(table, shard, start, max_rows, since_epoch)
        return Rows(*rows), following if following == start + max_rows else None

    def iterate_rows(self, table: int, *, since_epoch: int = 0, max_rows: int = 65536) -> Iterator[tuple[int, Rows]]:
        """All rows of a table in parts: (shard, rows), shard by shard, in row order."""
        for shard in range(self.config(table).resolved_shards):
            start: int | None = 0
            while start is not None:
                rows, start = self.export_rows(table, shard, start, max_rows, since_epoch)
                if len(rows.ids):
                    yield shard, rows

    def begin_cut(self, table: int, since: int, spill: Spill) -> int:
        """Marks this moment: `export_cut` gives the rows as they are now, while they go on changing.

        Before a row changes for the first time, its old bytes go to a file without a name; writers wait for that
        disk, so memory stays bounded. One cut of a table at a time. Rows cannot be imported or cleared meanwhile.

        Args:
            table: number of the table.
            since: leaves out rows that have not changed since the cut which returned this number; 0 takes all.
            spill: where and how.

        Returns:
            The number of this cut, for `since` of a later one. It rises from cut to cut.

        Raises:
            StoreError: a cut is under way, or what has changed `since` is not known (see `changes_since`).
        """
        shards = range(self.config(table).resolved_shards)
        epoch = 1 + max(int(self.export_state(table, shard)["clocks"][1]) for shard in shards)
        with _store_errors():
            self._native.begin_cut(table, epoch, since, *spill)
        return epoch

    def changes_since(self, table: int) -> int:
        """The last cut if what has changed since then is known; 0 if not.

        It is not before the first cut, nor after more evictions than `Spill.evicted_limit`.
        """
        with _store_errors():
            return int(self._native.changes_since(table))

    def export_cut(self, table: int, shard: int, cut: int, max_rows: int = 65536) -> tuple[Rows, bool]:
        """The next rows of a cut, in row order, up to 4,096 more than `max_rows`; and whether there may be more.

        The shard is locked for 4,096 rows at a time.

        Raises:
            StoreError: there is no such cut any more, or its old rows could not be kept: the message says why.
        """
        with _store_errors():
            rows, more = self._native.export_cut(table, shard, cut, max_rows)
        return Rows(*rows), more

    def cut_evicted(self, table: int, shard: int, cut: int) -> NDArray[np.uint64]:
        """Ids of rows that were evicted between the `since` of the cut and the cut, repetitions included."""
        with _store_errors():
            ids: NDArray[np.uint64] = self._native.cut_evicted(table, shard, cut)
        return ids

    def end_cut(self, table: int) -> None:
        """Forgets the cut, whether it was read or not; nothing happens without one."""
        with _store_errors():
            self._native.end_cut(table)

    def import_rows(self, table: int, rows: Rows) -> None:
        """Writes rows as exported: known ids are overwritten, others appended in order.

        Imported into an empty table of the same shards, in the order of export and followed by `import_state`, a table
        continues bit for bit, later evictions included. In a full shard the less recent of the incoming and the oldest
        row gives way. Imported rows count as unchanged for `since_epoch`, so afterwards nothing is known of changes
        (`changes_since`).
        """
        with _store_errors():
            self._native.import_rows(table, *rows)

    def export_state(self, table: int, shard: int) -> ShardState:
        """What a shard knows besides its rows: clocks, client sequences, counters, admission sketch."""
        with _store_errors():
            state: ShardState = self._native.export_state(table, shard)
        return state

    def import_state(self, table: int, shard: int, state: ShardState) -> None:
        """Restores `export_state`. Capacity, shards and admission must be those of the exporting table."""
        try:
            with _store_errors():
                self._native.import_state(table, shard, state)
        except KeyError as error:
            raise StoreError(f"the shard state lacks {error}", table=table, shard=shard) from error

    def set_dirty_epoch(self, table: int, epoch: int) -> None:
        """Rows that change from now on bear this epoch. It starts at 1; 0 is "unchanged since import"."""
        with _store_errors():
            self._native.set_dirty_epoch(table, epoch)

    def size(self, table: int) -> int:
        """Rows in a table."""
        with _store_errors():
            return int(self._native.size(table))

    def memory_bytes(self, table: int) -> int:
        """Bytes of rows, index, sketch and headers in use."""
        with _store_errors():
            return int(self._native.memory_bytes(table))

    def statistics(self, table: int) -> dict[str, int]:
        """Counts of ids looked up in training and of gradients.

        Ids: lookups, hits, misses, admitted, rejected, evicted. Gradients: applied, absent, nonfinite, duplicates.
        """
        with _store_errors():
            counts: dict[str, int] = self._native.statistics(table)
        return counts

    def clear(self, table: int) -> None:
        """Removes all rows and gives their memory back. Client sequences are kept."""
        with _store_errors():
            self._native.clear(table)
