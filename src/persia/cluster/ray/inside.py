"""The cluster as the user's function has it on an NN worker."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from persia.cluster.ray.connection import WorkerConnection
from persia.cluster.ray.plan import Service
from persia.errors import ConfigError
from persia.modes import Mode
from persia.schema import EmbeddingOptimizer, Schema
from persia.services import Connection
from persia.telemetry.metrics import Readings

if TYPE_CHECKING:
    from persia.cluster.ray.nn_worker import NNWorkerHost

__all__ = ["WorkerProcess"]


class WorkerProcess:
    """What `Ray(...)` is on an NN worker: `connect` gives that worker's connection.

    Args:
        host: the process.
        generation: of the NN workers.
        keeps: whether the driver keeps what it is given.
    """

    def __init__(self, host: NNWorkerHost, generation: int, keeps: bool = False) -> None:
        self._host = host
        self._generation = generation
        self._keeps = keeps
        self._linked: WorkerConnection | None = None

    def connect(self, schema: Schema, optimizer: EmbeddingOptimizer, mode: Mode, seed: int) -> Connection:
        """Waits for the roles, which the first call of all starts.

        Raises:
            ConfigError: the cluster serves something else, or this run is connected already.
        """
        if self._linked is not None:
            raise ConfigError(
                "A second EmbeddingCollection (or Trainer) was made in one run on this cluster. Make one, and put all "
                "tables into its schema; or use another cluster.",
                field="cluster",
            )
        host = self._host
        fed: bool = host.ask("serve", Service(schema, optimizer, mode, seed))
        assert host.coordinator is not None
        begin = functools.partial(host.ask, "begin") if fed else None
        make_dense = functools.partial(host.ask, "serve_dense")
        self._linked = WorkerConnection(host.coordinator, host.plan, host.rank, self._generation, begin, make_dense)
        keep = functools.partial(host.ask, "keep") if self._keeps else None

        def observe(trainer: Callable[[], Readings]) -> None:
            host.observer = trainer

        return self._linked.connection._replace(observe=observe, keep=keep, halted=lambda: host.halted)

    def close(self) -> None:
        """Ends the connection."""
        if self._linked is not None:
            self._linked.close()
