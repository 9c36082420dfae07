"""Trainings over several hosts, each with Ray and a link to the others, with keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from persia import rpc
from support.hosts import UnavailableError

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from hosts_demo import tell

from support.ray_hosts import RayHosts

pytestmark = [pytest.mark.hosts, pytest.mark.processes]


@pytest.mark.timeout(600)
def test_a_training_over_three_hosts(tmp_path):
    """Roles are on all of them, all traffic has keys, and rows travel as fp16 without being told to."""
    keys = tmp_path / "keys"
    rpc.make_keys(keys)
    try:
        hosts = RayHosts(3, 1.0, keys)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    with hosts:
        run = hosts.run(0, "-m", "support.over_hosts", seconds=240)
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
        found = json.loads(run.stdout.strip().splitlines()[-1])
        moved = [sum(hosts.hosts.moved(number)) for number in range(3)]
        addresses = hosts.hosts.addresses
    assert (found["rows"], found["steps"], found["lost"]) == (60 * 64, 30, 0)
    assert found["compression"] == "fp16"
    assert found["hosts"]["embedding_ps"] == addresses
    assert len(set(found["hosts"]["nn_worker"])) == 2
    assert found["auc"] > found["progressive"] > 0.55
    assert min(moved) > 100_000


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_host_dies_and_comes_back(tmp_path: Path):
    """As a power failure: nothing says so to the others. They go on, and use the host again once it has joined."""
    try:
        found = tell(1.0, 4.0, tmp_path)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    address = found["victim"]
    assert address in found["placed"]
    assert found["before"] > 0
    assert found["without"] > 0
    assert found["after"] > 0
    assert found["result"]["failures"] >= 1
    assert found["recovered_s"] < 200
    assert address in found["rejoined"]
