"""The rows of a prediction server: tables that many threads read while one thread applies changes."""

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
_store_errors = StoreErrors(MemoryError, "there is not enough memory for more rows; raise the limit of the process")


class ServedTable:
    """Rows of one table by id: an optional snapshot on disk, mapped and shared, and the changes to it in memory.

    Thread-safe, without the interpreter lock. `lookup` takes no lock and never waits for another call. Calls that
    change rows wait for each other, and for `ids` and `write_snapshot`. Do not use a table in a forked child.

    Args:
        dim: values per row, 1 to 65536.
        base: a file that `write_snapshot` has written. Opening it reads only its first page, so a damaged row goes
            unnoticed until `verify`. The file must not be written or truncated while it is in use: replace it by
            name, as `write_snapshot` does.

    Raises:
        StoreError: `dim` is invalid; or the file cannot be read, is damaged, or has rows of another `dim`.
    """

    def __init__(self, dim: int, base: _Path | None = None) -> None:
        if not 1 <= dim <= MAX_DIM:
            raise StoreError(f"dim must be within 1 ... {MAX_DIM}, not {dim}")
        self.dim = dim
        with _store_errors:
            self._native = _core.ServedTable(dim, None if base is None else os.fspath(base))

    @property
    def base_name(self) -> str:
        """Name of the table in its base snapshot; empty without one."""
        return str(self._native.name())

    def lookup(self, ids: NDArray[np.uint64], out: NDArray[np.float32], found: NDArray[np.bool_] | None = None) -> int:
        """Writes the values of ids to `out`, and zeros for ids without a row. Repeated ids are allowed.

        The values of a row are from one call of `set`; two rows may be from different calls.

        Args:
            ids: uint64 `[n]`, contiguous.
            out: float32 `[n, dim]` to write to, contiguous.
            found: bool `[n]` to write to, contiguous: whether each id has a row.

        Returns:
            The number of ids with a row.

        Raises:
            StoreError: an argument is invalid, or the index of the snapshot is damaged.
        """
        with _store_errors:
            return int(self._native.lookup(ids, out, found))

    def set(self, ids: NDArray[np.uint64], values: NDArray[np.float32]) -> None:
        """Inserts or overwrites rows, in order, so the last row of a repeated id counts.

        Args:
            ids: uint64 `[n]`, contiguous.
            values: float32 `[n, dim]`, contiguous.

        Raises:
            StoreError: an argument is invalid, and nothing has changed.
            StoreFullError: there is not enough memory. Some of the first rows have been set.
        """
        with _store_errors:
            self._native.set(ids, values)

    def remove(self, ids: NDArray[np.uint64]) -> int:
        """Removes rows; ids without a row are ignored. Their memory is reused for rows that are set later.

        Args:
            ids: uint64 `[n]`, contiguous.

        Returns:
            The number of rows removed.

        Raises:
            StoreError: an argument is invalid, and nothing has changed.
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
            all_ids: NDArray[np.uint64] = self._native.ids()
        return all_ids

    def iterate_rows(self, *, max_rows: int = 65536) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.float32]]]:
        """Yields the rows in parts: ids, uint64 `[n]`, and values, float32 `[n, dim]`, in the order of `ids`.

        Rows that are removed or added during the iteration are left out; values are current when their part is read.

        Args:
            max_rows: maximum rows of a part.
        """
        ids = self.ids()
        for start in range(0, len(ids), max_rows):
            part = ids[start : start + max_rows]
            values, exists = np.empty((len(part), self.dim), np.float32), np.empty(len(part), np.bool_)
            if self.lookup(part, values, exists) < len(part):
                part, values = part[exists], values[exists]
            if len(part):
                yield part, values

    def write_snapshot(self, path: _Path, name: str = "") -> None:
        """Writes a consistent copy of all rows to a file for `base`; see `docs/reference/served-rows.md`.

        Changes wait until it is written; lookups do not. The file gets its name once it is complete and synced, so
        readers of an older file of that name are not disturbed.

        Args:
            path: path of the file; its directory must exist.
            name: name of the table to store in the file, up to 1,024 bytes of UTF-8.

        Raises:
            StoreError: the file cannot be written; an older file of that name is unchanged.
        """
        with _store_errors:
            self._native.write_snapshot(os.fspath(path), name)

    def verify(self) -> None:
        """Reads the whole snapshot and verifies its checksum; no-op without one.

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
        tables: the tables, in which a table may occur several times.
        counts: per table, the number of ids.
        ids: uint64 `[sum of counts]`, contiguous.
        out: float32 `[sum of count * dim]` to write to, contiguous.
        found: bool `[sum of counts]` to write to, contiguous: whether each id has a row.

    Returns:
        The number of ids with a row.

    Raises:
        StoreError: an argument is invalid, or the index of a snapshot is damaged.
    """
    with _store_errors:
        natives = [table._native for table in tables]
        return int(_core.served_lookup_packed(natives, list(counts), ids, out, found))
