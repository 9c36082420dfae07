"""The thread that follows the log of changes."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

from persia.checks import without_userinfo
from persia.errors import ClosedError, DeadlineError
from persia.telemetry.logs import get_logger

__all__ = ["LogPoller"]

LOG = get_logger("persia.serve")

END_SECONDS = 120.0
"""Maximum wait for the call in progress: longer than the storages' own deadlines."""

EXIT_SECONDS = 10.0
"""Maximum wait at interpreter exit without a call of `end`."""


class LogPoller:
    """Calls `refresh` periodically in a thread. Logs the first of consecutive errors, and continues.

    Args:
        refresh: applies new entries of the log.
        seconds: interval of the calls.
        stop: ends the thread.
        url: URL of the log, for messages.

    Attributes:
        failure: error of the last call; empty if it succeeded.
    """

    def __init__(self, refresh: Callable[[], None], seconds: float, stop: threading.Event, url: str) -> None:
        self.failure = ""
        self._refresh = refresh
        self._seconds = seconds
        self._stop = stop
        self._url = without_userinfo(url)
        self._thread: threading.Thread | None = None

    def start(self, *, at_once: bool = False) -> None:
        """Starts the thread, unless it is running.

        Args:
            at_once: make the first call immediately.
        """
        if self._thread is None:
            first = 0.0 if at_once else self._seconds
            self._thread = threading.Thread(target=self._follow, args=(first,), name="persia-serve", daemon=True)
            self._thread.start()
            # A thread in the core at interpreter exit would abort the process.
            atexit.register(self._end_at_exit)

    def end(self) -> None:
        """Sets `stop`, and waits for the thread, which ends after the call in progress.

        Raises:
            DeadlineError: the thread did not end within `END_SECONDS`.
        """
        thread = self._thread
        self._end(END_SECONDS)
        atexit.unregister(self._end_at_exit)
        if thread is not None and thread.is_alive():
            raise DeadlineError(
                f"Reading {self._url} did not stop within {END_SECONDS:g} s: its storage does not answer. Check it.",
                url=self._url,
                seconds=END_SECONDS,
            )

    def _end_at_exit(self) -> None:
        self._end(EXIT_SECONDS)

    def _end(self, seconds: float) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(seconds)
            self._thread = None

    def _follow(self, seconds: float) -> None:
        while not self._stop.wait(seconds):
            seconds = self._seconds
            try:
                self._refresh()
                self.failure = ""
            except ClosedError:
                return
            except Exception as error:  # Keeps the current state, and retries.
                if not self.failure:
                    LOG.exception("The log of changes in %s cannot be read at present.", self._url)
                self.failure = without_userinfo(f"{type(error).__name__}: {error}")
