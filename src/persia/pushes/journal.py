"""Records the order in which pushes take effect at a parameter server, for a replay."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from persia.pushes.step_barrier import ArrivedPush
from persia.types import JournalRecord, PushHeader

__all__ = ["JournaledServer", "PushJournal"]

T = TypeVar("T")


class PushJournal:
    """The pushes that took effect at a PS, in order, and the version that each batch has read. Thread-safe.

    Reads and updates exclude each other, so all rows of a batch are of one version.

    Args:
        version: number of updates since step 0.
    """

    def __init__(self, version: int) -> None:
        self.record = JournalRecord(version, [], {}, [])
        self._lock = threading.Lock()
        self._version = version
        self._known: set[tuple[int, int, int]] = set()

    def add(self, header: PushHeader, empty: bool) -> bool:
        """Records a push that takes effect now. Returns False if it is a repetition, which has no effect.

        Pushes must not be added concurrently; callers order them.

        Args:
            header: header of the push.
            empty: whether the push has no gradients, although its header may have rows.
        """
        place = (header.rank, header.sequence, header.part)
        if place in self._known:
            return False
        self._known.add(place)
        if empty:
            self.record.empty.append(len(self.record.headers))
        self.record.headers.append(header)
        return True

    def apply(self, update: Callable[[], T], pushes: Sequence[ArrivedPush]) -> T:
        """Runs an update, which leads to the next version, and adds its pushes that were not added before."""
        with self._lock:
            result = update()
            fresh = [self.add(push.header, empty=not push.gradients) for push in pushes]
            self._version += all(fresh)  # Else the update is a repetition.
            return result

    def read(self, batch_id: int, lookup: Callable[[], T]) -> T:
        """Runs the lookup of a batch, and records the version that it reads."""
        with self._lock:
            self.record.reads[batch_id] = self._version
            return lookup()


class JournaledServer:
    """A PS of either kind, with an optional journal; see `persia.services.Recordable`."""

    journal: PushJournal | None = None
    """Journal of the pushes; None unless a schedule is being recorded."""

    _ended = JournalRecord(0, [], {}, [])

    def begin_recording(self, version: int) -> None:
        """Starts a journal; `version` is the number of updates since step 0."""
        self.journal = PushJournal(version)

    def end_recording(self) -> JournalRecord:
        """Ends the journal and returns its record. A repeated call returns the same one."""
        if self.journal is not None:
            self._ended, self.journal = self.journal.record, None
        return self._ended
