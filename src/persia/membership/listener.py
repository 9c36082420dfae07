"""Follows the membership at the coordinator, and waits for members to join."""

from __future__ import annotations

import threading
from collections.abc import Callable

from persia.errors import ClosedError, DeadlineError, PersiaError
from persia.retry import Deadline
from persia.services import Coordinator
from persia.telemetry.logs import get_logger
from persia.types import TITLES, Member, Membership

__all__ = ["POLL_SECONDS", "Listener", "await_members"]

LOG = get_logger("persia.cluster")

POLL_SECONDS = 5.0
"""Maximum time that a call to the coordinator waits for a change."""

PAUSE_SECONDS = 1.0
"""Pause after a failed call, as the coordinator may be restarting."""


class Listener:
    """Follows the membership in a thread. The constructor passes the first one on before it returns.

    Args:
        coordinator: polled for changes.
        changed: called with each new membership, by one thread at a time.
    """

    def __init__(self, coordinator: Coordinator, changed: Callable[[Membership], object]) -> None:
        self._coordinator = coordinator
        self._changed = changed
        self._closed = threading.Event()
        self._version = 0
        self._poll(0.0)
        threading.Thread(target=self._listen, name="persia-membership", daemon=True).start()

    def close(self) -> None:
        """Ends the polling; no more changes are passed on."""
        self._closed.set()

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                self._poll(POLL_SECONDS)
            except ClosedError:
                return
            except PersiaError:  # The driver ends this process if the coordinator does not return.
                self._closed.wait(PAUSE_SECONDS)
            except Exception:
                LOG.exception("A change of the membership could not be applied, and is retried.")
                self._closed.wait(PAUSE_SECONDS)

    def _poll(self, seconds: float) -> None:
        membership = self._coordinator.membership(self._version, seconds)
        if membership.version > self._version and not self._closed.is_set():
            self._changed(membership)
            self._version = membership.version  # Only now, so that a failed change is retried.


def await_members(coordinator: Coordinator, role: str, least: int, timeout: float) -> list[Member]:
    """Waits for `least` living members of a role, and returns the living members by rank.

    Raises:
        DeadlineError: not enough members joined in time.
    """
    deadline = Deadline(timeout)
    version = 0
    while True:
        membership = coordinator.membership(version, min(POLL_SECONDS, deadline.left))
        joined = sorted((m for m in membership.members if m.role == role and m.state == "alive"), key=lambda m: m.rank)
        if len(joined) >= least:
            return joined
        if deadline.passed:
            raise DeadlineError(
                f"Only {len(joined)} of {least} processes of the role {TITLES[role]} joined within {timeout:g} s. "
                "Check their log lines, or raise `timeout`.",
                role=role,
                joined=[m.rank for m in joined],
                seconds=timeout,
            )
        version = membership.version
