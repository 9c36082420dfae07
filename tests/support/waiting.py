"""Waits for what other threads and processes do."""

import time
from collections.abc import Callable

__all__ = ["wait_until"]


def wait_until(condition: Callable[[], bool], what: str = "the condition", seconds: float = 30.0) -> None:
    """Blocks until the condition is true; fails after this time, which is long enough for a busy machine."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not come true in {seconds:g} s"
        time.sleep(0.002)
