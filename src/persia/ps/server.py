"""The embedding parameter server (Persia paper, section 4.2.2): the rows of a partition, and their optimizer."""

from __future__ import annotations

import dataclasses
import functools
import operator
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import msgspec
import numpy as np

from persia import batching
from persia.errors import StoreError
from persia.modes import Dense, Mode, RowLimit, decode, encode
from persia.ps.ages import RowAges
from persia.ps.latest_reading import LatestReading
from persia.ps.movable import MovableServer
from persia.ps.opening import open_tables
from persia.ps.options import ServerOptions
from persia.ps.recent_changes import RecentChanges
from persia.ps.regions import Regions
from persia.ps.row_chunks import RowSetter, chunk_rows
from persia.ps.row_moves import RowMoves, owned_rows
from persia.ps.row_publishing import RowPublishing
from persia.ps.snapshots import StoreSnapshots
from persia.ps.space import SpaceWait
from persia.ps.state_transfer import export_rows, export_state, import_state
from persia.ps.storage_access import StorageAccess
from persia.ps.table_configs import learning_rate
from persia.ps.table_numbers import TableNumbers
from persia.pushes.accumulator import GradientAccumulator, average_step
from persia.pushes.sequencer import PushSequencer
from persia.pushes.step_barrier import ArrivedPush, StepBarrier, completes_step
from persia.retry import Deadline
from persia.schema import EmbeddingOptimizer, Table
from persia.services import RowChunk, SnapshotInfo, StatePiece
from persia.telemetry.metrics import Readings, metrics_of
from persia.types import (
    MERGED,
    RANK_BITS,
    Floats,
    FreshRows,
    Gradients,
    Ids,
    Moment,
    Packed,
    PublishOrder,
    PublishStatus,
    PushHeader,
    RowsAhead,
    RowsSet,
    RowStaleness,
    RowState,
    RowsToWrite,
    StoredRows,
    UpdateCounts,
    WrittenPart,
)

__all__ = ["EmbeddingServer"]

DISK_COUNTS = {
    "rows": "disk_rows",
    "disk_bytes": "disk_bytes",
    "spilled": "spilled",
    "read": "disk_reads",
    "promoted": "promoted",
    "compacted": "compacted",
    "unreadable": "disk_unreadable",
}
"""Names of metrics, by name in `EmbeddingStore.tier_counts`."""

Statistics = dict[str, dict[str, int]]
"""Counters by table and name."""


class EmbeddingServer(MovableServer, StorageAccess):
    """The rows of all tables in a partition. Safe to call from several threads; calls block until they are done.

    Args:
        tables: tables by name; tables without an optimizer get `optimizer`.
        optimizer: the default optimizer.
        mode: decides when and for which rows gradients are applied.
        seed: seed of row initialisation and admission.
        threads: number of threads that share the work of a call, over tables and their shards.
        options: number of NN workers until the first `switch`, deadlines, and location of the rows.

    Raises:
        ConfigError: the declared capacity of the tables exceeds the memory of this host.
        StoreError: the regions are in use, damaged, or of other tables.
        StoreFullError: there is no space for the regions.
    """

    def __init__(
        self,
        tables: Mapping[str, Table],
        optimizer: EmbeddingOptimizer,
        mode: Mode,
        seed: int,
        threads: int,
        options: ServerOptions | None = None,
    ) -> None:
        self._options = options or ServerOptions()
        self._sequencer: PushSequencer[dict[str, UpdateCounts]] = PushSequencer()
        self._row_staleness = RowStaleness()
        self._pool = batching.ThreadPool(threads)
        self._store = self._options.store(self._pool)
        self._scratch = batching.Scratch()
        self._tables = {
            name: msgspec.structs.replace(table, optimizer=table.optimizer_or(optimizer))
            for name, table in tables.items()
        }
        self._regions = Regions(self._options.regions) if self._options.regions is not None else None
        self._space = SpaceWait(self._options.timeout)
        open_tables(self._store, self._tables, optimizer, seed, self._options, self._regions)
        self._numbers = TableNumbers(self._store, self._tables)
        self._index = self._numbers.by_name
        ttls = {self._index[name]: table.ttl for name, table in self._tables.items() if table.ttl is not None}
        self._ages = RowAges(self._store, ttls)
        self._changes = RecentChanges()
        self._owned = owned_rows(self._options, self._regions)
        self._snapshots = StoreSnapshots(self._store, self._index, self._owned)
        self._publishing = RowPublishing(self._store, self._index)
        self._setter = RowSetter(self._store, self._space)
        self._moves = RowMoves(self._store, self._numbers, self._snapshots, self._space, self._options, self._regions)
        # A proxy avoids a reference cycle, so that rows are freed with the last reference to this PS.
        myself = cast("EmbeddingServer", weakref.proxy(self))
        self._latest = LatestReading(lambda: (myself.statistics(), myself._publishing.metrics()))
        self._nn_workers = (self._regions.nn_workers if self._regions is not None else 0) or self._options.nn_workers
        stored_mode = self._regions.mode if self._regions is not None else ""
        self._adopt(decode(stored_mode) if stored_mode else mode)

    def _adopt(self, mode: Mode, before: tuple[int, int] | None = None) -> None:
        """Starts a mode, or continues in the mode of an earlier process.

        Args:
            mode: the mode.
            before: generation and number of the step before the first one; None if unknown.
        """
        ranks = range(self._nn_workers)
        all_reduce, alone = mode.dense() is Dense.ALL_REDUCE, mode.group(len(ranks), 1) == 1
        self._prepare(mode)
        self._mode = mode
        self._sums = GradientAccumulator(mode.reduction)
        self._barrier_per_rank = all_reduce and alone
        if not all_reduce or alone:  # Turns are not steps.
            before = None
        regions = self._regions
        myself = cast("EmbeddingServer", weakref.proxy(self))  # As for the latest reading.
        if regions is not None and before is not None:
            regions.keep_step(0, *before)
        self._barriers = [
            StepBarrier(
                members,
                self._options.timeout,
                mode.arrive,
                functools.partial(EmbeddingServer._apply_step, myself, number),
                applied=regions.last_step(number) if regions is not None else before,
                gaps=self._barrier_per_rank,  # Such a barrier gets only pushes of several parts.
            )
            for number, members in enumerate([[rank] for rank in ranks] if self._barrier_per_rank else [ranks])
        ]

    def _prepare(self, mode: Mode) -> None:
        """Records the last steps of rows from now on if the mode depends on them. Raises `StoreFullError`."""
        if mode.dense() is not Dense.ALL_REDUCE:
            for index in self._index.values():
                self._store.keep_last_steps(index)

    def tables(self) -> Mapping[str, Table]:
        """Returns the tables by name, with their optimizers filled in; None for those that are not trainable."""
        return self._tables

    def lookup(self, ids: Mapping[str, Ids], train: bool, map_version: int = 0) -> Packed[np.float32]:
        """Returns rows of distinct ids, by table; see `persia.services.EmbeddingPS`."""
        self._moves.check(map_version)
        if not isinstance(ids, Packed):
            try:
                ids = Packed.of(ids, np.uint64)
            except ValueError as error:
                raise StoreError(f"lookup: {error}; ids are uint64 [n].") from error
        numbers, _, words = self._numbers.places(ids.names)
        rows = self._scratch.floats(sum(map(operator.mul, ids.counts, words)))
        self._space.retry(lambda: self._store.lookup_packed(numbers, ids.counts, ids.buffer, rows, train), "lookup")
        return Packed(ids.names, ids.counts, rows, words)

    def lookup_ahead(self, ids: Packed[np.uint64], map_version: int = 0) -> RowsAhead:
        """Looks up rows for training, ahead of their use; see `persia.services.EmbeddingPS`."""
        seen = self._changes.now()  # Before the lookup, which may then have newer rows, never older ones.
        return RowsAhead(self.lookup(ids, True, map_version), seen)

    def refresh(
        self, ids: Packed[np.uint64], seen: Moment, late: Packed[np.uint64] | None = None, map_version: int = 0
    ) -> FreshRows:
        """Returns the rows that may have changed since a moment, and late ones; see `persia.services.EmbeddingPS`."""
        self._moves.check(map_version)
        if ids.widths is not None or sum(ids.counts) != len(ids.buffer):
            raise StoreError(f"refresh: expected ids uint64 [n] by table, got {ids!r} with widths {ids.widths}.")
        numbers, _, words = self._numbers.places(ids.names)
        now = self._changes.now()
        places, changed = self._changes.changed(numbers, ids, seen)
        rows = self._scratch.floats(sum(map(operator.mul, changed.counts, words)))
        fresh = Packed(ids.names, changed.counts, rows, words)
        if changed.buffer.size:
            found = self._store.read_packed(numbers, changed.counts, changed.buffer, rows)
            if not found.all():  # Evicted since; the caller keeps what it has.
                places, fresh = batching.keep(places, found), batching.keep(fresh, found)
        looked_up = None if late is None else self.lookup(late, True, map_version)
        return FreshRows(places, cast("Packed[np.float32 | np.float16]", fresh), [now], late=looked_up)

    def recorded_lookup(self, ids: Mapping[str, Ids], batch_id: int, map_version: int = 0) -> Packed[np.float32]:
        """Looks up rows for training, and records it; see `persia.services.RecordableRows`."""
        self._moves.check(map_version)  # Before it is recorded.
        if (journal := self.journal) is None:
            return self.lookup(ids, True, map_version)
        return journal.read(batch_id, lambda: self.lookup(ids, True, map_version))

    def close(self) -> None:
        """Removes the regions and their rows, if there are any. Must be the last call."""
        self._latest.close()
        self._moves.close()
        if self._regions is not None:
            self._regions.remove()

    def push(
        self, header: PushHeader, gradients: Mapping[str, Gradients], map_version: int = 0
    ) -> dict[str, UpdateCounts]:
        """Applies gradients, each once; see `persia.services.EmbeddingPS`."""
        self._moves.check(map_version)
        packed = self._numbers.packed(gradients)
        if header.slot >= 0:
            return self._push_token(header, packed)
        arrived = ArrivedPush(header, packed, self._space.deadline())
        if not self._barrier_per_rank:
            return self._barriers[0].push(header.step, arrived)
        self._sequencer.refuse_earlier(header.generation)  # These barriers learn of a generation by its first push.
        if header.parts == 1 and completes_step(self._mode.arrive, header.step):
            return self._apply([arrived], header.client, header.sequence, packed, header.step)
        if header.rank >= len(self._barriers):
            raise StoreError(
                f"Invalid rank {header.rank} in a push: this PS serves {len(self._barriers)} NN workers. Start PSs "
                "and NN workers with the same number of NN workers.",
                rank=header.rank,
            )
        return self._barriers[header.rank].push(header.sequence, arrived)

    def switch(self, mode: Mode, generation: int, step: int, nn_workers: int = 0) -> None:
        """Switches to another mode from `step` on; see `persia.services.EmbeddingPS`."""
        self._sequencer.begin(generation, step)
        for barrier in self._barriers:
            barrier.renew(generation, step)
        deadline = self._space.deadline()
        # Steps that need space come first: a process that starts in the stored mode must not wait for space.
        self._space.retry(lambda: self._prepare(mode), "switch", deadline)
        if (regions := self._regions) is not None:
            regions.forget_steps()  # Training is quiesced, so no answer is outstanding.
            self._space.retry(lambda: regions.remember(encode(mode)), "switch", deadline)
        self._expect(nn_workers or self._nn_workers)
        self._adopt(mode, (generation, step - 1))
        self._ages.renumber()

    def drain(self, generation: int, step: int, held: int) -> dict[str, UpdateCounts]:
        """Applies the gradients of an incomplete step; see `persia.services.EmbeddingPS`."""
        counts: dict[str, UpdateCounts] = {}

        def apply() -> None:
            client = MERGED | generation << RANK_BITS
            counts.update(self._apply([], client, step + 1, self._sums.take(), step))

        self._sequencer.drain(generation, step, held, apply)
        return counts

    def _push_token(self, header: PushHeader, gradients: Mapping[str, Gradients]) -> dict[str, UpdateCounts]:
        """Adds a push of an asynchronous mode to the sum of the current step; the last push applies the sum.

        Returns the counts of the step that this call completes, so that the counts of all calls add up.
        """

        def work(step: int, last: bool) -> dict[str, UpdateCounts]:
            limit = self._mode.row_limit(step, header.token)
            weighed = {
                table: (part, self._weights(table, part.ids, header, limit)) for table, part in gradients.items()
            }
            self._sums.add(weighed, header.rows)
            if (journal := self.journal) is not None:
                journal.add(header, empty=not gradients)
            if not last:
                return {}
            return self._apply([], header.merged_client, step + 1, self._sums.take(), step)

        return self._sequencer.push(header, work) or {}

    def _weights(self, table: str, ids: Ids, header: PushHeader, limit: RowLimit) -> Floats:
        """Returns the weight of each row, 0 or 1, by the step of its last change."""
        touched = self._store.last_steps(self._index[table], ids).astype(np.int64)
        counts = limit.admits(touched)
        if header.rows:
            self._row_staleness.add(limit.last_steps(touched) - header.token, counts)
        return counts.astype(np.float32)

    def _apply_step(self, barrier: int, arrived: Sequence[ArrivedPush]) -> dict[str, UpdateCounts]:
        """Applies a complete step of barrier number `barrier`: one update with the average gradient."""
        header = arrived[0].header
        average = average_step(arrived, self._mode.reduction, self._pool, self._scratch)
        if self._barrier_per_rank:
            client, sequence, turn = header.client, header.sequence, header.sequence
        else:
            client, sequence, turn = header.merged_client, header.step + 1, header.step
        counts = self._apply(arrived, client, sequence, average, header.step)
        if self._regions is not None:
            self._regions.keep_step(barrier, header.generation, turn)  # Before the first answer.
        return counts

    def _apply(
        self,
        arrived: Sequence[ArrivedPush],
        client: int,
        sequence: int,
        gradients: Mapping[str, Gradients],
        step: int,
    ) -> dict[str, UpdateCounts]:
        """Updates rows with the sum of some pushes; pushes in `arrived` are not in the journal yet."""
        deadlines = [push.deadline for push in arrived if push.deadline is not None]
        deadline = min(deadlines, key=lambda deadline: deadline.left, default=None)  # The first caller gives up first.
        if (journal := self.journal) is None:
            return self._update(client, sequence, gradients, step, deadline)
        return journal.apply(lambda: self._update(client, sequence, gradients, step, deadline), arrived)

    def _update(
        self, client: int, sequence: int, gradients: Mapping[str, Gradients], step: int, deadline: Deadline | None
    ) -> dict[str, UpdateCounts]:
        ids, rows = (packed := self._numbers.packed(gradients)).ids, packed.rows
        numbers, _, _ = self._numbers.places(ids.names)
        rates = [learning_rate(self._tables[name], step) for name in ids.names]

        def update() -> list[UpdateCounts]:  # If the disk was full, a tracked push continues where it stopped.
            return self._store.update_packed(
                numbers, ids.counts, ids.buffer, rows.buffer, rates, step=step, client=client, sequence=sequence
            )

        with self._changes.updating(numbers, ids):
            counts = self._space.retry(update, "push", deadline)
        self._ages.updated(step)
        self._publishing.applied(step)
        return dict(zip(ids.names, counts, strict=True))

    def statistics(self) -> Statistics:
        """Returns counters by table, with `rows` and `bytes` in use, and counters of rows on disk if there are any.

        Blocks while a call holds the lock of a shard, which may wait for a disk.
        """
        return {
            name: {
                "rows": self._store.size(index),
                "bytes": self._store.memory_bytes(index),
                **self._store.statistics(index),
                **self._disk_counts(index),
            }
            for name, index in self._index.items()
        }

    def _disk_counts(self, index: int) -> dict[str, int]:
        if not self._store.config(index).memory_rows:
            return {}
        return {DISK_COUNTS[name]: count for name, count in self._store.tier_counts(index).items()}

    def latest_statistics(self) -> Statistics:
        """Returns `statistics`, or the last known ones if new ones take longer than a second."""
        return self._latest.get()[0][0]

    def observe(self) -> Readings:
        """Returns `statistics` and `row_staleness` as metrics. Blocks for at most a second; see `LatestReading`.

        `ps_metrics_late_seconds` is the time by which newer metrics are delayed.
        """
        (statistics, published), late = self._latest.get()
        metrics = [f for table, counts in statistics.items() for f in metrics_of("ps", counts, table=table)]
        metrics += metrics_of("ps_slot", dataclasses.asdict(self._row_staleness))
        metrics += metrics_of("ps", {"metrics_late_seconds": late})
        return Readings(metrics + published, [])

    def row_staleness(self) -> RowStaleness:
        """Returns the staleness of rows in asynchronous modes."""
        return self._row_staleness

    # --- rows by id -------------------------------------------------------------------------------------------

    def contains(self, ids: Packed[np.uint64], map_version: int = 0) -> Packed[np.bool_]:
        """Returns whether each id has a row, by table."""
        self._moves.check(map_version)
        return Packed.of(
            {name: self._store.contains(self._numbers.number(name), own) for name, own in ids.items()}, np.bool_
        )

    def read_rows(self, table: str, ids: Ids, state: bool, map_version: int = 0) -> StoredRows:
        """Returns rows of ids without changing anything; see `persia.services.EmbeddingPS`."""
        self._moves.check(map_version)
        exists, rows = self._store.peek(self._numbers.number(table), ids)
        row_state = RowState(rows.state, rows.update_count, rows.last_step) if state else None
        return StoredRows(ids, exists, rows.embeddings, row_state)

    def set_rows(
        self, call: int, table: str, ids: Ids, values: Floats, state: RowState | None, map_version: int = 0
    ) -> RowsSet:
        """Inserts or overwrites rows, once per call; see `persia.services.EmbeddingPS`."""
        self._moves.check(map_version)
        number = self._numbers.number(table)
        try:
            with self._changes.updating([number], self._numbers.keys(table, ids)):
                return self._setter.set(call, number, ids, values, state)
        finally:
            self._moves.check(map_version)  # If it was sealed meanwhile, the rows may have come too late.

    # --- checkpoints ------------------------------------------------------------------------------------------

    def export_rows(self, table: str | None = None) -> Iterator[RowChunk]:
        """Yields all rows, of a table or of all, in chunks of about 64 MiB; each row is consistent."""
        tables = self._index.values() if table is None else [self._numbers.number(table)]
        return self._owned.of(export_rows(self._store, tables), self.buckets())

    def begin_snapshot(self, name: str, since: Mapping[str, int], directory: str, live: bool = False) -> SnapshotInfo:
        """Begins a store snapshot; see `persia.services.EmbeddingPS`."""
        return self._snapshots.begin(name, since, directory, live)

    def snapshot_rows(self, name: str) -> Iterator[RowChunk]:
        """Yields the rows of a store snapshot."""
        return self._snapshots.rows(name)

    def snapshot_removed(self, name: str) -> Iterator[RowChunk]:
        """Yields the ids evicted before a store snapshot."""
        return self._snapshots.removed(name)

    def write_snapshot(self, name: str, order: RowsToWrite) -> Iterator[WrittenPart]:
        """Writes a store snapshot to a checkpoint; see `persia.services.EmbeddingPS`."""
        return self._snapshots.write(name, order)

    def hurry_snapshot(self, name: str) -> None:
        """Ends the pauses of `write_snapshot`."""
        self._snapshots.hurry(name)

    def end_snapshot(self, name: str) -> None:
        """Ends a store snapshot; no file of it is written after this returns."""
        self._snapshots.end(name)

    def publish(self, order: PublishOrder) -> PublishStatus:
        """Begins publishing the rows; see `persia.services.EmbeddingPS`."""
        return self._publishing.begin(order)

    def published(self) -> PublishStatus:
        """Returns the progress of publishing of this PS."""
        return self._publishing.status()

    def approve(self, run: str, ticket: int) -> None:
        """Lets readers see an entry; see `persia.services.EmbeddingPS`."""
        self._publishing.approve(run, ticket)

    def end_publishing(self, last: bool) -> PublishStatus:
        """Ends publishing; see `persia.services.EmbeddingPS`."""
        return self._publishing.end(last=last)

    def import_rows(self, chunk: RowChunk, map_version: int = 0) -> None:
        """Imports rows; rows of the same ids are replaced. See `persia.services.EmbeddingPS`."""
        self._moves.check(map_version)
        index = self._numbers.number(chunk.table)
        config = self._store.config(index)
        rows = chunk_rows(config, chunk)
        self._publishing.go_back()
        try:
            self._space.retry(lambda: self._store.import_rows(index, rows), "import_rows")
        finally:
            self._changes.forget()
            self._moves.check(map_version)  # As for `set_rows`.

    def export_state(self) -> Iterator[list[StatePiece]]:
        """Yields the state besides rows: clocks, counters and admission sketches, in lists of about 64 MiB.

        The record of applied pushes is left out, as a resumed run has new clients.
        """
        return export_state(self._store, self._index)

    def import_state(self, pieces: Sequence[StatePiece]) -> None:
        """Imports state after the rows, into a quiescent PS.

        Raises:
            StoreError: a table, shard or array does not exist, or is shorter: use the same capacity, shards and
                admission. Pieces of other shards may have been imported.
        """
        self._publishing.go_back()
        import_state(self._store, self._numbers, pieces)
        self._ages.renumber()

    def end_import(self) -> None:
        """Prepares evictions after an import; see `persia.services.EmbeddingPS`."""
        for index in self._index.values():
            self._store.end_import(index)
