"""Processes of a Ray on this machine that are forks of one process which has imported torch already.

A process of Ray imports ray twice, once only to start itself again, and an NN worker imports torch and its compiler:
seconds of a processor, for each. As in `support.forked`, nothing of persia is imported before a fork. Torch is hidden
until a program imports it, so that it is seen which process does.

    python -m support.ray_forks SOCKET    the process that is forked, until its stdin ends
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from support.ray_worker import SOCKET

__all__ = ["forking"]

START_SECONDS = 120.0
PRELOADED = (
    *("asyncio", "jsonschema", "msgspec", "numpy", "psutil", "requests", "yaml", "zmq", "google.protobuf.json_format"),
    *("torch", "torch._dynamo"),
)
"""Not ray itself: its library reads the environment of the process once, as it is imported."""


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Lets a Ray that `ray.init` starts within the block have such processes; end Ray before the block ends."""
    with tempfile.TemporaryDirectory(prefix="persia-ray-") as folder:
        path = f"{folder}/forks"
        process = subprocess.Popen(
            [sys.executable, "-m", "support.ray_forks", path],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Signals of a terminal go to processes of Ray as they would otherwise.
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert select.select([process.stdout], [], [], START_SECONDS)[0], "the process that is forked is late"
            assert process.stdout.readline(), "the process that is forked has ended"
            script = str(Path(__file__).with_name("ray_worker.py"))  # Absolute: Ray joins it to its own folder.
            with (
                mock.patch("ray._private.ray_constants.SETUP_WORKER_FILENAME", script),
                mock.patch.dict(os.environ, {SOCKET: path}),
            ):
                yield
        finally:
            process.stdin.close()
            process.stdout.close()
            process.wait(30)


class _Hidden(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A package that is imported, but not seen until somebody imports it.

    Args:
        name: of the package.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        names = [key for key in sys.modules if key.partition(".")[0] == name]
        self._modules = {key: sys.modules.pop(key) for key in names}
        self._spec = self._modules[name].__spec__
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """Finds the package itself; its modules come with it."""
        return importlib.machinery.ModuleSpec(name, self) if name == self._name else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Returns the package, as it was imported."""
        sys.meta_path.remove(self)
        sys.modules.update(self._modules)
        return self._modules[self._name]

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: it has been run."""
        module.__spec__ = self._spec
        if self._spec is not None:
            module.__loader__ = self._spec.loader


def _serve(path: str) -> dict[str, Any] | None:
    """Forks for each request. Returns it in the fork, and None once nobody has use for this process."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody waits for the forks.
    with socket.socket(socket.AF_UNIX) as here:
        here.bind(path)
        here.listen(64)
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([here, 0], [], [])
            if 0 in ready:
                return None
            client, _ = here.accept()
            with client:
                size, files, _, _ = socket.recv_fds(client, 4, 3)
                with client.makefile("rb") as stream:
                    request: dict[str, Any] = json.loads(stream.read(int.from_bytes(size, "big")))
                if not os.fork():
                    request["files"] = files
                    return request
                for file in files:
                    os.close(file)


def _become(request: dict[str, Any]) -> None:
    """Makes this process look like one that Ray has just started."""
    os.setpgid(0, 0)  # Ray ends the whole group of a process that has ended.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    for number, file in enumerate(request["files"]):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["arguments"]
    found = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [str(Path(sys.argv[0]).parent), *filter(None, found), *sys.path[1:]]
    for name in [name for name in sys.modules if name.partition(".")[0] == "support"]:
        del sys.modules[name]


if __name__ == "__main__":
    for module in PRELOADED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
    _Hidden("torch")
    gc.freeze()  # A fork would look for garbage in all of it, and copy each page by doing so.
    wanted = _serve(sys.argv[1])
    if wanted is not None:
        _become(wanted)
        runpy.run_path(sys.argv[0], run_name="__main__")
