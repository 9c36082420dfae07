"""The rows of a checkpoint that some PSs own, and the parts that may have them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from persia import batching
from persia.types import BucketMap

__all__ = ["Owned"]


class Owned(NamedTuple):
    """The rows of a table that some PSs own.

    Attributes:
        table: name of the table in these PSs, by which its ids are hashed.
        buckets: the PS of each bucket of ids.
        servers: the PSs.
    """

    table: str
    buckets: BucketMap
    servers: Collection[int]

    def writers(self, table: str, written_by: BucketMap | None) -> frozenset[int] | None:
        """Returns the PSs that may have written such rows; None if any PS may have.

        Args:
            table: name of the table in the checkpoint.
            written_by: the bucket map of the PSs that wrote it; None if shards are not numbered by PS.
        """
        if written_by is None or table != self.table:  # Ids of a table of another name have other buckets.
            return None
        return frozenset(written_by.owners[np.isin(self.buckets.owners, list(self.servers))].tolist())

    def of(self, arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Returns these rows out of others."""
        if self.buckets.servers == 1:
            return arrays
        mine = np.isin(batching.owners(self.table, arrays["ids"], self.buckets), list(self.servers))
        return arrays if mine.all() else {name: array[mine] for name, array in arrays.items()}
