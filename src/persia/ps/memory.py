"""Waits where the regions cannot grow: what fills the memory may be gone in a moment."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from persia.errors import StoreFullError
from persia.retry import retry

__all__ = ["retry_when_full"]

T = TypeVar("T")

RETRY_SECONDS = 0.1

log = logging.getLogger("persia.ps")


def retry_when_full(call: Callable[[], T], timeout: float, operation: str) -> T:
    """Calls, again and again while there is no room for new rows.

    Args:
        call: may be repeated.
        timeout: seconds to try.
        operation: for the error.

    Raises:
        StoreFullError: there still is none.
    """
    began = time.monotonic()

    def told(error: Exception) -> None:
        log.warning("%s waits for room: %s", operation, str(error))  # A log that keeps it would keep the store.

    try:
        return retry(call, lambda error: isinstance(error, StoreFullError), timeout, RETRY_SECONDS, told)
    except StoreFullError as error:
        raise StoreFullError(
            f"{error.message}. ({operation} has waited {time.monotonic() - began:.1f} s for it.)",
            operation=operation,
            seconds=timeout,
        ) from error
