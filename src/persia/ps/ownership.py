"""Which rows a PS owns."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from persia import batching
from persia.services import RowChunk
from persia.types import BucketMap

__all__ = ["OwnedRows", "Ownership"]


class Ownership(msgspec.Struct, frozen=True):
    """The map of a PS, and how far it is in a round of docs/reference/moves.md, as stored in its regions.

    Args:
        buckets: the map by which it serves.
        generation: generation of the last round.
        number: number of the last round.
        ended: whether this round has ended here.
        sealed: whether it serves no requests, as it has sent its last difference, or is about to.
        complete: the next map, if it has all rows that it will own by it, and keeps them.
        others: whether there may be rows in its store that it does not own. Set before the first one comes, and never
            cleared.
    """

    buckets: BucketMap
    generation: int = 0
    number: int = 0
    ended: bool = True
    sealed: bool = False
    complete: BucketMap | None = None
    others: bool = False


class OwnedRows:
    """Tells the rows that a PS owns from others in its store: those that have come, and those that have left.

    Args:
        rank: number of the PS; None if it has not been given, so that rows cannot move.
        ownership: what it owns.

    Attributes:
        ownership: see above; may be replaced.
    """

    def __init__(self, rank: int | None, ownership: Ownership) -> None:
        self._rank = rank
        self.ownership = ownership

    def of(self, chunks: Iterator[RowChunk], buckets: BucketMap) -> Iterator[RowChunk]:
        """Yields chunks without the rows that the PS does not own by a map."""
        for chunk in chunks:
            if not self.ownership.others:
                yield chunk
                continue
            own = buckets.owners[batching.buckets_of(chunk.table, chunk.arrays["ids"])] == self._rank
            if own.all():
                yield chunk
            elif own.any():
                yield chunk._replace(arrays={name: array[own] for name, array in chunk.arrays.items()})
