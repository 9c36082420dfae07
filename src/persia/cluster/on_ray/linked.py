"""Connections of a process that trains or reads: the roles as it sees them, with every change of the membership."""

from __future__ import annotations

from persia import rpc
from persia.cluster.on_ray.membership import Listener, alive, connect_servers, reach
from persia.cluster.on_ray.plan import Plan
from persia.nn.directory import Directory
from persia.nn.routing import DataLoaders, EmbeddingWorkers
from persia.services import Connection, Coordinator, DataLoader, EmbeddingWorker
from persia.types import Membership

__all__ = ["AHEAD", "Linked"]

AHEAD = 4
"""Batches that a data loader has ready for each NN worker."""


class Linked:
    """A connection that follows the membership until it is closed.

    Args:
        coordinator: knows the others.
        plan: of the cluster.
        rank: of the NN worker.
        generation: of the NN workers.

    Raises:
        DeadlineError: the roles are not there in time.
    """

    def __init__(self, coordinator: Coordinator, plan: Plan, rank: int = 0, generation: int = 1) -> None:
        timeout = plan.options.timeout
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
        self.connection = Connection(
            EmbeddingWorkers(self._workers, timeout, rank),
            self._servers,
            DataLoaders(self._loaders, timeout, AHEAD),
            rank,
            plan.nn_workers,
            generation,
        )

    def close(self) -> None:
        """Gives up all connections."""
        self._listener.close()
        stubs = [*self._servers, *self._workers.roster().serving(), *self._loaders.roster().serving()]
        for stub in stubs:
            rpc.close(stub)

    def _update(self, membership: Membership) -> None:
        self._workers.update(membership)
        self._loaders.update(membership)
