"""NN workers that join and leave while a run trains (docs/decisions/0033-nn-workers-join-and-leave.md).

NN worker 0 ends the function of all NN workers at a boundary between two phases. The next run begins with others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from fractions import Fraction
from typing import NamedTuple

import ray

from persia.cluster.ray.connection import WorkerConnection
from persia.cluster.ray.processes import Process
from persia.cluster.ray.roles import Roles
from persia.cluster.ray.scaling import free_ranks
from persia.errors import ClosedError, ConfigError, DeadlineError, PersiaError
from persia.retry import Deadline
from persia.services import NNWorkersChange
from persia.telemetry.logs import get_logger

__all__ = ["NNWorkerScaling"]

LOG = get_logger("persia.cluster")

POLL_SECONDS = 0.05


class _Order(NamedTuple):
    """A change that is requested from NN worker 0.

    Attributes:
        change: the change.
        joining: processes that have started, and train from then on.
        leaving: processes that end.
    """

    change: NNWorkersChange
    joining: Sequence[Process]
    leaving: Collection[Process]


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

    @property
    def requested(self) -> NNWorkersChange | None:
        """The change that NN worker 0 is to make; None if there is none."""
        order = self._order
        return order.change if order is not None else None

    def refuse(self, reason: str) -> None:
        """Refuses the change that is requested, for NN worker 0."""
        with self._changed:
            if self._order is not None:
                self._order, self._refusal = None, reason
                self._changed.notify_all()

    def adopt(self, tell_servers: bool) -> None:
        """Makes the change that is requested, if there is one, while no function runs on the NN workers.

        Args:
            tell_servers: whether PSs have to be told now: a `Trainer` tells them when it begins a phase.
        """
        roles = self._roles
        with self._changed:
            order = self._order
            if order is None:
                return
            if tell_servers and roles.service is not None:
                self._tell_servers(order.change.nn_workers)
            assert roles.processes is not None
            staying = [process for process in roles.nn_workers() if process not in order.leaving]
            started = [process for process in roles.processes.of("nn_worker") if process in order.joining]
            count = order.change.nn_workers
            # A process may have died; then all have ended, and the next run starts as many.
            trains = [*staying, *started][:count]
            for process in [*order.leaving, *[*staying, *started][count:]]:
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
                if roles.processes is None or not (present := roles.nn_workers()):
                    roles.set_nn_workers(count)
                    self.share *= factor
                    return
                if count == before:
                    return
                processes = roles.processes
                joining = self._start(count - before)
            leaving = present[count:] if leaves is None else [leaves]
            order = _Order(NNWorkersChange(count, factor), joining, leaving)
            try:
                processes.await_ready(joining, roles.options.timeout)
                prepare(joining)
                self._await(order)
            except BaseException:
                self._withdraw(order)
                self._end(joining)
                raise
            self._end([process for process in processes.of("nn_worker") if process.expendable])
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
            LOG.warning("%s has left; %d NN workers train on.", title, self._roles.counts["nn_worker"])
        except ClosedError:
            pass
        except PersiaError as error:
            LOG.warning("%s cannot leave, so it ends now: %s", title, error.message)
            ray.kill(process.handle, no_restart=True)

    def release(self, nn_workers: int) -> None:
        """Lets pushes that wait for a dead NN worker fail: PSs get a new generation of the others."""
        self._tell_servers(nn_workers)

    def drop(self, dead: Collection[int]) -> None:
        """Continues without dead NN workers, once no function runs any more.

        Args:
            dead: their ranks in the run that has ended.
        """
        roles = self._roles
        with self._changed:
            staying = roles.nn_workers()
            count = max(1, roles.counts["nn_worker"] - len(dead))
            roles.placer.renumber("nn_worker", [process.rank for process in staying])
            for rank, process in enumerate(staying):
                process.rank = rank
            roles.set_nn_workers(count)

    def _start(self, number: int) -> list[Process]:
        if number <= 0:
            return []
        roles = self._roles
        assert roles.processes is not None
        taken = {process.rank for process in roles.processes.of("nn_worker")}
        ranks = free_ranks("nn_worker", taken, number)
        roles.placer.reserve("nn_worker", ranks)
        return [roles.start_nn_worker(rank, expendable=True) for rank in ranks]

    def _await(self, order: _Order) -> None:
        """Orders a change, and waits until it is made."""
        roles = self._roles
        assert roles.processes is not None
        deadline = Deadline(roles.options.timeout)
        self._request(order)
        while True:
            self._adopt_between_runs()
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

    def _request(self, order: _Order) -> None:
        with self._changed:
            self._order, self._refusal = order, ""

    def _withdraw(self, order: _Order) -> None:
        with self._changed:
            if self._order is order:
                self._order = None

    def _adopt_between_runs(self) -> None:
        roles = self._roles
        if roles.running.locked() or not roles.moving.acquire(blocking=False):
            return  # Rows that move between two runs do so in a generation of their own.
        try:
            with roles.resting:
                if not roles.running.locked():
                    self.adopt(tell_servers=True)
        finally:
            roles.moving.release()

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

    def _end(self, leaving: Collection[Process]) -> None:
        """Ends processes that do not train."""
        roles = self._roles
        with roles.lock:
            assert roles.processes is not None
            ended = [process for process in leaving if process.expendable and process in roles.processes.all()]
            taken = {process.rank for process in roles.nn_workers()}
            roles.placer.release("nn_worker", [process.rank for process in ended if process.rank not in taken])
            roles.processes.end(ended)
