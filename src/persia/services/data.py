"""The interfaces of data loaders and of sources of batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from persia.batching.batch import Batch
from persia.errors import DataError
from persia.types import Delivery, Feed, SourceFingerprint, SourcePart

__all__ = ["DataLoader", "Divisible", "Fingerprinted", "Seekable", "Sharded", "fingerprint_of"]


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
class Fingerprinted(Protocol):
    """A source that can be recognised, also by a later run, which continues where this one stopped."""

    def fingerprint(self) -> SourceFingerprint | str | None:
        """Returns what decides which rows are in which batch.

        A text is enough: the source is the same if it is equal. None if that is not known.
        """


@runtime_checkable
class Divisible(Fingerprinted, Protocol):
    """A source some parts of whose fingerprint can be read without the others. One with a single part need not be."""

    def of_parts(self, order: Sequence[int], read: Sequence[int]) -> Any:
        """Returns a source of parts, by their numbers in the fingerprint.

        Args:
            order: parts in the order in which they are read, and rows are numbered.
            read: those that are read; the others only count, where the number of a row decides if it is read.
        """


def fingerprint_of(source: object) -> SourceFingerprint | None:
    """Returns the fingerprint of a source; None if it has none.

    Raises:
        DataError: its method `fingerprint` returns something else.
    """
    if not isinstance(source, Fingerprinted) or not callable(source.fingerprint):  # A frame may have such a column.
        return None
    found, kind = source.fingerprint(), type(source).__name__
    if isinstance(found, str):
        return SourceFingerprint("text", (SourcePart(found),))
    if found is not None and not (isinstance(found, SourceFingerprint) and found.parts):
        raise DataError(
            f"{kind}.fingerprint() returned a {type(found).__name__}; return a text that is equal for the same data, "
            "a persia.data.SourceFingerprint with one part or more, or None."
        )
    if found is not None and len(found.parts) > 1 and not isinstance(source, Divisible):
        raise DataError(
            f"{kind}.fingerprint() has {len(found.parts)} parts, and {kind} has no method `of_parts` that reads some "
            "of them; add it, or give one part."
        )
    return found
