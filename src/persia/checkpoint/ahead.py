"""Reading and writing at the same time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import Any, TypeVar

__all__ = ["ahead"]

_T = TypeVar("_T")


def ahead(items: Iterator[_T]) -> Generator[_T, None, None]:
    """The same items; the next one is made by another thread while this one is used."""
    done = object()
    handed: queue.Queue[Any] = queue.Queue(1)
    room = threading.Semaphore(0)  # so that at most two items are in memory
    stopped = threading.Event()
    failure: list[BaseException] = []

    def run() -> None:
        try:
            for item in items:
                handed.put(item)
                del item
                room.acquire()
                if stopped.is_set():
                    return
        except BaseException as error:
            failure.append(error)
        finally:
            handed.put(done)

    thread = threading.Thread(target=run, name="persia-checkpoint-rows", daemon=True)
    thread.start()
    try:
        while (item := handed.get()) is not done:
            room.release()
            yield item
            del item
    finally:
        stopped.set()
        room.release()
        while thread.is_alive():  # It may be about to hand over one more, or the end.
            with suppress(queue.Empty):
                handed.get_nowait()
            thread.join(0.01)
    if failure:
        raise failure[0]
