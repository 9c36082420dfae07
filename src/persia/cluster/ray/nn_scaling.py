"""NN workers that join and leave while a run trains (docs/decisions/0033-nn-workers-join-and-leave.md).

NN worker 0 ends the function of all NN workers at a boundary between two phases. The next run begins with others.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import ray

from persia.cluster.ray.connection import WorkerConnection
from persia.cluster.ray.processes import Process
from persia.cluster.ray.roles import Roles
from persia.cluster.ray.scaling import free_ranks
from persia.errors import ClosedError, ConfigError, DeadlineError
from persia.retry import Deadline
from persia.services import NNWorkersChange
from persia.telemetry.logs import get_logger

__all__ = ["NNWorkerScaling"]

LOG = get_logger("persia.cluster")

POLL_SECONDS = 0.05


@dataclass
class _Order:
    """A change that is requested from NN worker 0.

    Attributes:
        change: the change.
        joining: processes that have started, and train from then on.
        leaving: ranks of the NN workers that end.
        missing: ranks that had died before the order, and whose death `drop` has not been told yet.
        ready: whether the joining processes have started, so that NN worker 0 may be asked.
        approved: whether NN worker 0 has accepted it, and ends the function for it.
    """

    change: NNWorkersChange
    joining: Sequence[Process]
    leaving: Collection[int]
    missing: Collection[int] = ()
    ready: bool = False
    approved: bool = False


class NNWorkerScaling:
    """Changes the number of NN workers of a cluster. Thread-safe.

    Args:
        roles: the processes of the cluster.

    Attributes:
        share: factor of the batches per update of each NN worker since the cluster was made; see `ProcessCluster`.
    """

    def __init__(self, roles: Roles) -> None:
        self._roles = roles
        self.share = Fraction(1)
        self._scaling = threading.Lock()
        """Held by the one call of `scale`."""
        self._changed = threading.Condition(roles.lock)
        self._order: _Order | None = None
        self._refusal = ""
        self._numbers = itertools.count(1)

    @property
    def requested(self) -> NNWorkersChange | None:
        """The change that NN worker 0 is to make; None if there is none."""
        order = self._order
        return order.change if order is not None and order.ready else None

    @contextlib.contextmanager
    def fitting(self) -> Iterator[None]:
        """Keeps changes that NN worker 0 has not accepted pending, and rows in place, between the runs in the block."""
        with self._roles.resting, self._changed:
            self._roles.fits += 1
        try:
            yield
        finally:
            with self._changed:
                self._roles.fits -= 1

    def accept(self, number: int) -> bool:
        """Accepts a change for NN worker 0, which ends the function; returns False if it is not requested any more."""
        with self._changed:
            order = self._order
            if order is None or order.change.number != number:
                return False
            order.approved = True
            return True

    def refuse(self, number: int, reason: str) -> None:
        """Refuses a change for NN worker 0, if it is still requested."""
        with self._changed:
            if self._order is not None and self._order.change.number == number:
                self._order, self._refusal = None, reason
                self._changed.notify_all()

    def begin_run(self, trains: bool) -> None:
        """Makes the change that is requested, if it may be made here, before a function runs on the NN workers.

        Args:
            trains: whether it is a `Trainer`'s, which tells the PSs the number of NN workers when it begins a phase.
        """
        roles = self._roles
        with self._changed:
            self.adopt(tell_servers=not trains)
            count = roles.counts["nn_worker"]
            if roles.told != count and trains:
                roles.told = None  # It may end before it tells them.
            elif roles.told != count and roles.service is not None:
                self.tell(count)

    def adopt(self, tell_servers: bool) -> None:
        """Makes the change that is requested, if there is one, while no function runs on the NN workers.

        Between the runs of one call of `fit` it makes only one that NN worker 0 has accepted: another one might end
        `fit`, as its mode or options do not permit it.

        Args:
            tell_servers: whether PSs have to be told now.
        """
        roles = self._roles
        with self._changed:
            order = self._order
            if order is None or not order.ready or (roles.fits and not order.approved):
                return
            if tell_servers and roles.service is not None:
                self.tell(order.change.nn_workers)
            assert roles.processes is not None
            present, count = roles.nn_workers(), order.change.nn_workers
            leaving = [process for process in present if process.rank in order.leaving]
            started = [process for process in roles.processes.of("nn_worker") if process in order.joining]
            stays = [*(process for process in present if process not in leaving), *started]
            # A process may have died; then all have ended, and the next run starts as many.
            trains = stays[:count]
            for process in [*leaving, *stays[count:]]:
                process.expendable = True
            roles.processes.need(trains)
            roles.placer.renumber("nn_worker", [process.rank for process in trains])
            for rank, process in enumerate(trains):
                process.rank = rank
            roles.set_nn_workers(count)
            self.share *= order.change.factor
            self._order = None
            self._changed.notify_all()

    def scale(self, count: int, keep_global_batch: bool, prepare: Callable[[Sequence[Process]], object]) -> None:
        """Starts or retires NN workers. Blocks until training continues with them, and retired ones have ended.

        Args:
            count: number of NN workers.
            keep_global_batch: whether each NN worker trains another number of batches per update instead.
            prepare: prepares new processes for the function that runs. Blocks.

        Raises:
            ConfigError: a process cannot be placed, or training cannot continue with this number; nothing has changed.
            DeadlineError: a process did not start, or training did not come to a boundary, in time.
            RoleDiedError: a new process has died. Training continues without it.
        """
        self._scale(count, keep_global_batch, prepare)

    def _scale(
        self,
        count: int | None,
        keep_global_batch: bool,
        prepare: Callable[[Sequence[Process]], object],
        leaves: Process | None = None,
    ) -> None:
        """See `scale`. With `leaves`, that process leaves, and the number is one less."""
        roles = self._roles
        with self._scaling:
            with roles.lock:
                before = roles.counts["nn_worker"]
                if count is None:
                    count = before - 1
                    if not count or leaves not in roles.nn_workers():
                        raise ConfigError("it is the only NN worker, or does not train.", field="cluster.nn_workers")
                factor = Fraction(before, count) if keep_global_batch else Fraction(1)
                if count == before and not keep_global_batch:
                    factor = 1 / self.share  # Each trains as many batches per update as its options say.
                if count == before and factor == 1:
                    return
                if roles.processes is None or not (roles.nn_workers() or roles.fits):
                    roles.set_nn_workers(count)
                    self.share *= factor
                    return
                processes = roles.processes
                present = {process.rank for process in roles.nn_workers()}
                missing = [rank for rank in range(before) if leaves is None and present and rank not in present]
                joining = self._start(count - before, range(before))
                leaving = range(count, before) if leaves is None else [leaves.rank]
                change = NNWorkersChange(count, factor, next(self._numbers))
                # From now on, as NN workers may die while others start.
                order = self._order = _Order(change, joining, leaving, missing)
                self._refusal = ""
            try:
                processes.await_ready(joining, roles.options.timeout)
                prepare(joining)
                self._await(order)
            except BaseException:
                self._withdraw(order)
                self._end([*joining, *self._others(joining)])
                raise
            self._end(self._others([]))
            LOG.info("%d NN workers train instead of %d", count, before)

    def let_leave(self, pid: int, node: str) -> None:
        """Lets an NN worker leave that has got SIGTERM. Returns immediately.

        If it cannot, for example because it is the only one, it ends nevertheless: as at a death, all NN workers
        restart from the last recovery point.

        Args:
            pid: id of its process.
            node: id of its node.
        """
        roles = self._roles
        assert roles.processes is not None
        known = [p for p in roles.nn_workers() if p.info is not None and (p.info.pid, p.info.node) == (pid, node)]
        if known:
            threading.Thread(target=self._let_leave, args=(known[0],), name="persia-leave", daemon=True).start()

    def _let_leave(self, process: Process) -> None:
        title = process.title
        LOG.warning("%s has got SIGTERM, and leaves at the next boundary between two phases.", title)
        try:
            self._scale(None, False, lambda _: None, process)
            if process in self._roles.nn_workers():
                raise ConfigError("the others have died.", field="cluster.nn_workers")
            LOG.warning("%s has left; %d NN workers train on.", title, self._roles.counts["nn_worker"])
        except ClosedError:
            pass
        except Exception as error:  # Whatever it is, the process has got SIGTERM, and must not stay.
            LOG.warning("%s cannot leave, so it ends now: %s", title, error)
            ray.kill(process.handle, no_restart=True)

    def release(self, nn_workers: int) -> None:
        """Lets pushes that wait for a dead NN worker fail: PSs get a new generation of the others."""
        self.tell(nn_workers)

    def drop(self, dead: Collection[int]) -> None:
        """Continues without dead NN workers, once no function runs any more; a change that is requested shrinks.

        Args:
            dead: their ranks in the run that has ended.
        """
        roles = self._roles
        with self._changed:
            assert roles.processes is not None
            before = roles.counts["nn_worker"]
            staying = roles.nn_workers()
            ranks = [process.rank for process in staying]
            others = [process.rank for process in roles.processes.of("nn_worker") if process.expendable]
            roles.placer.renumber("nn_worker", ranks, [rank for rank in others if rank not in ranks])
            for rank, process in enumerate(staying):
                process.rank = rank
            roles.set_nn_workers(max(1, before - len(dead)))
            if self._order is not None:
                self._shrink(self._order, before, dead)

    def _shrink(self, order: _Order, before: int, dead: Collection[int]) -> None:
        """Takes dead NN workers out of a change that is requested; withdraws it if nothing is left to do.

        Args:
            order: the change.
            before: number of NN workers of the run in which they died.
            dead: their ranks.
        """
        now, change = self._roles.counts["nn_worker"], order.change
        lost = [rank for rank in dead if rank not in order.leaving and rank not in order.missing]
        if lost:
            count = max(1, change.nn_workers - len(lost))
            factor = change.factor
            if factor * change.nn_workers == before:  # The global batch was to stay; now it shrinks by the dead, too.
                factor = Fraction(before - len(lost), count)
            order.change, order.approved = NNWorkersChange(count, factor, next(self._numbers)), False
        others = [rank for rank in range(before) if rank not in dead]
        leaving = sorted(others.index(rank) for rank in order.leaving if rank in others)
        order.leaving = leaving[max(0, len(leaving) - max(0, now - order.change.nn_workers)) :]
        order.missing = ()
        if order.change.nn_workers == now and order.change.factor == 1:
            self._order = None
            self._changed.notify_all()

    def _start(self, number: int, taken: Collection[int]) -> list[Process]:
        """Starts processes that join, all or none, with other ranks than those `taken`."""
        if number <= 0:
            return []
        roles = self._roles
        assert roles.processes is not None
        taken = {*taken, *(process.rank for process in roles.processes.of("nn_worker"))}
        ranks = free_ranks("nn_worker", taken, number)
        started: list[Process] = []
        try:
            roles.placer.reserve("nn_worker", ranks)
            for rank in ranks:
                started.append(roles.start_nn_worker(rank, expendable=True))
        except BaseException:
            roles.placer.release("nn_worker", ranks)
            self._end(started)
            raise
        return started

    def _await(self, order: _Order) -> None:
        """Orders a change, and waits until it is made."""
        roles = self._roles
        assert roles.processes is not None
        deadline = Deadline(roles.options.timeout)
        with self._changed:
            order.ready = True
        while True:
            self._adopt_between_runs()
            if roles.fits and not roles.running.locked():  # The time in which rows are saved or loaded does not count.
                deadline = Deadline(roles.options.timeout)
            with self._changed:
                if self._order is None:
                    break
                died = roles.processes.expended(order.joining)
                if died or deadline.passed:
                    self._order = None
                    if died:
                        raise died[0]
                    raise DeadlineError(
                        f"Training did not come to a boundary within {deadline.seconds:g} s, so it continues with "
                        f"{roles.counts['nn_worker']} NN workers. Check that it makes progress, and that it is a "
                        "Trainer's: the number of NN workers cannot change while a function of your own runs.",
                        seconds=deadline.seconds,
                    )
                self._changed.wait(POLL_SECONDS)
        if self._refusal:
            raise ConfigError(self._refusal, field="cluster.nn_workers")

    def _withdraw(self, order: _Order) -> None:
        with self._changed:
            if self._order is order:
                self._order = None

    def _adopt_between_runs(self) -> None:
        roles = self._roles
        if roles.running.locked() or roles.fits or not roles.moving.acquire(blocking=False):
            return  # Rows that move between two runs do so in a generation of their own.
        try:
            with roles.resting:
                if not roles.running.locked():
                    self.adopt(tell_servers=True)
        finally:
            roles.moving.release()

    def tell(self, nn_workers: int) -> None:
        """Tells the PSs the number of NN workers, while no function runs, or to end the phase of one. Blocks."""
        self._tell_servers(nn_workers)
        self._roles.told = nn_workers

    def _tell_servers(self, nn_workers: int) -> None:
        """Tells the PSs the number of NN workers, in a generation without any."""
        _, plan, coordinator = self._roles.started(check=False)  # One may just have died.
        generation = coordinator.regenerate(nn_workers)
        if self._roles.attachment is not None:
            self._roles.attachment.began(generation)
        connection = WorkerConnection(coordinator, plan, generation=generation, begin_rounds=True)
        try:
            rounds = connection.connection.rounds
            assert rounds is not None
            rounds.make(None, 0, nn_workers)
        finally:
            connection.close()

    def _others(self, known: Collection[Process]) -> list[Process]:
        """Returns the NN workers that do not train, apart from known ones."""
        assert self._roles.processes is not None
        return [p for p in self._roles.processes.of("nn_worker") if p.expendable and p not in known]

    def _end(self, leaving: Collection[Process]) -> None:
        """Ends processes that do not train, and releases what they had reserved, also if they have died."""
        roles = self._roles
        with roles.lock:
            assert roles.processes is not None
            ended = [process for process in leaving if process.expendable]
            taken = {process.rank for process in roles.nn_workers()}
            roles.placer.release("nn_worker", [process.rank for process in ended if process.rank not in taken])
            living = roles.processes.all()
            roles.processes.end([process for process in ended if process in living])
