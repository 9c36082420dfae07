"""Finds rows that may have changed since they were looked up."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from persia.batching.native import as_data_error
from persia.types.packed import Packed

__all__ = ["LAST_VERSION", "ChangeFilter"]

LAST_VERSION = (1 << 16) - 1
"""The last version that a filter can hold: later ones need another filter."""

_core: Any = importlib.import_module("persia._core")


class ChangeFilter:
    """Records when ids were updated, in constant memory; answers which may have been updated since a version.

    Each id of a table shares one of `2**bits` slots with others, and a slot holds the newest version of all its ids. An
    updated id is always found; another one is found only if an updated id shares its slot.

    Thread-safe. A call sees all marks of calls that returned before it began. Forked children must not use it.

    Args:
        bits: binary logarithm of the number of slots, from 1 to 32. A slot takes 2 bytes, from its first use on.

    Raises:
        DataError: `bits` is out of range.
    """

    def __init__(self, bits: int = 22) -> None:
        with as_data_error:
            self._native: Any = _core.ChangeFilter(bits)

    def mark(self, tables: Sequence[int], ids: Packed[np.uint64], version: int) -> None:
        """Marks ids as updated. Marks of an older version change nothing.

        Args:
            tables: number of the table of each array of ids.
            ids: updated ids, uint64 `[n_i]`.
            version: version that contains the updates, from 1 to `LAST_VERSION`.

        Raises:
            DataError: an argument has another dtype, size or range; nothing has changed.

        Blocks until done, without the GIL. Calls wait for each other.
        """
        with as_data_error:
            self._native.mark(tables, ids.counts, ids.buffer, version)

    def changed(
        self, tables: Sequence[int], ids: Packed[np.uint64], since: int
    ) -> tuple[Packed[np.uint32], Packed[np.uint64]]:
        """Finds the ids that may have been marked with a version after `since`.

        Args:
            tables: number of the table of each array of ids.
            ids: ids to find, uint64 `[n_i]`.
            since: version, from 0 (finds all marked ids) to `LAST_VERSION`.

        Returns:
            Positions in each array of ids, by the names of the arrays; ascending, uint32 `[found_i]`. And these ids.

        Raises:
            DataError: an argument has another dtype, size or range.

        Runs without the GIL, and never waits for another call.
        """
        places, found = np.empty(len(ids.buffer), np.uint32), np.empty(len(ids.buffer), np.uint64)
        with as_data_error:
            counts = self._native.changed(tables, ids.counts, ids.buffer, since, places, found)
        total = sum(counts)
        return Packed(ids.names, counts, places[:total]), Packed(ids.names, counts, found[:total])
