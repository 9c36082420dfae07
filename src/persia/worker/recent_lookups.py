"""Which rows of a batch change before its use, since earlier batches have them too (docs/concepts/fresh-rows.md)."""

from __future__ import annotations

import threading

import numpy as np

from persia.batching import LAST_VERSION, ChangeFilter, flag_places
from persia.types import Packed

__all__ = ["RecentLookups"]


class RecentLookups:
    """Records in which batch each id was last looked up ahead. Thread-safe, in constant memory from the first call on.

    An id may be said to have been in a recent batch though it was not, and with concurrent calls the reverse.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches = 0
        self._marks: ChangeFilter | None = None

    def add(self, ids: Packed[np.uint64], recent: int) -> Packed[np.bool_] | None:
        """Adds a batch. Returns which of its ids were in the last `recent` batches, by table; None if none was.

        Args:
            ids: distinct ids by table; the same tables in each call.
            recent: number of batches; 0 for none.
        """
        with self._lock:
            if self._marks is None or self._batches >= LAST_VERSION:  # Then no batch is recent for a moment.
                self._marks, self._batches = ChangeFilter(), 0
            self._batches += 1
            number, marks = self._batches, self._marks
        tables = range(len(ids))
        places = marks.changed(tables, ids, max(0, number - 1 - recent))[0] if recent else None
        marks.mark(tables, ids, number)
        return flag_places(ids.counts, places) if places is not None and places.buffer.size else None
