"""A cluster whose NN workers are threads, with a driver as on a cluster of processes: each gets a copy of its work."""

from __future__ import annotations

import contextlib
import copy
from fractions import Fraction
from typing import Any

from persia import rpc
from persia.errors import RoleDiedError
from persia.services import Attempt, Connection, MovableRows, NNWorkersChange, Round
from persia.testing.thread_replicas import Meeting
from persia.testing.threads import Threads
from persia.types import Delivery


class ThreadsOfDriver:
    """A `persia.services.ProcessCluster` in this process.

    Args:
        nn_workers: number of NN workers.

    Attributes:
        changes: changes of the number of NN workers, in order, each with the batch with which it is requested.
        refused: reasons for which changes were refused.
        parts: of each run that a change has ended, the number of NN workers, and the global step.
        share: see `ProcessCluster`.
    """

    recovery_points = None
    gpus = 0.0

    def __init__(self, nn_workers: int, **options: Any) -> None:
        self.threads = Threads(nn_workers, **options)
        self.changes: list[tuple[int, NNWorkersChange]] = []
        self.refused: list[str] = []
        self.parts: list[tuple[int, int]] = []
        self.share = Fraction(1)
        self.accepted: NNWorkersChange | None = None
        """The change that NN worker 0 has accepted last."""
        self.withdraws = False
        """Whether changes are withdrawn before NN worker 0 accepts them."""
        self.dies: tuple[int, int] | None = None
        """Rank of an NN worker, and the number of the batch at which it dies."""
        self._died: list[RoleDiedError] = []
        self._taken = 0
        self._source: Any = None

    def connect(self, *service: Any) -> Connection:
        connection = self.threads.connect_as(0, *service)
        return connection._replace(nn_workers=1, replicas=None)

    def feed(self, source: Any, *_: Any) -> None:
        self._source = source

    def fitting(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    keeping_rows = fitting

    def take(self, rank: int, epoch: int, number: int) -> Delivery:
        self._taken = max(self._taken, number)
        if self.dies is not None and rank == self.dies[0] and number >= self.dies[1]:
            self.die()
        return Delivery(number, next(self._source.batches(epoch, number), None))

    def begin(self, feed: Any) -> None:
        pass

    def attempt(self, function: Any, halting: Any, keep: Any = None) -> Attempt:
        points: list[Any] = []

        def save(point: Any) -> None:
            points.append(point)
            if keep is not None:
                keep(point)

        # Not in the threads: with CPython 3.11 two threads that copy one object at the same time may corrupt memory. A
        # collection while an object gets its `__dict__` lets another thread make a second dict of the same values
        # (python/cpython#97922; since 3.12 collections run between bytecodes).
        members = [_Member(self, self.threads.member(rank), save) for rank in range(self.threads.nn_workers)]
        work = [copy.deepcopy(function, {id(self): member}) for member in members]
        outcomes = self.threads.outcomes(lambda member: work[member.rank]())
        # The thread of one that has died goes on until it meets an error, and may take it for that of another's death.
        gone = {death.fields["rank"] for death in self._died}
        results = {
            rank: outcome
            for rank, outcome in enumerate(outcomes)
            if rank not in gone and not isinstance(outcome, BaseException)
        }
        if (dead := self._died) and len(results) + len(dead) == self.threads.nn_workers:
            self._died = []
            self.renew(len(results))
            return Attempt(results, dead, points[-1] if points else None)
        if dead and not results:  # No other one continues: all restart.
            self._died = []
            self.renew(self.threads.nn_workers - len(dead))
            return Attempt({}, dead, points[-1] if points else None)
        for failure in self.threads.failures:
            raise failure
        if (due := self.requested) is not None and not self.withdraws:
            self.parts.append((self.threads.nn_workers, points[-1].step))
            self.share *= due.factor
            self.renew(due.nn_workers)
            self.changes.pop(0)
        return Attempt(results, [], points[-1] if points else None)

    def renew(self, nn_workers: int) -> None:
        self.threads.nn_workers, self.threads._meeting = nn_workers, Meeting(nn_workers)

    def die(self) -> None:
        """Ends the NN worker that calls it, as its driver notices: pushes that wait for it fail."""
        rank, self.dies = self.dies[0], None  # type: ignore[index]
        death = RoleDiedError(f"NN worker {rank} has died.", role="nn_worker", rank=rank)
        self._died.append(death)
        self.threads._generation += 1
        for server in self.threads._servers:
            number = Round(self.threads._generation, 1)
            rpc.cast_to(MovableRows, server).adopt(number, server.buckets(), None, 0, self.threads.nn_workers - 1)
        raise death

    @property
    def requested(self) -> NNWorkersChange | None:
        return self.changes[0][1] if self.changes and self.changes[0][0] <= self._taken else None

    def accept(self, change: NNWorkersChange) -> bool:
        self.accepted = change
        return not self.withdraws

    def refuse(self, change: NNWorkersChange, reason: str) -> None:
        self.refused.append(reason)
        self.changes.pop(0)

    def run(self, function: Any) -> Any:
        raise NotImplementedError

    owning_servers = restart_servers = scale = statistics = close = run


class _Member:
    """The view of one NN worker."""

    def __init__(self, cluster: ThreadsOfDriver, member: Any, save: Any) -> None:
        self.cluster, self.member, self.save, self.share = cluster, member, save, cluster.share

    def connect(self, *service: Any) -> Connection:
        connection = self.member.connect(*service)
        return connection._replace(
            loader=self.cluster, save_recovery_point=self.save, changes=self.cluster, stream=None, survives=True
        )
