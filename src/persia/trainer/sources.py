"""Batches of one pass by their numbers: read by the NN worker itself, or by data loaders."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import NoneType
from typing import Any, Protocol

from persia.batching.batch import Batch
from persia.batching.items import checked_items
from persia.errors import DataError
from persia.modes import Gba, Mode
from persia.nn.replicas import Replicas
from persia.schema import input_rules_of
from persia.services import (
    Connection,
    DataLoader,
    Divisible,
    LoaderStream,
    Seekable,
    Sharded,
    StreamDataLoader,
    StreamPosition,
)
from persia.trainer.data_progress import DataProgress, Pass
from persia.trainer.state import TrainingState
from persia.types import Feed, RegisteredBatch

__all__ = [
    "BatchSource",
    "LoaderSource",
    "LocalSource",
    "ScheduledSource",
    "StreamSource",
    "declared_batch_size",
    "largest_batch",
    "parts_of",
    "scheduled",
    "set_input_rules",
    "set_local_batch",
    "source_of",
]


class BatchSource(Protocol):
    """Batches of one pass by their numbers."""

    @property
    def endless(self) -> bool:
        """Whether `read` may block for any time, until a stream has data."""

    def read(self, number: int) -> Batch | RegisteredBatch | None:
        """Returns a batch; None if the pass has none of this number, nor a higher one. Blocks."""

    def forget(self, below: int) -> None:
        """Forgets batches of lower numbers, which are trained."""

    def idle(self) -> bool:
        """Returns whether an NN worker waits for data of an endless source, so that the others wait for it."""

    def begin_phase(self, on_demand: bool, stopped_early: bool) -> None:
        """Prepares for a phase.

        Args:
            on_demand: whether NN workers take batches when they are ready for one; otherwise they take them in turn.
            stopped_early: whether the phase before stopped before batches that were read already; they are read again.
        """


class LocalSource:
    """Reads data in this process, and keeps each batch until `forget` says that it is trained.

    A phase may end at any batch, though later ones were read ahead: the next phase gets these again.

    Args:
        reopen: returns an iterator from a batch number on; None if the data can be read only once.
        rest: an iterator over the rest of the pass.
        position: number of its first batch.
        state: of the run, if the data are a stream, which may forget what is trained; None for other data.
    """

    def __init__(
        self,
        reopen: Callable[[int], Iterator[Batch | RegisteredBatch]] | None,
        rest: Iterator[Batch | RegisteredBatch],
        position: int,
        state: TrainingState | None = None,
    ) -> None:
        self.endless = state is not None
        self._state = state
        self._reopen = reopen
        self._rest = rest
        self._following = position
        """Number of the next batch of `_rest`."""
        self._kept: dict[int, Batch | RegisteredBatch] = {}
        self._failure: Exception | None = None
        """The error that ended `_rest`. It is kept, as a generator that has raised an error raises no other."""
        # The reading thread of a phase that was left may still be within `next` when the next phase's thread begins.
        self._lock = threading.Lock()

    def read(self, number: int) -> Batch | RegisteredBatch | None:
        """Returns a batch; None if the pass has none of this number.

        Raises:
            DataError: the batch was read and forgotten, and the data can be read only once; or an item up to this one
                is not a batch. So does every later number: whichever phase of the pass comes there has to end.
        """
        with self._lock:
            return self._read(number)

    def _read(self, number: int) -> Batch | RegisteredBatch | None:
        batch = self._kept.get(number)
        if batch is not None:
            return batch
        if number < self._following:
            if self._reopen is None:
                raise DataError(
                    f"Cannot rewind to batch {number}: the data are a one-shot iterator. Give a reader or a list.",
                    batch=number,
                )
            self._rest, self._following, self._failure = self._reopen(number), number, None
        if self._failure is not None:
            raise self._failure
        try:
            for batch in self._rest:
                self._following += 1
                if self._following > number:
                    self._kept[number] = batch
                    return batch
        except Exception as error:
            self._failure = error
            raise
        return None

    def forget(self, below: int) -> None:
        """Forgets batches of lower numbers."""
        for number in [n for n in list(self._kept) if n < below]:
            del self._kept[number]
        if self._state is not None:
            self._state.covered("training", below)

    def idle(self) -> bool:
        """Returns False: there are no other NN workers."""
        return False

    def begin_phase(self, on_demand: bool, stopped_early: bool) -> None:
        """No-op: batches that are not trained are still here."""


class LoaderSource:
    """Batches that data loaders have ready.

    Args:
        loader: the data loaders.
        begin: makes them begin where training is, in turn or on demand. All NN workers call it.
        rank: of the NN worker that takes batches.
        epoch: number of the pass in the run.
    """

    endless = False

    def __init__(self, loader: DataLoader, begin: Callable[[bool], None], rank: int, epoch: int) -> None:
        self._loader = loader
        self._begin = begin
        self._rank = rank
        self._epoch = epoch
        self._on_demand: bool | None = None

    def read(self, number: int) -> Batch | RegisteredBatch | None:
        """Returns a batch; blocks until it is there."""
        rank = 0 if self._on_demand else self._rank
        return self._loader.take(rank, self._epoch, number).batch

    def forget(self, below: int) -> None:
        """No-op: data loaders drop batches when later ones are taken."""

    def idle(self) -> bool:
        """Returns False: it has an end."""
        return False

    def begin_phase(self, on_demand: bool, stopped_early: bool) -> None:
        """Restarts the data loaders where training is: batches that were taken but not trained have been released."""
        if stopped_early or on_demand != self._on_demand:
            self._on_demand = on_demand
            self._begin(on_demand)


class StreamSource(LoaderSource):
    """Batches of a stream that data loaders have ready.

    Args:
        loader: the data loaders.
        begin: see `LoaderSource`.
        state: of the run.
        rank: of the NN worker.
    """

    endless = True

    def __init__(
        self, loader: StreamDataLoader, begin: Callable[[bool], None], state: TrainingState, rank: int
    ) -> None:
        super().__init__(loader, begin, rank, state.pass_number)
        self._stream_loader = loader
        self._state = state

    def read(self, number: int) -> Batch | RegisteredBatch | None:
        """Returns a batch; blocks until it has come, and with it the batches of the other NN workers in its step."""
        if self._on_demand:
            return self._stream_loader.take_on_demand(self._epoch, number).batch
        return super().read(number)

    def forget(self, below: int) -> None:
        """Lets the stream forget what is trained, if no restart goes back to it."""
        self._state.covered("training", below)

    def idle(self) -> bool:
        """Returns whether an NN worker waits for the stream."""
        return self._stream_loader.awaited()


def declared_batch_size(data: Any) -> int:
    """Returns the rows of every batch of a source but the last, as a reader declares them; 0 if unknown."""
    if not isinstance(data, Seekable):  # The `batch_size` of a torch `DataLoader` counts what its data set yields.
        return 0
    declared: int | None = getattr(data, "batch_size", None) or getattr(getattr(data, "order", None), "batch_size", 0)
    return declared or 0


def largest_batch(data: Any, mode: Mode) -> int:
    """Returns the rows of the largest batch of a list; 0 for other data. A single batch is a whole step of Gba."""
    rows = [len(batch) for batch in data if isinstance(batch, Batch)] if isinstance(data, Sequence) else []
    if len(rows) == 1 and isinstance(mode, Gba):
        rows.append(mode.global_batch_size)
    return max(rows, default=0)


def set_local_batch(data: Iterable[Batch] | None, state: TrainingState) -> None:
    """Sets `state.local_batch` at the start of a `fit` call, if the data declare a batch size or are a list.

    Args:
        data: see `Trainer.fit`; None where data loaders read.
        state: keeps its local batch if the data declare none and a pass over them is under way.
    """
    if data is not None:
        known = declared_batch_size(data) or (state.local_batch if state.position else 0)
        state.local_batch = known or largest_batch(data, state.mode)


def set_input_rules(data: Iterable[Batch] | None, state: TrainingState) -> None:
    """Keeps the reader's rules for missing values and lists at the start of a `fit` call, if the data declare some."""
    state.input_rules = input_rules_of(data) or state.input_rules


def parts_of(data: Seekable, current: Pass | None) -> Seekable:
    """Returns a source of the parts that a pass reads; all of them for None."""
    if current is None or current.read is None or current.order is None:
        return data
    if not isinstance(data, Divisible):
        raise DataError(
            f"The pass under way reads {len(current.read)} parts of the data, and a {type(data).__name__} reads them "
            "as a whole. All NN workers have to be given the same data."
        )
    divided: Seekable = data.of_parts(current.order, current.read)
    return divided


def scheduled(data: Iterable[Batch] | Seekable, progress: DataProgress) -> Iterable[Batch] | Seekable:
    """Returns a source for data loaders, each of whose passes has its number in the run."""
    if isinstance(data, StreamPosition) or not isinstance(data, Seekable) or progress.uniform():
        return data
    return ScheduledSource(data, progress)


class ScheduledSource:
    """A source whose passes differ in what they read, for data loaders, which know a pass by its number in the run.

    Args:
        data: the source.
        progress: of the run when the data loaders begin.
        shard: share of a data loader, as (index, count).
    """

    def __init__(self, data: Seekable, progress: DataProgress, shard: tuple[int, int] = (0, 1)) -> None:
        self._data = data
        self._progress = progress
        self._shard = shard

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Iterates over a pass by its number; see `persia.services.Seekable`."""
        current, (index, count) = self._progress.at(epoch), self._shard
        parts = parts_of(self._data, current)
        if count > 1 and isinstance(parts, Sharded):
            return parts.shard(index, count).batches(current.epoch, start)
        return itertools.islice(parts.batches(current.epoch, start * count + index), None, None, count)

    def shard(self, index: int, count: int) -> ScheduledSource:
        """Returns the batches with number % count == index; see `persia.services.Sharded`."""
        return ScheduledSource(self._data, self._progress, (index, count))


def source_of(
    data: Iterable[Batch] | None,
    state: TrainingState,
    connection: Connection,
    replicas: Replicas,
    *,
    loader_stream: LoaderStream | None = None,
) -> BatchSource:
    """Opens the rest of the pass under way.

    Args:
        data: see `Trainer.fit`; None where data loaders read.
        state: has the pass and the position. After it has been loaded, an iterator is at its beginning.
        connection: has the data loaders, if any.
        replicas: of all NN workers; the first one makes data loaders begin.
        loader_stream: a stream that data loaders read.
    """
    loader = loader_stream.loader if loader_stream is not None else connection.loader
    position = state.position
    if loader is not None:

        def begin(on_demand: bool) -> None:
            # `DataLoaders` fills in the share of each loader, and how far it reads ahead.
            takers = 1 if on_demand else connection.nn_workers
            feed = Feed(state.pass_number, state.position, takers, 0, 1, 1, connection.generation, on_demand)
            replicas.run_on_rank0(lambda: loader.begin(feed), NoneType)

        if loader_stream is not None:
            return StreamSource(loader_stream.loader, begin, state, connection.rank)
        return LoaderSource(loader, begin, connection.rank, state.pass_number)
    assert data is not None
    if isinstance(data, Seekable):
        stream = state if state.stream is not None else None
        parts, epoch = parts_of(data, state.data.current), state.epoch
        return _local(lambda n: parts.batches(epoch, n), parts.batches(epoch, position), position, stream)
    if isinstance(data, Iterator):  # The call before has read it up to `position`, except after a resume.
        return _local(None, itertools.islice(data, position if state.loaded else 0, None), position)
    return _local(
        lambda n: itertools.islice(iter(data), n, None), itertools.islice(iter(data), position, None), position
    )


def _local(
    reopen: Callable[[int], Iterator[Batch]] | None,
    rest: Iterator[Batch],
    position: int,
    stream: TrainingState | None = None,
) -> LocalSource:
    """Returns a `LocalSource` of items that are checked: in `read`, None means the end of the pass."""
    reopened = None if reopen is None else lambda number: checked_items(reopen(number), number)
    return LocalSource(reopened, checked_items(rest, position), position, stream)
