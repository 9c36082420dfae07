"""Trainings over several hosts, each with Ray and a link to the others, with keys."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import pytest

from persia import rpc
from support.hosts import NETWORK, UnavailableError

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from hosts_demo import HOSTS, HostsRun, run_scenario

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
    done = ray_hosts.run(0, "-m", "support.over_hosts", seconds=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    moved = [sum(ray_hosts.hosts.moved(number)) for number in range(HOSTS)]
    addresses = ray_hosts.hosts.addresses
    assert (result["rows"], result["steps"], result["lost"]) == (60 * 64, 30, 0)
    assert result["compression"] == "fp16"
    assert result["hosts"]["embedding_ps"] == addresses
    assert len(set(result["hosts"]["nn_worker"])) == 2
    assert result["auc"] > result["progressive"] > 0.55
    assert min(moved) > 100_000


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("returns", ["", f"{NETWORK}.99"], ids=["at its address", "at another address"])
def test_a_host_dies_and_comes_back(returns, ray_hosts, tmp_path):
    """As in a power failure, without notice. Training continues, and uses the host again once it has joined.

    `run_scenario` fails if it does not continue.
    """
    metrics = run_scenario(ray_hosts, 4.0, tmp_path, returns)
    assert metrics["victim"] in metrics["placed"]
    assert metrics["result"]["failures"] >= 1
    assert (returns or metrics["victim"]) in metrics["rejoined"]


def test_a_silent_training_fails_with_the_end_of_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(HostsRun, "WAIT_SECONDS", 0.01)
    drivers = []

    def start(_number, *_arguments, stderr, **pipes):
        print("waits for a lock", file=stderr, flush=True)
        drivers.append(subprocess.Popen(["sleep", "infinity"], text=True, **pipes))
        return drivers[0]

    hosts = SimpleNamespace(start=start, hosts=SimpleNamespace(close=lambda: drivers[0].kill()))
    with contextlib.closing(HostsRun(hosts, tmp_path)) as run:
        measure, wait = partial(run.measure_rate, 300.0), partial(run.wait_until, lambda: True)
        for method in (measure, wait, run.add_embedding_worker, run.stop):
            with pytest.raises(AssertionError, match="waits for a lock"):
                method()
