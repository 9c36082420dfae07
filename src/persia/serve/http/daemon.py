"""Runs blocking calls in daemon threads, which do not delay the exit of the process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["in_daemon_thread"]

T = TypeVar("T")


async def in_daemon_thread(call: Callable[..., T], *arguments: Any) -> T:
    """Runs a blocking call in its own daemon thread, and returns its result.

    Unlike with `asyncio.to_thread`, neither the event loop nor the interpreter waits for the call at exit.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():  # Cancelled.
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = call(*arguments)
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="persia-serve-call", daemon=True).start()
    return await future
