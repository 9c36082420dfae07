"""Calls to several embedding workers through one interface (docs/reference/protocol.md, sections 4, 7, 8)."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from persia import rpc
from persia.batching.id_column import IdColumn
from persia.errors import StaleBatchError
from persia.membership.directory import Directory, Roster, ServingMember
from persia.rpc.fan_out import call_all
from persia.services import EmbeddingWorker, RecordableWorker
from persia.types import (
    COUNTER_BITS,
    BatchId,
    Contribution,
    FreshRows,
    LookedUp,
    Moment,
    Packed,
    PushHeader,
    UpdateCounts,
    sum_counts,
)

__all__ = ["EmbeddingWorkers"]

T = TypeVar("T")


class EmbeddingWorkers:
    """The embedding workers as one `EmbeddingWorker`, which routes calls by batch id.

    A call to an embedding worker that does not answer is retried until the membership reports the worker as gone. Its
    batches are then lost: a lookup raises StaleBatchError; a push continues without their gradients and counts them.

    Args:
        directory: the embedding workers.
        timeout: deadline of a call in seconds, including retries.
        home: number of the embedding worker for batches that this NN worker registers itself, such as its rank.
    """

    def __init__(self, directory: Directory[EmbeddingWorker], timeout: float = 600.0, home: int = 0) -> None:
        self._directory = directory
        self._timeout = timeout
        self._home = home
        self._turns = itertools.count(home)
        self._rows: dict[int, int] = {}
        """Samples of each batch that is looked up and not yet pushed: the weight of a part of a push."""
        self._lock = threading.Lock()
        self._lost = 0

    def register(self, id_features: Mapping[str, IdColumn]) -> int:
        """Buffers a batch at one embedding worker, the same one while it is alive, so that a step has one part."""
        return self._any(
            "register", lambda member: member.service.register(id_features), self._home, past_deadline=True
        )

    def distinct_ids(self, batch_id: int) -> Packed[np.uint64]:
        """Returns the distinct ids of a registered batch by table.

        Raises:
            StaleBatchError: the batch is unknown, or lost with its embedding worker.
        """
        return self._ask(batch_id, "distinct_ids", lambda worker: worker.distinct_ids(batch_id))

    def lookup_part(self, batch_id: int, wanted: Packed[np.bool_]) -> LookedUp:
        """Looks up some rows of a registered batch.

        Raises:
            StaleBatchError: the batch is unknown, or lost with its embedding worker.
        """
        looked_up = self._ask(batch_id, "lookup", lambda worker: worker.lookup_part(batch_id, wanted))
        self._rows[batch_id] = _rows(looked_up)
        return looked_up

    def lookup(self, batch_id: int, train: bool = True, pool: bool = False) -> LookedUp:
        """Looks up the rows of a registered batch.

        Raises:
            StaleBatchError: the batch is unknown, or lost with its embedding worker.
        """
        looked_up = self._ask(batch_id, "lookup", lambda worker: worker.lookup(batch_id, train, pool))
        if train:
            self._rows[batch_id] = _rows(looked_up)
        return looked_up

    def lookup_ahead(self, batch_id: int, pool: bool = False, recent: int = 0) -> LookedUp:
        """Looks up the rows of a registered batch, ahead of their use.

        `recent` is a number of batches at all embedding workers; each gets an equal share, rounded up.

        Raises:
            StaleBatchError: the batch is unknown, or lost with its embedding worker.
        """
        share = -(-recent // max(1, len(self._directory.roster().alive())))
        looked_up = self._ask(batch_id, "lookup", lambda worker: worker.lookup_ahead(batch_id, pool, share))
        self._rows[batch_id] = _rows(looked_up)
        return looked_up

    def refresh(self, batch_id: int, seen: list[Moment], left_out: Packed[np.bool_] | None = None) -> FreshRows:
        """Returns the rows of a batch that may have changed since moments, or were left out.

        Raises:
            StaleBatchError: the batch is unknown, or lost with its embedding worker.
        """
        return self._ask(batch_id, "refresh", lambda worker: worker.refresh(batch_id, seen, left_out))

    def recorded_lookup(self, batch_id: int) -> LookedUp:
        """Looks up a batch for training; see `persia.services.RecordableWorker`."""
        looked_up = self._ask(
            batch_id, "lookup", lambda worker: rpc.cast_to(RecordableWorker, worker).recorded_lookup(batch_id)
        )
        self._rows[batch_id] = _rows(looked_up)
        return looked_up

    def push(self, header: PushHeader, contributions: Sequence[Contribution]) -> dict[str, UpdateCounts]:
        """Pushes the gradients of a step concurrently, one part per embedding worker with batches of the step.

        Gradients of lost batches count as `lost_gradients`. Another embedding worker pushes an empty part with the same
        header in their place, as PSs that combine the step wait for it.
        """
        batches: dict[int, list[Contribution]] = {}
        for contribution in contributions:
            batches.setdefault(contribution.batch_id >> COUNTER_BITS, []).append(contribution)
        if len(batches) <= 1:
            counts = self._push_part(header, list(contributions))
        else:
            parts = list(batches.values())
            headers = [
                header._replace(part=number, parts=len(parts), rows=sum(self._rows.get(c.batch_id, 0) for c in part))
                for number, part in enumerate(parts)
            ]
            # Concurrently, as a PS holds each part until all have arrived. A change of membership causes several parts.
            pushes = [functools.partial(self._push_part, h, part) for h, part in zip(headers, parts, strict=True)]
            counts = sum_counts(call_all(pushes))
        for contribution in contributions:
            self._rows.pop(contribution.batch_id, None)
        return counts

    def release(self, batch_id: int) -> None:
        """Forgets a batch; no-op if its embedding worker is gone."""
        self._rows.pop(batch_id, None)
        with contextlib.suppress(StaleBatchError):
            self._ask(batch_id, "release", lambda worker: worker.release(batch_id))

    def evaluate(self, id_features: Mapping[str, IdColumn], pool: bool = False) -> LookedUp:
        """Looks up rows for evaluation, at each embedding worker in turn."""
        return self._any("evaluate", lambda member: member.service.evaluate(id_features, pool), next(self._turns))

    def follow_map(self, version: int) -> None:
        """Has all embedding workers that answer continue with the newest bucket map."""
        self._directory.call_all(lambda worker: functools.partial(worker.follow_map, version))

    @property
    def lost_gradients(self) -> int:
        """Number of batches whose gradient could not be pushed."""
        return self._lost

    def statistics(self) -> dict[str, int]:
        """Returns the counters, summed over all workers that answer, and `lost_gradients`."""
        total = Counter(lost_gradients=self._lost)
        for counts in self._directory.call_all(lambda worker: worker.statistics):
            total.update(counts)
        return dict(total)

    def _push_part(self, header: PushHeader, contributions: list[Contribution]) -> dict[str, UpdateCounts]:
        while contributions:
            try:
                push = functools.partial(_push, header, contributions)
                return self._ask(contributions[0].batch_id, "push", push)
            except StaleBatchError as error:
                # Nothing was sent. If the error names a batch, only that one is lost; else the worker and all batches.
                stale = error.fields.get("batch_id")
                remaining = [c for c in contributions if c.batch_id != stale] if stale is not None else []
                remaining = remaining if len(remaining) < len(contributions) else []
                with self._lock:
                    self._lost += len(contributions) - len(remaining)
                contributions = remaining
        return self._any("push", lambda member: member.service.push(header, []), next(self._turns))

    def _ask(self, batch_id: int, operation: str, call: Callable[[EmbeddingWorker], T]) -> T:
        """Calls the embedding worker that has the batch; retries until it answers or is gone."""
        rank, incarnation, _ = BatchId.unpack(batch_id)

        def ask(roster: Roster[EmbeddingWorker]) -> T:
            if roster.gone(rank, incarnation):
                raise StaleBatchError(
                    f"{operation}: embedding worker {rank}, incarnation {incarnation}, is gone, and its batches are "
                    "lost. They are skipped.",
                    rank=rank,
                    incarnation=incarnation,
                )
            member = roster.members.get(rank)
            if member is None or member.incarnation != incarnation:  # The data loader has a newer membership.
                raise self._directory.absent(self._timeout, operation)
            return call(member.service)

        return self._directory.call(ask, self._timeout)

    def _any(
        self,
        operation: str,
        call: Callable[[ServingMember[EmbeddingWorker]], T],
        turn: int,
        past_deadline: bool = False,
    ) -> T:
        """Calls the embedding worker of this turn, or another one if it does not answer or is leaving."""
        return self._directory.call_any(call, turn, self._timeout, operation, past_deadline=past_deadline)


def _push(
    header: PushHeader, contributions: Sequence[Contribution], worker: EmbeddingWorker
) -> dict[str, UpdateCounts]:
    return worker.push(header, contributions)


def _rows(looked_up: LookedUp) -> int:
    """Returns the number of samples of the batch."""
    if looked_up.offsets:
        return looked_up.offsets.counts[0] - 1
    indices = [*looked_up.narrow.counts, *looked_up.wide.counts]
    return next(iter(indices), looked_up.rows.counts[-1] if looked_up.pooled else 0)
