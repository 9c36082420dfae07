"""Finds out which NN workers of a group are silent: they ask the store of their process group.

The store works when collectives do not.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any

from persia.retry import Deadline

__all__ = ["FailureReports", "named_ranks", "silent_ranks"]

LOOK_SECONDS = 2e-3
"""Pause between two looks for reports. Short: the process of the store may end once it has named the silent ranks."""


class FailureReports:
    """The reports of workers whose collectives have failed. All that wait for a worker fail at about the same time.

    Args:
        store: of the process group, as torch.distributed has it.
        key: of the reports in the store.
        rank: of this worker.
        size: number of workers.
    """

    def __init__(self, store: Any, key: str, rank: int, size: int) -> None:
        self._store = store
        self._key = key
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]

    def others_failed(self) -> bool:
        """Returns whether another worker has reported a failure, or the store does not answer."""
        with contextlib.suppress(Exception):
            return any(map(self._reported, self._others))
        return True

    def silent(self, seconds: float) -> list[int]:
        """Reports a failure of this worker, and returns the ranks that report none, which it waited for. Blocks.

        Args:
            seconds: maximum wait for their reports.
        """
        try:
            self._store.set(f"{self._key}/{self._rank}", "1")
        except Exception:
            return [0] if self._rank else self._others  # The store usually runs in the process of rank 0.

        def reported(rank: int) -> bool:
            with contextlib.suppress(Exception):  # That process may end first.
                return self._reported(rank)
            return False

        return silent_ranks(self._others, reported, seconds)

    def _reported(self, rank: int) -> bool:
        return bool(self._store.check([f"{self._key}/{rank}"]))


def silent_ranks(ranks: Iterable[int], reported: Callable[[int], bool], seconds: float) -> list[int]:
    """Returns the ranks without a report. Blocks until all have one, or the time is over.

    Args:
        ranks: the workers.
        reported: returns whether one has reported; what it raises is passed on.
        seconds: maximum wait.
    """
    deadline = Deadline(seconds)
    while silent := [rank for rank in ranks if not reported(rank)]:
        if deadline.passed:
            break
        time.sleep(LOOK_SECONDS)
        ranks = silent
    return silent


def named_ranks(ranks: Iterable[int]) -> str:
    """Returns the names of NN workers, for messages."""
    numbers = list(map(str, ranks))
    return f"NN worker{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
