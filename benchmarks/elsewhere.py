"""Processes with an environment of their own: OpenMP reads how its threads wait when torch is loaded.

In smoke runs, whose figures mean nothing, they are forks of one process that has imported torch: to import it takes
longer than what most of them do. So are the programs that benchmarks run there, by `tests/support/forked.py`.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from persia.openmp import SPINS

__all__ = [
    "AS_A_COMMAND", "AS_A_PROGRAM", "Elsewhere", "busy", "forking", "methods", "run_python", "start_python", "started",
    "tests_module", "tests_support",
]  # fmt: skip

TESTS = Path(__file__).resolve().parents[1] / "tests"
PRELOADED = ["torch", "torch._dynamo", "pyarrow.parquet", "zmq"]
"""What nearly all processes import. Nothing of persia: `benchmarks/python_time.py` must be the first to import it."""

AS_A_PROGRAM: Mapping[str, str] = {}
"""As a user's program is started: the threads of torch wait as they do by themselves."""
AS_A_COMMAND = {"GOMP_SPINCOUNT": str(SPINS)}
"""As `persia train` sets it, and the roles on Ray."""

T = TypeVar("T")

_methods: BaseContext = multiprocessing.get_context("spawn")
_forks: Any = None


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Lets processes and programs that start within the block be forks."""
    global _methods, _forks
    before = _methods
    _methods = multiprocessing.get_context("forkserver")
    _methods.set_forkserver_preload(PRELOADED)
    try:
        with tests_support("forked").Forks() as _forks:
            yield
    finally:
        _methods, _forks = before, None


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that do nothing, all the time."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def tests_support(name: str) -> Any:
    """Returns a module of tests/support, which knows how to fork."""
    return tests_module(f"support.{name}")


def tests_module(name: str) -> Any:
    """Returns a module of tests."""
    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))
    return importlib.import_module(name)


def methods() -> BaseContext:
    """Returns how benchmarks start processes: each is a new interpreter, or within `forking` a fork."""
    return _methods


def run_python(
    arguments: Sequence[object], env: Mapping[str, str] | None = None, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `python ARGUMENTS...` to its end; within `forking`, as a fork.

    Args:
        arguments: `-c CODE`, `-m MODULE` or `FILE`, and what follows.
        env: its environment; this process's if None.
        timeout: in seconds, after which it is killed; none if None.
    """
    if _forks is not None:
        done: subprocess.CompletedProcess[str] = _forks.run(arguments, os.getcwd(), env, timeout or 240.0)
        return done
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=timeout)


def start_python(arguments: Sequence[object], env: Mapping[str, str] | None = None) -> Any:
    """Starts `python ARGUMENTS...`; within `forking`, as a fork.

    Returns:
        The program: its `pid`, its outputs in the files `out` and `err`, and `wait(timeout)`. Call `end`.
    """
    start = tests_support("forked").Interpreter if _forks is None else _forks.start
    return start(arguments, os.getcwd(), env)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Gives processes that are started meanwhile these variables, too."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def started(
    target: Callable[..., object], variables: Mapping[str, str], *arguments: Any
) -> tuple[Connection, BaseProcess]:
    """Starts a process of a function with these variables, which gets an end of a pipe and the arguments.

    Returns:
        The other end, and the process, which ends with this one.
    """
    ours, theirs = methods().Pipe()
    process = methods().Process(target=target, args=(theirs, *arguments), daemon=True)  # type: ignore[attr-defined]
    with _environment(variables):
        process.start()
    theirs.close()  # Here, so that the end of the process ends the pipe.
    return ours, process


class Elsewhere:
    """A process that calls functions for this one.

    Args:
        variables: for its environment, in addition to this process's.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._pipe, self._process = started(_serve, variables)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Calls a function of a module there, and returns or raises what it does."""
        self._pipe.send((function, arguments))
        result, error = self._pipe.recv()
        if error is not None:
            raise error
        answer: T = result
        return answer

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(pipe: Connection) -> None:
    while True:
        function, arguments = pipe.recv()
        try:
            pipe.send((function(*arguments), None))
        except Exception as error:
            pipe.send((None, error))
