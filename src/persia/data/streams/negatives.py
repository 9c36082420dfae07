"""`negatives` of a stream: passes the offsets on, so that runs can be resumed, and shared by data loaders."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from persia.batching.batch import Batch
from persia.data.negative_sampling import NegativeSampling
from persia.data.reader import InputStream
from persia.data.streams.recorded import LoggedStream
from persia.errors import ConfigError
from persia.schema import InputRules, Schema
from persia.services import NewBatch, SharedStream, StreamLog, StreamShare
from persia.telemetry.metrics import Metric
from persia.types import OffsetRange, Offsets

__all__ = ["NegativeStream"]


class NegativeStream(LoggedStream):
    """The stream that `negatives` returns for a stream. Draws depend only on the seed and a batch's first offset.

    Args:
        stream: the samples.
        sampling: adds negatives to a batch.
    """

    def __init__(self, stream: SharedStream, sampling: NegativeSampling) -> None:
        super().__init__(stream.topics)
        self._stream = stream
        self._sampling = sampling

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles without the record."""
        return NegativeStream, (self._stream, self._sampling)

    @property
    def schema(self) -> Schema:
        """The schema of the batches."""
        return self._sampling.schema

    @property
    def input_rules(self) -> InputRules | None:
        """The rules of the samples for missing values and lists."""
        return self._sampling.input_rules

    def first_inputs(self, names: Sequence[str], rows: int | None) -> Iterator[dict[str, Any]]:
        """Yields columns of the samples before the rules of features are applied, without negatives."""
        return self._input_stream().first_inputs(names, rows)

    def with_schema(self, schema: Schema) -> NegativeStream:
        """Returns a stream of the same samples for another schema, without a record.

        Raises:
            ConfigError: the schema of the samples is fixed.
        """
        stream: Any = self._input_stream().with_schema(schema)
        return NegativeStream(stream, replace(self._sampling, reader=stream))

    def _input_stream(self) -> InputStream:
        if not isinstance(self._stream, InputStream):
            raise ConfigError(
                f"The schema of {type(self._stream).__name__} is fixed; give a stream of persia.data.kafka.",
                field="reader",
            )
        return self._stream

    def share(self, log: StreamLog, loader: int, loaders: int, stopping: Callable[[], bool]) -> StreamShare:
        """Opens the share of a data loader; see `persia.services.SharedStream`."""
        return _NegativeShare(self._stream.share(log, loader, loaders, stopping), self._sampling)

    def commit(self, offsets: Offsets) -> None:
        """Reports that a checkpoint has all before `offsets`."""
        self._stream.commit(offsets)

    def observe(self) -> list[Metric]:
        """Returns metrics of the stream, without its negatives."""
        return self._stream.observe()


class _NegativeShare:
    """A share of a stream, with negatives."""

    def __init__(self, share: StreamShare, sampling: NegativeSampling) -> None:
        self._share = share
        self._sampling = sampling

    def read(self, offsets: OffsetRange) -> Batch:
        """See `persia.services.StreamShare`."""
        return self._sampling.added(self._share.read(offsets), self._generator(offsets), offsets.begin)

    def poll(self) -> NewBatch | None:
        """See `persia.services.StreamShare`."""
        new = self._share.poll()
        if new is None:
            return None
        generator = self._generator(new.range)
        return new._replace(batch=self._sampling.added(new.batch, generator, new.range.begin))

    def close(self) -> None:
        """See `persia.services.StreamShare`."""
        self._share.close()

    def _generator(self, offsets: OffsetRange) -> np.random.Generator:
        topic, number = offsets.partition
        key = (self._sampling.seed, zlib.crc32(topic.encode()), number, offsets.begin)
        return np.random.Generator(np.random.PCG64(key))
