"""Processes with an environment of their own: OpenMP reads how its threads wait when torch is loaded."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from persia.openmp import SPINS

__all__ = ["AS_A_COMMAND", "AS_A_PROGRAM", "Elsewhere", "started"]

AS_A_PROGRAM: Mapping[str, str] = {}
"""As a user's program is started: the threads of torch wait as they do by themselves."""
AS_A_COMMAND = {"GOMP_SPINCOUNT": str(SPINS)}
"""As `persia train` sets it, and the roles on Ray."""

T = TypeVar("T")


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
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=target, args=(theirs, *arguments), daemon=True)
    with _environment(variables):
        process.start()
    theirs.close()  # Here, so that the end of the process ends the pipe.
    return ours, process


class Elsewhere:
    """A process that calls functions for this one.

    Args:
        variables: of its environment, beside those of this process.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._pipe, self._process = started(_serve, variables)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Calls a function of a module there, and returns or raises what it does."""
        self._pipe.send((function, arguments))
        result, error = self._pipe.recv()
        if error is not None:
            raise error
        found: T = result
        return found

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
