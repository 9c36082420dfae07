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
    Contribution,
    LookedUp,
    Packed,
    PackedGradients,
    PublishOrder,
    PublishStatus,
    PushHeader,
    RowsSet,
    RowStaleness,
    RowState,
    StoredRows,
    UpdateCounts,
)

__all__ = ["EmbeddingPS", "EmbeddingWorker", "RowChunk", "SnapshotInfo", "StatePiece"]


class RowChunk(NamedTuple):
    """Whole rows of one shard, for checkpoints.

    Attributes:
        table: name of the table.
        shard: internal slice of the PS that the rows are from.
        arrays: the columns of `persia.store.Rows`: `ids` uint64 `[n]`, `embeddings` float32 `[n, dim]`, `state`
            float32 `[n, width]`, `update_count`, `last_step` and `stamp` uint32 `[n]`. Embeddings have the dtype of
            their table; bfloat16 as its bits, uint16.
    """

    table: str
    shard: int
    arrays: dict[str, np.ndarray]


class SnapshotInfo(NamedTuple):
    """Answer of a PS that has begun a store snapshot.

    Attributes:
        numbers: by table, the number of this snapshot, for `since` of a later one.
        whole: whether all rows are in it. That may be so even if only changes were requested: they are not known after
            a restart, or after very many evictions.
    """

    numbers: dict[str, int]
    whole: bool


class StatePiece(NamedTuple):
    """A part of the state of a shard besides its rows, for checkpoints.

    Attributes:
        table: name of the table.
        shard: internal slice of the PS.
        array: one of the arrays of `persia.store.ShardState`: `clocks`, `counters` or `sketch`.
        start: index of its first value in that array.
        values: `[n]` values from there on.
    """

    table: str
    shard: int
    array: str
    start: int
    values: NDArray[Any]


class EmbeddingPS(Protocol):
    """Embedding parameter server: owns the rows of a partition of every table."""

    def tables(self) -> Mapping[str, Table]:
        """Returns the tables by name, with their optimizers filled in."""

    def lookup(self, ids: Packed[np.uint64], train: bool) -> Packed[np.float32]:
        """Looks up rows of distinct ids, by table.

        Args:
            ids: by table, uint64 `[n]`, distinct.
            train: whether missing ids may be admitted; otherwise they read as zeros and nothing changes.

        Returns:
            By table, rows as stored: float32 `[n, dim]`, or the words of 16-bit values; see `persia.types.values`.
        """

    @rpc.waits
    def push(self, header: PushHeader, gradients: PackedGradients) -> dict[str, UpdateCounts]:
        """Takes gradients of an NN worker, which are applied exactly once, as the mode decides.

        In `Sync` and `Hybrid` it returns when they are applied. Where a step combines the gradients of all NN workers,
        that needs those of all of them, for this step and the ones before. In asynchronous modes it returns when they
        are added to the sum of their step, or queued behind an earlier push. Send a push without gradients to every PS,
        too: it counts.

        Args:
            header: sender and step; the learning-rate schedule and `last_step` of the rows follow the step.
            gradients: by table.

        Returns:
            By table, the outcome of the gradients. The counts of a step go to one call: where it is combined to that of
            the lowest rank, in asynchronous modes to the one that completes the step. The others get none.

        Raises:
            StoreError: an unknown table, or arrays that do not fit; nothing is held or applied.
            DeadlineError: gradients of the step did not arrive in time; the error names the NN workers. The gradients
                of this call stay held, and it may be repeated.
            StalePushError: the NN workers have restarted since, or this one has left out a step.
        """

    def statistics(self) -> dict[str, dict[str, int]]:
        """Returns counters by table: rows, bytes, hits, misses, admitted, evicted, absent gradients, ..."""

    def row_staleness(self) -> RowStaleness:
        """Returns the staleness of rows in asynchronous modes."""

    def export_rows(self) -> Iterator[RowChunk]:
        """Yields all rows, in chunks of bounded size; each row is of one moment."""

    def begin_snapshot(self, name: str, since: Mapping[str, int], directory: str, live: bool = False) -> SnapshotInfo:
        """Begins a store snapshot: `snapshot_rows` returns the rows as they are now while training continues.

        Returns at once. A repetition changes nothing; an unfinished snapshot of another name is dropped.

        Args:
            name: of the snapshot, unique.
            since: by table, `SnapshotInfo.numbers` of an earlier snapshot: take only changes since. Empty for all rows.
            directory: where to keep rows that change before they are read; the directory for temporary files is used if
                this PS does not have it.
            live: return rows as they are when they are read, each of one moment, and keep none.
        """

    def snapshot_rows(self, name: str) -> Iterator[RowChunk]:
        """Yields the rows of a snapshot, in chunks of bounded size, shard by shard; to be read once.

        Raises:
            StoreError: there is no snapshot of this name (any more), or its disk was full; training is unharmed.
        """

    def snapshot_removed(self, name: str) -> Iterator[RowChunk]:
        """Yields ids evicted between `since` and the snapshot, as chunks with `ids` only; none if it is whole."""

    def end_snapshot(self, name: str) -> None:
        """Ends a snapshot; an unknown one is no error."""

    def publish(self, order: PublishOrder) -> PublishStatus:
        """Begins to publish the rows in the background, from a snapshot on; a repetition changes nothing.

        A publisher of another epoch ends before. `import_rows` and `import_state` end the epoch, as rows go back, and
        so does a restart: begin another one then.

        Returns:
            See `published`.

        Raises:
            CheckpointError: the URL is not valid.
            MissingExtraError: a package for the URL's file system is not installed.
        """

    def published(self) -> PublishStatus:
        """Returns how far this PS has published; an epoch of -1 if it does not, or not any more."""

    def approve(self, run: str, ticket: int) -> None:
        """Lets readers see the entry that waits for approval; no-op if that is another one.

        Args:
            run: `PublishOrder.run` of its epoch.
            ticket: `PublishStatus.waiting`.
        """

    @rpc.waits
    def end_publishing(self, last: bool) -> PublishStatus:
        """Ends publishing, if it has begun, and returns how far it came.

        Args:
            last: publish what has changed until now before, and retry for 30 s. `PublishStatus.complete` says whether
                that has succeeded.
        """

    def import_rows(self, chunk: RowChunk) -> None:
        """Imports rows; rows of the same ids are replaced.

        Without the column `state`, or with one of another width, rows start with the optimizer's initial state and an
        update count of 0. Embeddings may have another dtype than the table; they are rounded to the nearest.

        Raises:
            StoreError: there is no such table, a column is missing, embeddings are neither float32, float16 nor uint16,
                or values do not fit the dtype of the table. None of the rows was imported.
        """

    def contains(self, ids: Packed[np.uint64]) -> Packed[np.bool_]:
        """Returns by table whether each id has a row; reads only."""

    def read_rows(self, table: str, ids: NDArray[np.uint64], state: bool) -> StoredRows:
        """Reads rows of ids, which may repeat; nothing is admitted, touched or counted.

        Args:
            table: name of the table.
            ids: uint64 `[n]`.
            state: also read the optimizer's state.

        Raises:
            StoreError: there is no such table.
        """

    def set_rows(
        self,
        call: int,
        table: str,
        ids: NDArray[np.uint64],
        values: NDArray[np.float32],
        state: RowState | None,
    ) -> RowsSet:
        """Inserts or overwrites rows, which become the most recently used ones of their table.

        Args:
            call: random number that identifies the call. A repetition has no effect and gets the same answer; after a
                restart of the PS it sets the same rows again, and counts them as replaced.
            table: name of the table.
            ids: uint64 `[n]`, distinct.
            values: float32 `[n, dim]`.
            state: of the optimizer. None keeps that of existing rows; new rows get the optimizer's initial state.

        Raises:
            StoreError: there is no such table, arrays do not fit it, or a checkpoint is being read from it; then some
                of the rows may be set.
        """

    def export_state(self) -> Iterator[list[StatePiece]]:
        """Yields the state besides the rows (clocks, counters, admission sketches), in lists of bounded size."""

    def import_state(self, pieces: Sequence[StatePiece]) -> None:
        """Imports state after the rows, into a quiescent PS of the same capacity, shards and admission."""

    def end_import(self) -> None:
        """Prepares evictions of tables with hardly any space left, so that the first request does not wait for that.

        Called after the last `import_rows` or `import_state`. Blocks for about 25 ms for 1,000,000 rows.
        """

    def switch(self, mode: Mode, generation: int, step: int) -> None:
        """Switches to another mode from `step` on; no gradients may be held.

        Args:
            mode: the mode.
            generation: of the NN workers.
            step: next global step.

        Raises:
            PersiaError: gradients are held; drain first.
        """

    def drain(self, generation: int, step: int, held: int) -> dict[str, UpdateCounts]:
        """Applies the `held` gradients that have arrived of `step`, in an asynchronous mode.

        Raises:
            PersiaError: this PS holds another number of gradients, so it is out of phase.
        """


class EmbeddingWorker(Protocol):
    """Embedding worker (Persia paper, Algorithm 1): buffers ID features, removes duplicates, routes.

    With `compression="fp16"` rows and gradients travel as float16 with a scale per row. Rows of tables of 16-bit values
    travel as they are stored, with and without it.
    """

    @rpc.waits
    def register(self, id_features: Mapping[str, IdColumn]) -> int:
        """Buffers the ID features of a batch and returns its batch id. A repeated call registers another batch.

        Blocks while the buffer is full.

        Raises:
            DeadlineError: the buffer stayed full.
            MovedError: this embedding worker is leaving; register with another one.
        """

    def lookup(self, batch_id: int, train: bool = True) -> LookedUp:
        """Looks up the rows of a registered batch.

        Args:
            batch_id: what `register` returned.
            train: ids may be admitted, and the batch stays registered until its push or release. Otherwise nothing
                changes, and the batch is forgotten; the one that an NN worker has pushed last can still be read.

        Raises:
            StaleBatchError: the batch is unknown here: pushed, released, expired, or of an earlier incarnation.
        """

    def distinct_ids(self, batch_id: int) -> Packed[np.uint64]:
        """Returns the distinct ids of a registered batch by table, in the order of its rows.

        Raises:
            StaleBatchError: the batch is unknown here.
        """

    def lookup_part(self, batch_id: int, wanted: Packed[np.bool_]) -> LookedUp:
        """Looks up some rows of a registered batch for training, where the NN worker has the others.

        Args:
            batch_id: what `register` returned.
            wanted: by table, bool `[unique ids]`, in the order of `distinct_ids`: the rows to return. Indices in the
                result are those of all rows, and so are gradients to push.

        Raises:
            StaleBatchError: the batch is unknown here.
            StoreError: `wanted` does not fit the ids of the batch.
        """

    @rpc.waits
    def push(self, header: PushHeader, contributions: Sequence[Contribution]) -> dict[str, UpdateCounts]:
        """Sends the sum of the gradients of these batches to the PSs as one update, and forgets the batches.

        Every PS gets a push, also when it owns no row of it, and also without contributions: it counts. A repetition
        of one of an NN worker's last pushes gets the same answer.

        Args:
            header: passed on to the PSs.
            contributions: of batches that were looked up here; none for a push without data.

        Returns:
            By table, the outcome of the gradients over all PSs.

        Raises:
            StaleBatchError: a batch is unknown; nothing is sent.
            DeadlineError: a PS was late, or something that it waits for.
        """

    def release(self, batch_id: int) -> None:
        """Forgets a batch that will have no gradient; an unknown one is no error."""

    def evaluate(self, id_features: Mapping[str, IdColumn]) -> LookedUp:
        """Looks up rows for evaluation: nothing is admitted, touched or buffered."""

    def statistics(self) -> dict[str, int]:
        """Returns counters: batches buffered, registered, looked up, pushed, released, expired; rows of gradients."""
