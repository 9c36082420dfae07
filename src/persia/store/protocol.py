"""The interface of an embedding store, and the records that it hands out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from persia.store.config import TableConfig
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
        last_step: uint32 [rows], global step or token of the last one; 0 unless the table keeps it, see
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
    """Where and how a store keeps the old bytes of rows while a snapshot is read.

    Attributes:
        directory: of the file for those that do not fit in memory; it must be on a disk of this machine.
        buffer_bytes: memory per shard, and once more while it is written.
        evicted_limit: ids of evicted rows that each shard remembers between two snapshots, 8 bytes each.
        live: keep no old rows: rows are exported as they are when they are read, each of one moment. Tables with rows
            on disk keep old rows nevertheless, as rows that move would be left out, or read twice.
    """

    directory: str
    buffer_bytes: int = 1 << 20
    evicted_limit: int = 1 << 18
    live: bool = False


class RowChanges(NamedTuple):
    """Changes of rows, for a copy of a table: it drops `removed` and then sets `ids`.

    Attributes:
        removed: uint64 [n], evicted or expired, repetitions included.
        ids: uint64 [rows], each once in a pass.
        embeddings: float32 [rows, dim], whatever the dtype of the table.
    """

    removed: NDArray[np.uint64]
    ids: NDArray[np.uint64]
    embeddings: NDArray[np.float32]


class EmbeddingStore(Protocol):
    """Hash tables from id to embedding row, bounded by eviction.

    A full table evicts the least recently used row; one with rows on disk, those that have been there for the longest.

    An embedding PS, its snapshots and its regions use nothing else of a store. Tables are numbered in the order of
    creation. Methods are safe to call from several threads, and block while another thread works on the same shard.
    """

    def create_table(
        self, config: TableConfig, files: str | None = None, attach: bool = False, spill: str | None = None
    ) -> int:
        """Adds a table and returns its number.

        Memory is used as rows arrive.

        Args:
            config: of the table.
            files: None keeps rows in the memory of this process. A path keeps them in the files path.0, path.1, ...,
                one per shard, on any file system. The files outlive the process, however it ends: a row that was being
                written at that moment is as it was before. One process uses them at a time.
            attach: continue with the rows in these files instead of creating new ones. Blocks for about a second per
                10 M rows if a process died while it inserted.
            spill: path of the files for rows that leave memory, path.0, path.1, ..., one per shard, on a disk of this
                machine; for tables with `TableConfig.memory_rows`, and for these only. Rows there are as much part of
                the table as others: each method reads them, and lookups in training and updates bring them back to
                memory. The files outlive the process if `files` do, else they have no name.

        Raises:
            ConfigError: the name is in use, or only one of `spill` and `TableConfig.memory_rows` is given.
            StoreError: the address space cannot be reserved; the files are in use, damaged, missing, or of another
                table.
            StoreFullError: there is not enough space for the files.
        """

    def recovery(self, table: int) -> dict[str, int]:
        """Returns how an attached table was found: its `shards`, and how many of them were in which condition.

        `busy`: in use when the process died. `undone`: a half-written row was rolled back. `open`: a push was
        interrupted, and continues where it was when it is repeated. `rebuilt`: the index was rebuilt from the rows.
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

        In training a missing id is admitted (or not) and initialised, and every row found becomes recently used. In
        evaluation nothing changes. Ids without a row get zeros. Repeated ids are allowed. Within a shard, ids are
        served in order: if the batch exceeds the capacity, later ids may evict earlier ones, whose values stay right.

        Args:
            tables: numbers of the tables, each at most once.
            counts: per table, the number of ids.
            ids: uint64 [sum of counts], contiguous.
            out: float32 [sum of count * row_words] to write to, contiguous: rows as stored, which are embeddings in
                tables of dtype float32; see `persia.types.values` for others.
            train: admit missing ids, and count the lookup as a use of the rows.

        Raises:
            StoreError: an argument does not fit, and nothing has been changed; or a row on disk cannot be read.
            StoreFullError: the table cannot grow, in memory or on disk. Some of the ids may have got rows; repeat the
                call when there is free space.
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

        With `client` and `sequence` (both above 0) each shard applies the push exactly once, however often it is sent.

        Args:
            tables: numbers of the tables, each at most once.
            counts: per table, the number of ids.
            ids: uint64 [sum of counts], contiguous.
            gradients: float32 [sum of count * dim], contiguous.
            lrs: per table, the learning rate.
            step: global step or token; see `keep_last_steps`.
            client: identity of the sender; 0 is not tracked.
            sequence: number of the push at that client, rising from 1; 0 is not tracked.

        Returns:
            Per table, the outcome of its gradients.

        Raises:
            StoreError: an argument does not fit, and nothing has been changed: the message names the table. Or a row on
                disk cannot be read.
            StoreFullError: rows on disk cannot come back to memory, as others have to leave it and the disk is full. A
                tracked push continues where it was when it is repeated; the counts of the call that failed are lost.
        """

    def age(self, table: int, by: int) -> None:
        """Lets time pass in a table with a `TableConfig.ttl`, in the unit of that; no-op for others.

        Rows leave that training has not met for `ttl`, at the latest a sixteenth of it and the time between two calls
        later. They are absent from then on: lookups in training give them new rows, subject to admission, and exports
        leave them out. Their memory goes to new rows, each of which looks at a few rows for some; until then `size`
        counts them. `statistics` never counts them as evicted. Imported rows count as met.
        """

    def keep_last_steps(self, table: int) -> None:
        """Keeps the step of each row's last update or import from now on, 4 bytes a row; no-op if it is kept already.

        Rows that were there before have 0 until they are updated. Regions keep it for good.

        Raises:
            StoreFullError: there is not enough space. Repeat the call when there is.
        """

    def last_steps(self, table: int, ids: NDArray[np.uint64]) -> NDArray[np.uint32]:
        """Returns the step of each row's last update, uint32 [n]; 0 for a new row and for none. Touches nothing.

        All are 0 unless the table keeps them.
        """

    def contains(self, table: int, ids: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Returns whether each id has a row: bool [n]."""
        return self.peek(table, ids)[0]

    def peek(self, table: int, ids: NDArray[np.uint64]) -> tuple[NDArray[np.bool_], Rows]:
        """Returns whole rows without touching them: (found [n], rows [n]); columns of ids without a row are zero."""

    def size(self, table: int) -> int:
        """Returns the number of rows of a table, in memory and on disk; see `age` for rows that have left."""

    def memory_bytes(self, table: int) -> int:
        """Returns the bytes of rows, index, sketch, headers and marks of changed rows in use."""

    def statistics(self, table: int) -> dict[str, int]:
        """Returns counts of ids looked up in training and of gradients.

        Ids: lookups, hits, misses, admitted, rejected, evicted. Gradients: applied, absent, nonfinite, duplicates.
        """

    def tier_counts(self, table: int) -> dict[str, int]:
        """Returns counts of rows on disk; all are 0 in a table without.

        `rows`: on disk now. `disk_bytes`: of the files now. `unreadable`: segments of the files that could not be read
        when their rows were to move, so they stay as they are, and calls that have failed as a record that they needed
        is damaged. Since creation: `spilled`, rows that left memory;
        `read`, rows that calls read from disk; `promoted`, rows that came back to memory; `compacted`, rows written
        again to free the space of others.
        """

    def iterate_rows(self, table: int, *, max_rows: int = 65536) -> Iterator[tuple[int, Rows]]:
        """Yields all rows of a table in parts: (shard, rows), shard by shard, in row order."""

    def import_rows(self, table: int, rows: Rows) -> None:
        """Writes rows as exported: known ids are overwritten, others appended in order.

        A table of 16-bit values rounds what it does not have exactly to the nearest, within its `value_bound`.

        Imported into an empty table of the same shards, in the order of export and followed by `import_state`, a table
        continues bit for bit, later evictions included (but for those by midpoint). In a full shard the less recent of
        the incoming and the oldest row is evicted. Afterwards `changes_since` is 0.
        """

    def end_import(self, table: int) -> None:
        """Prepares evictions after the last `import_rows` or `import_state`: else the first eviction waits for a scan.

        Has no effect on shards that are prepared, or have space for more than a sixteenth of their rows. Blocks for
        about 25 ms for 1,000,000 rows of the others.
        """

    def export_state(self, table: int, shard: int) -> ShardState:
        """Returns the state of a shard besides its rows: clocks, client sequences, counters, admission sketch, ages."""

    def import_state(self, table: int, shard: int, state: ShardState) -> None:
        """Restores `export_state`. Capacity, shards and admission must be those of the exporting table."""

    def changes_since(self, table: int) -> int:
        """Returns the number of the last snapshot, or 0 if changes since then are not known.

        They are not known before the first snapshot, nor after more evictions than `Spill.evicted_limit`.
        """

    def begin_snapshot(self, table: int, since: int, spill: Spill) -> int:
        """Begins a store snapshot: `export_snapshot` returns rows as they are now, while they go on changing.

        Before a row changes for the first time, its old bytes go to an unnamed file; writers wait for that disk, so
        memory stays bounded. One snapshot of a table at a time. Rows cannot be imported or cleared meanwhile.

        Args:
            table: number of the table.
            since: leave out rows that have not changed since the snapshot of this number; 0 takes all.
            spill: where to keep old bytes.

        Returns:
            The number of this snapshot, for `since` of a later one. Numbers rise.

        Raises:
            StoreError: a snapshot is under way, or changes `since` are not known (see `changes_since`). It begins none.
        """

    def export_snapshot(self, table: int, shard: int, epoch: int, max_rows: int = 65536) -> tuple[Rows, bool]:
        """Returns the next rows of a snapshot, in row order (up to 4,096 above `max_rows`), and if there may be more.

        The shard is locked for 4,096 rows at a time.

        Raises:
            StoreError: the snapshot was ended, or its old rows could not be kept: the message says why.
        """

    def snapshot_evicted(self, table: int, shard: int, epoch: int) -> NDArray[np.uint64]:
        """Returns ids of rows evicted between the `since` of the snapshot and the snapshot, repetitions included."""

    def end_snapshot(self, table: int) -> None:
        """Ends the snapshot, whether it was read or not; no-op without one."""

    def begin_changes(self, table: int, whole: bool, removed_limit: int = 1 << 17) -> bool:
        """Begins a pass over the rows whose values have changed since the last pass, or over all rows.

        Passes serve one publisher, and are independent of snapshots: both may be read at once. From the first pass over
        all rows on, the store marks rows whose values change, two bits a row, and lists ids that are removed.

        Args:
            table: number of the table.
            whole: take all rows. A copy of the table drops all its rows before it applies the pass.
            removed_limit: ids of removed rows that each shard lists between two passes, 8 bytes each.

        Returns:
            False if it is not known what has changed, as it is before the first pass, after more removals than
            `removed_limit`, if the last pass was not read to its end, and after `import_state`. Then begin again with
            `whole`.
        """

    def take_changes(self, table: int, shard: int, max_rows: int = 65536) -> tuple[RowChanges, bool]:
        """Returns the next changes of a pass (`max_rows`, or up to 4,096 more), and whether there may be more.

        The shard is locked for 4,096 rows at a time. Values are those of now. What changes or is removed after a
        shard's pass has begun is in the next pass, unless its values have been taken. Once all shards have been read, a
        copy has each row that has not been removed meanwhile with values at least as new as when the pass began.

        Raises:
            StoreError: there is no pass, or it is lost, as `import_state` ends it. Or a row on disk cannot be read.
        """

    def end_changes(self, table: int) -> None:
        """Marks no more changes and frees the memory of marks; no-op without a pass."""
