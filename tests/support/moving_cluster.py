"""A cluster in this process whose embedding PSs join and leave while a Trainer trains in a thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from persia import rpc
from persia.coordinator import CoordinatorServer, TokenScheduler
from persia.dense import DenseServer
from persia.membership.directory import Directory
from persia.membership.embedding_workers import EmbeddingWorkers
from persia.membership.listener import Listener
from persia.membership.map_rounds import MapRounds
from persia.membership.reached_servers import ReachedServers
from persia.ps import EmbeddingServer, ServerOptions
from persia.services import Connection
from persia.types import BucketMap, Member, Membership
from persia.worker import Worker
from support.moving_ps import SECONDS, until


class MovingCluster:
    """One NN worker, one embedding worker, and PSs of which some join and leave.

    Args:
        ps: number of PSs at the start.
    """

    def __init__(self, ps: int) -> None:
        self.coordinator = CoordinatorServer(buckets=BucketMap.even(ps))
        self.ps = ps
        self.all: dict[int, EmbeddingServer] = {}
        self.connection: Connection | None = None

    def connect(self, *service: Any) -> Connection:
        self.service = service
        for rank in range(self.ps):
            self.join(rank)
        servers = self.reached()
        servers.resize(self.ps)
        self.worker = Worker(service[0], list(servers), newest_map=servers.current)
        directory: Directory[Any] = Directory("embedding_worker", lambda _: self.worker)
        directory.update(Membership(1, 1, [Member("embedding_worker", 0, 1, "")]))
        workers = EmbeddingWorkers(directory, SECONDS)
        tokens, generation = TokenScheduler(SECONDS), self.coordinator.regenerate(1)
        self.rounds = MapRounds(self.coordinator, servers, workers, generation, SECONDS)

        def dense(maker: Any) -> list[DenseServer]:
            return [DenseServer(maker, 0, 1, SECONDS)]

        return Connection(
            workers,
            servers,
            generation=generation,
            tokens=tokens,
            dense=dense,
            rounds=self.rounds,  # type: ignore[arg-type]
        )

    def reached(self) -> ReachedServers:
        servers = ReachedServers(lambda member: self.all[member.rank], rpc.close, SECONDS)
        Listener(self.coordinator, servers.update)
        return servers

    def join(self, rank: int) -> None:
        schema, optimizer, mode, seed = self.service
        buckets, peers = self.coordinator.map_state().buckets, self.reached()
        options = ServerOptions(timeout=SECONDS, buckets=buckets, rank=rank, peer=peers.reach)  # type: ignore[arg-type]
        self.all[rank] = EmbeddingServer(schema.resolved_tables(), optimizer, mode, seed, 1, options)
        self.coordinator.join("embedding_ps", rank, f"ps-{rank}-{id(self.all[rank])}")

    def order(self, after: BucketMap) -> None:
        for rank in range(len(self.all), after.servers):
            self.join(rank)
        self.coordinator.order_map(after)

    def move(self, after: BucketMap) -> None:
        """Orders a map, and waits until the run has it. PSs that have left end."""
        self.order(after)
        until(lambda: self.coordinator.map_state().adopted == after.version)
        for rank in range(after.servers, len(self.all)):
            self.coordinator.depart("embedding_ps", rank, 1)
            del self.all[rank]

    @property
    def buckets(self) -> BucketMap:
        return self.coordinator.map_state().buckets


@contextlib.contextmanager
def training(trainer: Any, data: Any) -> Iterator[None]:
    """Trains in a thread until the block has ended."""
    failures: list[BaseException] = []

    def train() -> None:
        try:
            trainer.fit(data)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        until(lambda: bool(failures) or trainer.global_step > 0)
        yield
    finally:
        trainer.stop()
        thread.join(SECONDS)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


def trains_on(trainer: Any, steps: int) -> None:
    """Waits for further steps."""
    trained = trainer.global_step
    until(lambda: trainer.global_step > trained + steps)
