"""Tells a store how time passes for tables whose rows leave: in steps of training, or in the time that it has run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from persia.schema import Days, Steps
from persia.store import EmbeddingStore

__all__ = ["RowAges", "ttl_of"]

SECONDS_OF_DAY = 86_400
LONGEST_PAUSE = 3600.0
"""Seconds between two updates that count at most: a job that was down for a month must not lose all its rows."""
CALLS_OF_TTL = 64
"""Calls of the store in a time to live."""


def ttl_of(ttl: Days | Steps | None) -> int:
    """Returns a time to live in the unit of the store: steps, or seconds."""
    match ttl:
        case Steps(steps):
            return steps
        case Days(days):
            return max(1, round(days * SECONDS_OF_DAY))
        case None:
            return 0


class RowAges:
    """Lets time pass in the tables of a store that have a time to live. Safe to call from several threads.

    Args:
        store: with all its tables.
        ttls: time to live by number of table.
        clock: returns seconds, from any moment on.
    """

    def __init__(
        self, store: EmbeddingStore, ttls: Mapping[int, Days | Steps], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._ttls = dict(ttls)
        self._clock = clock
        self._lock = threading.Lock()
        self._untold = dict.fromkeys(self._ttls, 0.0)
        """Time since the last call of the store, by table, in its unit."""
        self._step: int | None = None
        self._at: float | None = None
        for table in self._ttls:
            self._store.age(table, 0)

    def updated(self, step: int) -> None:
        """Notes an update of a global step. Steps that come late, and those of a process before, do not count."""
        if not self._ttls:
            return
        with self._lock:
            now = self._clock()
            seconds = min(now - self._at, LONGEST_PAUSE) if self._at is not None else 0.0
            steps = max(0, step - self._step) if self._step is not None else 0
            self._at, self._step = now, step if self._step is None else max(step, self._step)
            for table, ttl in self._ttls.items():
                self._untold[table] += steps if isinstance(ttl, Steps) else seconds
                passed = int(self._untold[table])
                if passed >= max(1, ttl_of(ttl) // CALLS_OF_TTL):
                    self._store.age(table, passed)
                    self._untold[table] -= passed
