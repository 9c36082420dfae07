"""SIGTERM as a notice that a process is going to be ended, for example because its host goes away."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

__all__ = ["on_sigterm"]

STATUS = 128 + signal.SIGTERM


def on_sigterm(notice: Callable[[], bool]) -> None:
    """Calls a function at the first SIGTERM of this process, in a thread. Returns immediately.

    The process ends if the function returns False or fails, and at the second SIGTERM. A handler of Python alone would
    not do: it runs when the main thread executes Python, and the main thread of an actor waits for calls in Ray.
    Outside of the main thread nothing changes.

    Args:
        notice: the function; whether the process is going to end by itself.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.signal(signal.SIGTERM, lambda *_: None)  # Else the number would not be written.
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def wait() -> None:
        noticed = False
        while numbers := os.read(reading, 64):
            for _ in range(numbers.count(signal.SIGTERM)):
                leaves = False
                try:
                    leaves = not noticed and notice()
                finally:  # Also if it has failed: a process that ignores SIGTERM would stay until SIGKILL.
                    if not leaves:
                        os._exit(STATUS)
                noticed = True

    threading.Thread(target=wait, name="persia-sigterm", daemon=True).start()
