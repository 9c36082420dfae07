"""Asks several peers at once."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from persia import rpc
from persia.rpc.stub import RemoteMethod

__all__ = ["call_all"]

T = TypeVar("T")


def call_all(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Runs all calls side by side and returns their results in order, once all have ended.

    Calls may block for long, and must not queue behind others that wait for them. Those of stubs (as `partial`) are all
    under way at once by themselves; for others, threads are made.

    Raises:
        BaseException: what the first of the calls that failed has raised.
    """
    if len(calls) == 1:  # Nobody to be under way beside.
        return [calls[0]()]
    results: list[T | None] = [None] * len(calls)
    failures: dict[int, BaseException] = {}

    def run(number: int, call: Callable[[], T]) -> None:
        try:
            results[number] = call()
        except BaseException as error:
            failures[number] = error

    waits = [_started(call) for call in calls]
    here = [number for number, wait in enumerate(waits) if wait is None]
    threads = [threading.Thread(target=run, args=(n, calls[n]), name="persia-call", daemon=True) for n in here[1:]]
    for thread in threads:
        thread.start()
    if here:
        run(here[0], calls[here[0]])
    for number, wait in enumerate(waits):
        if wait is not None:
            run(number, wait)
    for thread in threads:
        thread.join()
    if failures:
        raise failures[min(failures)]
    return cast("list[T]", results)


def _started(call: Callable[[], T]) -> Callable[[], T] | None:
    """Starts a call of a stub, and returns what waits for it."""
    if isinstance(call, functools.partial) and isinstance(call.func, RemoteMethod):
        return rpc.start(call.func, *call.args).result
    return None
