"""Connections of a process that trains or reads: the roles as it sees them, with every change of the membership."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from persia import rpc
from persia.cluster.ray.membership import Listener, alive, connect_dense, connect_servers, reach, reach_tokens
from persia.cluster.ray.plan import Plan
from persia.membership.data_loaders import DataLoaders
from persia.membership.directory import Directory
from persia.membership.embedding_workers import EmbeddingWorkers
from persia.services import Connection, Coordinator, DataLoader, DenseMaker, DensePS, EmbeddingWorker
from persia.types import Feed, Membership

__all__ = ["WorkerConnection"]


class _Driven(DataLoaders):
    """Data loaders that the driver tells what to read, as it has to tell those again that it starts later.

    Args:
        directory: the data loaders.
        timeout: seconds that a call may take.
        begin: tells the driver.
    """

    def __init__(self, directory: Directory[DataLoader], timeout: float, begin: Callable[[Feed], None]) -> None:
        super().__init__(directory, timeout)
        self._begin = begin

    def begin(self, feed: Feed) -> None:
        """Returns when all have begun."""
        self._begin(feed)


class WorkerConnection:
    """A connection that follows the membership until it is closed.

    Args:
        coordinator: knows the others.
        plan: of the cluster.
        rank: of the NN worker.
        generation: of the NN workers.
        begin: tells the driver to let the data loaders begin; None where this process reads its data itself.
        make_dense: tells the driver to start the dense PSs.

    Raises:
        DeadlineError: the roles are not there in time.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        plan: Plan,
        rank: int = 0,
        generation: int = 1,
        begin: Callable[[Feed], None] | None = None,
        make_dense: Callable[[DenseMaker], Any] | None = None,
    ) -> None:
        timeout = plan.options.timeout
        self._coordinator, self._plan = coordinator, plan
        self._servers = connect_servers(coordinator, plan)
        alive(coordinator, "embedding_worker", 1, timeout)
        alive(coordinator, "data_loader", 1, timeout)
        self._workers: Directory[EmbeddingWorker] = Directory(
            "embedding_worker", lambda member: reach(member, EmbeddingWorker, plan), rpc.close
        )
        self._loaders: Directory[DataLoader] = Directory(
            "data_loader", lambda member: reach(member, DataLoader, plan), rpc.close
        )
        self._listener = Listener(coordinator, self._update)
        self._tokens = reach_tokens(plan)
        self._dense: Sequence[DensePS] = []

        def dense(maker: DenseMaker) -> Sequence[DensePS]:
            if make_dense is not None:
                make_dense(maker)
            self._dense = connect_dense(coordinator, plan)
            return self._dense

        self.connection = Connection(
            EmbeddingWorkers(self._workers, timeout, rank),
            self._servers,
            _Driven(self._loaders, timeout, begin) if begin is not None else None,
            rank,
            plan.nn_workers,
            generation,
            self._tokens,
            dense,
        )

    def close(self) -> None:
        """Gives up all connections."""
        self._listener.close()
        stubs: list[object] = [self._tokens, *self._dense, *self._servers]
        stubs += [*self._workers.roster().serving(), *self._loaders.roster().serving()]
        for stub in stubs:
            rpc.close(stub)

    def reconnect(self) -> None:
        """To embedding PSs of which some are elsewhere now. Nobody is calling them."""
        for stub in self._servers:
            rpc.close(stub)
        self._servers[:] = connect_servers(self._coordinator, self._plan)

    def _update(self, membership: Membership) -> None:
        self._workers.update(membership)
        self._loaders.update(membership)
