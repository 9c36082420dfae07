"""Runs programs as `python ARGUMENTS...` does, as forks of one process that has imported torch already.

Importing torch and its compiler takes seconds of a processor, which most programs of tests would spend on nothing else.
Nothing of persia is imported before a fork, so a program that forgets an import of it fails as it does for a user.

    python -m support.forked    the process that is forked: reads a request a line, answers with a number a line
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Forks", "Interpreter", "Started"]

KILL_SECONDS = 60.0


class Started:
    """A program that runs, alone in its session as a shell starts it.

    Args:
        forks: where it was started.
        pid: of its process, and of its process group.
        out: the file of its stdout.
        err: the file of its stderr.
    """

    def __init__(self, forks: Forks, pid: int, out: Path, err: Path) -> None:
        self.pid = pid
        self.out = out
        self.err = err
        self._forks = forks
        self._ended = os.pidfd_open(pid)
        self._status: int | None = None

    def wait(self, timeout: float) -> int | None:
        """Returns its status, or None if it still runs after `timeout` seconds."""
        if self._status is None and select.select([self._ended], [], [], timeout)[0]:
            self._status = self._forks.ask({"pid": self.pid})
            os.close(self._ended)
        return self._status

    def end(self) -> int:
        """Kills its process group, if it still runs. Returns its status."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        status = self.wait(KILL_SECONDS)
        assert status is not None, f"process {self.pid} was killed, and runs after {KILL_SECONDS:g} s"
        return status


class Interpreter:
    """A program as a new interpreter, alone in its session; used as `Started` is.

    Args:
        arguments: of `python`.
        cwd: working directory.
        env: the whole environment; that of this process if None.
    """

    def __init__(self, arguments: Sequence[Any], cwd: Path | str, env: Mapping[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="persia-python-")
        self.out, self.err = (Path(self._folder.name, name) for name in ("out", "err"))
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, *map(str, arguments)], cwd=cwd, env=env, stdin=subprocess.DEVNULL,
                stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip
        self.pid = self._process.pid

    def wait(self, timeout: float) -> int | None:
        """Returns its status, or None if it still runs after `timeout` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout)
        return None

    def end(self) -> int:
        """Kills its process group, if it still runs. Returns its status."""
        if self._process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
        return self._process.wait(KILL_SECONDS)


class Forks:
    """The process that is forked; started by the first program. A context, for one thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._number = 0

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._folder is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.close()
            self._process.wait(30)
            self._process.stdout.close()
            self._folder.cleanup()

    def run(
        self,
        arguments: Sequence[Any],
        cwd: Path | str,
        env: Mapping[str, str] | None = None,
        timeout: float = 240.0,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program to its end: `-c CODE`, `-m MODULE` or `FILE`, after `-W error` if that is wanted.

        Args:
            arguments: of `python`.
            cwd: working directory.
            env: the whole environment; that of this process if None. Threads of torch are one in any case.
            timeout: in seconds, after which the program is killed, and its status is -9.
        """
        program = self.start(arguments, cwd, env)
        program.wait(timeout)
        status = program.end()
        texts = [file.read_text(encoding="utf-8") for file in (program.out, program.err)]
        return subprocess.CompletedProcess(["python", *map(str, arguments)], status, *texts)

    def start(self, arguments: Sequence[Any], cwd: Path | str, env: Mapping[str, str] | None = None) -> Started:
        """Starts a program; see `run`. Call `end` of the result."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="persia-fork-")
        self._number += 1
        out, err = (Path(self._folder.name, f"{self._number}.{name}") for name in ("out", "err"))
        for file in (out, err):
            file.touch()
        request = {
            "arguments": [str(argument) for argument in arguments],
            "cwd": str(Path(cwd).absolute()),
            "env": dict(os.environ if env is None else env),
            "out": str(out),
            "err": str(err),
        }
        return Started(self, self.ask(request), out, err)

    def ask(self, request: Mapping[str, Any]) -> int:
        """Returns the answer to a request: the pid of a program to start, or the status of one that has ended."""
        if self._process is None:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.forked"],
                cwd=Path(__file__).parents[1],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Signals of a terminal reach the programs through those who start them.
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, f"the process that is forked has ended: {self._process.poll()}"
        number: int = json.loads(answer)
        return number


def _serve() -> dict[str, Any] | None:
    """Answers requests. Returns one that starts a program in the fork, and None at the end of the requests."""
    running: set[int] = set()
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        if "pid" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["pid"], 0)[1])
            running.remove(request["pid"])
        else:
            begun, begin = os.pipe()
            answer = os.fork()
            os.close(begin if answer else begun)
            if not answer:
                os.setsid()
                os.close(begin)
                return request
            os.read(begun, 1)  # Until it has a process group.
            os.close(begun)
            running.add(answer)
        print(answer, flush=True)
    for pid in running:  # Whoever started them was killed.
        os.killpg(pid, signal.SIGKILL)
    return None


def _become(request: dict[str, Any]) -> None:
    """Makes this process look like one that was just started."""
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for number, name in ((1, "out"), (2, "err")):
        with open(request[name], "wb") as file:
            os.dup2(file.fileno(), number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Ignored in the background of a script.
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *sys.path[1:]]
    for name in [name for name in sys.modules if name.partition(".")[0] == "support"]:
        del sys.modules[name]


def _run(arguments: list[str]) -> None:
    """Runs a program in this process, which ends as the program does."""
    if arguments[:2] == ["-W", "error"]:
        warnings.resetwarnings()
        warnings.simplefilter("error")
        arguments = arguments[2:]
    kind, *rest = arguments
    if kind == "-c":
        sys.argv, sys.path[:0] = ["-c", *rest[1:]], [""]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    elif kind == "-m":
        sys.argv, sys.path[:0] = rest, [os.getcwd()]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:0] = arguments, [str(Path(kind).absolute().parent)]
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    for module in ("torch", "torch._dynamo"):  # An optimizer of torch imports the second one.
        importlib.import_module(module)
    gc.freeze()  # A fork would look for garbage in all of it, and copy each page by doing so.
    wanted = _serve()
    if wanted is not None:
        _become(wanted)
        _run(wanted["arguments"])
