"""The interface of an embedding store, and the records that it returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from persia.store.table_config import TableConfig
from persia.types import UpdateCounts

__all__ = ["EmbeddingStore", "RowChanges", "Rows", "ShardState", "Spill"]

ShardState = dict[str, NDArray[np.generic]]
"""Clocks, client sequences, counters, admission sketch and ages of one shard, as small arrays by name."""


class Rows(NamedTuple):
    """Whole rows, column by column. Values are float32, whatever the dtype of the table.

    Attributes:
        ids: uint64 [rows].
        embeddings: float32 [rows, dim].
        state: float32 [rows, state width], the optimizer's state.
        update_count: uint32 [rows], updates applied to each row.
        last_step: uint32 [rows], global step or token of the last update; 0 unless the table records it, see
            `EmbeddingStore.keep_last_steps`.
        stamp: uint32 [rows], recency within the shard: larger is more recent.
    """

    ids: NDArray[np.uint64]
    embeddings: NDArray[np.float32]
    state: NDArray[np.float32]
    update_count: NDArray[np.uint32]
    last_step: NDArray[np.uint32]
    stamp: NDArray[np.uint32]


class Spill(NamedTuple):
    """Options for the old bytes of rows that a store keeps while a snapshot is read.

    Attributes:
        directory: directory, on a disk of this machine, of the file for old rows that do not fit in memory.
        buffer_bytes: memory per shard, and the same again while it is written.
        evicted_limit: number of ids of evicted rows that each shard remembers between two snapshots, 8 bytes each.
        live: whether to keep no old rows: rows are exported as they are when read, each one consistent. Tables with
            rows on disk keep old rows anyway, as moving rows would be missed, or read twice.
    """

    directory: str
    buffer_bytes: int = 1 << 20
    evicted_limit: int = 1 << 18
    live: bool = False


class RowChanges(NamedTuple):
    """Changes of rows, for a copy of a table: it drops `removed` and then sets `ids`.

    Attributes:
        removed: uint64 [n], ids of evicted or expired rows, possibly repeated.
        ids: uint64 [rows], each once in a pass.
        embeddings: float32 [rows, dim], whatever the dtype of the table.
    """

    removed: NDArray[np.uint64]
    ids: NDArray[np.uint64]
    embeddings: NDArray[np.float32]


class EmbeddingStore(Protocol):
    """Hash tables from id to embedding row, bounded by eviction.

    A full table evicts the least recently used row; a full table with rows on disk, the rows that have been on disk
    longest.

    An embedding PS, its snapshots and its regions use only this interface. Tables are numbered in the order of
    creation. Methods are safe to call from several threads, and block while another thread works on the same shard.
    """

    def create_table(
        self, config: TableConfig, files: str | None = None, attach: bool = False, spill: str | None = None
    ) -> int:
        """Adds a table and returns its number.

        Memory is allocated as rows arrive.

        Args:
            config: configuration of the table.
            files: None keeps rows in the memory of this process. A path keeps them in the files path.0, path.1, ...,
                one per shard, on any file system. The files outlive the process, however it ends: a row that was being
                written then has its earlier values. Only one process can use them at a time.
            attach: whether to continue with the rows in these files instead of creating new ones. Blocks for about a
                second per 10 M rows if a process died during an insertion.
            spill: path of the files for rows that leave memory, path.0, path.1, ..., one per shard, on a disk of this
                machine; only for tables with `TableConfig.memory_rows`. Rows on disk are part of the table: all methods
                read them, and lookups in training and updates move them back to memory. The files outlive the process
                if `files` do; else they have no name.

        Raises:
            ConfigError: the name is in use, or only one of `spill` and `TableConfig.memory_rows` is given.
            StoreError: the address space cannot be reserved; the files are in use, damaged, missing, or of another
                table.
            StoreFullError: there is not enough space for the files.
        """

    def recovery(self, table: int) -> dict[str, int]:
        """Returns the condition of an attached table: its number of `shards`, and the number of shards in each state.

        `busy`: in use when the process died. `undone`: a half-written row was rolled back. `open`: a push was
        interrupted, and continues where it stopped when repeated. `rebuilt`: the index was rebuilt from the rows.
        """

    def config(self, table: int) -> TableConfig:
        """Returns the configuration of a table. Raises `StoreError` for an unknown number."""

    def lookup_packed(
        self,
        tables: Sequence[int],
        counts: Sequence[int],
        ids: NDArray[np.uint64],
        out: NDArray[np.float32],
        train: bool,
    ) -> None:
        """Writes the embeddings of ids to `out`, for several tables, one table after another.

        In training a missing id may be admitted and initialised, and every existing row becomes recently used. In
        evaluation nothing changes. Ids without a row get zeros. Repeated ids are allowed. Within a shard, ids are
        served in order: if the batch exceeds the capacity, later ids may evict earlier ones, whose values in `out`
        remain correct.

        Args:
            tables: numbers of the tables, each at most once.
            counts: per table, the number of ids.
            ids: uint64 [sum of counts], contiguous.
            out: float32 [sum of count * row_words] to write to, contiguous: rows as stored, which are embeddings in
                tables of dtype float32; see `persia.types.half_floats` for others.
            train: whether to admit missing ids, and count the lookup as a use of the rows.

        Raises:
            StoreError: an argument is invalid, and nothing has changed; or a row on disk cannot be read.
            StoreFullError: the table cannot grow, in memory or on disk. Some of the ids may have new rows; repeat the
                call when there is free space.
        """

    def read_packed(
        self,
        tables: Sequence[int],
        counts: Sequence[int],
        ids: NDArray[np.uint64],
        out: NDArray[np.float32],
    ) -> NDArray[np.bool_]:
        """Writes the embeddings of ids to `out` like `lookup_packed` without `train`.

        Returns:
            Whether each id has a row, bool `[sum of counts]`.

        Raises:
            StoreError: an argument is invalid, or a row on disk cannot be read.
        """

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
        """Applies gradients to rows, in order; a repeated id is updated once per occurrence.

        With `client` and `sequence` (both above 0) each shard applies the push exactly once, even if it is repeated.

        Args:
            tables: numbers of the tables, each at most once.
            counts: per table, the number of ids.
            ids: uint64 [sum of counts], contiguous.
            gradients: float32 [sum of count * dim], contiguous.
            lrs: per table, the learning rate.
            step: global step or token; see `keep_last_steps`.
            client: identity of the sender; 0 is not tracked.
            sequence: number of the push of this client, increasing from 1; 0 is not tracked.

        Returns:
            Per table, the outcome of its gradients.

        Raises:
            StoreError: an argument is invalid, and nothing has changed; names the table. Or a row on disk cannot be
                read.
            StoreFullError: rows on disk cannot return to memory, as others must move to the disk, which is full. A
                tracked push continues where it stopped when repeated; the counts of the failed call are lost.
        """

    def advance_clock(self, table: int, by: int) -> None:
        """Advances the TTL clock of a table with a `TableConfig.ttl`, in its unit; no-op for others.

        Rows expire that training has not met for `ttl`, at the latest a sixteenth of it and the time between two calls
        later. They are absent from then on: lookups in training give them new rows, subject to admission, and exports
        leave them out. Their memory goes to new rows, each of which looks at a few rows for some; until then `size`
        counts them. `statistics` never counts them as evicted. Imported rows count as met.
        """

    def keep_last_steps(self, table: int) -> None:
        """Records the step of each row's last update or import from now on, 4 bytes a row; no-op if already recorded.

        Existing rows have 0 until they are updated. Regions record it permanently.

        Raises:
            StoreFullError: there is not enough space. Repeat the call when there is.
        """

    def last_steps(self, table: int, ids: NDArray[np.uint64]) -> NDArray[np.uint32]:
        """Returns the step of each row's last update, uint32 [n]; 0 for a new or missing row. Changes nothing.

        All are 0 unless the table records them.
        """

    def contains(self, table: int, ids: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Returns whether each id has a row: bool [n]."""
        return self.peek(table, ids)[0]

    def peek(self, table: int, ids: NDArray[np.uint64]) -> tuple[NDArray[np.bool_], Rows]:
        """Returns (whether each id has a row [n], whole rows [n]), and changes nothing; missing rows are zeros."""

    def size(self, table: int) -> int:
        """Returns the number of rows of a table, in memory and on disk; see `advance_clock` for expired ones."""

    def memory_bytes(self, table: int) -> int:
        """Returns the bytes of rows, index, sketch, headers and marks of changed rows in use."""

    def statistics(self, table: int) -> dict[str, int]:
        """Returns counts of ids looked up in training and of gradients.

        Ids: lookups, hits, misses, admitted, rejected, evicted. Gradients: applied, absent, nonfinite, duplicates.
        """

    def tier_counts(self, table: int) -> dict[str, int]:
        """Returns counts of rows on disk; all are 0 in a table without.

        `rows`: rows on disk now. `disk_bytes`: current size of the files. `unreadable`: segments of the files that
        could not be read when their rows were to move, and so remain, plus calls that failed as a record that they
        needed is damaged. Since creation: `spilled`, rows moved to disk; `read`, rows that calls read from disk;
        `promoted`, rows moved back to memory; `compacted`, rows rewritten to free the space of others.
        """

    def iterate_rows(self, table: int, *, max_rows: int = 65536) -> Iterator[tuple[int, Rows]]:
        """Yields all rows of a table in parts: (shard, rows), shard by shard, in row order."""

    def import_rows(self, table: int, rows: Rows) -> None:
        """Writes rows as exported: existing ids are overwritten, others appended in order.

        A table of 16-bit values rounds values to the nearest representable one, within its `value_bound`.

        If rows are imported into an empty table of the same shards, in the order of export and followed by
        `import_state`, the table continues bit for bit, including later evictions (except with eviction by midpoint).
        In a full shard, the less recent of the incoming and the oldest row is evicted. Imported rows count as changed:
        a snapshot in progress has the rows before, and the next increment has the imported ones.
        """

    def end_import(self, table: int) -> None:
        """Prepares evictions after the last `import_rows` or `import_state`; otherwise the first one waits for a scan.

        Has no effect on shards that are prepared, or have space for more than a sixteenth of their rows. Blocks for
        about 25 ms per 1,000,000 rows of other shards.
        """

    def remove_rows(self, table: int, ids: NDArray[np.uint64]) -> int:
        """Removes the rows of ids, if there are any, and returns how many there were.

        Other rows may get other places, so a concurrent `iterate_rows` may miss some. `changes_since` is then 0.

        Args:
            table: number of the table.
            ids: uint64 `[n]`, contiguous.

        Raises:
            StoreError: a snapshot is in progress, or a row on disk cannot be read. Some rows may have been removed; a
                repetition removes the others.
        """

    def remove_buckets(self, table: int, shard: int, buckets: NDArray[np.bool_]) -> int:
        """Removes the rows of a shard whose ids are in some buckets, and frees their memory.

        The shard is locked for a few thousand rows at a time; rows of these buckets must not be inserted meanwhile.
        Other rows get other places, so a concurrent `iterate_rows` may miss some. If there were any, `changes_since` is
        then 0.

        Args:
            table: number of the table.
            shard: number of the shard.
            buckets: whether to remove the ids of each bucket, bool `[persia.types.BUCKETS]`.

        Returns:
            The number of removed rows.

        Raises:
            StoreError: a snapshot is in progress, or a row on disk cannot be read. Some rows may have been removed; a
                repetition removes the others.
        """

    def export_state(self, table: int, shard: int) -> ShardState:
        """Returns the state of a shard besides its rows: clocks, client sequences, counters, admission sketch, ages."""

    def import_state(self, table: int, shard: int, state: ShardState) -> None:
        """Restores `export_state`. Capacity, shards and admission must equal those of the exporting table."""

    def changes_since(self, table: int) -> int:
        """Returns the number of the last snapshot, or 0 if changes since then are unknown.

        They are unknown before the first snapshot, and after more evictions than `Spill.evicted_limit`.
        """

    def begin_snapshot(self, table: int, since: int, spill: Spill, buckets: NDArray[np.bool_] | None = None) -> int:
        """Begins a store snapshot: `export_snapshot` returns rows as they are now, while they continue to change.

        Before a row changes for the first time, its old bytes are written to an unnamed file; writers wait for that
        disk, so memory stays bounded. A table has one snapshot at a time, during which rows cannot be removed or
        cleared.

        Args:
            table: number of the table.
            since: leave out rows that have not changed since the snapshot of this number; 0 for all rows.
            spill: options for the old bytes.
            buckets: bool [4096], whether to take the rows, and evicted ids, of each bucket; None for all. Rows on disk
                of other buckets are read, too, as only they say their id.

        Returns:
            The number of this snapshot, for `since` of a later one. Numbers increase.

        Raises:
            StoreError: a snapshot is in progress, or changes `since` are unknown (see `changes_since`). No snapshot
                begins.
        """

    def export_snapshot(self, table: int, shard: int, epoch: int, max_rows: int = 65536) -> tuple[Rows, bool]:
        """Returns the next rows of a snapshot, in row order, and whether there may be more.

        Returns up to `max_rows` + 4,096 rows, less those of buckets that the snapshot does not take. The shard is
        locked for 4,096 rows at a time.

        Raises:
            StoreError: the snapshot was ended, or its old rows could not be kept; the message gives the reason.
        """

    def snapshot_evicted(self, table: int, shard: int, epoch: int) -> NDArray[np.uint64]:
        """Returns ids of rows evicted between the `since` of the snapshot and the snapshot, possibly repeated."""

    def end_snapshot(self, table: int) -> None:
        """Ends the snapshot, even if it was not read to its end; no-op without one."""

    def begin_changes(self, table: int, whole: bool, removed_limit: int = 1 << 17) -> bool:
        """Begins a pass over the rows whose values have changed since the last pass, or over all rows.

        Passes serve one publisher, and are independent of snapshots: both may be read concurrently. From the first pass
        over all rows on, the store marks rows whose values change, two bits a row, and lists removed ids.

        Args:
            table: number of the table.
            whole: whether to take all rows. A copy of the table drops all its rows before it applies the pass.
            removed_limit: number of ids of removed rows that each shard lists between two passes, 8 bytes each.

        Returns:
            False if the changes are unknown: before the first pass, after more removals than `removed_limit`, if the
            last pass was not read to its end, and after `import_state`. Then begin again with `whole`.
        """

    def take_changes(self, table: int, shard: int, max_rows: int = 65536) -> tuple[RowChanges, bool]:
        """Returns the next changes of a pass (`max_rows`, or up to 4,096 more), and whether there may be more.

        The shard is locked for 4,096 rows at a time. Values are current. Changes and removals after a shard's pass has
        begun are in the next pass, unless their values were already taken. Once all shards have been read, a copy has
        each row that was not removed during the pass, with values at least as new as when the pass began.

        Raises:
            StoreError: there is no pass, or `import_state` has ended it. Or a row on disk cannot be read.
        """

    def end_changes(self, table: int) -> None:
        """Stops marking changes and frees the memory of marks; no-op without a pass."""
