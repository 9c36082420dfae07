"""A stream for NN workers in the threads of one process, read by data loaders in the same process."""

from __future__ import annotations

from typing import NamedTuple

from persia.data.streams.loader import StreamLoader
from persia.membership.data_loaders import DataLoaders
from persia.membership.directory import Directory
from persia.membership.streams import RecordedStream, StreamLoaders
from persia.schema import Schema
from persia.services import DataLoader, EmbeddingWorker, FedStream, SharedStream
from persia.streams import OffsetLog
from persia.types import Feed, Member, Membership
from persia.worker import Worker

__all__ = ["StreamOptions", "ThreadStream"]


class StreamOptions(NamedTuple):
    """Sizes of a `ThreadStream`.

    Attributes:
        data_loaders: number of data loaders.
        nn_workers: number of NN workers.
        timeout: deadline of a call in seconds.
    """

    data_loaders: int
    nn_workers: int
    timeout: float


class ThreadStream:
    """The record and the data loaders of one call of `fit` on a stream.

    Args:
        source: the stream.
        schema: of the batches.
        worker: the embedding worker.
        options: sizes.

    Attributes:
        log: the record.
        loaders: the data loaders, by number.
    """

    def __init__(self, source: SharedStream, schema: Schema, worker: Worker, options: StreamOptions) -> None:
        self.log = OffsetLog()
        self._source = source
        self._schema = schema
        self._options = options
        self._workers: Directory[EmbeddingWorker] = Directory.fixed("embedding_worker", [worker])
        self.loaders = [self._loader() for _ in range(options.data_loaders)]
        self._directory: Directory[DataLoader] = Directory("data_loader", lambda member: self.loaders[member.rank])
        self._incarnations = [1] * options.data_loaders
        self._version = 0
        self._feed: Feed | None = None
        self._publish()

    def restart(self, number: int) -> None:
        """Replaces a data loader by an empty one, as after its death. No batch is lost."""
        old, self.loaders[number] = self.loaders[number], self._loader()
        self._incarnations[number] += 1
        self._publish()
        if self._feed is not None:
            self._begin(self._feed)  # For the others nothing changes.
        old.end()

    def of(self, rank: int) -> FedStream:
        """Returns the stream as one NN worker has it."""
        source, options = self._source, self._options
        stream = RecordedStream(self.log, rank == 0, source.commit, source.observe)
        loaders = DataLoaders(self._directory, options.timeout)
        return FedStream(stream, StreamLoaders(loaders, self._begin, stream, options.nn_workers, options.timeout))

    def end(self) -> None:
        """Ends reading."""
        for loader in self.loaders:
            loader.end()

    def _begin(self, feed: Feed) -> None:
        self._feed = feed
        DataLoaders(self._directory, self._options.timeout).begin(feed)

    def _loader(self) -> StreamLoader:
        return StreamLoader(self._source, self.log, self._schema, self._workers, timeout=self._options.timeout)

    def _publish(self) -> None:
        """Makes the directory follow `loaders`."""
        self._version += 1
        members = [Member("data_loader", rank, number, "") for rank, number in enumerate(self._incarnations)]
        self._directory.update(Membership(self._version, 1, members))
