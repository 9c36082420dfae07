"""Several NN workers as threads of this process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from persia.cluster.embedded import Embedded
from persia.coordinator import TokenScheduler
from persia.data.streams.loader import StreamLoader, StreamLoaders
from persia.data.streams.offset_log import OffsetLog
from persia.data.streams.recorded import RecordedStream
from persia.dense import DenseServer
from persia.errors import ConfigError
from persia.membership.data_loaders import DataLoaders
from persia.membership.directory import Directory
from persia.modes import Mode
from persia.ps import EmbeddingServer, ServerOptions
from persia.ps.shares import divide_here
from persia.schema import EmbeddingOptimizer, Schema
from persia.services import (
    Connection,
    DataLoader,
    DenseMaker,
    DensePS,
    EmbeddingPS,
    EmbeddingWorker,
    LoaderStream,
    SharedStream,
)
from persia.testing.thread_replicas import Meeting, ThreadReplicas
from persia.types import BucketMap, Feed, Member, Membership
from persia.worker import Worker

__all__ = ["ThreadMember", "ThreadStream", "Threads"]

T = TypeVar("T")


class Threads:
    """All roles in this process, and several NN workers, each in a thread with its own model and `Trainer`.

    For experiments with modes, and for tests: Python lets one thread compute at a time, so it trains no faster than one
    NN worker. Use `Ray` for speed.

        cluster = Threads(nn_workers=4)
        results = cluster.run(lambda member: persia.Trainer(make_model(), schema, ..., cluster=member).fit(data))

    Args:
        nn_workers: number of NN workers.
        ps: number of embedding PSs.
        dense_ps: number of dense PSs.
        timeout: maximum wait for others in seconds.
        tokens: the token scheduler, such as one with a file; a new one by default.
        data_loaders: number of data loaders that read a stream; NN workers read other data themselves.

    Raises:
        ConfigError: an argument is not valid.
    """

    def __init__(
        self,
        nn_workers: int,
        ps: int = 1,
        dense_ps: int = 1,
        timeout: float = 600.0,
        tokens: TokenScheduler | None = None,
        data_loaders: int = 1,
    ) -> None:
        numbers = {"nn_workers": nn_workers, "ps": ps, "dense_ps": dense_ps, "data_loaders": data_loaders}
        for name, value in numbers.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"Invalid Threads.{name} = {value!r}; expected a whole number >= 1.", field=f"cluster.{name}"
                )
        self.nn_workers = nn_workers
        self.tokens = tokens or TokenScheduler(timeout)
        self._ps = ps
        self._dense_ps = dense_ps
        self._timeout = timeout
        self._lock = threading.Lock()
        self._generation = 1
        self._meeting = Meeting(nn_workers, timeout)
        self._servers: Sequence[EmbeddingPS] = []
        self._dense: Sequence[DensePS] = []
        self._worker: Worker | None = None
        self._data_loaders = data_loaders
        self._streams: list[ThreadStream] = []
        """Streams of the `fit` calls in this run."""
        self._stream_calls: Counter[int] = Counter()
        """Number of these calls, by rank."""

    def member(self, rank: int) -> ThreadMember:
        """Returns the view of the cluster for NN worker `rank`."""
        return ThreadMember(self, rank)

    def run(self, function: Callable[[ThreadMember], T]) -> list[T]:
        """Calls a function in a thread for each NN worker, and returns the results by rank.

        Each run has new NN workers, which need their own EmbeddingCollection or Trainer. Rows are retained.

        In an asynchronous mode an NN worker that fails does not stop the others.

        Raises:
            Exception: raised by the function on the NN worker that failed first.
        """
        results = self.outcomes(function)
        for result in self.failures:
            raise result
        return [result for result in results if not isinstance(result, BaseException)]

    def outcomes(self, function: Callable[[ThreadMember], T]) -> list[T | BaseException]:
        """Like `run`, but the result of an NN worker that failed is its exception."""
        self.failures: list[BaseException] = []
        self._generation += 1  # NN workers number their pushes from 1 again.

        def work(rank: int) -> T | BaseException:
            try:
                return function(self.member(rank))
            except BaseException as error:
                self.failures.append(error)
                self._meeting.leave(rank, f"{type(error).__name__}: {error}")
                self.tokens.cancel(self._generation, rank)
                return error

        try:
            with ThreadPoolExecutor(self.nn_workers, "nn-worker") as threads:
                return list(threads.map(work, range(self.nn_workers)))
        finally:
            for stream in self._streams:
                stream.end()
            self._streams.clear()
            self._stream_calls.clear()

    @property
    def stream(self) -> ThreadStream | None:
        """The stream that is being read, or was read last in this run; None if there is none."""
        return self._streams[-1] if self._streams else None

    def _stream(self, rank: int, data: object, schema: Schema) -> LoaderStream | None:
        """Returns the view of the stream of a `fit` call for one NN worker; the first call starts to read it."""
        if not isinstance(data, SharedStream):
            return None
        assert self._worker is not None
        with self._lock:
            call = self._stream_calls[rank]
            self._stream_calls[rank] += 1
            if call == len(self._streams):
                for previous in self._streams:
                    previous.end()
                sizes = (self._data_loaders, self.nn_workers, self._timeout)
                self._streams.append(ThreadStream(data, schema, self._worker, *sizes))
            return self._streams[call].of(rank)

    def connect_as(self, rank: int, schema: Schema, optimizer: EmbeddingOptimizer, mode: Mode, seed: int) -> Connection:
        """Starts the roles on the first call, and returns the connection of an NN worker."""
        with self._lock:
            if self._worker is None:
                threads, tables = Embedded().threads, schema.resolved_tables()
                buckets = BucketMap.even(self._ps)
                options = [
                    ServerOptions(
                        self.nn_workers, self._timeout, neighbours=self._ps, **shares._asdict(), buckets=buckets
                    )
                    for shares in divide_here(tables, optimizer, self._ps)
                ]
                self._servers = [
                    EmbeddingServer(tables, optimizer, mode, seed, threads, server_options)
                    for server_options in options
                ]
                self._worker = Worker(schema, self._servers, threads)
        return Connection(
            self._worker,
            self._servers,
            rank=rank,
            nn_workers=self.nn_workers,
            generation=self._generation,
            tokens=self.tokens,
            dense=self._dense_servers,
            replicas=lambda model, _: ThreadReplicas(model, rank, self._meeting),
            stream=lambda data: self._stream(rank, data, schema),
        )

    def _dense_servers(self, maker: DenseMaker) -> Sequence[DensePS]:
        with self._lock:
            if not self._dense:
                count = self._dense_ps
                self._dense = [DenseServer(maker, rank, count, self._timeout) for rank in range(count)]
            return self._dense


class ThreadMember:
    """The view of a `Threads` cluster for one of its NN workers.

    Args:
        cluster: the cluster.
        rank: rank of the NN worker.
    """

    def __init__(self, cluster: Threads, rank: int) -> None:
        self._cluster = cluster
        self.rank = rank

    def connect(self, schema: Schema, optimizer: EmbeddingOptimizer, mode: Mode, seed: int) -> Connection:
        """Returns the connection of this NN worker."""
        return self._cluster.connect_as(self.rank, schema, optimizer, mode, seed)

    def __reduce__(self) -> Any:
        raise ConfigError("A cluster of threads cannot be pickled: it exists only in one process.", field="cluster")


class ThreadStream:
    """The offset log and the data loaders of one `fit` call on a stream.

    Args:
        source: the stream.
        schema: schema of the batches.
        worker: the embedding worker.
        data_loaders: number of data loaders.
        nn_workers: number of NN workers.
        timeout: deadline of a call in seconds.

    Attributes:
        log: the offset log.
        loaders: the data loaders, by number.
    """

    def __init__(
        self, source: SharedStream, schema: Schema, worker: Worker, data_loaders: int, nn_workers: int, timeout: float
    ) -> None:
        self.log = OffsetLog()
        self._source = source
        self._schema = schema
        self._nn_workers = nn_workers
        self._timeout = timeout
        self._workers: Directory[EmbeddingWorker] = Directory.fixed("embedding_worker", [worker])
        self.loaders = [self._loader() for _ in range(data_loaders)]
        self._directory: Directory[DataLoader] = Directory("data_loader", lambda member: self.loaders[member.rank])
        self._incarnations = [1] * data_loaders
        self._version = 0
        self._feed: Feed | None = None
        self._publish()

    def restart(self, number: int) -> None:
        """Replaces a data loader by an empty one, as after its death. No batch is lost."""
        old, self.loaders[number] = self.loaders[number], self._loader()
        self._incarnations[number] += 1
        self._publish()
        if self._feed is not None:
            self._begin(self._feed)  # Nothing changes for the other data loaders.
        old.end()

    def of(self, rank: int) -> LoaderStream:
        """Returns the view of the stream for one NN worker."""
        stream = RecordedStream(self.log, rank == 0, self._source.commit, self._source.observe)
        loaders = DataLoaders(self._directory, self._timeout)
        return LoaderStream(stream, StreamLoaders(loaders, self._begin, stream, self._nn_workers, self._timeout))

    def end(self) -> None:
        """Stops reading."""
        for loader in self.loaders:
            loader.end()

    def _begin(self, feed: Feed) -> None:
        self._feed = feed
        DataLoaders(self._directory, self._timeout).begin(feed)

    def _loader(self) -> StreamLoader:
        return StreamLoader(self._source, self.log, self._schema, self._workers, timeout=self._timeout)

    def _publish(self) -> None:
        """Updates the directory from `loaders`."""
        self._version += 1
        members = [Member("data_loader", rank, number, "") for rank, number in enumerate(self._incarnations)]
        self._directory.update(Membership(self._version, 1, members))
