"""The embedding worker (Persia paper, section 4.1, Algorithm 1)."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypeVar, cast

import numpy as np

from persia import batching, rpc
from persia.batching import RoutedBatch
from persia.batching.id_column import IdColumn
from persia.errors import ConfigError, StaleBatchError, StalePushError
from persia.rpc.fan_out import call_all
from persia.schema import Schema
from persia.services import EmbeddingPS, RecordableRows
from persia.telemetry.metrics import Metric, Readings, metrics_of
from persia.types import (
    INCARNATION_BITS,
    BucketMap,
    Contribution,
    Floats,
    FreshRows,
    LookedUp,
    Moment,
    Packed,
    PushHeader,
    UpdateCounts,
    WireRows,
    sum_counts,
)
from persia.worker.buffer import BatchBuffer, WorkerOptions
from persia.worker.feature_pooler import BufferedBatch, FeaturePooler, LookupState
from persia.worker.map_follower import MapFollower, map_of
from persia.worker.recent_lookups import RecentLookups
from persia.worker.routing import Router

__all__ = ["Worker"]

T = TypeVar("T")

Lookup: TypeAlias = Callable[[Packed[np.uint64], T, int], Packed[np.float32]]
"""A lookup at one PS: of ids, with an argument and the version of the bucket map."""

OUTCOMES = 64
"""Pushes per NN worker whose outcome is retained for repeated calls; far more than it has in flight."""


class _Outcome(NamedTuple):
    """The outcome of a completed push."""

    batch_ids: frozenset[int]
    counts: dict[str, UpdateCounts]


class Worker(MapFollower):
    """Buffers the ID features of batches, removes duplicates over the whole batch, and routes rows and gradients.

    Its state does not outlive a batch, so it needs no recovery. Safe to call from several threads.

    Args:
        schema: schema of the model, which maps features to tables.
        servers: the embedding PSs, by partition. The first one is asked for the bucket map.
        threads: number of threads for duplicate removal, not shared with other roles.
        rank: rank of this embedding worker, 0 to 255.
        incarnation: incarnation of this embedding worker, 1 to 65,535; increases with each restart.
        options: bounds, deadlines, compression.
        newest_map: returns the newest bucket map of the PSs, and the PSs of this map; called when a PS refuses a
            request because it has another map. None if the map never changes.

    Raises:
        ConfigError: the rank or the incarnation does not fit a batch id, or the PSs are more or fewer than in their
            bucket map.
    """

    def __init__(
        self,
        schema: Schema,
        servers: Sequence[EmbeddingPS],
        threads: int = 1,
        rank: int = 0,
        incarnation: int = 1,
        options: WorkerOptions | None = None,
        newest_map: Callable[[], tuple[BucketMap, Sequence[EmbeddingPS]]] | None = None,
    ) -> None:
        if not 0 <= rank < 256 or not 1 <= incarnation < 1 << INCARNATION_BITS:
            raise ConfigError(
                f"Rank {rank}, incarnation {incarnation} of an embedding worker does not fit a batch id: ranks are "
                "0 to 255, incarnations 1 to 65,535. Restart the cluster.",
                field="rank",
            )
        options = options or WorkerOptions()
        super().__init__(servers, Router(schema, map_of(servers), threads), newest_map, options.timeout)
        self._buffer: BatchBuffer[BufferedBatch] = BatchBuffer(rank, incarnation, options)
        self._compresses = options.compression == "fp16"
        self._tables = schema.resolved_tables()
        self._pooler = FeaturePooler(schema, options.pool_at, self._compresses, threads)
        self._recent = RecentLookups()
        self._counts: Counter[str] = Counter()
        self._traffic: Counter[tuple[str, str]] = Counter()
        """Bytes by kind and codec."""
        self._outcomes: dict[tuple[int, int, int], dict[int, _Outcome]] = {}
        """The last pushes of each (generation, rank, part), by sequence number, in case their replies were lost."""

        self._last_pushed: dict[int, tuple[int, RoutedBatch]] = {}
        """Batch id and ids of the last batch that each NN worker has pushed, for repeated reads; by rank."""

    def register(self, id_features: Mapping[str, IdColumn]) -> int:
        """Removes duplicates from a batch, buffers it and returns its batch id; blocks while the buffer is full.

        Raises:
            DeadlineError: the buffer stayed full.
            MovedError: this embedding worker is leaving.
        """
        return self._buffer.put(BufferedBatch(self._router.route(id_features), LookupState()))

    def lookup(self, batch_id: int, train: bool = True, pool: bool = False) -> LookedUp:
        """Looks up the rows of a registered batch; without `train`, only reads them and forgets the batch.

        With `pool`, features may be pooled here; see `persia.services.EmbeddingWorker`.

        The last batch that an NN worker has pushed can still be read.

        Raises:
            StaleBatchError: the batch is unknown, pushed, released, expired, or of another incarnation.
        """
        return self._by_map(lambda: self._lookup(batch_id, train, pool))

    def _lookup(self, batch_id: int, train: bool, pool: bool) -> LookedUp:
        lookups = [server.lookup for server in self._servers]
        if not train and (pushed := dict(self._last_pushed.values()).get(batch_id)) is not None:
            return self._rows(self._in_order(pushed), lookups, False, pool=pool, pushed=False)
        rows = self._look_up(batch_id, lookups, train, pool=pool, pushed=train)
        if not train:
            self.release(batch_id)
        return rows

    def lookup_ahead(self, batch_id: int, pool: bool = False, recent: int = 0) -> LookedUp:
        """Looks up the rows of a registered batch ahead of their use; see `persia.services.EmbeddingWorker`.

        Raises:
            StaleBatchError: the batch is unknown, pushed, released, expired, or of another incarnation.
        """
        return self._by_map(lambda: self._lookup_ahead(batch_id, pool, recent))

    def _lookup_ahead(self, batch_id: int, pool: bool, recent: int) -> LookedUp:
        servers = self._servers
        seen: list[Moment] = [Moment(0, 0)] * len(servers)

        def ahead(number: int, ids: Packed[np.uint64], _: bool, map_version: int) -> Packed[np.float32]:
            rows, seen[number] = servers[number].lookup_ahead(ids, map_version)
            return rows

        lookups = [functools.partial(ahead, number) for number in range(len(servers))]
        with self._sorted(batch_id) as (batch, state), state.lock:
            pool = pool and self._pooler.applies(batch)
            recent = 0 if pool else recent  # To pool them, all its rows are needed.
            if state.recent != recent:  # Else a repetition, to which all ids of the batch would be recent ones.
                state.left_out, state.recent = self._recent.add(batch.ids, recent), recent
            left_out = state.left_out
            wanted = None if left_out is None else batching.complement(left_out)
            rows = self._look_up(batch_id, lookups, True, wanted, pool=pool, keep=True)
        return rows._replace(seen=seen, left_out=left_out)

    def refresh(self, batch_id: int, seen: list[Moment], left_out: Packed[np.bool_] | None = None) -> FreshRows:
        """Returns the rows of a batch that may have changed or were left out; see `persia.services.EmbeddingWorker`.

        Raises:
            StaleBatchError: the batch is unknown, pushed, released, expired, or of another incarnation.
            StaleMapError: `seen` does not have a moment for each PS, as it is from before a move.
            StoreError: `left_out` does not match the ids of the batch.
        """
        servers = self._servers
        with self._buffer.use(batch_id) as (batch, state), state.lock:
            if len(seen) != len(servers):
                raise self._stale(len(seen), batch.buckets.version, len(servers))
            split = self._router.split(batch, left_out)
            answers = call_all(
                [
                    functools.partial(server.refresh, *self._router.ids_to_refresh(split, number, moment))
                    for number, (server, moment) in enumerate(zip(servers, seen, strict=True))
                ]
            )
            fresh = self._pooler.refreshed(batch, state, self._router.join_fresh(split, answers))
        if self._compresses:
            halves, scales = batching.encode_packed(cast("Packed[np.float32]", fresh.rows), self._tables)
            fresh = fresh._replace(rows=cast("Packed[np.float32 | np.float16]", halves), scales=scales)
        self._carried("refreshed_bytes", fresh.rows, fresh.scales)
        return fresh

    def distinct_ids(self, batch_id: int) -> Packed[np.uint64]:
        """Returns the distinct ids of a registered batch by table, in the order of its rows.

        Raises:
            StaleBatchError: the batch is unknown, pushed, released, expired, or of another incarnation.
        """
        with self._sorted(batch_id) as (batch, _):
            return batch.ids

    def lookup_part(self, batch_id: int, wanted: Packed[np.bool_]) -> LookedUp:
        """Looks up some rows of a registered batch for training; see `persia.services.EmbeddingWorker`.

        Raises:
            StaleBatchError: the batch is unknown, pushed, released, expired, or of another incarnation.
            StoreError: `wanted` does not match the ids of the batch.
        """
        return self._look_up(batch_id, [server.lookup for server in self._servers], True, wanted)

    def recorded_lookup(self, batch_id: int) -> LookedUp:
        """Looks up a batch for training, and records it at the PSs; see `persia.services.RecordableWorker`."""

        def look_up() -> LookedUp:
            servers = [rpc.cast_to(RecordableRows, server) for server in self._servers]
            return self._look_up(batch_id, [server.recorded_lookup for server in servers], batch_id)

        return self._by_map(look_up)

    def evaluate(self, id_features: Mapping[str, IdColumn], pool: bool = False) -> LookedUp:
        """Looks up the rows of a batch, read-only; nothing is buffered."""

        def look_up() -> LookedUp:
            lookups = [server.lookup for server in self._servers]
            return self._rows(self._router.route(id_features), lookups, False, pool=pool, pushed=False)

        return self._by_map(look_up)

    def push(self, header: PushHeader, contributions: Sequence[Contribution]) -> dict[str, UpdateCounts]:
        """Sends the summed gradients of the batches to every PS, even if a PS gets none, and forgets the batches.

        A repetition of a recent push of an NN worker is answered without the batches.

        Raises:
            StaleBatchError: a batch is unknown, pushed, released, expired, or of another incarnation; nothing is sent.
            StalePushError: the NN worker has already made a push of this number with other batches; nothing is sent.
        """
        batch_ids = frozenset(c.batch_id for c in contributions)
        if (known := self._outcome(header, batch_ids)) is not None:
            return known
        with contextlib.ExitStack() as used:
            try:
                batches = [used.enter_context(self._buffer.use(c.batch_id)).batch for c in contributions]
            except StaleBatchError:
                if (known := self._outcome(header, batch_ids)) is not None:
                    return known  # The repeated call has just ended.
                raise
            of_rows = [self._of_rows(batch, c) for batch, c in zip(batches, contributions, strict=True)]
            send = functools.partial(self._send, header, list(zip(batches, of_rows, strict=True)))
            # Gradients are in the order of the map by which their rows were looked up.
            counts = send() if batches else self._by_map(send)
        with self._lock:
            for old in [old for old in self._outcomes if old[0] < header.generation]:
                del self._outcomes[old]
            outcomes = self._outcomes.setdefault((header.generation, header.rank, header.part), {})
            outcomes[header.sequence] = _Outcome(batch_ids, counts)
            if len(outcomes) > OUTCOMES:
                del outcomes[min(outcomes)]
            if batches:
                self._last_pushed[header.rank] = contributions[-1].batch_id, batches[-1]
        for contribution in contributions:
            self._carried("gradient_bytes", contribution.gradients, contribution.scales)
            self._count("gradient_rows", sum(Packed.counts_of(contribution.gradients)))
            self._buffer.forget(contribution.batch_id, "pushed")
        return counts

    def _send(self, header: PushHeader, batches: Sequence[tuple[RoutedBatch, Contribution]]) -> dict[str, UpdateCounts]:
        servers = self._servers
        for batch, _ in batches:
            self._check_servers(batch, len(servers))
        gradients, version = self._router.gradients_for(batches)
        if len(gradients) != len(servers):  # Another map was adopted meanwhile.
            raise self._stale(len(gradients), version, len(servers))
        return sum_counts(
            call_all(
                [
                    functools.partial(server.push, header, part, version)
                    for server, part in zip(servers, gradients, strict=True)
                ]
            )
        )

    def _outcome(self, header: PushHeader, batch_ids: frozenset[int]) -> dict[str, UpdateCounts] | None:
        """Returns the outcome of a repeated push; None if the push is new."""
        with self._lock:
            outcomes = self._outcomes.get((header.generation, header.rank, header.part), {})
            known = outcomes.get(header.sequence)
            newest = max(outcomes, default=header.sequence)
        if known is not None:
            if batch_ids <= known.batch_ids:
                return known.counts
        elif not batch_ids or header.sequence > newest - OUTCOMES:
            return None
        raise StalePushError(
            f"NN worker {header.rank} made push {header.sequence} of generation {header.generation} before, with other "
            f"batches, and push {newest} is its newest. This one is not applied. Train with one EmbeddingCollection or "
            "Trainer in each run of a cluster.",
            rank=header.rank,
            sequence=header.sequence,
        )

    def release(self, batch_id: int) -> None:
        """Forgets a batch that will have no gradient; no-op for unknown batches."""
        self._buffer.forget(batch_id, "released")

    def retire(self) -> None:
        """Refuses new batches. Once `buffered` is 0, this embedding worker can end without loss."""
        self._buffer.retire()

    def statistics(self) -> dict[str, int]:
        """Returns counters: batches `buffered`; `registered`, `looked_up`, `pushed`, `released`, `expired` so far.

        `stale`: calls for an unknown batch; `gradient_rows`: rows of pushed gradients.
        """
        with self._lock:
            counts = {name: self._counts[name] for name in ("looked_up", "gradient_rows")}
        return {**self._buffer.statistics(), **counts}

    def observe(self) -> Readings:
        """Returns the counters as metrics, and the bytes of rows and gradients by codec."""
        with self._lock:
            traffic = [Metric(f"worker_{n}", float(v), {"codec": codec}) for (n, codec), v in self._traffic.items()]
        return Readings(metrics_of("worker", self.statistics()) + traffic, [])

    @property
    def buffered(self) -> int:
        """Number of batches between registration and push."""
        return len(self._buffer)

    def _look_up(
        self,
        batch_id: int,
        lookups: Sequence[Lookup[T]],
        argument: T,
        wanted: Packed[np.bool_] | None = None,
        *,
        pool: bool = False,
        pushed: bool = True,
        keep: bool = False,
    ) -> LookedUp:
        # A mask is in the order of the ids, which another map changes.
        with self._sorted(batch_id) if wanted is None else self._buffer.use(batch_id) as (batch, state):
            whole = batch if wanted is None else self._router.part_of(batch, wanted)
            rows = self._rows(whole, lookups, argument, pool=pool, pushed=pushed, state=state if keep else None)
        self._count("looked_up")
        self._carried("row_bytes", rows.rows, rows.scales)
        return rows

    def _rows(
        self,
        batch: RoutedBatch,
        lookups: Sequence[Lookup[T]],
        argument: T,
        *,
        pool: bool = False,
        pushed: bool = True,
        state: LookupState | None = None,
    ) -> LookedUp:
        """Calls each PS with its ids and the argument; `pushed` says whether gradients will be pushed."""
        self._check_servers(batch, len(lookups))
        answers = call_all(
            [
                functools.partial(lookup, self._router.ids_of(batch, number), argument, batch.buckets.version)
                for number, lookup in enumerate(lookups)
            ]
        )
        rows = self._router.join(batch, answers)
        if pool:
            looked_up = self._pooler.looked_up(batch, rows, state, pushed=pushed)
        else:
            plain = cast("Packed[np.float32 | np.float16]", rows)
            looked_up = LookedUp(plain, batch.narrow, batch.wide, batch.offsets, weights=batch.weights)
        if not self._compresses:
            return looked_up
        halves, scales = batching.encode_packed(cast("Packed[np.float32]", looked_up.rows), self._tables)
        return looked_up._replace(rows=cast("Packed[np.float32 | np.float16]", halves), scales=scales)

    def _check_servers(self, batch: RoutedBatch, servers: int) -> None:
        """Raises StaleMapError if a batch is sorted for another number of PSs."""
        if batch.buckets.servers != servers:
            raise self._stale(batch.buckets.servers, batch.buckets.version, servers)

    @contextlib.contextmanager
    def _sorted(self, batch_id: int) -> Iterator[BufferedBatch]:
        """Yields a registered batch, sorted by the current bucket map."""
        with self._buffer.use(batch_id) as entry:
            if entry.batch.buckets.version != self._router.buckets.version:
                again = BufferedBatch(self._in_order(entry.batch), LookupState())
                entry = self._buffer.replace(batch_id, entry, again)
            yield entry

    def _of_rows(self, batch: RoutedBatch, contribution: Contribution) -> Contribution:
        """Returns a contribution with the gradients of rows, if it has those of features that were pooled here."""
        if not self._pooler.pools(contribution.gradients):
            return contribution
        gradients = self._pooler.row_gradients(batch, self._router.plain(contribution))
        rows = cast("Packed[np.float32 | np.float16]", gradients)
        return contribution._replace(gradients=rows, scales=None)

    def _carried(self, what: str, rows: Mapping[str, WireRows], scales: Mapping[str, Floats] | None) -> None:
        """Counts bytes to or from an NN worker."""
        nbytes = Packed.nbytes_of(rows) + (0 if scales is None else Packed.nbytes_of(scales))
        with self._lock:
            self._traffic[what, "none" if scales is None else "fp16"] += nbytes

    def _count(self, what: str, by: int = 1) -> None:
        with self._lock:
            self._counts[what] += by
