"""The interfaces of embedding parameter servers and embedding workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from persia import rpc
from persia.batching.id_column import IdColumn
from persia.modes import Mode
from persia.schema import Table
from persia.types import (
    BucketMap,
    Contribution,
    FreshRows,
    LookedUp,
    MarkPath,
    Moment,
    Packed,
    PackedGradients,
    PartCheck,
    PlaceCheck,
    PublishOrder,
    PublishStatus,
    PushHeader,
    RowsAhead,
    RowsRead,
    RowsSet,
    RowStaleness,
    RowState,
    RowsToRead,
    RowsToWrite,
    StoredRows,
    UpdateCounts,
    WrittenPart,
    WrittenState,
)

__all__ = ["EmbeddingPS", "EmbeddingWorker", "RowChunk", "SnapshotInfo", "StatePiece"]


class RowChunk(NamedTuple):
    """Whole rows of one shard, for checkpoints.

    Attributes:
        table: name of the table.
        shard: shard of the PS that has the rows.
        arrays: the columns of `persia.store.Rows`: `ids` uint64 `[n]`, `embeddings` float32 `[n, dim]`, `state`
            float32 `[n, width]`, `update_count`, `last_step` and `stamp` uint32 `[n]`. Embeddings have the dtype of
            their table; bfloat16 as its bits, uint16.
    """

    table: str
    shard: int
    arrays: dict[str, np.ndarray]


class SnapshotInfo(NamedTuple):
    """Response of a PS that has started a store snapshot.

    Attributes:
        numbers: number of this snapshot by table, for `since` of a later one.
        whole: whether it contains all rows. It may even if only changes were requested, as changes are unknown after a
            restart, or after very many evictions.
    """

    numbers: dict[str, int]
    whole: bool


class StatePiece(NamedTuple):
    """A part of the state of a shard other than its rows, for checkpoints.

    Attributes:
        table: name of the table.
        shard: shard of the PS.
        array: one of the arrays of `persia.store.ShardState`: `clocks`, `counters` or `sketch`.
        start: index of the first value in that array.
        values: values from `start` on, `[n]`.
    """

    table: str
    shard: int
    array: str
    start: int
    values: NDArray[Any]


class EmbeddingPS(Protocol):
    """Embedding parameter server: owns the rows of a partition of every table.

    Methods with ids have the version of the bucket map by which their caller has routed them, 0 for the first map of a
    run. They raise `StaleMapError`, without any effect, if the PS has another version.
    """

    def buckets(self) -> BucketMap:
        """Returns the PS of each bucket of ids, by which callers route ids; the same at all PSs."""

    def tables(self) -> Mapping[str, Table]:
        """Returns the tables by name, with their optimizers filled in."""

    def lookup(self, ids: Packed[np.uint64], train: bool, map_version: int = 0) -> Packed[np.float32]:
        """Looks up rows of distinct ids, by table.

        Args:
            ids: distinct ids by table, uint64 `[n]`.
            train: whether missing ids may be admitted; otherwise their rows are zeros and nothing changes.
            map_version: version of the bucket map by which the ids were routed.

        Returns:
            Rows as stored, by table: float32 `[n, dim]`, or the words of 16-bit values; see `persia.types.half_floats`.
        """

    def lookup_ahead(self, ids: Packed[np.uint64], map_version: int = 0) -> RowsAhead:
        """Looks up rows for training like `lookup`, ahead of their use: `refresh` brings them up to date."""

    def refresh(
        self, ids: Packed[np.uint64], seen: Moment, late: Packed[np.uint64] | None = None, map_version: int = 0
    ) -> FreshRows:
        """Returns the rows that may have been updated since they were looked up ahead, and looks up the others.

        Rows that were looked up ahead do not change. Those that are no longer in their table are left out: the caller
        keeps the values that it has.

        Args:
            ids: the ids that were looked up ahead, by table.
            seen: the moment that their rows are of.
            late: ids that were not, by table: they are looked up for training. None if there are none.
            map_version: version of the bucket map by which all ids were routed.
        """

    @rpc.waits
    def push(self, header: PushHeader, gradients: PackedGradients, map_version: int = 0) -> dict[str, UpdateCounts]:
        """Receives gradients of an NN worker, which are applied exactly once, as the mode decides.

        In `Sync` and `Hybrid` it returns once they are applied. If a step combines the gradients of all NN workers,
        that requires the gradients of all of them for this step and earlier ones. In asynchronous modes it returns once
        they are added to the sum of the current step of this PS. Pushes without gradients count, so send them to every
        PS, too.

        Args:
            header: sender and step; the step determines the learning rate and `last_step` of the rows, except in
                asynchronous modes, in which the PS counts steps.
            gradients: gradients by table.
            map_version: version of the bucket map by which they were routed.

        Returns:
            Counts of the gradients by table. One call gets the counts of a step: in a combined step the call of the
            lowest rank, in asynchronous modes the call that completes the step. The others get none.

        Raises:
            StoreError: a table is unknown, or arrays do not match it; nothing is stored or applied.
            DeadlineError: gradients of the step did not arrive in time; the error names the NN workers. The gradients
                of this call remain stored, and the call may be repeated.
            StalePushError: the NN workers have restarted since, or this NN worker has skipped a step.
        """

    def statistics(self) -> dict[str, dict[str, int]]:
        """Returns counters by table: rows, bytes, hits, misses, admitted, evicted, absent gradients, ..."""

    def row_staleness(self) -> RowStaleness:
        """Returns the staleness of rows in asynchronous modes."""

    def export_rows(self, table: str | None = None) -> Iterator[RowChunk]:
        """Yields all rows, of a table or of all, in chunks of bounded size. Each row is consistent by itself."""

    def begin_snapshot(self, name: str, since: Mapping[str, int], directory: str, live: bool = False) -> SnapshotInfo:
        """Starts a store snapshot: `snapshot_rows` returns the current rows while training continues.

        Returns immediately. A repeated call has no effect; an unfinished snapshot with another name is dropped.

        Args:
            name: unique name of the snapshot.
            since: `SnapshotInfo.numbers` of an earlier snapshot, by table: takes only changes since. Empty for all
                rows.
            directory: directory for rows that change before they are read; if this PS does not have it, the directory
                for temporary files is used.
            live: whether to return rows as they are when they are read, each consistent by itself, and copy none.
        """

    def snapshot_rows(self, name: str) -> Iterator[RowChunk]:
        """Yields the rows of a snapshot in chunks of bounded size, shard by shard. Call it once.

        Raises:
            StoreError: there is no snapshot with this name (any more), or its disk was full; training is unaffected.
        """

    def snapshot_removed(self, name: str) -> Iterator[RowChunk]:
        """Yields ids evicted between `since` and the snapshot, as chunks with only `ids`; none if it is whole."""

    def end_snapshot(self, name: str) -> None:
        """Ends a snapshot. `write_snapshot` of it writes nothing after this returns. No-op if it is unknown."""

    def check_place(self, url: str, path: MarkPath, checksum: str) -> PlaceCheck:
        """Checks whether this PS sees a file in a directory of checkpoints, and can write there.

        Args:
            url: the directory: an absolute path, or any URL that fsspec supports.
            path: path of the file, relative to the directory. Only names that a writer gives such files are allowed,
                as the PS writes next to it.
            checksum: checksum of the file.
        """

    def write_snapshot(self, name: str, order: RowsToWrite) -> Iterator[WrittenPart]:
        """Writes the rows of a snapshot, and the ids of removed rows, straight to a checkpoint. Call it once.

        It writes only while the next item is asked for, so a caller that gives up, or dies, ends it. All files are
        synced when it ends.

        Yields:
            Each file, once it is written.

        Raises:
            StoreError: as `snapshot_rows`.
            CheckpointError: a file cannot be written.
        """

    def write_state(self, order: RowsToWrite) -> Iterator[WrittenState]:
        """Writes what `export_state` yields straight to a checkpoint, like `write_snapshot`, while nothing trains.

        Yields:
            Each file, once it is written.

        Raises:
            CheckpointError: a file cannot be written.
        """

    def hurry_snapshot(self, name: str) -> None:
        """Lets `write_snapshot` use the processors without limit from now on. No-op if the snapshot is unknown."""

    def check_row_parts(
        self, url: str, step: int | None, checksum: str, share: int, shares: int
    ) -> Iterator[PartCheck]:
        """Reads and checks every n-th part of the rows of a checkpoint, those that it builds on included.

        Args:
            url: directory of checkpoints, or of one step.
            step: the step; None if `url` is its directory.
            checksum: checksum of its manifest.
            share: number of the first part to check.
            shares: number of parts from one to the next.

        Yields:
            One result without bytes if this PS sees the checkpoint; then one for each part.

        Raises:
            CheckpointError: this PS does not see the checkpoint.
            MissingExtraError: a package for the URL's file system is not installed.
        """

    def read_own_rows(self, order: RowsToRead) -> Iterator[RowsRead]:
        """Imports the rows of a checkpoint that this PS owns, straight from the storage; see `import_rows`.

        Yields:
            The number of rows of each part, once they are imported; and an item without a table once the checkpoint is
            open, and after each part of the state besides rows, so that no deadline is for more than one file.

        Raises:
            StaleMapError: this PS has another bucket map.
            CheckpointError: a part is missing or damaged; some rows have been imported.
            StoreError: as `import_rows`.
        """

    def publish(self, order: PublishOrder) -> PublishStatus:
        """Starts to publish the rows in the background, from a snapshot on. A repeated call has no effect.

        Ends the publisher of another epoch first. `import_rows` and `import_state` end the epoch, as they reset rows,
        and so does a restart: start another epoch then.

        Returns:
            See `published`.

        Raises:
            CheckpointError: the URL is not valid.
            MissingExtraError: a package for the URL's file system is not installed.
        """

    def published(self) -> PublishStatus:
        """Returns the publishing progress of this PS; the epoch is -1 if it does not publish (any more)."""

    def approve(self, run: str, ticket: int) -> None:
        """Makes the entry that waits for approval visible to readers. No-op if another entry waits.

        Args:
            run: `PublishOrder.run` of its epoch.
            ticket: `PublishStatus.waiting`.
        """

    @rpc.waits
    def end_publishing(self, last: bool) -> PublishStatus:
        """Ends publishing, if it has started, and returns its progress.

        Args:
            last: whether to publish all changes until now first, with retries for 30 s. `PublishStatus.complete` is
                set if that succeeds.
        """

    def import_rows(self, chunk: RowChunk, map_version: int = 0) -> None:
        """Imports rows. Replaces rows with the same ids.

        Without the column `state`, or with a column of another width, rows start with the optimizer's initial state and
        an update count of 0. Embeddings may have another dtype than the table; they are rounded to the nearest.

        Raises:
            StoreError: the table does not exist, a column is missing, embeddings are neither float32, float16 nor
                uint16, or values exceed the dtype of the table. None of the rows was imported.
        """

    def contains(self, ids: Packed[np.uint64], map_version: int = 0) -> Packed[np.bool_]:
        """Returns, by table, whether each id has a row. Read-only."""

    def read_rows(self, table: str, ids: NDArray[np.uint64], state: bool, map_version: int = 0) -> StoredRows:
        """Reads rows of ids, which may repeat. Nothing is admitted, touched or counted.

        Args:
            table: name of the table.
            ids: ids, uint64 `[n]`.
            state: whether to also read the optimizer state.
            map_version: version of the bucket map by which the ids were routed.

        Raises:
            StoreError: the table does not exist.
        """

    def set_rows(
        self,
        call: int,
        table: str,
        ids: NDArray[np.uint64],
        values: NDArray[np.float32],
        state: RowState | None,
        map_version: int = 0,
    ) -> RowsSet:
        """Inserts or overwrites rows, which become the most recently used ones of their table.

        Args:
            call: random number that identifies the call. A repeated call has no effect and the same result; after a
                restart of the PS it sets the same rows again, and counts them as replaced.
            table: name of the table.
            ids: distinct ids, uint64 `[n]`.
            values: embeddings, float32 `[n, dim]`.
            state: optimizer state. None keeps the state of existing rows; new rows get the initial state.
            map_version: version of the bucket map by which the ids were routed.

        Raises:
            StoreError: the table does not exist, or arrays do not match it.
        """

    def export_state(self) -> Iterator[list[StatePiece]]:
        """Yields the state other than the rows (clocks, counters, admission sketches), in lists of bounded size."""

    def import_state(self, pieces: Sequence[StatePiece]) -> None:
        """Imports state after the rows, into a quiescent PS of the same capacity, shards and admission."""

    def end_import(self) -> None:
        """Prepares evictions of almost full tables, so that the first request does not wait for them.

        Called after the last `import_rows` or `import_state`. Blocks for about 25 ms per 1,000,000 rows.
        """

    def switch(self, mode: Mode, generation: int, step: int, nn_workers: int = 0) -> None:
        """Switches to another mode from `step` on. No gradients may be pending.

        Args:
            mode: the mode.
            generation: generation of the NN workers.
            step: next global step.
            nn_workers: number of NN workers that push from now on; 0 for as many as before.

        Raises:
            PersiaError: gradients are pending; drain first.
        """

    def drain(self, generation: int, step: int, held: int) -> dict[str, UpdateCounts]:
        """Applies the `held` gradients of `step` that have arrived, in an asynchronous mode.

        Raises:
            PersiaError: this PS has another number of gradients, so it is out of phase.
        """


class EmbeddingWorker(Protocol):
    """Embedding worker (Persia paper, Algorithm 1): buffers ID features, deduplicates and routes ids.

    With `compression="fp16"` rows and gradients are sent as float16 with a scale per row. Rows of tables of 16-bit
    values are always sent as stored.
    """

    @rpc.waits
    def register(self, id_features: Mapping[str, IdColumn]) -> int:
        """Buffers the ID features of a batch and returns its batch id. A repeated call registers another batch.

        Blocks while the buffer is full.

        Raises:
            DeadlineError: the buffer remained full.
            MovedError: this embedding worker is leaving; register with another one.
        """

    def lookup(self, batch_id: int, train: bool = True, pool: bool = False) -> LookedUp:
        """Looks up the rows of a registered batch.

        Args:
            batch_id: id that `register` returned.
            pool: whether the embedding worker may pool features; see `LookedUp.pooled`. Gradients to push are then
                those of their values. What is only read, with `train` False, is pooled more often, as no gradients
                follow.
            train: whether ids may be admitted, and the batch remains registered until its push or release. Otherwise
                nothing changes, and the batch is removed; the last batch that an NN worker pushed can still be read.

        Raises:
            StaleBatchError: the batch is unknown: pushed, released, expired, or of an earlier incarnation.
        """

    def lookup_ahead(self, batch_id: int, pool: bool = False, recent: int = 0) -> LookedUp:
        """Looks up the rows of a registered batch for training, ahead of their use: `refresh` brings them up to date.

        Args:
            batch_id: id that `register` returned.
            pool: as for `lookup`. A refresh returns the values of all samples of which a row has changed.
            recent: number of batches that were looked up ahead here and are trained before this one. Their rows will
                have changed by then, so they may be left out; see `LookedUp.left_out`. 0 leaves out no row.

        Raises:
            StaleBatchError: the batch is unknown.
        """

    def refresh(self, batch_id: int, seen: list[Moment], left_out: Packed[np.bool_] | None = None) -> FreshRows:
        """Returns the rows of a batch that may have been updated since they were looked up ahead, or were left out.

        Args:
            batch_id: id that `register` returned.
            seen: the moments that its rows are of, from `lookup_ahead` or an earlier `refresh`.
            left_out: from `lookup_ahead`, until a `refresh` has returned.

        Raises:
            StaleBatchError: the batch is unknown.
            StoreError: `seen` does not have a moment for each PS, or `left_out` does not match the ids of the batch.
        """

    def distinct_ids(self, batch_id: int) -> Packed[np.uint64]:
        """Returns the distinct ids of a registered batch by table, in the order of its rows.

        Raises:
            StaleBatchError: the batch is unknown.
        """

    def lookup_part(self, batch_id: int, wanted: Packed[np.bool_]) -> LookedUp:
        """Looks up some rows of a registered batch for training. The NN worker has the other rows.

        Args:
            batch_id: id that `register` returned.
            wanted: mask of the rows to return, by table, bool `[unique ids]`, in the order of `distinct_ids`. Indices
                in the result refer to all rows, and gradients to push cover all rows.

        Raises:
            StaleBatchError: the batch is unknown.
            StoreError: `wanted` does not match the ids of the batch.
        """

    @rpc.waits
    def push(self, header: PushHeader, contributions: Sequence[Contribution]) -> dict[str, UpdateCounts]:
        """Sends the sum of the gradients of these batches to the PSs as one update, and removes the batches.

        Every PS gets a push, even if it owns none of the rows or there are no contributions, as every push counts. A
        repetition of one of an NN worker's last pushes gets the same result.

        Args:
            header: header for the PSs.
            contributions: gradients of batches that were looked up here; empty for a push without data.

        Returns:
            Counts of the gradients over all PSs, by table.

        Raises:
            StaleBatchError: a batch is unknown; nothing is sent.
            DeadlineError: a PS, or an NN worker that it waits for, was late.
        """

    def release(self, batch_id: int) -> None:
        """Removes a batch that will have no gradient. No-op if it is unknown."""

    def evaluate(self, id_features: Mapping[str, IdColumn], pool: bool = False) -> LookedUp:
        """Looks up rows for evaluation. Nothing is admitted, touched or buffered. `pool` is as for `lookup`."""

    def follow_map(self, version: int) -> None:
        """Continues with the newest bucket map of the PSs, which has at least this version. Never with an older one.

        Requests that a PS refuses because of its map lead to the same; see docs/reference/moves.md.

        Raises:
            StaleMapError: no PS has a map of this version.
        """

    def statistics(self) -> dict[str, int]:
        """Returns counters: batches buffered, registered, looked up, pushed, released, expired; rows of gradients."""
