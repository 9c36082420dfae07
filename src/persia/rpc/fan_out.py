"""Calls several peers concurrently."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from persia.rpc.stub import RemoteMethod, start

__all__ = ["call_all", "try_all"]

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)


def call_all(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Runs all calls concurrently; returns their results in order once all have ended.

    No call waits for another one. Calls of stubs, passed as the method or a `functools.partial` of it, need no threads:
    all are sent before the first reply is awaited. Every other call except one gets a thread.

    Raises:
        BaseException: the error of the first call, in order, that failed.
    """
    if len(calls) == 1:
        return [calls[0]()]
    outcomes = try_all(calls, BaseException)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return cast("list[T]", outcomes)


def try_all(calls: Sequence[Callable[[], T]], errors: type[E] | tuple[type[E], ...]) -> list[T | E]:
    """Like `call_all`, but returns errors of these types in place of the results of the calls that raised them."""
    started = [(call, _send(call)) for call in calls]
    outcomes: list[T | BaseException | None] = [None] * len(started)

    def run(number: int, call: Callable[[], T]) -> None:
        try:
            outcomes[number] = call()
        except BaseException as error:
            outcomes[number] = error

    local = [number for number, (_, sent) in enumerate(started) if sent is None]
    threads = [
        threading.Thread(target=run, args=(number, started[number][0]), name="persia-call", daemon=True)
        for number in local[1:]
    ]
    for thread in threads:
        thread.start()
    if local:
        run(local[0], started[local[0]][0])
    for number, (_, sent) in enumerate(started):
        if sent is not None:
            run(number, sent)
    for thread in threads:
        thread.join()
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, errors):
            raise outcome
    return cast("list[T | E]", outcomes)


def _send(call: Callable[[], T]) -> Callable[[], T] | None:
    """Sends a call of a stub; returns the function that waits for its reply. Returns None for any other call."""
    if isinstance(call, functools.partial) and isinstance(call.func, RemoteMethod):
        return start(call.func, *call.args, **call.keywords).result
    return start(call).result if isinstance(call, RemoteMethod) else None
