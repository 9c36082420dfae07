"""Requests of other numbers of processes: by a command at the coordinator, for the driver of the run."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from persia.errors import ConfigError, PersiaError
from persia.services import ScaleRequest

__all__ = ["ScaleRequests"]

KEPT = 64
"""Number of answers that are kept for those who ask again."""

NAMES = ("ps", "embedding_workers", "data_loaders", "nn_workers")


class ScaleRequests:
    """The requests so far, one at a time; see `persia.services.BucketMaps`. Thread-safe; only `next` blocks."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: ScaleRequest | None = None
        self._answered: dict[str, ScaleRequest] = {}

    def request(self, ticket: str, counts: Mapping[str, int], keep_global_batch: bool = False) -> ScaleRequest:
        """Adds a request, or returns a known one with its answer.

        Raises:
            ConfigError: there is no such role.
            PersiaError: another request is not answered yet.
        """
        unknown = [name for name in counts if name not in NAMES]
        if unknown or not counts:
            raise ConfigError(
                f"Invalid role {unknown[0] if unknown else ''!r}; expected any of: {', '.join(NAMES)}.", field="scale"
            )
        with self._changed:
            if (known := self._answered.get(ticket)) is not None:
                return known
            if self._open is None:
                self._open = ScaleRequest(ticket, dict(counts), keep_global_batch=keep_global_batch)
                self._changed.notify_all()
            elif self._open.ticket != ticket:
                asked = ", ".join(f"{name}={count}" for name, count in self._open.counts.items())
                raise PersiaError(f"The run still changes its numbers of processes to {asked}. Try again later.")
            return self._open

    def next(self, timeout: float) -> ScaleRequest | None:
        """Returns the request that is not answered; waits up to `timeout` seconds for one."""
        with self._changed:
            self._changed.wait_for(lambda: self._open is not None, max(0.0, timeout))
            return self._open

    def answer(self, ticket: str, error: str) -> None:
        """Answers a request; no-op if it is unknown."""
        with self._changed:
            if self._open is None or self._open.ticket != ticket:
                return
            self._answered[ticket] = self._open._replace(answered=True, error=error)
            self._open = None
            while len(self._answered) > KEPT:
                del self._answered[next(iter(self._answered))]
            self._changed.notify_all()
