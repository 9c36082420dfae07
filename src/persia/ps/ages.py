"""Advances the TTL clocks of a store, in steps of training or in training time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from persia.schema import Days, Steps
from persia.store import EmbeddingStore
from persia.store.table_config import TtlUnit

__all__ = ["RowAges", "ttl_of"]

SECONDS_OF_DAY = 86_400
LONGEST_PAUSE = 3600.0
"""Maximum seconds that count between two updates: a job that was down for a month must not lose all its rows."""


def ttl_of(ttl: Days | Steps | None) -> tuple[int, TtlUnit]:
    """Returns a time to live as a number for a store, and its unit."""
    match ttl:
        case Days(days):
            return max(1, round(days * SECONDS_OF_DAY)), "seconds"
        case Steps(steps):
            return steps, "steps"
        case None:
            return 0, "steps"


class RowAges:
    """Advances the TTL clocks of the tables of a store. Safe to call from several threads.

    Args:
        store: the store, with all its tables.
        ttls: time to live by number of table.
        clock: clock in seconds, from any start.
    """

    def __init__(
        self, store: EmbeddingStore, ttls: Mapping[int, Days | Steps], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._by_steps = [table for table, ttl in ttls.items() if isinstance(ttl, Steps)]
        self._by_seconds = [table for table, ttl in ttls.items() if isinstance(ttl, Days)]
        self._clock = clock
        self._lock = threading.Lock()
        self._step: int | None = None
        self._at: float | None = None
        self._seconds = 0.0
        """Training time by which the clocks of the store have not been advanced yet."""
        for table in ttls:
            self._store.advance_clock(table, 0)

    def updated(self, step: int) -> None:
        """Notes an update of a global step. Each step counts once, and late steps do not count."""
        if not self._by_steps and not self._by_seconds:
            return
        with self._lock:
            steps = max(0, step - self._step) if self._step is not None else 1
            self._step = step if self._step is None else max(step, self._step)
            now = self._clock()
            self._seconds += min(now - self._at, LONGEST_PAUSE) if self._at is not None else 0.0
            self._at = now
            seconds = int(self._seconds)
            self._seconds -= seconds
            for tables, passed in ((self._by_steps, steps), (self._by_seconds, seconds)):
                for table in tables if passed else ():
                    self._store.advance_clock(table, passed)

    def renumber(self) -> None:
        """Notes that global steps may be renumbered from the next update on."""
        with self._lock:
            self._step = None
