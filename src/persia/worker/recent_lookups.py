"""Which rows of a batch change before its use, since earlier batches have them too (docs/concepts/fresh-rows.md)."""

from __future__ import annotations

import threading

import numpy as np

from persia.batching import LAST_VERSION, ChangeFilter, flag_places
from persia.types import Packed

__all__ = ["RecentLookups"]

BITS = 24
"""Binary logarithm of the number of slots, which has space for the ids of dozens of batches; 32 MiB."""

PROBES = Packed([""], [1024], np.random.default_rng(0).integers(0, 1 << 64, 1024, np.uint64))
"""Random ids, of which as large a share is found as of ids that are in no batch."""

MOST_FOUND = len(PROBES.buffer) // 20
"""Maximum number of probes that may be found: a twentieth."""


class RecentLookups:
    """Records in which batch each id was last looked up ahead. Thread-safe, in constant memory from the first call on.

    An id may be said to have been in a recent batch though it was not, and with concurrent calls the reverse. If the
    recent batches have so many ids that this would be said of more than a twentieth of the others, `add` names none.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches = 0
        self._marks: ChangeFilter | None = None

    def add(self, ids: Packed[np.uint64], recent: int) -> Packed[np.bool_] | None:
        """Adds a batch. Returns which of its ids were in the last `recent` batches, by table; None if it names none.

        Args:
            ids: distinct ids by table; the same tables in each call.
            recent: number of batches; 0 for none.
        """
        with self._lock:
            if self._marks is None or self._batches >= LAST_VERSION:  # Then no batch is recent for a moment.
                self._marks, self._batches = ChangeFilter(BITS), 0
            self._batches += 1
            number, marks = self._batches, self._marks
        tables = range(len(ids))
        since = max(0, number - 1 - recent)
        places = None
        if recent and marks.changed([0], PROBES, since)[0].buffer.size <= MOST_FOUND:
            places = marks.changed(tables, ids, since)[0]
        marks.mark(tables, ids, number)
        return None if places is None or not places.buffer.size else flag_places(ids.counts, places)
