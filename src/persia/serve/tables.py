"""Served rows: the tables of one PS, for reading by requests while updates are applied."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Rows", "ServedTable", "Table"]


class Table(Protocol):
    """Rows of one table, read by any number of threads while one thread changes them."""

    def lookup(self, ids: NDArray[np.uint64], out: NDArray[np.float32], found: NDArray[np.bool_] | None = None) -> int:
        """Writes the rows of ids to `out`, zeros where there is none, and to `found` whether there is one.

        Returns:
            The number of ids with a row.
        """

    def set(self, ids: NDArray[np.uint64], values: NDArray[np.float32]) -> None:
        """Inserts or overwrites rows, values `[n, dim]`."""

    def remove(self, ids: NDArray[np.uint64]) -> int:
        """Removes rows; returns how many there were."""

    def __len__(self) -> int:
        """Returns the number of rows."""


Rows: TypeAlias = Mapping[str, Table]
"""The rows of one PS, by table."""


class ServedTable:
    """A table in a dictionary."""

    def __init__(self, dim: int) -> None:
        self._rows: dict[int, NDArray[np.float32]] = {}
        self._lock = threading.Lock()
        self.dim = dim

    def lookup(self, ids: NDArray[np.uint64], out: NDArray[np.float32], found: NDArray[np.bool_] | None = None) -> int:
        count = 0
        for place, id_ in enumerate(ids.tolist()):
            row = self._rows.get(id_)
            out[place] = 0 if row is None else row
            count += row is not None
            if found is not None:
                found[place] = row is not None
        return count

    def set(self, ids: NDArray[np.uint64], values: NDArray[np.float32]) -> None:
        self._rows.update(zip(ids.tolist(), values.copy(), strict=True))

    def remove(self, ids: NDArray[np.uint64]) -> int:
        return sum(self._rows.pop(id_, None) is not None for id_ in ids.tolist())

    def __len__(self) -> int:
        return len(self._rows)
