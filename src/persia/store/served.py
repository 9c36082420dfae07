"""The rows of a prediction server: tables that many threads read while one applies changes."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia.errors import StoreError
from persia.store.core_errors import StoreErrors

__all__ = ["ServedTable", "lookup_packed"]

_core: Any = importlib.import_module("persia._core")

MAX_DIM = 65536
_Path = str | os.PathLike[str]
_store_errors = StoreErrors(MemoryError, "there is no memory for more rows; raise the limit of the process")


class ServedTable:
    """Rows of one table by id: an optional snapshot on disk, mapped and shared, and the changes to it in memory.

    Thread-safe, without the interpreter lock. `lookup` takes no lock and never waits for another call. Calls that
    change rows wait for one another, and for `ids` and `write_snapshot`. Do not use a table in a forked child.

    Args:
        dim: values per row, 1 to 65536.
        base: a file that `write_snapshot` has written. Opening it reads its first page only, so a damaged row goes
            unnoticed until `verify`. Nothing may write to the file or truncate it while it is in use: replace it by
            name, as `write_snapshot` does.

    Raises:
        StoreError: `dim` is not valid; or the file cannot be read, is damaged, or has rows of another `dim`.
    """

    def __init__(self, dim: int, base: _Path | None = None) -> None:
        if not 1 <= dim <= MAX_DIM:
            raise StoreError(f"dim must be within 1 ... {MAX_DIM}, not {dim}")
        self.dim = dim
        with _store_errors:
            self._native = _core.ServedTable(dim, None if base is None else os.fspath(base))

    @property
    def base_name(self) -> str:
        """Name of the table in the snapshot that it began with; empty without."""
        return str(self._native.name())

    def lookup(self, ids: NDArray[np.uint64], out: NDArray[np.float32], found: NDArray[np.bool_] | None = None) -> int:
        """Writes the values of ids to `out`, zeros where there is no row. Repeated ids are allowed.

        The values of a row are those of one call of `set`; two rows may be of different ones.

        Args:
            ids: uint64 `[n]`, contiguous.
            out: float32 `[n, dim]` to write to, contiguous.
            found: bool `[n]` to write to, contiguous: whether each id has a row.

        Returns:
            The number of ids with a row.

        Raises:
            StoreError: an argument does not fit, or the index of the snapshot is damaged.
        """
        with _store_errors:
            return int(self._native.lookup(ids, out, found))

    def set(self, ids: NDArray[np.uint64], values: NDArray[np.float32]) -> None:
        """Inserts or overwrites rows, in order: of a repeated id the last one stays.

        Args:
            ids: uint64 `[n]`, contiguous.
            values: float32 `[n, dim]`, contiguous.

        Raises:
            StoreError: an argument does not fit, and nothing has been changed.
            StoreFullError: there is not enough memory. Some of the first rows have been set.
        """
        with _store_errors:
            self._native.set(ids, values)

    def remove(self, ids: NDArray[np.uint64]) -> int:
        """Removes rows; ids without a row are ignored. The memory goes to rows that are set later.

        Args:
            ids: uint64 `[n]`, contiguous.

        Returns:
            The number of rows removed.

        Raises:
            StoreError: an argument does not fit, and nothing has been changed.
        """
        with _store_errors:
            return int(self._native.remove(ids))

    def __len__(self) -> int:
        """Returns the number of rows."""
        return int(self._native.size())

    def memory_bytes(self) -> int:
        """Returns the bytes of memory of this table, without the snapshot, which processes share."""
        return int(self._native.memory_bytes())

    def ids(self) -> NDArray[np.uint64]:
        """Returns the ids of all rows, uint64 `[n]`, in an order that depends on the ids only."""
        with _store_errors:
            found: NDArray[np.uint64] = self._native.ids()
        return found

    def iterate_rows(self, *, max_rows: int = 65536) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.float32]]]:
        """Yields the rows in parts: ids, uint64 `[n]`, and values, float32 `[n, dim]`, in the order of `ids`.

        Rows that are removed meanwhile are left out, those that are added meanwhile too; values are as of their part.

        Args:
            max_rows: rows of a part at most.
        """
        ids = self.ids()
        for start in range(0, len(ids), max_rows):
            part = ids[start : start + max_rows]
            values, found = np.empty((len(part), self.dim), np.float32), np.empty(len(part), np.bool_)
            if self.lookup(part, values, found) < len(part):
                part, values = part[found], values[found]
            if len(part):
                yield part, values

    def write_snapshot(self, path: _Path, name: str = "") -> None:
        """Writes all rows, as of one moment, to a file for `base` of other tables; see `docs/reference/served-rows.md`.

        Changes wait until it is written, lookups do not. The file gets its name once it is complete and synced, so
        readers of an older one of that name are not disturbed.

        Args:
            path: of the file; its directory must exist.
            name: of the table, up to 1,024 bytes of UTF-8, to be kept in the file.

        Raises:
            StoreError: the file cannot be written; an older one of that name is unchanged.
        """
        with _store_errors:
            self._native.write_snapshot(os.fspath(path), name)

    def verify(self) -> None:
        """Reads the snapshot as a whole and compares its checksum; no-op without one.

        Raises:
            StoreError: the snapshot is damaged.
        """
        with _store_errors:
            self._native.verify()


def lookup_packed(
    tables: Sequence[ServedTable],
    counts: Sequence[int],
    ids: NDArray[np.uint64],
    out: NDArray[np.float32],
    found: NDArray[np.bool_] | None = None,
) -> int:
    """Looks up the ids of several tables, one table after another, in one call.

    Args:
        tables: a table may be there several times.
        counts: per table, the number of ids.
        ids: uint64 `[sum of counts]`, contiguous.
        out: float32 `[sum of count * dim]` to write to, contiguous.
        found: bool `[sum of counts]` to write to, contiguous: whether each id has a row.

    Returns:
        The number of ids with a row.

    Raises:
        StoreError: an argument does not fit, or the index of a snapshot is damaged.
    """
    with _store_errors:
        natives = [table._native for table in tables]
        return int(_core.served_lookup_packed(natives, list(counts), ids, out, found))
