"""Calls over links that lose, delay, reorder and duplicate packets, that are cut, and that are slow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from persia import rpc
from support.hosts import Hosts, Treatment, UnavailableError
from support.waiting import wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.processes]

TESTS = Path(__file__).parents[1]
PROGRAM = (sys.executable, "-m", "support.rpc_over_hosts")
TIMEOUT = 240.0
"""Of calls, seconds."""


class Calls:
    """Calls from host 1 to host 0, with keys.

    Args:
        hosts: two hosts.
        keys: file of the keys.
    """

    def __init__(self, hosts: Hosts, keys: Path) -> None:
        self.hosts = hosts
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        environment = {"PERSIA_CURVE_KEYS": str(keys), "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
        serving = hosts.start(0, *PROGRAM, "serve", f"tcp://{hosts.addresses[0]}:*", env=environment, **pipes)
        address = serving.stdout.readline().strip()
        self._calling = hosts.start(1, *PROGRAM, "call", address, env=environment, **pipes)
        self.processes = serving, self._calling

    def begin(self, count: int, size: int, seconds: float = TIMEOUT) -> None:
        """Begins so many calls, with so many bytes each."""
        assert self._calling.stdin is not None
        self._calling.stdin.write(f"{count} {size} {seconds}\n")
        self._calling.stdin.flush()

    def flow(self) -> None:
        """Waits until some calls have been sent over a connection that there is now."""
        before = self.hosts.moved(1)[0]
        wait_until(lambda: self.hosts.moved(1)[0] > before + 100_000, "calls", 60)

    def outcome(self) -> dict[str, Any]:
        """Waits for the calls and returns what came of them."""
        assert self._calling.stdout is not None
        outcome: dict[str, Any] = json.loads(self._calling.stdout.readline())
        return outcome

    def end(self) -> dict[str, Any]:
        """As `outcome`, of calls of which none may fail."""
        outcome = self.outcome()
        assert outcome["errors"] == []
        return outcome


@pytest.fixture
def calls(tmp_path) -> Iterator[Calls]:
    keys = tmp_path / "keys"
    rpc.make_keys(keys)
    try:
        hosts = Hosts(2, 1.0)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    with hosts:
        started = Calls(hosts, keys)
        yield started
    for process in started.processes:
        process.communicate()


@pytest.mark.parametrize(
    ("treatment", "lost"),
    [
        pytest.param(Treatment(), 0.01, id="loss of 1 %"),
        pytest.param(Treatment(), 0.1, id="loss of 10 %"),
        pytest.param(Treatment(0.01, 0.02), 0.0, id="delay and jitter"),
        pytest.param(Treatment(0.002, 0.002, 0.05, 0.05), 0.02, id="all"),
    ],
)
def test_calls_over_a_link_with(treatment, lost, calls):
    calls.hosts.treat(1, treatment)
    calls.hosts.lose(1, lost)
    calls.begin(60, 200_000)
    assert calls.end()["same"] == 60


def test_connections_that_are_reset_and_links_that_are_cut(calls):
    """Calls are sent again; where packets were only lost, TCP sends them again."""
    calls.hosts.treat(1, Treatment(delay=0.02))
    calls.begin(400, 20_000)
    for _ in range(5):
        calls.flow()
        calls.hosts.reset(1)
    calls.hosts.mute(1)
    time.sleep(1.0)
    calls.hosts.lose(1, 0.0)
    calls.hosts.cut(1)
    time.sleep(1.0)
    calls.hosts.join(1)
    found = calls.end()
    assert found["same"] == 400
    assert found["resent"] >= 1
    assert found["connects"] >= 3


@pytest.mark.slow
def test_a_message_that_takes_longer_than_a_silent_connection_may(calls):
    """A link of 1 Mbit/s. What takes 8 s arrives; what takes 24 s never does, and the error says why."""
    calls.hosts.shape(1, 0.001)
    calls.begin(1, 1_000_000)
    assert calls.end()["same"] == 1
    calls.begin(1, 3_000_000, seconds=60.0)
    (error,) = calls.outcome()["errors"]
    assert "a request or reply takes more than 15 s on a slow network" in error


NAME, NAMED_PORT = "rows", 7000


@pytest.mark.slow
def test_a_name_that_moves_to_another_address(tmp_path):
    """The host behind it is gone without notice, and nothing answers at its address, as beyond a router."""
    keys, names = tmp_path / "keys", tmp_path / "hosts"
    rpc.make_keys(keys)
    environment = {"PERSIA_CURVE_KEYS": str(keys), "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": environment}
    try:
        hosts = Hosts(3, 0.05)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    started = []
    with hosts:

        def serve(number: int) -> None:
            address = hosts.addresses[number]
            started.append(hosts.start(number, *PROGRAM, "serve", f"tcp://{address}:{NAMED_PORT}", **pipes))
            assert started[-1].stdout.readline().strip() == f"tcp://{address}:{NAMED_PORT}"
            names.write_text(f"127.0.0.1 localhost\n{address} {NAME}\n")

        def dialled() -> bool:
            """Whether the caller has sent a request for a connection that was not answered."""
            return "SYN-SENT" in hosts.run(1, "ss", "-tan", "dst", hosts.addresses[0]).stdout

        serve(0)
        assert hosts.run(1, "mount", "--bind", str(names), "/etc/hosts").returncode == 0
        calling = hosts.start(1, *PROGRAM, "call", f"tcp://{NAME}:{NAMED_PORT}", **pipes)
        started.append(calling)
        calling.stdin.write(f"2000 20000 {TIMEOUT}\n")
        calling.stdin.flush()
        wait_until(lambda: hosts.moved(1)[0] > 1_000_000, "calls", 60)
        hosts.kill(0)
        nobody = ("lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent")
        assert hosts.run(1, "ip", "neigh", "replace", hosts.addresses[0], *nobody).returncode == 0
        wait_until(dialled, "a connection to the address that is gone", 60)
        serve(2)
        moved = time.monotonic()
        outcome = json.loads(calling.stdout.readline())
        seconds = time.monotonic() - moved
    for process in started:
        process.communicate()
    assert outcome["errors"] == []
    assert outcome["same"] == 2000
    assert outcome["connects"] == 2
    assert seconds < 30
