"""Requests of eight clients to one table of a PS: what they get together, against one client and the store alone.

    python -m benchmarks 'ps.clients*' [--preset smoke|laptop|full] [--json FILE]

A client looks up rows for training and pushes their gradients, which are applied on arrival. All sides do the same
number of rows of the same batches, with the same pool of threads, in one process: no message is sent.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import runner
from benchmarks.store import ids_of
from persia.modes import Hybrid
from persia.ps import EmbeddingServer, ServerOptions
from persia.schema import Adagrad, Table
from persia.store import NativeStore, TableConfig
from persia.types import Gradients, Packed, PushHeader

CLIENTS = 8
DIM = 16
CORES = len(os.sched_getaffinity(0))
LR = 0.05


@dataclass(frozen=True)
class Scale:
    """How much of everything a preset does."""

    rows: int
    batch: int  # distinct ids of a request
    calls: int  # of each side and round, over all clients
    rounds: int


SCALES = {
    "smoke": Scale(20_000, 2_000, 16, 1),
    "laptop": Scale(1_000_000, 16_384, 32, 21),
    "full": Scale(10_000_000, 16_384, 160, 31),
}

Work = Callable[[int, int], object]
"""Processes call number `n` of client number `c`: `work(c, n)`."""


def together(clients: int, calls: int, work: Work) -> float:
    """Returns the seconds that `calls` calls of several clients take, each in its own thread."""
    begin = threading.Barrier(clients + 1)

    def run(client: int) -> None:
        begin.wait()
        for number in range(calls // clients):
            work(client, number)

    threads = [threading.Thread(target=run, args=(client,)) for client in range(clients)]
    for thread in threads:
        thread.start()
    begin.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


class Sides:
    """A PS and a store with the same rows, and the batches of all clients.

    Args:
        scale: rows and batches.
        threads: threads of the pool of each side.
    """

    def __init__(self, scale: Scale, threads: int) -> None:
        self._scale = scale
        random = np.random.default_rng(0)
        self._batches = [
            ids_of(random.choice(scale.rows, scale.batch, replace=False, shuffle=True)) for _ in range(2 * CLIENTS)
        ]
        self._gradients = random.normal(size=(scale.batch, DIM)).astype(np.float32)
        self._outs = [np.empty((scale.batch, DIM), np.float32) for _ in range(CLIENTS)]
        """As many as a PS has answers on their way: one alone would stay in the cache."""
        capacity = 2 * scale.rows
        options = ServerOptions(CLIENTS)
        self._ps = EmbeddingServer(
            {"t": Table("t", DIM, capacity=capacity)}, Adagrad(LR), Hybrid(combine=False), 0, threads, options
        )
        self._store = NativeStore(threads)
        self._store.create_table(TableConfig("t", DIM, capacity=capacity))
        for start in range(0, scale.rows, 65_536):
            ids = ids_of(np.arange(start, min(start + 65_536, scale.rows)))
            self._ps.lookup({"t": ids}, True)
            self._store.lookup([0], [ids], True)
        self._sequences = [0] * CLIENTS

    def _batch(self, client: int, number: int) -> np.ndarray:
        return self._batches[(2 * client + number) % len(self._batches)]

    def _at_ps(self, client: int, number: int) -> None:
        ids = self._batch(client, number)
        self._ps.lookup(Packed(["t"], [len(ids)], ids), True)
        self._sequences[client] += 1
        sequence = self._sequences[client]
        header = PushHeader(1, client, sequence, sequence - 1, len(ids))
        self._ps.push(header, {"t": Gradients(ids, self._gradients)})

    def _at_store(self, client: int, number: int) -> None:
        ids = self._batch(client, number)
        self._store.lookup([0], [ids], True, [self._outs[number % CLIENTS]])
        self._store.update([0], [ids], [self._gradients], [LR], number)

    def rate(self, clients: int, *, ps: bool = True) -> float:
        """Returns rows/s, looked up and updated, of a number of clients of the PS, or of the store."""
        scale = self._scale
        return scale.calls * scale.batch / together(clients, scale.calls, self._at_ps if ps else self._at_store)


@runner.measures("ps.clients", "ps.clients.vs_one", "ps.clients.pool_of_one")
def clients(preset: str) -> Iterator[runner.Measure]:
    """Rows/s that 8 clients of a table of a PS look up and update together.

    Against the store's own rate, which one thread calls; against one client of the PS; and the same with a pool of one
    thread, where clients use several processors only as far as they do not lock each other out.
    """
    scale = SCALES[preset]
    details: dict[str, Any] = {"clients": CLIENTS, "cores": CORES, "batch": scale.batch, "rows": scale.rows}
    both = Sides(scale, CORES)
    for name, one in (
        ("ps.clients", lambda: both.rate(1, ps=False)),
        ("ps.clients.vs_one", lambda: both.rate(1)),
    ):
        both.rate(CLIENTS), one()  # Warm.
        yield runner.ratio(
            name,
            ours=lambda: both.rate(CLIENTS),
            theirs=one,
            of="rows/s",
            rounds=scale.rounds,
            at_least=0.9,
            details={**details, "threads": CORES},
        )
    alone = Sides(scale, 1)
    alone.rate(CLIENTS), alone.rate(1)
    yield runner.ratio(
        "ps.clients.pool_of_one",
        ours=lambda: alone.rate(CLIENTS),
        theirs=lambda: alone.rate(1),
        of="rows/s",
        rounds=scale.rounds,
        details={**details, "threads": 1},
    )
