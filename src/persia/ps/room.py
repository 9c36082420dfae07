"""Waits where the regions cannot grow: what fills the memory may be gone in a moment."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from persia.errors import StoreFullError

__all__ = ["with_room"]

T = TypeVar("T")

RETRY_SECONDS = 0.1

log = logging.getLogger("persia.ps")


def with_room(call: Callable[[], T], timeout: float, operation: str) -> T:
    """Calls, again and again while there is no room for new rows.

    Args:
        call: may be repeated.
        timeout: seconds to try.
        operation: for the error.

    Raises:
        StoreFullError: there still is none.
    """
    began = time.monotonic()
    warned = False
    while True:
        try:
            return call()
        except StoreFullError as error:
            waited = time.monotonic() - began
            if waited >= timeout:
                raise StoreFullError(
                    f"{error.message}. ({operation} has waited {waited:.1f} s for it.)",
                    operation=operation,
                    seconds=timeout,
                ) from error
            if not warned:
                log.warning("%s waits for room: %s", operation, error.message)
                warned = True
        time.sleep(min(RETRY_SECONDS, timeout))
