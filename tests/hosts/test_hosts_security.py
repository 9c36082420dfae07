"""Trainings over three hosts: every socket is on the page of ports, and keys are rotated without an interruption."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from persia import rpc
from support.hosts import UnavailableError
from support.listening import Listening
from support.ports_page import rows

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')
pytest.importorskip("prometheus_client")

from support.hosts_driver import HostsDriver
from support.hosts_training import BATCH
from support.ray_hosts import RayHosts

pytestmark = [pytest.mark.hosts, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

HOSTS = 3


@pytest.fixture
def keys(tmp_path) -> Path:
    path: Path = tmp_path / "keys"
    rpc.make_keys(path)
    return path


@pytest.fixture
def ray_hosts(keys) -> Iterator[RayHosts]:
    try:
        hosts = RayHosts(HOSTS, None, keys)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    with hosts:
        yield hosts


def listening(hosts: RayHosts, number: int) -> list[tuple[Listening, str]]:
    """Returns the sockets of a host, with what a stranger on it sees."""
    done = hosts.run(number, "-m", "support.listening")
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return [(Listening(*fields), seen) for *fields, seen in found]


def lookups(driver: HostsDriver, more: int) -> dict[str, Any]:
    """Waits for this number of lookups more than in the next message; returns the last message."""
    first = None
    for message in driver.messages(300.0):
        if "looked_up" in message:
            count = sum(message["looked_up"].values())
            first = count if first is None else first
            if count >= first + more:
                return message
    raise AssertionError


def test_every_socket_is_on_the_page(ray_hosts, tmp_path):
    arguments = ("-m", "support.hosts_training", str(tmp_path / "checkpoints"), "metrics")
    with contextlib.closing(HostsDriver(ray_hosts, tmp_path / "log", *arguments)) as driver:
        message = lookups(driver, 1)
        found = [listening(ray_hosts, number) for number in range(HOSTS)]
    page = rows()
    for address, sockets in zip(ray_hosts.hosts.addresses, found, strict=True):
        for one, seen in sockets:
            title = "driver" if one.title.startswith("python") else one.title
            assert [row for row in page if row.covers(title, one.address, address, seen)], (one, seen)
        roles = message["hosts"].get(address, [])
        for seen, where in (("CURVE", {address}), ("HTTP", {"0.0.0.0"})):
            of_roles = [one for one, what in sockets if what == seen and one.title.endswith("Host")]
            assert {one.address for one in of_roles} <= where
            assert len(of_roles) == len(roles), (of_roles, roles)
        assert not [one for one, seen in sockets if seen in ("PLAIN", "NULL")]
    assert {one.title for sockets in found for one, _ in sockets} >= {"gcs_server", "raylet", "ray::NNWorkerHost"}


def test_keys_are_rotated_while_it_trains(ray_hosts, keys, tmp_path):
    """Twice, as roles must find the second new key as well. No process dies, and no batch is lost."""
    arguments = ("-m", "support.hosts_training", str(tmp_path / "checkpoints"))
    with contextlib.closing(HostsDriver(ray_hosts, tmp_path / "log", *arguments)) as driver:
        lookups(driver, 1)
        for _ in range(2):
            for step in (rpc.add_key, rpc.promote_key, rpc.retire_keys):
                step(keys)
                lookups(driver, 50)
        driver.end_input()
        result = driver.await_message("result", 240.0)
    assert (result["failures"], result["lost_batches"]) == (0, 0)
    assert result["rows"] == result["steps"] * 2 * BATCH
