"""Which pushes took effect at a server, in which order: the server's part of a recorded schedule."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from persia.types import JournalRecord, PushHeader

__all__ = ["PushJournal"]


class PushJournal:
    """Kept while somebody records. Reading and applying exclude each other then, so what is read is of one step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._on = False
        self._version = 0
        self._headers: list[PushHeader] = []
        self._known: set[tuple[int, int, int]] = set()

    def begin(self, version: int) -> None:
        """Records from this version on; what was recorded is forgotten."""
        with self._lock:
            self._on, self._version = True, version
            self._headers, self._known = [], set()

    def end(self) -> JournalRecord:
        """Records no more, and returns what it has."""
        with self._lock:
            self._on = False
            found, self._headers, self._known = self._headers, [], set()
            return JournalRecord(self._version, found)

    def add(self, header: PushHeader) -> bool:
        """This push takes effect now. Returns False for a repetition, which has none; known only while recording."""
        if not self._on:
            return True
        place = (header.rank, header.sequence, header.part)
        if place in self._known:
            return False
        self._known.add(place)
        self._headers.append(header)
        return True

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Surrounds reading rows, and applying a step."""
        if not self._on:
            yield
            return
        with self._lock:
            yield
