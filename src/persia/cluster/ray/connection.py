"""Stubs of the roles for a process that trains or reads, following the membership."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from persia import rpc
from persia.cluster.ray.process_plan import Plan
from persia.cluster.ray.stubs import connect_dense, reach, reach_servers, reach_stream_log, reach_tokens
from persia.data.streams.loader import StreamLoaders
from persia.data.streams.recorded import RecordedStream
from persia.membership.data_loaders import DataLoaders
from persia.membership.directory import Directory
from persia.membership.embedding_workers import EmbeddingWorkers
from persia.membership.listener import Listener, await_members
from persia.membership.map_rounds import MapRounds
from persia.services import (
    BucketMaps,
    Connection,
    Coordinator,
    DataLoader,
    DenseMaker,
    DensePS,
    EmbeddingWorker,
    LoaderStream,
)
from persia.types import Feed, Membership, Offsets

__all__ = ["WorkerConnection"]


class _DriverLoaders(DataLoaders):
    """Data loaders whose feed is sent by the driver, also to data loaders that start later.

    Args:
        directory: the data loaders.
        timeout: deadline of a call in seconds.
        begin: sends a feed to the driver.
    """

    def __init__(self, directory: Directory[DataLoader], timeout: float, begin: Callable[[Feed], None]) -> None:
        super().__init__(directory, timeout)
        self._begin = begin

    def begin(self, feed: Feed) -> None:
        """Starts a feed; returns once all data loaders have started it."""
        self._begin(feed)


class WorkerConnection:
    """A `Connection` that follows the membership until it is closed.

    Args:
        coordinator: coordinator of the cluster.
        plan: plan of the cluster.
        rank: rank of the NN worker.
        generation: generation of the NN workers.
        begin: requests that the driver start a feed; None if this process reads its data itself.
        make_dense: requests that the driver start the dense PSs.
        commit: commits the offsets of a stream; None if the data loaders do not read a stream.
        begin_rounds: whether this process trains, so that NN worker 0 may have rows move to other PSs.

    Attributes:
        servers: the embedding PSs.

    Raises:
        DeadlineError: the roles did not join in time.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        plan: Plan,
        rank: int = 0,
        generation: int = 1,
        begin: Callable[[Feed], None] | None = None,
        make_dense: Callable[[DenseMaker], Any] | None = None,
        commit: Callable[[Offsets], None] | None = None,
        begin_rounds: bool = False,
    ) -> None:
        timeout = plan.options.timeout
        self._coordinator, self._plan = coordinator, plan
        self.servers = reach_servers(coordinator, plan)
        await_members(coordinator, "embedding_worker", 1, timeout)
        await_members(coordinator, "data_loader", 1, timeout)
        self._workers: Directory[EmbeddingWorker] = Directory(
            "embedding_worker", lambda member: reach(member, EmbeddingWorker, plan), rpc.close
        )
        self._loaders: Directory[DataLoader] = Directory(
            "data_loader", lambda member: reach(member, DataLoader, plan), rpc.close
        )
        workers = EmbeddingWorkers(self._workers, timeout, rank)
        self._rounds: MapRounds | None = None
        if begin_rounds:
            maps = rpc.cast_to(BucketMaps, coordinator)
            self._rounds = MapRounds(maps, self.servers, workers, generation, timeout)
        self._listener = Listener(coordinator, self._update)
        self._tokens = reach_tokens(plan)
        self._stream_log = reach_stream_log(plan) if commit is not None else None
        self._dense: Sequence[DensePS] = []

        def dense(maker: DenseMaker) -> Sequence[DensePS]:
            if make_dense is not None:
                make_dense(maker)
            self._dense = connect_dense(coordinator, plan)
            return self._dense

        self.connection = Connection(
            workers,
            self.servers,
            _DriverLoaders(self._loaders, timeout, begin) if begin is not None else None,
            rank,
            plan.nn_workers,
            generation,
            self._tokens,
            dense,
            gpus=plan.options.gpus,
            pools=plan.pool_at != "nn_worker",
            rounds=self._rounds,
        )
        if self._stream_log is not None and commit is not None and begin is not None:
            stream = RecordedStream(self._stream_log, False, commit)
            loaders = DataLoaders(self._loaders, timeout)
            loader_stream = LoaderStream(stream, StreamLoaders(loaders, begin, stream, plan.nn_workers, timeout))
            self.connection = self.connection._replace(stream=lambda _: loader_stream)

    def close(self) -> None:
        """Closes all connections."""
        if self._rounds is not None:
            self._rounds.close()
        self._listener.close()
        self.servers.close()
        stubs: list[object] = [self._tokens, self._stream_log, *self._dense]
        stubs += [*self._workers.roster().serving(), *self._loaders.roster().serving()]
        for stub in stubs:
            rpc.close(stub)

    def reconnect(self) -> None:
        """Reconnects to the embedding PSs after some have moved."""
        self.servers.update(self._coordinator.membership())

    def _update(self, membership: Membership) -> None:
        self.servers.update(membership)
        self._workers.update(membership)
        self._loaders.update(membership)
