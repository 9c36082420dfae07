"""The one door to the native core, typed; and its errors as persia's."""

from __future__ import annotations

import importlib
from types import TracebackType
from typing import TYPE_CHECKING, Any

from persia.errors import DataError

__all__ = ["Scratch", "ThreadPool", "as_data_error", "core"]

_module: Any = importlib.import_module("persia._core")

core: Any = _module.batch
"""The functions of `bindings/batch.cpp`. They never convert an array: what does not fit is a ValueError."""

if TYPE_CHECKING:

    class ThreadPool:
        """Threads that share the loops of the core; the caller helps. Thread-safe; calls do not block one another.

        Args:
            threads: how many work on a loop, the caller included; 1 starts none.
        """

        def __init__(self, threads: int) -> None: ...

        @property
        def threads(self) -> int:
            """As given."""

    class Scratch:
        """Working memory that calls borrow and give back, so that later calls need not ask the system for pages.

        Keep one per role and pass it to every call; without one, a call frees its own in the end. Thread-safe.
        """

else:
    ThreadPool = _module.ThreadPool
    Scratch = core.Scratch


class _AsDataError:
    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, ValueError):
            raise DataError(f"{error}.") from error


as_data_error = _AsDataError()
"""Context in which a ValueError of the core becomes a DataError. It has no state."""
