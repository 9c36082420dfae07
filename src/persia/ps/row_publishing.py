"""Publishing of the rows of a PS: runs the publisher, and ends its epoch."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from persia.store import EmbeddingStore
from persia.telemetry.metrics import Metric, metrics_of
from persia.types import PublishOrder, PublishStatus

if TYPE_CHECKING:
    from persia.publish import Publisher

__all__ = ["RowPublishing"]


class RowPublishing:
    """Runs at most one publisher. Safe to call from several threads.

    Args:
        store: the store, with all its tables.
        tables: numbers of the tables, by name.
    """

    def __init__(self, store: EmbeddingStore, tables: Mapping[str, int]) -> None:
        self._store = store
        self._tables = tables
        self._lock = threading.Lock()
        self._run = ""
        self._publisher: Publisher | None = None
        self._ended = PublishStatus()
        """Status of the last publisher that ended, for repeated calls of `end` by callers that lost the answer."""
        self._counting = threading.Lock()
        """Guards changes of `_step`: pushes must not wait for `_lock`, under which a publisher begins and ends."""
        self._step = 0

    def applied(self, step: int) -> None:
        """Notes that the gradients of the global step `step`, counted from 0, have been applied."""
        with self._counting:
            self._step = max(self._step, step + 1)

    def begin(self, order: PublishOrder) -> PublishStatus:
        """See `persia.services.EmbeddingPS.publish`."""
        from persia.publish import Publisher  # A PS that does not publish restarts faster.

        with self._lock:
            if self._run != order.run:
                self._end(last=False)
                self._ended = PublishStatus()
                with self._counting:
                    self._step = max(self._step, order.step)
                publisher = Publisher(self._store, self._tables, order, lambda: self._step)
                self._run, self._publisher = order.run, publisher
                publisher.start()
            return self.status()

    def status(self) -> PublishStatus:
        """Returns the progress of publishing. Does not wait for a publisher that is ending."""
        publisher = self._publisher
        return PublishStatus() if publisher is None else publisher.status

    def approve(self, run: str, ticket: int) -> None:
        """See `persia.services.EmbeddingPS.approve`. Does not wait for a publisher that is ending."""
        publisher = self._publisher
        if publisher is not None and run == self._run:
            publisher.approve(ticket)

    def end(self, *, last: bool) -> PublishStatus:
        """Ends publishing, if it has begun, and returns its progress. Blocks."""
        with self._lock:
            publisher = self._publisher
            self._end(last=last)
            if publisher is not None:
                self._ended = publisher.status
            return self._ended

    def go_back(self) -> None:
        """Ends the epoch before rows return to an earlier state, which invalidates the published rows."""
        with self._lock:
            self._end(last=False)
            self._ended = PublishStatus()
            with self._counting:
                self._step = 0

    def metrics(self) -> list[Metric]:
        """Returns the metrics of publishing; empty if it has not begun."""
        status = self.status()
        if status.epoch < 0:
            return []
        counts = {"age_seconds": status.age, "step": status.step, "rows": status.rows, "failing": bool(status.error)}
        return metrics_of("ps_publish", counts)

    def _end(self, *, last: bool) -> None:
        if self._publisher is not None:
            self._publisher.stop(last=last)
            self._publisher = None
