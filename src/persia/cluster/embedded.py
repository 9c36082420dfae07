"""All roles in this process."""

from __future__ import annotations

import os

from persia.coordinator import Tokens
from persia.errors import ConfigError
from persia.modes import Mode
from persia.ps import EmbeddingServer
from persia.schema import EmbeddingOptimizer, Schema
from persia.services import Connection, DenseMaker, DensePS
from persia.worker import Worker

__all__ = ["Embedded"]


class Embedded:
    """One process, for one machine: roles call each other directly. Any number of these may live side by side.

    Args:
        threads: threads of the embedding store, beside those of torch; None for one per core, at most 8.
    """

    def __init__(self, threads: int | None = None) -> None:
        if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 1):
            raise ConfigError(f"Embedded.threads = {threads!r}; give a whole number >= 1.", field="cluster.threads")
        self.threads = threads or min(8, len(os.sched_getaffinity(0)))

    def connect(self, schema: Schema, optimizer: EmbeddingOptimizer, mode: Mode, seed: int) -> Connection:
        """Makes a store and an embedding worker; each call makes new ones."""

        def serve(maker: DenseMaker) -> list[DensePS]:
            from persia.dense import DenseServer  # With torch, which this module's other users do without.

            return [DenseServer(maker)]

        server = EmbeddingServer(schema.resolved_tables(), optimizer, mode, seed, self.threads)
        return Connection(
            Worker(schema, [server], self.threads),
            [server],
            tokens=Tokens(),
            dense=serve,
        )
