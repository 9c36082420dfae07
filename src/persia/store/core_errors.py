"""Converts exceptions of the C++ core to errors of persia."""

from __future__ import annotations

from types import TracebackType

from persia.errors import StoreError, StoreFullError

__all__ = ["StoreErrors"]


class StoreErrors:
    """A context that turns exceptions of the core into `StoreError` or `StoreFullError`. Threads may share one.

    It is not a generator: from Python 3.12 on, a generator that raises another exception leaves a cycle of frames
    behind, which would keep the store of a failed call, and the locks of its regions, until the garbage collector runs.

    Args:
        full: the exception for a lack of space.
        message: message of the `StoreFullError`; empty for the message of the exception.
    """

    def __init__(self, full: type[Exception], message: str = "") -> None:
        self._full = full
        self._message = message

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, self._full):
            raise StoreFullError(self._message or str(error)) from error
        if isinstance(error, ValueError | RuntimeError | TypeError | IndexError):
            raise StoreError(str(error)) from error
