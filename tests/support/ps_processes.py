"""Embedding PSs in processes of their own that a trainer here reaches through the network, as on Ray but without it."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
from collections.abc import Mapping
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from persia import rpc
from persia.membership.directory import Directory
from persia.membership.embedding_workers import EmbeddingWorkers
from persia.modes import Mode, decode, encode
from persia.ps import EmbeddingServer, ServerOptions
from persia.ps.shares import divide_here
from persia.schema import EmbeddingOptimizer, Schema, Table
from persia.services import Connection, EmbeddingPS, EmbeddingWorker
from persia.types import BucketMap
from persia.worker import Worker, WorkerOptions

START_SECONDS = 60.0


class PSProcesses:
    """A cluster of one NN worker: PSs elsewhere, and an embedding worker that is served here; used as a context.

    Each call has the same timeout, and so have the PSs: as on Ray, from the NN worker to the last PS.

    Args:
        log: file to which the PSs log.
        timeout: in seconds.
        count: number of PSs.
    """

    def __init__(self, log: Path, timeout: float, count: int = 2) -> None:
        self.log, self.timeout, self.count = log, timeout, count
        log.touch()
        self._stack = contextlib.ExitStack()
        self._pipes: list[Pipe] = []  # The PSs end when they are closed.

    def __enter__(self) -> PSProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def connect(self, schema: Schema, optimizer: EmbeddingOptimizer, mode: Mode, seed: int) -> Connection:
        tables = schema.resolved_tables()
        spawn = multiprocessing.get_context("spawn")
        for shares in divide_here(tables, optimizer, self.count):
            ours, theirs = spawn.Pipe()
            options = ServerOptions(1, self.timeout, **shares._asdict(), buckets=BucketMap.even(self.count))
            process = spawn.Process(
                target=_serve, args=(theirs, str(self.log), tables, optimizer, encode(mode), seed, options), daemon=True
            )
            process.start()
            self._stack.callback(_end, process)
            self._pipes.append(ours)
        addresses = []
        for pipe in self._pipes:
            assert pipe.poll(START_SECONDS), "a PS is late"
            addresses.append(pipe.recv())
        worker = Worker(schema, self._stubs(addresses, EmbeddingPS), options=WorkerOptions(timeout=self.timeout))
        served = self._stack.enter_context(rpc.serve(worker, protocol=EmbeddingWorker))
        workers: Directory[EmbeddingWorker] = Directory.fixed(
            "embedding_worker", self._stubs([served.address], EmbeddingWorker)
        )
        return Connection(EmbeddingWorkers(workers, self.timeout), self._stubs(addresses, EmbeddingPS))

    def _stubs(self, addresses: list[str], protocol: type) -> list[Any]:
        stubs: list[Any] = [rpc.connect(address, protocol, timeout=self.timeout) for address in addresses]
        for stub in stubs:
            self._stack.callback(rpc.close, stub)
        return stubs


def _serve(
    pipe: Pipe,
    log: str,
    tables: Mapping[str, Table],
    optimizer: EmbeddingOptimizer,
    mode: str,
    seed: int,
    options: ServerOptions,
) -> None:
    logging.basicConfig(filename=log, level="WARNING")
    servant = EmbeddingServer(tables, optimizer, decode(mode), seed, 1, options)
    with rpc.serve(servant, protocol=EmbeddingPS) as server, contextlib.suppress(EOFError):
        pipe.send(server.address)
        pipe.recv()  # Until the test ends.


def _end(process: BaseProcess) -> None:
    process.kill()
    process.join(START_SECONDS)
    assert not process.is_alive()
