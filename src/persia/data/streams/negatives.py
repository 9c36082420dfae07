"""`negatives` and `shared_negatives` of a stream: pass the offsets on, so that runs can be resumed, and shared."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from persia.batching.batch import Batch
from persia.data.item_catalogs import ItemDraws
from persia.data.negative_sampling import SampledReader
from persia.data.reader import InputStream
from persia.data.shared_sampling import SharedNegatives
from persia.data.streams.recorded import LoggedStream
from persia.errors import ConfigError, DataError
from persia.schema import InputRules, Schema
from persia.services import NewBatch, SharedStream, StreamLog, StreamShare
from persia.telemetry.logs import get_logger
from persia.telemetry.metrics import Metric
from persia.types import OffsetRange, Offsets, Partition

__all__ = ["NegativeStream"]

LOG = get_logger("persia.data")


class NegativeStream(LoggedStream):
    """The stream that `negatives` and `shared_negatives` return for a stream.

    Draws depend only on the seed and a batch's first offset, and without a catalog on messages before it.

    Args:
        stream: the samples.
        sampling: adds negatives to a batch.
    """

    def __init__(self, stream: SharedStream, sampling: SampledReader) -> None:
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
    def are_shared(self) -> bool:
        """Whether the samples of a batch share its negatives."""
        return isinstance(self._sampling, SharedNegatives)

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
        stream: Any = self._input_stream().with_schema(self._sampling.inner_schema(schema))
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
        share = self._stream.share(log, loader, loaders, stopping)
        if isinstance(self._sampling, SharedNegatives) and self._sampling.catalog is None:
            return _WindowShare(share, self._sampling)
        return _NegativeShare(share, self._sampling)

    def commit(self, offsets: Offsets) -> None:
        """Reports that a checkpoint has all before `offsets`."""
        self._stream.commit(offsets)

    def observe(self) -> list[Metric]:
        """Returns metrics of the stream, without its negatives."""
        return self._stream.observe()


class _NegativeShare:
    """A share of a stream, with negatives."""

    def __init__(self, share: StreamShare, sampling: SampledReader) -> None:
        self._share = share
        self._sampling = sampling

    def read(self, offsets: OffsetRange) -> Batch:
        """See `persia.services.StreamShare`."""
        return self._added(self._share.read(offsets), offsets)

    def past(self, messages: OffsetRange) -> Iterator[tuple[int, Batch]]:
        """See `persia.services.StreamShare`."""
        for begin, batch in self._share.past(messages):
            yield begin, self._added(batch, messages._replace(begin=begin))

    def poll(self) -> NewBatch | None:
        """See `persia.services.StreamShare`."""
        new = self._share.poll()
        return None if new is None else new._replace(batch=self._added(new.batch, new.range))

    def close(self) -> None:
        """See `persia.services.StreamShare`."""
        self._share.close()

    def _added(self, batch: Batch, offsets: OffsetRange) -> Batch:
        topic, number = offsets.partition
        generator = self._sampling.generator(zlib.crc32(topic.encode()), number, offsets.begin)
        return self._sampling.added(batch, generator, offsets.begin)


class _WindowShare(_NegativeShare):
    """A share of a stream, with negatives among the items of messages before each batch.

    The offsets of a partition are divided into windows of equal size, and the items of a batch's negatives are those of
    the window before the one in which it begins. So they depend on the offset only, wherever a run has begun.
    """

    def __init__(self, share: StreamShare, sampling: SharedNegatives) -> None:
        super().__init__(share, sampling)
        self._shared = sampling
        self._windows: dict[Partition, tuple[int, ItemDraws | None]] = {}
        """Number of the present window of each partition, and draws from the one before."""

    def past(self, messages: OffsetRange) -> Iterator[tuple[int, Batch]]:
        """See `persia.services.StreamShare`; without negatives, which are drawn for batches of the record only."""
        return self._share.past(messages)

    def _added(self, batch: Batch, offsets: OffsetRange) -> Batch:
        topic, number = offsets.partition
        generator = self._shared.generator(zlib.crc32(topic.encode()), number, offsets.begin)
        return self._shared.added(batch, generator, offsets.begin, self._draws(offsets))

    def _draws(self, offsets: OffsetRange) -> ItemDraws | None:
        window = offsets.begin // self._shared.window
        known = self._windows.get(offsets.partition)
        if known is None or known[0] != window:
            known = self._windows[offsets.partition] = window, self._read(offsets.partition, window - 1)
        return known[1]

    def _read(self, partition: Partition, window: int) -> ItemDraws | None:
        """Returns draws of the items of a window; None if it has none, or its messages have been deleted."""
        if window < 0:
            return None
        begin = window * self._shared.window
        try:
            return self._shared.draws_of(self._share.past(OffsetRange(partition, begin, begin + self._shared.window)))
        except DataError as error:
            LOG.warning(
                "Negatives are drawn from their own batch for now, as those before it cannot be read: %s", error
            )
            return None
