"""The batches and gradients of an NN worker: registered, pushed, lost."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from persia.errors import StaleBatchError
from persia.nn.non_finite import NonFiniteLog
from persia.nn.prepared import PreparedBatch
from persia.nn.transfer import Encoded
from persia.services import Connection, ReadObserver
from persia.telemetry.tracing import Tracer
from persia.types import Contribution, Losses, ReadRecord, UpdateCounts

__all__ = ["Gradient", "PushCounts", "PushLog"]

Gradient = tuple[PreparedBatch, Callable[[], Encoded]]
"""A batch, and a function that waits until its gradients are on the host and returns them."""


class PushCounts(NamedTuple):
    """Outcome of the gradients so far, in rows, and of batches without a gradient.

    Attributes:
        applied: rows updated.
        absent: rows that are not in the table (not admitted, or evicted): skipped.
        non_finite: rows that stay as they were, as their gradient, or a value after it, is not finite.
        released: batches that were drawn and never back-propagated.
        lost_batches: batches whose rows could not be looked up, as their embedding worker was gone: skipped.
        lost_rows: samples of those.
        lost_gradients: batches whose gradient could not be pushed, for the same reason.
    """

    applied: int = 0
    absent: int = 0
    non_finite: int = 0
    released: int = 0
    lost_batches: int = 0
    lost_rows: int = 0
    lost_gradients: int = 0

    @classmethod
    def of(cls, lost: Losses) -> PushCounts:
        """Returns counts of nothing but these losses."""
        return cls(lost_batches=lost.batches, lost_rows=lost.rows, lost_gradients=lost.gradients)


class PushLog:
    """Keeps which batches of an NN worker are registered, and counts the outcome of its pushes, from pass to pass.

    Used by the training thread, the lookup thread and the push threads.

    Args:
        connection: has the embedding workers and the identity of this NN worker.
        non_finite: notes which gradients are not finite.

    Attributes:
        global_step: number of global steps that have been pushed.
        sequence: sequence number of the last push, in whatever mode.
        registered: ids of the batches that are registered, and whose push has neither begun nor failed.
        released: number of batches that were drawn and never back-propagated.
        observer: receives the inputs of each gradient while a schedule is recorded, with one batch per push.
        tracer: records pushes.
    """

    def __init__(self, connection: Connection, non_finite: NonFiniteLog) -> None:
        self.connection = connection
        self.non_finite = non_finite
        self.tracer = connection.tracer or Tracer()
        self.global_step = 0
        self.sequence = 0
        self.registered: set[int] = set()
        self.released = 0
        self.observer: ReadObserver | None = None
        self._lock = threading.Lock()  # Of the updates, which several push threads add up.
        self._updates = UpdateCounts()
        self._lost_batches = 0
        self._lost_rows = 0

    def counts(self, lost_gradients: int) -> PushCounts:
        """Returns all counts; the batches whose gradient could not be pushed are counted elsewhere."""
        total = self._updates
        return PushCounts(
            total.applied,
            total.absent,
            total.non_finite,
            self.released,
            self._lost_batches,
            self._lost_rows,
            lost_gradients,
        )

    def losses(self) -> Losses:
        """Returns the batches that this NN worker has lost with embedding workers. For any thread."""
        # `EmbeddingWorkers`, the facade of several processes, counts gradients; a worker in this process loses none.
        gradients = getattr(self.connection.worker, "lost_gradients", 0)
        return Losses(self._lost_batches, self._lost_rows, gradients)

    def lost(self, batch_id: int, rows: int) -> None:
        """Counts a batch that was lost with its embedding worker before all its rows were looked up."""
        with self._lock:  # The lookup thread and the training thread may both find an embedding worker dead.
            self.registered.discard(batch_id)
            self._lost_batches += 1
            self._lost_rows += rows

    def release(self, batch: PreparedBatch) -> None:
        """Releases a batch that was drawn and never back-propagated, and counts it."""
        assert batch.batch_id is not None
        self.connection.worker.release(batch.batch_id)
        self.registered.discard(batch.batch_id)
        self.released += 1

    def release_all(self) -> None:
        """Releases the batches that are still registered. Their pushes do not begin any more."""
        with self._lock:
            batch_ids = list(self.registered)
            self.registered.clear()
        for batch_id in batch_ids:
            self.connection.worker.release(batch_id)

    @contextlib.contextmanager
    def pushing(self, group: Sequence[Gradient]) -> Iterator[None]:
        """Surrounds a push: its batches are not released meanwhile; if it fails, `release_all` releases them later.

        Raises:
            StaleBatchError: they have been released.
        """
        batch_ids = {batch.batch_id for batch, _ in group if batch.batch_id is not None}
        with self._lock:
            if not batch_ids <= self.registered:
                raise StaleBatchError("This push was dropped: its training pass has failed.")
            self.registered.difference_update(batch_ids)
        try:
            yield
        except BaseException:
            with self._lock:
                self.registered.update(batch_ids)
            raise

    def contributions(
        self, group: Sequence[Gradient], sequence: int, versions: list[int]
    ) -> tuple[list[Contribution], int]:
        """Waits until the gradients of a push are on the host. Returns them, and the rows of their batches.

        Args:
            group: the gradients.
            sequence: sequence number of the push.
            versions: of the dense parameters by dense PS; in modes without, the global step.
        """
        contributions: list[Contribution] = []
        total = 0
        for batch, gradients in group:
            assert batch.batch_id is not None
            rows = len(batch)
            total += rows
            with self.tracer.span("transfer", batch=batch.batch_id):
                part = None if batch.owned is None else batch.owned.pushed
                contributions.append(Contribution(batch.batch_id, *gradients(), part))
            if self.observer is not None:
                rank = self.connection.rank
                self.observer.note(ReadRecord(rank, sequence, batch.number, rows, batch.batch_id, versions))
        return contributions, total

    def pushed(
        self,
        counts: Mapping[str, UpdateCounts],
        step: int,
        group: Sequence[Gradient],
        contributions: Sequence[Contribution],
    ) -> None:
        """Counts the outcome of a push.

        Args:
            counts: by table.
            step: number of the global step, from 1.
            group: the gradients that were pushed.
            contributions: the same, as they were sent.
        """
        for batch, _ in group:
            if batch.owned is not None:
                counts = batch.owned.with_owned(counts)
        with self._lock:
            self._updates = UpdateCounts(*map(sum, zip(self._updates, *counts.values(), strict=True)))
        self.non_finite.add(counts, step, [(batch, c) for (batch, _), c in zip(group, contributions, strict=True)])
