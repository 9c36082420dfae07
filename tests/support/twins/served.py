"""The slow, readable twin of `persia.store.served`: a dict."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["ReferenceServedTable"]


class ReferenceServedTable:
    """Rows in a dict: what `ServedTable` returns, without threads and without files. Not thread-safe.

    Args:
        dim: values per row.
        base: rows that it begins with.
    """

    def __init__(self, dim: int, base: ReferenceServedTable | None = None) -> None:
        self.dim = dim
        self.rows: dict[int, NDArray[np.float32]] = {} if base is None else dict(base.rows)

    def lookup(self, ids: NDArray[np.uint64], out: NDArray[np.float32], found: NDArray[np.bool_] | None = None) -> int:
        """See `ServedTable.lookup`."""
        there = np.array([id_ in self.rows for id_ in ids.tolist()], np.bool_)
        out[:] = 0
        for place in np.flatnonzero(there):
            out[place] = self.rows[int(ids[place])]
        if found is not None:
            found[:] = there
        return int(there.sum())

    def set(self, ids: NDArray[np.uint64], values: NDArray[np.float32]) -> None:
        """See `ServedTable.set`."""
        self.rows.update(zip(ids.tolist(), values.copy(), strict=True))

    def remove(self, ids: NDArray[np.uint64]) -> int:
        """See `ServedTable.remove`."""
        return sum(self.rows.pop(id_, None) is not None for id_ in ids.tolist())

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self.rows)
