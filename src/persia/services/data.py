"""The interfaces of data loaders and of sources of batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from persia.batching.batch import Batch
from persia.errors import DataError
from persia.types import Delivery, Feed, SourceFingerprint, SourcePart

__all__ = ["DataLoader", "Divisible", "Fingerprinted", "Seekable", "Sharded", "fingerprint_of"]


class DataLoader(Protocol):
    """Data loader: reads its share of the batches, registers their ID features, and prepares them for NN workers.

    NN workers request batches by number, so a restarted or added loader neither repeats nor skips a batch.
    """

    def begin(self, feed: Feed) -> None:
        """Starts reading a pass, or another share of it; releases ready batches that are no longer needed.

        Raises:
            DataError: the source would have to start in the middle of a pass, but cannot.
        """

    def take(self, rank: int, epoch: int, number: int) -> Delivery:
        """Returns batch `number` of a pass to NN worker `rank`. Blocks until it is ready.

        Acknowledges all lower numbers that this rank has taken from this loader, which removes them. A batch that is
        not ready, because the loader is new or has already delivered a higher number, is read from the source again.

        Raises:
            DataError: the batch could not be read, or does not match the schema.
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
        """Yields the batches of an epoch, from number `start` on; the same batches every time."""


@runtime_checkable
class Sharded(Seekable, Protocol):
    """A source that can skip other loaders' batches without reading them."""

    def shard(self, index: int, count: int) -> Seekable:
        """Returns the batches with number % count == index; batch `i` of the result is batch `i * count + index`."""


@runtime_checkable
class Fingerprinted(Protocol):
    """A source that a later run can identify, to continue where this one stopped."""

    def fingerprint(self) -> SourceFingerprint | str | None:
        """Returns the identity of the source, which determines which rows are in which batch.

        May be a string, which is equal for equal sources. None if unknown.
        """


@runtime_checkable
class Divisible(Fingerprinted, Protocol):
    """A source that can read some parts of its fingerprint without the others. Not needed for a single part."""

    def of_parts(self, order: Sequence[int], read: Sequence[int]) -> Any:
        """Returns a source of some parts, given by their numbers in the fingerprint.

        Args:
            order: parts in the order of reading, which is also the order of row numbers.
            read: parts to read; the other parts only count if the number of a row determines whether it is read.
        """


def fingerprint_of(source: object) -> SourceFingerprint | None:
    """Returns the fingerprint of a source; None if it has none.

    Raises:
        DataError: its method `fingerprint` returns another type.
    """
    if not isinstance(source, Fingerprinted) or not callable(
        source.fingerprint
    ):  # A data frame may have such a column.
        return None
    fingerprint, kind = source.fingerprint(), type(source).__name__
    if isinstance(fingerprint, str):
        return SourceFingerprint("text", (SourcePart(fingerprint),))
    if fingerprint is not None and not (isinstance(fingerprint, SourceFingerprint) and fingerprint.parts):
        raise DataError(
            f"{kind}.fingerprint() returned a {type(fingerprint).__name__}; return a string that is equal for the same "
            "data, a persia.data.SourceFingerprint with one part or more, or None."
        )
    if fingerprint is not None and len(fingerprint.parts) > 1 and not isinstance(source, Divisible):
        raise DataError(
            f"{kind}.fingerprint() has {len(fingerprint.parts)} parts, but {kind} has no method `of_parts` that reads "
            "some of them; add it, or return one part."
        )
    return fingerprint
