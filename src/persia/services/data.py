"""The interfaces of data loaders and of sources of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

from persia.batching.batch import Batch
from persia.telemetry.metrics import Metric
from persia.types import Delivery, Feed, Offsets

__all__ = ["DataLoader", "Seekable", "Sharded", "Stream"]


class DataLoader(Protocol):
    """Data loader: reads its share of the batches, registers their ID features, and keeps them ready for NN workers.

    It decides nothing: NN workers ask for batches by number, so a restarted or added loader repeats and skips nothing.
    """

    def begin(self, feed: Feed) -> None:
        """Starts reading for a pass, or for another share of it; releases ready batches that are not needed any more.

        Raises:
            DataError: the source cannot start in the middle of a pass, and would have to.
        """

    def take(self, rank: int, epoch: int, number: int) -> Delivery:
        """Returns batch `number` of a pass to NN worker `rank`. Blocks until it is ready.

        Acknowledges all lower numbers that this rank has taken here; they are forgotten. A batch that is not ready,
        because the loader is new or was asked for a higher one, is read from the source again.

        Raises:
            DataError: the batch could not be read, or does not fit the schema.
            DeadlineError: the source, or the embedding workers, were late.
            MovedError: another loader reads this batch; refresh the membership.
        """

    def end(self) -> None:
        """Stops reading; releases ready batches."""

    def statistics(self) -> dict[str, int]:
        """Returns counters: batches read, ready, taken, registered again; rows and bytes read."""


@runtime_checkable
class Seekable(Protocol):
    """A source of batches that can start anywhere, so that a resumed run neither repeats nor skips a batch."""

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Yields the batches of an epoch, from number `start` on; the same ones every time."""


@runtime_checkable
class Sharded(Seekable, Protocol):
    """A source that can skip other loaders' batches without making them."""

    def shard(self, index: int, count: int) -> Seekable:
        """Returns the batches with number % count == index; number `i` there is `i * count + index` here."""


@runtime_checkable
class Stream(Seekable, Protocol):
    """A source whose batches depend on what has arrived, perhaps without an end.

    It records the content of each batch before it hands it out, so `batches` yields the same ones again until they are
    forgotten. Its position beyond the process is `offsets`, which is part of checkpoints.
    """

    @property
    def interrupted(self) -> bool:
        """Whether the last iteration ended because `stopping` was true, rather than at the end of the stream."""

    def begin(self, number: int, offsets: Offsets, stopping: Callable[[], bool]) -> None:
        """Starts a new record.

        Args:
            number: number of the first batch.
            offsets: where it begins; topics that are not read are ignored, partitions that are missing begin where the
                source says.
            stopping: polled while the source waits for data; once true, iterations end.
        """

    def offsets(self, number: int) -> Offsets:
        """Returns where a batch begins that is recorded, or that will be recorded next."""

    def forget(self, below: int) -> None:
        """Forgets batches of lower numbers."""

    def commit(self, offsets: Offsets) -> None:
        """Reports to whoever monitors the stream that a checkpoint has all before `offsets`. Never raises."""

    def observe(self) -> list[Metric]:
        """Returns metrics. Thread-safe."""
