"""The faults of `online.exactly_once`, one after another: processes that are killed, and a broker that goes away."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from benchmarks.elsewhere import start_python
from benchmarks.exactly_once_broker import Broker
from benchmarks.exactly_once_training import Clicks, WatchedRay, columns, say
from persia.errors import PersiaError
from persia.serve import Client

ROLES = ("embedding_worker", "nn_worker", "data_loader", "embedding_ps", "coordinator", "dense_ps")
ON_BROKER = ("pause", "refuse")
KINDS = (*ROLES, "server", *ON_BROKER)
OUTAGE_SECONDS = 3.0
"""For which the broker is paused, or refuses connections."""

WAIT_SECONDS = 120.0
"""Maximum wait for a process to be there, or to answer."""

BURST = 120
"""Batches that are sent at once before a fault, so that it meets all roles at work."""

ASK_SECONDS = 0.2
"""Between two requests for predictions."""


def draw(seed: int, count: int, kinds: tuple[str, ...]) -> list[str]:
    """Returns `count` faults: in rounds, in which each kind comes once."""
    rng, faults = random.Random(seed), []
    while len(faults) < count:
        faults += rng.sample(kinds, len(kinds))
    return faults[:count]


class Server:
    """`persia serve` as a process, that is asked for predictions all the time. Use it as a context manager.

    Args:
        log: directory of changes.
    """

    def __init__(self, log: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        model = ["--model", "benchmarks.exactly_once_training:Net"]
        self._command = ["-m", "persia", "serve", log, *model, "--port", port, "--poll-seconds", "0.5"]
        self._process = start_python(self._command)
        self.client = Client(f"http://127.0.0.1:{port}")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="asks")
        self.answered = self.unanswered = 0

    def await_answer(self) -> None:
        """Waits for the next answer.

        Raises:
            RuntimeError: the server has ended, or does not answer in time.
        """
        before, end = self.answered, time.monotonic() + WAIT_SECONDS
        while self.answered == before:
            if self._process.wait(0) is not None or time.monotonic() > end:
                raise RuntimeError(f"The server does not answer; its exit status is {self._process.wait(0)}.")
            time.sleep(0.05)

    def kill(self) -> None:
        """Kills the process, starts another one, and waits until it answers."""
        self._process.end()
        self._process = start_python(self._command)
        self.await_answer()

    def _ask(self) -> None:
        number = 0
        while not self._over.wait(ASK_SECONDS):
            try:
                self.client.predict(columns(number))
                self.answered += 1
            except PersiaError:  # It starts, or has been killed.
                self.unanswered += 1
            number += 1

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self.client.close()
        self._process.end()


class Storm(threading.Thread):
    """Makes faults at equal intervals while a stream is trained, then calls `after`.

    Args:
        cluster: trains.
        clicks: come in a burst before each fault.
        broker: has the stream.
        server: follows.
        seconds: over which faults are made.
        faults: in order.
        after: called at the end, also after a failure.
    """

    def __init__(
        self,
        cluster: WatchedRay,
        clicks: Clicks,
        broker: Broker,
        server: Server,
        seconds: float,
        faults: list[str],
        after: Callable[[], None],
    ) -> None:
        super().__init__(name="storm")
        self._cluster, self._clicks, self._broker, self._server = cluster, clicks, broker, server
        self._seconds, self._faults, self._after = seconds, faults, after
        self._over = threading.Event()
        self.made: list[str] = []
        self.failure: BaseException | None = None

    def give_up(self) -> None:
        """Makes no more faults."""
        self._over.set()

    def run(self) -> None:
        """Makes the faults."""
        try:
            self._await_batches(BURST // 4)
            self._server.await_answer()
            began = time.monotonic()
            for number, kind in enumerate(self._faults):
                at = self._seconds * (number + 0.5) / len(self._faults)
                if self._over.wait(max(0.0, began + at - time.monotonic())):
                    return
                self._clicks.burst(BURST)
                self._await_batches(BURST // 4)
                place = self._make(kind)
                self.made.append(kind)
                read = sum(self._cluster.read().values())
                say(f"{time.monotonic() - began:7.1f} s: {kind.replace('_', ' ')} {place}; {read:,} batches read")
            self._over.wait(max(0.0, began + self._seconds - time.monotonic()))
        except BaseException as error:
            self.failure = error
        finally:
            self._after()

    def _kill(self, role: str) -> str:
        rank = len(self.made)
        end = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < end and not self._over.is_set():
            processes = self._cluster._roles.processes
            there = [p for p in processes.of(role) if p.info is not None] if processes is not None else []
            there = [p for p in there if Path(f"/proc/{p.info.pid}").exists()]
            if there:
                process = there[rank % len(there)]
                try:
                    os.kill(process.info.pid, signal.SIGKILL)
                    return f"{process.rank} was killed"
                except ProcessLookupError:  # It has ended meanwhile.
                    pass
            time.sleep(0.1)
        raise RuntimeError(f"There is no {role} to be killed.")

    def _make(self, kind: str) -> str:
        match kind:
            case "server":
                self._server.kill()
                return "was killed, and its successor answers"
            case "pause":
                self._broker.pause()
                try:
                    self._over.wait(OUTAGE_SECONDS)
                finally:
                    self._broker.resume()
                return "of the broker"
            case "refuse":
                self._broker.refuse()
                try:
                    self._over.wait(OUTAGE_SECONDS)
                finally:
                    self._broker.accept()
                return "of connections by the broker"
        return self._kill(kind)

    def _await_batches(self, count: int) -> None:
        """Waits until `count` more batches are read."""
        end, before = time.monotonic() + WAIT_SECONDS, sum(self._cluster.read().values())
        while sum(self._cluster.read().values()) < before + count:
            if time.monotonic() > end:
                raise RuntimeError(f"Not a batch was read within {WAIT_SECONDS:g} s.")
            if self._over.wait(0.1):
                return
