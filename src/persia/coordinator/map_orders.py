"""The bucket map of a run at its coordinator: which map is ordered, and which one is committed."""

from __future__ import annotations

import msgspec

from persia.errors import PersiaError, StaleMapError
from persia.types import BucketMap

__all__ = ["MapOrders"]


class MapOrders(msgspec.Struct, frozen=True):
    """The bucket map of a run, and the next one if it is wanted. A change returns another value; the caller saves it.

    Args:
        buckets: the map.
        ordered: the next map, if it is ordered and not committed.
        adopted: version of the last map that all PSs have adopted.
        refused: generation and number of the last round whose commit was refused.
    """

    buckets: BucketMap
    ordered: BucketMap | None = None
    adopted: int = 0
    refused: tuple[int, int] = (0, 0)

    def order(self, after: BucketMap) -> MapOrders:
        """Returns the state with an order.

        Raises:
            StaleMapError: the map does not follow the current one.
            PersiaError: another map is ordered.
        """
        if after == self.buckets:  # A repetition, after it was committed.
            return self
        if after.version != self.buckets.version + 1:
            raise StaleMapError(
                f"Bucket map {after.version} does not follow bucket map {self.buckets.version} of this run. Nothing "
                "has changed; make the next map from the current one, `Ray.buckets`.",
                routed=after.version,
                current=self.buckets.version,
            )
        if self.ordered is not None and self.ordered != after:
            raise PersiaError("Rows are already moving to another bucket map. Wait until they have moved.")
        return msgspec.structs.replace(self, ordered=after)

    def withdraw(self, after: BucketMap) -> MapOrders:
        """Returns the state without the order of a map."""
        return msgspec.structs.replace(self, ordered=None) if self.ordered == after else self

    def commit(self, number: tuple[int, int], after: BucketMap) -> MapOrders:
        """Returns the state with an ordered map as the map of the run; else with the round as refused.

        A late repetition of a commit that was refused stays refused, also if the same map is ordered again.
        """
        if after == self.buckets or number <= self.refused:
            return self
        if self.ordered == after:
            return msgspec.structs.replace(self, buckets=after, ordered=None)
        return msgspec.structs.replace(self, refused=number)

    def adopt(self, version: int) -> MapOrders:
        """Returns the state in which all PSs have adopted a map."""
        if not self.adopted < version <= self.buckets.version:
            return self
        return msgspec.structs.replace(self, adopted=version)
