"""Served tables: the twin in memory."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["ServedTable", "lookup_packed"]


class ServedTable:
    """A table in a dictionary."""

    def __init__(self, dim: int, base: str | os.PathLike[str] | None = None) -> None:
        self._rows: dict[int, NDArray[np.float32]] = {}
        self.base_name = ""
        if base is not None:
            with np.load(base) as file:
                self.set(file["ids"], file["values"])
                self.base_name = str(file["name"])
        self.dim = dim

    def lookup(self, ids: NDArray[np.uint64], out: NDArray[np.float32], found: NDArray[np.bool_] | None = None) -> int:
        """Looks rows up."""
        count = 0
        for place, id_ in enumerate(ids.tolist()):
            row = self._rows.get(id_)
            out[place] = 0 if row is None else row
            count += row is not None
            if found is not None:
                found[place] = row is not None
        return count

    def set(self, ids: NDArray[np.uint64], values: NDArray[np.float32]) -> None:
        """Sets rows."""
        self._rows.update(zip(ids.tolist(), values.copy(), strict=True))

    def remove(self, ids: NDArray[np.uint64]) -> int:
        """Removes rows."""
        return sum(self._rows.pop(id_, None) is not None for id_ in ids.tolist())

    def __len__(self) -> int:
        return len(self._rows)

    def write_snapshot(self, path: str | os.PathLike[str], name: str = "") -> None:
        """Writes all rows."""
        ids = np.array(list(self._rows), np.uint64)
        values = np.array(list(self._rows.values()), np.float32).reshape(-1, self.dim)
        with open(path, "wb") as file:
            np.savez(file, name=name, ids=ids, values=values)


def lookup_packed(
    tables: Sequence[ServedTable],
    counts: Sequence[int],
    ids: NDArray[np.uint64],
    out: NDArray[np.float32],
) -> int:
    """Looks rows of several tables up."""
    begin = at = total = 0
    for table, count in zip(tables, counts, strict=True):
        size = count * table.dim
        total += table.lookup(ids[begin : begin + count], out[at : at + size].reshape(count, table.dim))
        begin, at = begin + count, at + size
    return total
