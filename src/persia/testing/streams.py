"""A stream for NN workers in the threads of one process, read by data loaders in the same process."""

from __future__ import annotations

from typing import NamedTuple

from persia.data.stream_loader import StreamLoader
from persia.membership.data_loaders import DataLoaders
from persia.membership.directory import Directory
from persia.membership.streams import RecordedStream, StreamLoaders
from persia.schema import Schema
from persia.services import DataLoader, EmbeddingWorker, FedStream, SharedStream
from persia.streams import OffsetLog
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
        loaders: the data loaders, by number. A test may replace one, as a restart does.
    """

    def __init__(self, source: SharedStream, schema: Schema, worker: Worker, options: StreamOptions) -> None:
        self.log = OffsetLog()
        self._source = source
        self._schema = schema
        self._options = options
        self._workers: Directory[EmbeddingWorker] = Directory.fixed("embedding_worker", [worker])
        self.loaders = [self.loader() for _ in range(options.data_loaders)]
        self._directory: Directory[DataLoader] = Directory.fixed("data_loader", self.loaders)

    def loader(self) -> StreamLoader:
        """Returns a data loader that has not begun."""
        return StreamLoader(self._source, self.log, self._schema, self._workers, timeout=self._options.timeout)

    def of(self, rank: int) -> FedStream:
        """Returns the stream as one NN worker has it."""
        source, options = self._source, self._options
        stream = RecordedStream(self.log, rank == 0, source.commit, source.observe)
        loaders = DataLoaders(self._directory, options.timeout)
        return FedStream(stream, StreamLoaders(loaders, loaders.begin, stream, options.nn_workers, options.timeout))

    def end(self) -> None:
        """Ends reading."""
        for loader in self.loaders:
            loader.end()
