"""CPU time that a process spends in Python: that of its threads, less what native functions use.

What is counted: CPU time (`CLOCK_THREAD_CPUTIME_ID`) of the threads that run Python, in user and kernel mode: the
interpreter, the record and array codecs of `persia.rpc` (msgspec, numpy), waking and locking. What is not: time inside
the functions of `persia._core`; time inside the `send`, `recv` and `getsockopt` of sockets, that is libzmq and the
kernel; threads without Python (those of ZeroMQ and of the core); time asleep. These functions are replaced by ones that
read the clock before and after; what the reading costs by itself is measured at the start, and taken off per call.

So the figure is the work that would vanish if the role were written in C++, and does not depend on the size of arrays.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import zmq

__all__ = ["PythonTime"]


class PythonTime:
    """Counts from its creation on; make it before anything of `persia` is imported.

    `seconds` is that of all threads that are alive; of `apart` threads, only the time `within` a piece of work counts.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self._lock = threading.Lock()
        self._native: dict[int, list[float]] = {}  # By thread: seconds in native functions, and calls of them.
        self._apart: set[int] = set()
        self._within = 0.0
        core = importlib.import_module("persia._core")
        assert "persia.batching.native" not in sys.modules, "too late: the functions are known by then"
        self._replace(core)
        for name in ("send", "recv", "getsockopt"):
            setattr(zmq.Socket, name, self._timed(getattr(zmq.Socket, name)))
        self._cost = self._calibrated()

    def _replace(self, owner: Any) -> None:
        """Functions of a module, of its submodules, and methods of its classes by timed ones."""
        for name, value in list(vars(owner).items()):
            if isinstance(value, ModuleType) or (isinstance(value, type) and not isinstance(owner, type)):
                self._replace(value)
            elif callable(value) and not name.startswith("_"):
                with contextlib.suppress(TypeError, AttributeError):  # An enumeration's members, say.
                    setattr(owner, name, self._timed(value))

    def seconds(self) -> float:
        """Python's seconds so far. Call it again and subtract."""
        total = self._within
        for thread in threading.enumerate():
            ident = thread.ident
            if ident is None or ident in self._apart:
                continue
            with contextlib.suppress(OSError):  # It has ended meanwhile.
                spent = time.clock_gettime(time.pthread_getcpuclockid(ident))
                native, calls = self._native.get(ident, (0.0, 0))
                total += spent - native - calls * self._cost
        return total

    def apart(self) -> None:
        """Leaves the calling thread out, but for what it does `within`."""
        self._apart.add(threading.get_ident())

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """A piece of work of a thread that is `apart`; may be nested."""
        local = self._local
        if getattr(local, "inside", False):
            yield
            return
        local.inside = True
        state = self._state()
        before, began = tuple(state), time.thread_time()
        try:
            yield
        finally:
            spent = time.thread_time() - began
            native, calls = state[0] - before[0], state[1] - before[1]
            self._within += spent - native - calls * self._cost
            local.inside = False

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, as a piece of work `within`."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.within():
                return function(*args, **kwargs)

        return call

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.thread_time

        def call(*args: Any, **kwargs: Any) -> Any:
            state = self._state()
            began = clock()
            try:
                return function(*args, **kwargs)
            finally:
                state[0] += clock() - began
                state[1] += 1

        return call

    def _state(self) -> list[float]:
        try:
            state: list[float] = self._local.state
        except AttributeError:
            state = self._local.state = [0.0, 0]
            self._native[threading.get_ident()] = state
        return state

    def _calibrated(self) -> float:
        """Seconds of Python that a timed call adds, and does not subtract as native."""
        count = 20_000
        plain = len
        timed = self._timed(plain)
        for _ in range(count):
            timed(())
        state = self._state()
        before, began = state[0], time.thread_time()
        for _ in range(count):
            timed(())
        with_clock = time.thread_time() - began - (state[0] - before)
        began = time.thread_time()
        for _ in range(count):
            pass
        without = time.thread_time() - began
        state[0], state[1] = 0.0, 0
        return (with_clock - without) / count
