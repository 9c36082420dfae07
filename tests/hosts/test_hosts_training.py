"""Trainings over several hosts, each with Ray and a link to the others, with keys."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from persia import rpc
from support.hosts import UnavailableError

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

import hosts_demo
from hosts_demo import HOSTS, Story, tell

from support.ray_hosts import RayHosts

pytestmark = [pytest.mark.hosts, pytest.mark.processes]


@pytest.fixture
def ray_hosts(tmp_path) -> Iterator[RayHosts]:
    keys = tmp_path / "keys"
    rpc.make_keys(keys)
    try:
        hosts = RayHosts(HOSTS, 1.0, keys)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    with hosts:
        yield hosts


@pytest.mark.timeout(600)
def test_a_training_over_three_hosts(ray_hosts):
    """Roles are on all of them, all traffic has keys, and rows travel as fp16 by default."""
    run = ray_hosts.run(0, "-m", "support.over_hosts", seconds=240)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
    found = json.loads(run.stdout.strip().splitlines()[-1])
    moved = [sum(ray_hosts.hosts.moved(number)) for number in range(HOSTS)]
    addresses = ray_hosts.hosts.addresses
    assert (found["rows"], found["steps"], found["lost"]) == (60 * 64, 30, 0)
    assert found["compression"] == "fp16"
    assert found["hosts"]["embedding_ps"] == addresses
    assert len(set(found["hosts"]["nn_worker"])) == 2
    assert found["auc"] > found["progressive"] > 0.55
    assert min(moved) > 100_000


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_host_dies_and_comes_back(ray_hosts, tmp_path):
    """As in a power failure, without notice. Training continues, and uses the host again once it has joined."""
    found = tell(ray_hosts, 4.0, tmp_path)
    address = found["victim"]
    assert address in found["placed"]
    assert found["before"] > 0
    assert found["without"] > 0
    assert found["after"] > 0
    assert found["result"]["failures"] >= 1
    assert address in found["rejoined"]


def test_a_silent_training_fails_with_the_end_of_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(hosts_demo, "WAIT_SECONDS", 0.01)
    drivers = []

    def start(_number, *_arguments, stderr, **pipes):
        print("waits for a lock", file=stderr, flush=True)
        drivers.append(subprocess.Popen(["sleep", "infinity"], text=True, **pipes))
        return drivers[0]

    hosts = SimpleNamespace(start=start, hosts=SimpleNamespace(close=lambda: drivers[0].kill()))
    with contextlib.closing(Story(hosts, tmp_path)) as story:
        for wait in (lambda: story.follow(300.0), lambda: story.until(lambda: True), story.joined, story.end):
            with pytest.raises(AssertionError, match="waits for a lock"):
                wait()
