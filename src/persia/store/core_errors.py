"""Exceptions of the C++ core as those of persia."""

from __future__ import annotations

from types import TracebackType

from persia.errors import StoreError, StoreFullError

__all__ = ["StoreErrors"]


class StoreErrors:
    """A block that exceptions of the core leave as `StoreError` or `StoreFullError`. Threads may share one.

    No generator: from Python 3.12 on, one that raises another exception leaves a cycle of frames behind. It would keep
    the store of a failed call, and the locks of its regions, until the garbage collector runs.

    Args:
        full: the exception for a lack of space.
        message: what to say then, in place of its message.
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
