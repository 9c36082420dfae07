"""The interfaces of data loaders and of sources of batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from persia.batching.batch import Batch
from persia.types import Delivery, Feed

__all__ = ["DataLoader", "Seekable", "Sharded"]


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
