"""A cluster with all roles in this process."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from persia.batching import default_threads
from persia.checks import MAX_THREADS, check_flag, check_integer, plain
from persia.coordinator import TokenScheduler
from persia.malloc import keep_memory
from persia.modes import Mode
from persia.ps import EmbeddingServer, ServerOptions
from persia.ps.shares import divide_here
from persia.schema import EmbeddingOptimizer, Schema
from persia.services import Connection, DenseMaker, DensePS
from persia.telemetry.metrics import Health, Readings
from persia.telemetry.process import LOOPBACK, ObservedProcess, check_port, process_metrics
from persia.worker import Worker

__all__ = ["Embedded"]


class Embedded:
    """All roles in this process, where they call each other directly. Several instances are independent.

    Args:
        threads: threads of the embedding store, in addition to torch's threads; None for one per core, at most 8.
        prometheus_port: port at 127.0.0.1 where this process exports its metrics. If it is in use, the process takes
            the next free port, which `health().metrics_url` contains. None for no export.
        overcommit: whether to accept tables whose declared capacity exceeds the memory of this host, with a warning:
            for trials that will not fill them.
    """

    def __init__(
        self, threads: int | None = None, prometheus_port: int | None = None, overcommit: bool = False
    ) -> None:
        threads, prometheus_port = plain(threads), plain(prometheus_port)
        check_flag("cluster.overcommit", overcommit)
        if threads is not None:
            check_integer("cluster.threads", threads, 1, MAX_THREADS)
        self.threads = threads or default_threads()
        self._overcommit = overcommit
        # Roles of the last connection; weak references, so that observing does not keep them alive.
        self._server: Callable[[], EmbeddingServer | None] = lambda: None
        self._worker: Callable[[], Worker | None] = lambda: None
        self._trainer: Callable[[], Callable[[], Readings] | None] = lambda: None
        self._process = ObservedProcess("embedded", 0, self._observe)
        check_port(prometheus_port, "cluster.prometheus_port")
        if prometheus_port is not None:
            self._process.expose(prometheus_port, LOOPBACK)

    def health(self) -> Health:
        """Returns the health of this process, with metrics of the last connection's roles. Thread-safe."""
        return self._process.health()

    def close(self) -> None:
        """Stops the Prometheus endpoint, if there is one."""
        self._process.close()

    def _observe(self) -> Readings:
        readings = Readings(process_metrics(), [])
        server, worker, trainer = self._server(), self._worker(), self._trainer()
        if server is not None:
            readings.metrics.extend(server.observe().metrics)
        if worker is not None:
            readings.metrics.extend(worker.observe().metrics)
        if trainer is not None:
            trainer_readings = trainer()
            readings.metrics.extend(trainer_readings.metrics)
            readings.latencies.extend(trainer_readings.latencies)
        return readings

    def connect(self, schema: Schema, optimizer: EmbeddingOptimizer, mode: Mode, seed: int) -> Connection:
        """Creates a new PS and a new embedding worker.

        Raises:
            ConfigError: the declared capacity of the tables exceeds the memory of this host.
        """

        def serve(maker: DenseMaker) -> list[DensePS]:
            from persia.dense import DenseServer  # Imports torch, which other users of this module do not need.

            return [DenseServer(maker)]

        keep_memory()  # Useful even without rpc: a step frees megabytes that the next one allocates.
        tables = schema.resolved_tables()
        shares = divide_here(tables, optimizer, 1, overcommit=self._overcommit)[0]
        options = ServerOptions(
            capacities=shares.capacities, overcommit=self._overcommit, memory_rows=shares.memory_rows
        )
        server = EmbeddingServer(tables, optimizer, mode, seed, self.threads, options)
        worker = Worker(schema, [server], self.threads)
        self._server, self._worker = weakref.ref(server), weakref.ref(worker)

        def observe(trainer: Callable[[], Readings]) -> None:
            self._trainer = weakref.WeakMethod(trainer)

        return Connection(
            worker,
            [server],
            tokens=TokenScheduler(),
            dense=serve,
            observe=observe,
            tracer=self._process.tracer,
            near=all(table.spill is None for table in tables.values()),
        )
