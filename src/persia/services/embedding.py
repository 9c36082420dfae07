"""Embedding parameter servers and embedding workers, as others see them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from persia.batching.batch import IdColumn
from persia.schema import Table
from persia.types import (
    Contribution,
    JournalRecord,
    LookedUp,
    Packed,
    PackedGradients,
    PushHeader,
    RowsAt,
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
            float32 `[n, width]`, `update_count`, `last_step` and `stamp` uint32 `[n]`.
    """

    table: str
    shard: int
    arrays: dict[str, np.ndarray]


class SnapshotInfo(NamedTuple):
    """What a PS says when it has made a cut.

    Attributes:
        epochs: by table: the number of this cut, for `since` of a later one.
        whole: whether all rows are in it, also where only changes were asked for: what has changed is not known
            after a restart or very many evictions.
    """

    epochs: dict[str, int]
    whole: bool


class StatePiece(NamedTuple):
    """A part of what a shard knows besides its rows, for checkpoints.

    Attributes:
        table: name of the table.
        shard: internal slice of the PS.
        array: which of the arrays of `persia.store.ShardState`: `clocks`, `counters` or `sketch`.
        start: index of its first value in that array.
        values: so many of its values, `[n]`.
    """

    table: str
    shard: int
    array: str
    start: int
    values: NDArray[Any]


class EmbeddingPS(Protocol):
    """Embedding parameter server: owns the rows of a partition of every table."""

    def tables(self) -> Mapping[str, Table]:
        """The tables by name, their optimizers filled in."""

    def lookup(self, ids: Packed[np.uint64], train: bool) -> Packed[np.float32]:
        """Rows of distinct ids, by table.

        Args:
            ids: by table, uint64 `[n]`, distinct.
            train: whether missing ids may be admitted; otherwise they read as zeros and nothing changes.

        Returns:
            By table, float32 `[n, dim]`.
        """

    def lookup_at(self, ids: Packed[np.uint64], train: bool) -> RowsAt:
        """As `lookup`, and of which version the rows are."""

    def record(self) -> None:
        """Keeps a journal from now on; lookups and updates exclude each other meanwhile."""

    def journal(self) -> JournalRecord:
        """Ends that: the pushes that took effect, in this order."""

    def push(self, header: PushHeader, gradients: PackedGradients) -> dict[str, UpdateCounts]:
        """Takes gradients of an NN worker; returns once they are applied, as the mode says, each once.

        In a mode that holds gradients this blocks until those of all NN workers have come. Send a push without
        gradients too, to every PS: it counts.

        Args:
            header: who pushes, and for which step; the learning-rate schedule and `last_step` of the rows follow it.
            gradients: by table.

        Returns:
            By table, what became of the gradients. The counts of a step that was summed over NN workers go to the
            lowest rank, the others get none.

        Raises:
            StoreError: an unknown table, or arrays that do not fit; nothing is held or applied.
            DeadlineError: gradients of the step did not come in time; it names the NN workers. What was sent stays
                held, and the call may be repeated.
            StalePushError: the NN workers have started anew since, or the step is not the one in work.
        """

    def statistics(self) -> dict[str, dict[str, int]]:
        """Counters by table: rows, bytes, hits, misses, admitted, evicted, absent gradients, ..."""

    def slots(self) -> RowStaleness:
        """How stale rows were in asynchronous modes."""

    def export_rows(self) -> Iterator[RowChunk]:
        """All rows, in chunks of bounded size; each row is of one moment."""

    def begin_cut(self, name: str, since: Mapping[str, int], directory: str, live: bool = False) -> SnapshotInfo:
        """Marks this moment, so that `cut_rows` gives the rows as they are now while training goes on.

        Returns at once. A repetition changes nothing; a cut of another name that was not ended is given up.

        Args:
            name: of the cut, unique.
            since: by table, `SnapshotInfo.epochs` of an earlier cut: only what has changed since. Empty for all rows.
            directory: where rows that change before they are read may be kept; a directory that this PS does not
                have is replaced by that for temporary files.
            live: give rows as they are when they are read, each of one moment, and keep none.
        """

    def cut_rows(self, name: str) -> Iterator[RowChunk]:
        """The rows of a cut, in chunks of bounded size, shard by shard; to be read once.

        Raises:
            StoreError: there is no cut of this name (any more), or its disk was full; training is unharmed.
        """

    def cut_removed(self, name: str) -> Iterator[RowChunk]:
        """Ids that were evicted between `since` and the cut, as chunks that have `ids` only; none if it is whole."""

    def end_cut(self, name: str) -> None:
        """Forgets a cut; an unknown one is no error."""

    def import_rows(self, chunk: RowChunk) -> None:
        """Puts rows back; rows of the same ids are replaced.

        Without the column `state`, or with one of another width, rows begin with the optimizer's first state and
        an update count of 0.
        """

    def contains(self, ids: Packed[np.uint64]) -> Packed[np.bool_]:
        """By table, which ids have a row; reads only."""

    def read_rows(self, table: str, ids: NDArray[np.uint64], state: bool) -> StoredRows:
        """Rows of ids, which may repeat; nothing is admitted, touched or counted.

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
            call: number of the call, its own at random. A repetition has no effect and gets the same answer; after a
                restart of the PS it sets the same rows again, and counts them as replaced.
            table: name of the table.
            ids: uint64 `[n]`, distinct.
            values: float32 `[n, dim]`.
            state: of the optimizer. None keeps that of existing rows, and gives new ones the optimizer's first state.

        Raises:
            StoreError: there is no such table, arrays do not fit it, or a checkpoint is being read from it; then some
                of the rows may be set.
        """

    def export_state(self) -> Iterator[list[StatePiece]]:
        """What besides the rows decides the future: clocks, counters, admission sketches. In lists of bounded size."""

    def import_state(self, pieces: Sequence[StatePiece]) -> None:
        """Puts pieces back, after the rows, into a PS at rest: of the same capacity, shards and admission."""

    def switch(self, mode: str, generation: int, step: int) -> None:
        """Another mode from `step` on; nothing may be held.

        Args:
            mode: `persia.modes.encode`.
            generation: of the NN workers.
            step: global step that comes next.

        Raises:
            PersiaError: gradients are held: drain first.
        """

    def drain(self, generation: int, step: int, held: int) -> dict[str, UpdateCounts]:
        """Applies the `held` gradients that have arrived of `step`, in an asynchronous mode.

        Raises:
            PersiaError: this PS has others: it is out of phase.
        """


class EmbeddingWorker(Protocol):
    """Embedding worker (Persia paper, Algorithm 1): buffers ID features, removes duplicates, routes.

    With `compression="fp16"` rows and gradients travel as float16 with a scale per row.
    """

    def register(self, id_features: Mapping[str, IdColumn]) -> int:
        """Buffers the ID features of a batch and returns its batch id. A repetition registers another batch.

        Blocks while the buffer is full.

        Raises:
            DeadlineError: the buffer stayed full.
            MovedError: this embedding worker is leaving; register with another one.
        """

    def lookup(self, batch_id: int, train: bool = True) -> LookedUp:
        """Rows of a registered batch.

        Args:
            batch_id: what `register` returned.
            train: if so, ids may be admitted, and the batch stays registered until its push or release. Otherwise
                nothing changes, and the batch is forgotten.

        Raises:
            StaleBatchError: the batch is unknown here: pushed, released, expired, or of an earlier incarnation.
        """

    def push(self, header: PushHeader, contributions: Sequence[Contribution]) -> dict[str, UpdateCounts]:
        """Sends the sum of the gradients of these batches to the PSs as one update, and forgets the batches.

        Every PS gets a push, also when it owns no row of it, and also without contributions: it counts. A repetition
        of an NN worker's last push gets the same answer.

        Args:
            header: passed on to the PSs.
            contributions: of batches that were looked up here; none for a push without data.

        Returns:
            By table, what became of the gradients, over all PSs.

        Raises:
            StaleBatchError: a batch is unknown; nothing is sent.
            DeadlineError: a PS, or what it waits for, was late.
        """

    def release(self, batch_id: int) -> None:
        """Forgets a batch that will have no gradient; an unknown one is no error."""

    def evaluate(self, id_features: Mapping[str, IdColumn]) -> LookedUp:
        """Rows for evaluation: read-only, nothing is admitted, touched or buffered."""

    def statistics(self) -> dict[str, int]:
        """Counters: batches buffered, registered, looked up, pushed, released, expired; rows of gradients."""
