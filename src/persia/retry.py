"""Waits for what may be over soon: a full disk, a process that is being started again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["retry"]

T = TypeVar("T")


def retry(
    call: Callable[[], T],
    passing: Callable[[Exception], bool],
    seconds: float,
    pause: float,
    told: Callable[[Exception], object] = lambda _: None,
) -> T:
    """Calls, again and again while what it fails with may be over soon; blocks for that long.

    Args:
        call: may be repeated.
        passing: whether a failure is of that kind. Any other is raised at once.
        seconds: after so many the failure is raised.
        pause: seconds between two calls.
        told: gets the first failure that is waited for.
    """
    end = time.monotonic() + seconds
    waiting = False
    while True:
        try:
            return call()
        except Exception as error:
            if not passing(error) or time.monotonic() >= end:
                raise
            if not waiting:
                told(error)
                waiting = True
        time.sleep(min(pause, seconds))
