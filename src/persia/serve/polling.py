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
"""Maximum wait for the call that runs: longer than the storages' own deadlines."""

EXIT_SECONDS = 10.0
"""The same when Python ends without a call of `end`."""


class LogPoller:
    """Calls `refresh` every so many seconds, in a thread. What it raises is logged once, and it is called again.

    Args:
        refresh: applies what is new in the log.
        seconds: between two calls.
        stop: ends the thread.
        url: of the log, for messages.

    Attributes:
        failure: why the last call has failed; empty if it has not.
    """

    def __init__(self, refresh: Callable[[], None], seconds: float, stop: threading.Event, url: str) -> None:
        self.failure = ""
        self._refresh = refresh
        self._seconds = seconds
        self._stop = stop
        self._url = without_userinfo(url)
        self._thread: threading.Thread | None = None

    def start(self, *, at_once: bool = False) -> None:
        """Starts the thread, unless it runs.

        Args:
            at_once: whether the first call is not to wait.
        """
        if self._thread is None:
            first = 0.0 if at_once else self._seconds
            self._thread = threading.Thread(target=self._follow, args=(first,), name="persia-serve", daemon=True)
            self._thread.start()
            atexit.register(
                self._end_with_the_process
            )  # A thread in the core when Python ends would abort the process.

    def end(self) -> None:
        """Sets `stop`, and waits for the thread, which ends once the call that runs has returned.

        Raises:
            DeadlineError: it has not within `END_SECONDS`.
        """
        thread = self._thread
        self._end(END_SECONDS)
        atexit.unregister(self._end_with_the_process)
        if thread is not None and thread.is_alive():
            raise DeadlineError(
                f"Reading {self._url} did not stop within {END_SECONDS:g} s. Late: its storage. Check it.",
                url=self._url,
                seconds=END_SECONDS,
            )

    def _end_with_the_process(self) -> None:
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
            except Exception as error:  # What is there stays, and is tried again.
                if not self.failure:
                    LOG.exception("The log of changes in %s cannot be read at present.", self._url)
                self.failure = without_userinfo(f"{type(error).__name__}: {error}")
