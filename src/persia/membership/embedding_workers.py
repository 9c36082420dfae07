"""Several embedding workers as one (docs/reference/protocol.md, sections 4, 7, 8)."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from persia.batching.batch import IdColumn
from persia.errors import StaleBatchError
from persia.membership.directory import UNREACHABLE, Directory, Roster
from persia.rpc.fan_out import call_all
from persia.services import EmbeddingWorker
from persia.types import COUNTER_BITS, BatchId, Contribution, LookedUp, PushHeader, UpdateCounts, sum_counts

__all__ = ["EmbeddingWorkers"]

T = TypeVar("T")


class EmbeddingWorkers:
    """The embedding workers as one: an `EmbeddingWorker` that finds the right one by the batch id.

    A call whose embedding worker does not answer is repeated until the membership says that it is gone; then its
    batches are lost: a lookup raises StaleBatchError, a push goes on without their gradients, and counts them.

    Args:
        directory: the embedding workers.
        timeout: seconds that a call may take with its repetitions.
        home: which one gets batches that this NN worker registers itself: its rank, say.
    """

    def __init__(self, directory: Directory[EmbeddingWorker], timeout: float = 600.0, home: int = 0) -> None:
        self._directory = directory
        self._timeout = timeout
        self._home = home
        self._turns = itertools.count(home)
        self._rows: dict[int, int] = {}
        """Of batches that are looked up and not pushed: what a part of a push weighs."""
        self._lock = threading.Lock()
        self._lost = 0

    def register(self, id_features: Mapping[str, IdColumn]) -> int:
        """Buffers a batch at one of them. All batches go to the same one while it stays: so do those of a step."""
        return self._anyone("register", lambda worker: worker.register(id_features), self._home)

    def lookup(self, batch_id: int, train: bool = True) -> LookedUp:
        """Rows of a registered batch.

        Raises:
            StaleBatchError: the batch is unknown, or its embedding worker is gone: it is lost.
        """
        found = self._ask(batch_id, "lookup", lambda worker: worker.lookup(batch_id, train))
        if train:
            self._rows[batch_id] = _rows(found)
        return found

    def push(self, header: PushHeader, contributions: Sequence[Contribution]) -> dict[str, UpdateCounts]:
        """Pushes the gradients of a step, in as many parts as embedding workers have its batches, at once.

        Gradients of batches that are lost count as `lost_gradients`; their part is pushed empty by another embedding
        worker, with the same header: where PSs hold the step, they wait for it.
        """
        batches: dict[int, list[Contribution]] = {}
        for contribution in contributions:
            batches.setdefault(contribution.batch_id >> COUNTER_BITS, []).append(contribution)
        if len(batches) <= 1:
            counts = self._push_part(header, list(contributions))
        else:
            parts = list(batches.values())
            headers = [
                header._replace(part=number, parts=len(parts), weight=sum(self._rows.get(c.batch_id, 0) for c in part))
                for number, part in enumerate(parts)
            ]
            # At the same time: a PS holds each part until all are there. Several parts follow a change of membership.
            pushes = [functools.partial(self._push_part, h, part) for h, part in zip(headers, parts, strict=True)]
            counts = sum_counts(call_all(pushes))
        for contribution in contributions:
            self._rows.pop(contribution.batch_id, None)
        return counts

    def release(self, batch_id: int) -> None:
        """Forgets a batch; one whose embedding worker is gone is forgotten already."""
        self._rows.pop(batch_id, None)
        with contextlib.suppress(StaleBatchError):
            self._ask(batch_id, "release", lambda worker: worker.release(batch_id))

    def evaluate(self, id_features: Mapping[str, IdColumn]) -> LookedUp:
        """Rows for evaluation, from each in turn."""
        return self._anyone("evaluate", lambda worker: worker.evaluate(id_features), next(self._turns))

    @property
    def lost_gradients(self) -> int:
        """Batches whose gradient could not be pushed."""
        return self._lost

    def statistics(self) -> dict[str, int]:
        """Counters of all that answer, summed, and `lost_gradients`: batches whose gradient could not be pushed."""
        total = Counter(lost_gradients=self._lost)
        for worker in self._directory.roster().serving():
            with contextlib.suppress(*UNREACHABLE):
                total.update(worker.statistics())
        return dict(total)

    def _push_part(self, header: PushHeader, contributions: list[Contribution]) -> dict[str, UpdateCounts]:
        while contributions:
            try:
                push = functools.partial(_push, header, contributions)
                return self._ask(contributions[0].batch_id, "push", push)
            except StaleBatchError as error:
                # Nothing was sent. One that names the batch leaves the others; else all are lost with their worker.
                stale = error.fields.get("batch_id")
                kept = [c for c in contributions if c.batch_id != stale] if stale is not None else []
                kept = kept if len(kept) < len(contributions) else []
                with self._lock:
                    self._lost += len(contributions) - len(kept)
                contributions = kept
        return self._anyone("push", lambda worker: worker.push(header, []), next(self._turns))

    def _ask(self, batch_id: int, operation: str, call: Callable[[EmbeddingWorker], T]) -> T:
        """Calls the embedding worker that has the batch, until it answers or is gone."""
        rank, incarnation, _ = BatchId.unpack(batch_id)

        def ask(roster: Roster[EmbeddingWorker]) -> T:
            if roster.gone(rank, incarnation):
                raise StaleBatchError(
                    f"{operation}: embedding worker {rank}, incarnation {incarnation}, is gone, and its batches with "
                    "it. They are skipped.",
                    rank=rank,
                    incarnation=incarnation,
                )
            peer = roster.peers.get(rank)
            if peer is None or peer.incarnation != incarnation:  # The data loader has heard of it before us.
                raise self._directory.absent(self._timeout, operation)
            return call(peer.service)

        return self._directory.call(ask, self._timeout, operation)

    def _anyone(self, operation: str, call: Callable[[EmbeddingWorker], T], turn: int) -> T:
        """Calls the one whose turn it is, or another one if it does not answer or is leaving."""
        tried: list[EmbeddingWorker] = []

        def ask(roster: Roster[EmbeddingWorker]) -> T:
            nonlocal turn, tried
            if not (workers := roster.alive()):
                raise self._directory.absent(self._timeout, operation)
            turn += workers == tried  # They are the same as when one failed: ask the next one.
            tried = workers
            return call(workers[turn % len(workers)])

        return self._directory.call(ask, self._timeout, operation)


def _push(
    header: PushHeader, contributions: Sequence[Contribution], worker: EmbeddingWorker
) -> dict[str, UpdateCounts]:
    return worker.push(header, contributions)


def _rows(found: LookedUp) -> int:
    """Samples of the batch."""
    if found.offsets:
        return found.offsets.counts[0] - 1
    return next(iter([*found.narrow.counts, *found.wide.counts]), 0)
