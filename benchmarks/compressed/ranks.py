"""The parent's side of a group of ranks: starts them on a network, commands them, ends them."""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.compressed.network import Network, open_network

__all__ = ["Groups", "Ranks"]

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 4000.0
"""More than what the ranks themselves wait for one another."""


class Ranks:
    """Processes of one process group, each on its host of the network.

    Args:
        count: how many.
        network: where; stays the caller's to close.

    Raises:
        RuntimeError: from every method, a rank died or was silent for too long; its error is on standard error.
    """

    def __init__(self, count: int, network: Network) -> None:
        self.network = network
        self._processes: list[subprocess.Popen] = []
        path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        port = _free_port() if network.address(0) == "127.0.0.1" else 29500
        try:
            for rank in range(count):
                command = [
                    *network.command(rank), sys.executable, "-m", "benchmarks.compressed.rank",
                    f"--rank={rank}", f"--ranks={count}", f"--address={network.address(0)}", f"--port={port}",
                    f"--interface={network.interface()}",
                ]  # fmt: skip
                pipe = subprocess.PIPE
                environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
                self._processes.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment))
            self._answers()
        except BaseException:
            self.close(by_force=True)
            raise

    def call(self, do: str, **arguments: Any) -> list[Any]:
        """Every rank's answer to a command of `rank.Commands`."""
        line = json.dumps({"do": do, **arguments}).encode() + b"\n"
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
        return self._answers()

    def time(self, variant: str, steps: int) -> float:
        """Seconds a step of a prepared training: of the slowest rank."""
        return max(answer["seconds"] for answer in self.call("time", variant=variant, steps=steps)) / steps

    def limit(self, gbit: float | None) -> None:
        """Sets the bandwidth of every link, by the network or by the ranks themselves."""
        self.network.limit(gbit)
        if self.network.sent() is None:
            self.call("limit", gbit=gbit)

    def sent(self) -> list[int]:
        """Bytes that each rank has sent so far: with headers, or the payload where the network does not count."""
        counted = self.network.sent()
        return self.call("sent") if counted is None else counted

    def _answers(self) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + DEADLINE_S
        with selectors.DefaultSelector() as waiting:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                waiting.register(process.stdout, selectors.EVENT_READ, rank)
            while len(answers) < len(self._processes):
                ready = waiting.select(max(0.0, deadline - time.monotonic()))
                for key, _ in ready:
                    line = key.fileobj.readline()  # type: ignore[union-attr]
                    if not line:
                        raise RuntimeError(f"Rank {key.data} has died; its error is printed above.")
                    answers[key.data] = json.loads(line)
                    waiting.unregister(key.fileobj)
                if not ready:
                    late = sorted(set(range(len(self._processes))) - set(answers))
                    raise RuntimeError(f"Ranks {late} have not answered within {DEADLINE_S:.0f} s.")
        return [answers[rank] for rank in range(len(self._processes))]

    def close(self, by_force: bool = False) -> None:
        """Ends the processes."""
        for process in self._processes:
            assert process.stdin is not None
            assert process.stdout is not None
            if by_force:
                process.kill()
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        self._processes.clear()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(by_force=kind is not None)


class Groups:
    """Groups of ranks that measures share: one of each size, opened when first asked for."""

    def __init__(self) -> None:
        self._open: dict[int, Ranks] = {}

    def of(self, count: int) -> Ranks:
        """The group of `count` ranks, its network unlimited and nothing prepared."""
        if count not in self._open:
            network = open_network(count)
            try:
                self._open[count] = Ranks(count, network)
            except BaseException:
                network.close()
                raise
        ranks = self._open[count]
        ranks.limit(None)
        ranks.call("prepare", task="", variants=[], lr=0.0, warmup=0, steps=0)
        return ranks

    def close(self) -> None:
        """Ends them and takes their networks down."""
        for ranks in self._open.values():
            try:
                ranks.close()
            finally:
                ranks.network.close()

    def __enter__(self) -> Groups:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
