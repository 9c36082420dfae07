"""The cluster as the user's function has it on an NN worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from persia import rpc
from persia.cluster.on_ray.membership import alive, connect_servers, reach
from persia.cluster.on_ray.plan import Service
from persia.errors import ConfigError
from persia.modes import Mode
from persia.schema import EmbeddingOptimizer, Schema
from persia.services import Connection, EmbeddingWorker

if TYPE_CHECKING:
    from persia.cluster.on_ray.nn_host import NNWorkerHost

__all__ = ["Inside"]


class Inside:
    """What `Ray(...)` is on an NN worker: `connect` gives that worker's connection.

    Args:
        host: the process.
        generation: of the NN workers.
    """

    def __init__(self, host: NNWorkerHost, generation: int) -> None:
        self._host = host
        self._generation = generation
        self._connection: Connection | None = None

    def connect(self, schema: Schema, optimizer: EmbeddingOptimizer, mode: Mode, seed: int) -> Connection:
        """Waits for the roles, which the first call of all starts.

        Raises:
            ConfigError: the cluster serves something else, or this run is connected already.
        """
        if self._connection is not None:
            raise ConfigError(
                "A second EmbeddingCollection (or Trainer) was made in one run on this cluster. Make one, and put all "
                "tables into its schema; or use another cluster.",
                field="cluster",
            )
        host = self._host
        host.ask("serve", Service(schema, optimizer, mode, seed))
        assert host.coordinator is not None
        servers = connect_servers(host.coordinator, host.plan)
        workers = alive(host.coordinator, "embedding_worker", 1, host.plan.options.timeout)
        worker = reach(workers[0], EmbeddingWorker, host.plan)  # type: ignore[type-abstract]
        self._connection = Connection(worker, servers, None, host.rank, host.plan.nn_workers, self._generation)
        return self._connection

    def close(self) -> None:
        """Ends the connection."""
        if self._connection is not None:
            for stub in (self._connection.worker, *self._connection.servers):
                rpc.close(stub)
