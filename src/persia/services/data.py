"""Data loaders and sources of batches, as others see them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from persia.batching.batch import Batch
from persia.types import Delivery, Feed

__all__ = ["DataLoader", "Seekable", "Sharded"]


class DataLoader(Protocol):
    """Data loader: reads its share of the batches, registers their ID features, and has them ready for NN workers.

    It decides nothing: NN workers ask for batches by number, so a restarted or added loader repeats and skips nothing.
    """

    def begin(self, feed: Feed) -> None:
        """Starts reading for a pass, or for another share of it; what is ready and no longer wanted is released.

        Raises:
            DataError: the source cannot be read from the middle, and this would be needed.
        """

    def take(self, rank: int, epoch: int, number: int) -> Delivery:
        """Batch `number` of a pass, for the NN worker `rank`. Blocks until it is ready.

        It acknowledges all lower numbers that this rank has taken here; those are forgotten. A batch that is not
        ready because the loader is new, or has been asked for a higher one, is sought in the source.

        Raises:
            DataError: the batch could not be read, or does not fit the schema.
            DeadlineError: the source, or the embedding workers, were late.
            MovedError: the batch is another loader's; get the membership anew.
        """

    def end(self) -> None:
        """Stops reading; what is ready is released."""

    def statistics(self) -> dict[str, int]:
        """Counters: batches read, ready, taken, registered again; rows and bytes read."""


@runtime_checkable
class Seekable(Protocol):
    """A source of batches that can begin anywhere, so that a resumed run neither repeats nor skips a batch."""

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from number `start` on; the same ones every time."""


@runtime_checkable
class Sharded(Seekable, Protocol):
    """A source that can pass over other loaders' batches without making them."""

    def shard(self, index: int, count: int) -> Seekable:
        """The batches with number % count == index; number `i` there is `i * count + index` here."""
