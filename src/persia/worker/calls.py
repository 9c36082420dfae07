"""Asks several peers at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

__all__ = ["CallAll", "call_all"]

T = TypeVar("T")

CallAll = Callable[[Sequence[Callable[[], T]]], list[T]]


def call_all(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Runs all calls side by side and returns their results in order, once all have ended.

    Threads are made for the purpose: calls may block for long, and must not queue behind others that wait for them.

    Raises:
        BaseException: what the first of the calls that failed has raised.
    """
    results: list[T | None] = [None] * len(calls)
    failures: dict[int, BaseException] = {}

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except BaseException as error:
            failures[number] = error

    threads = [threading.Thread(target=run, args=(n,), name="persia-call", daemon=True) for n in range(1, len(calls))]
    for thread in threads:
        thread.start()
    if calls:
        run(0)
    for thread in threads:
        thread.join()
    if failures:
        raise failures[min(failures)]
    return cast("list[T]", results)
