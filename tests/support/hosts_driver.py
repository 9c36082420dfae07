"""A program on the first of several hosts: its input is commands, its output one line of JSON for each message."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.ray_hosts import RayHosts

__all__ = ["HostsDriver"]


class HostsDriver:
    """A training that runs over hosts. Close it, which ends the hosts too.

    Args:
        hosts: hosts that run Ray.
        log: file for what the program prints besides its messages.
        arguments: of Python.
    """

    WAIT_SECONDS = 240.0
    """How long to wait for the next message."""

    def __init__(self, hosts: RayHosts, log: Path, *arguments: str) -> None:
        self.hosts = hosts
        self._log_file = log
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue()
        with log.open("w") as file:
            self._process = hosts.start(0, *arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file)
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def send(self, line: str) -> None:
        """Sends a line to the program."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def end_input(self) -> None:
        """Ends the input of the program."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def messages(self, seconds: float) -> Iterator[dict[str, Any]]:
        """Yields the messages of the program.

        Raises:
            AssertionError: the program failed or ended, no message came for `WAIT_SECONDS`, or `seconds` have passed.
        """
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            timeout = min(left, self.WAIT_SECONDS)
            try:
                message = self._queue.get(timeout=timeout)
            except queue.Empty:
                raise AssertionError(f"no message of the training for {timeout:.0f} s:\n{self._tail()}") from None
            if message is None:
                raise AssertionError(f"the training has ended:\n{self._tail()}")
            if "failed" in message:
                raise AssertionError(f"the training has failed:\n{message['failed']}")
            yield message
        raise AssertionError(f"the training did not reach the expected state in {seconds:g} s:\n{self._tail()}")

    def await_message(self, key: str, seconds: float) -> Any:
        """Returns the value of the next message with this key, and skips others; see `messages`."""
        for message in self.messages(seconds):
            if key in message:
                return message[key]
        raise AssertionError

    def close(self) -> None:
        """Ends the hosts, and the program with its host."""
        self.hosts.hosts.close()
        self._process.wait()
        self._reading.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _tail(self) -> str:
        """Returns the end of the log."""
        return self._log_file.read_text()[-4000:]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._queue.put(json.loads(line))
        self._queue.put(None)
