"""Which rows have been updated since they were looked up ahead (docs/concepts/fresh-rows.md)."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from persia.batching import LAST_VERSION, ChangeFilter
from persia.types import Moment, Packed

__all__ = ["RecentChanges"]

EPOCH_BITS = 62
"""Of the random number of an epoch, so that it fits a signed integer of any message format."""


class RecentChanges:
    """Numbers the updates of a PS, and answers which rows may have changed since one of them. Thread-safe.

    A row may be said to have changed though it has not, never the reverse. Until the first call of `now` updates cost
    next to nothing: a PS whose NN workers look nothing up ahead marks no rows.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[object, int] = {}
        """Versions of updates that have begun and not ended; 0 for those of an earlier epoch."""
        self._begun = 0
        self._marks: ChangeFilter | None = None
        self._first_marked = 0
        """Updates up to this version are not all marked."""
        self._epoch = 0
        self.forget()

    def forget(self) -> None:
        """Starts another epoch: everything counts as changed. For changes of rows other than updates."""
        with self._lock:
            self._epoch = secrets.randbits(EPOCH_BITS)

    def now(self) -> Moment:
        """Returns a moment whose updates are all in the rows that are read from now on."""
        with self._lock:
            if self._marks is None:
                self._marks, self._first_marked = ChangeFilter(), self._begun
            return Moment(self._epoch, min(self._running.values(), default=self._begun + 1) - 1)

    @contextlib.contextmanager
    def updating(self, tables: Sequence[int], ids: Packed[np.uint64]) -> Iterator[None]:
        """Surrounds an update of rows.

        Args:
            tables: number of the table of each array of ids.
            ids: ids of the rows, by table.
        """
        update = object()
        with self._lock:
            if self._begun >= LAST_VERSION:
                self._begun = self._first_marked = 0
                self._epoch = secrets.randbits(EPOCH_BITS)
                self._marks = None if self._marks is None else ChangeFilter()
                # Their marks are in the other filter, so that moments before their end know nothing.
                self._running = dict.fromkeys(self._running, 0)
            self._begun += 1
            version = self._running[update] = self._begun
            marks = self._marks
        try:
            if marks is not None:
                marks.mark(tables, ids, version)
            yield
        finally:
            with self._lock:
                del self._running[update]

    def changed(
        self, tables: Sequence[int], ids: Packed[np.uint64], seen: Moment
    ) -> tuple[Packed[np.uint32], Packed[np.uint64]]:
        """Returns the places of ids whose rows may have changed after a moment, uint32, ascending; and these ids.

        Args:
            tables: number of the table of each array of ids.
            ids: ids, by table.
            seen: the moment.
        """
        with self._lock:
            comparable = seen.epoch == self._epoch and self._first_marked <= seen.version <= self._begun
            marks = self._marks
        if marks is not None and comparable:
            return marks.changed(tables, ids, seen.version)
        every = [np.arange(count, dtype=np.uint32) for count in ids.counts]
        return Packed(ids.names, ids.counts, np.concatenate(every) if every else np.empty(0, np.uint32)), ids
