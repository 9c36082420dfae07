"""Runs programs as `python ARGUMENTS...` does, as forks of one process that has imported torch already.

Importing torch and its compiler takes seconds of a processor, which most programs of tests would spend on nothing else.
Nothing of persia is imported before a fork, so a program that forgets an import of it fails as it does for a user.

    python -m support.forked    the process that is forked: reads a request a line, answers with the status a line
"""

from __future__ import annotations

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

__all__ = ["Forks"]


class Forks:
    """The process that is forked; started by the first call of `run`. A context, for one thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.close()
            self._process.wait(30)
            self._process.stdout.close()

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
        if self._process is None:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.forked"],
                cwd=Path(__file__).parents[1],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryDirectory(prefix="persia-fork-") as folder:
            request = {
                "arguments": [str(argument) for argument in arguments],
                "cwd": str(Path(cwd).absolute()),
                "env": dict(os.environ if env is None else env),
                "out": f"{folder}/out",
                "err": f"{folder}/err",
                "timeout": timeout,
            }
            print(json.dumps(request), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
            assert answer, f"the process that is forked has ended: {self._process.poll()}"
            texts = [Path(request[name]).read_text(encoding="utf-8") for name in ("out", "err")]
        return subprocess.CompletedProcess(["python", *request["arguments"]], json.loads(answer), *texts)


def _serve() -> dict[str, Any] | None:
    """Forks for each request. Returns it in the fork, and None at the end of the requests."""
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        child = os.fork()
        if not child:
            return request
        pidfd = os.pidfd_open(child)
        if not select.select([pidfd], [], [], request["timeout"])[0]:
            os.kill(child, signal.SIGKILL)
        os.close(pidfd)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return None


def _become(request: dict[str, Any]) -> None:
    """Makes this process look like one that was just started."""
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for number, name in ((1, "out"), (2, "err")):
        with open(request[name], "wb") as file:
            os.dup2(file.fileno(), number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
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
    wanted = _serve()
    if wanted is not None:
        _become(wanted)
        _run(wanted["arguments"])
