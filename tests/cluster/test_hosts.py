"""Several hosts: two with a link between them, and several nodes of Ray on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import persia
from persia import rpc

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from support.cluster_samples import losses, one_torch_thread
from support.hosts import Hosts, UnavailableError

pytestmark = pytest.mark.processes

HERE = Path(__file__).parents[1]
SECONDS = 120


@pytest.mark.hosts
def test_roles_on_two_hosts(tmp_path):
    """PS and embedding worker on one, the NN worker on the other: encrypted, and the bits of one process."""
    keys = tmp_path / "keys"
    rpc.make_keys(keys)
    with one_torch_thread():
        expected = losses(persia.cluster.Embedded(1), 10)
    environment = {"PERSIA_CURVE_KEYS": str(keys), "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    program = [sys.executable, "-m", "support.roles_apart"]
    try:
        hosts = Hosts(2)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    with hosts:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        serving = hosts.start(0, *program, "serve", hosts.addresses[0], env=environment, **pipes)
        assert serving.stdout is not None
        addresses = serving.stdout.readline().strip()
        assert addresses, "the roles did not start; their error is printed above"
        found = hosts.run(1, *program, "train", addresses, env=environment, seconds=SECONDS)
        assert json.loads(found.stdout) == expected, found.stderr
        serving.communicate()


def on_nodes(script: str, tmp_path: Path, *arguments: str, seconds: float = 240) -> dict[str, Any]:
    """What a script prints, which makes a Ray of its own, with several nodes."""
    keys = tmp_path / "keys"
    rpc.make_keys(keys)
    run = subprocess.run(
        [sys.executable, "-m", script, *arguments],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
            "PERSIA_CURVE_KEYS": str(keys),
            "GLOO_SOCKET_IFNAME": "lo",
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
        },
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
    found: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    return found


@pytest.mark.slow
def test_a_host_dies(tmp_path):
    """Its PS is reloaded from the last checkpoint elsewhere, its NN worker begins elsewhere, `fit` goes on."""
    found = on_nodes("support.host_dies", tmp_path, str(tmp_path / "checkpoints"))
    assert found["finished"]
    assert found["failures"] >= 1
    assert (found["rows"], found["steps"]) == (2000 * 64, 1000)
    assert found["rows_in_store"] == 4 * 500
    (reloaded,) = [line for line in found["told"] if "have the rows of" in line]
    assert "/step-0" in reloaded
    assert found["auc"] == pytest.approx(found["progressive"], abs=0.1)
    assert found["hosts"] == 1


@pytest.mark.slow
def test_two_nodes_of_ray(tmp_path):
    """PSs are spread, all roles listen on their node's address, with keys; training, resizing and a death work."""
    found = on_nodes("support.two_nodes", tmp_path)
    assert sorted(found["servers"]) == [2, 2]  # Four PSs on two nodes.
    assert found["nn_workers"] == 2
    assert found["rows"] == 40 * 64
    assert found["loopback"] is False
    assert "keys" in found["without_keys"]
    assert "embedding PS 0" in found["died"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_roles_are_where_their_placements_say(tmp_path):
    """Three nodes with different resources. PSs are where the memory is, also after a restart."""
    found = on_nodes("support.placed_roles", tmp_path, seconds=540)
    assert found["started"] is False
    assert "embedding PS 4 (of 6) cannot be placed: no host has memory 0.2 GB" in found["refused"]
    assert "memory 0 GB of 0.6 GB" in found["refused"]
    assert "label pool=memory; has 3 embedding PS; no memory left" in found["refused"]
    assert "NN worker 1 (of 2) cannot be placed: no host has GPU 1" in found["gpus"]
    hosts = found["hosts"]
    assert hosts["embedding_ps"] == ["large", "large", "small"]
    assert set(hosts["embedding_worker"] + hosts["data_loader"]) <= {"large", "small"}
    assert hosts["nn_worker"] == ["fast"]
    assert found["rows"] == found["restarted"][0] == 100 * 64
    assert found["reserved"] == {"large": 400e6, "small": 200e6, "fast": 1}  # By Ray.
    assert "embedding worker 4 (of 5) cannot be placed: no host has CPU 0.5, label pool=memory" in found["scale"]
    assert found["scaled"] == 2
    assert found["restarted"][1:] == [0, 0]  # Lost batches and gradients.
    assert found["after_restart"] == ["large", "large", "small"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_host_with_placed_roles_dies(tmp_path):
    """They go to another with enough memory and the label, not to one that is merely free."""
    found = on_nodes("support.placed_roles", tmp_path, str(tmp_path / "checkpoints"), seconds=540)
    assert found["before_death"] == ["large", "large", "small"]
    assert found["hosts"]["embedding_ps"] == ["large"] * 3
    assert found["hosts"]["embedding_worker"] == ["large"]
    assert found["hosts"]["nn_worker"] == ["fast"]
    assert found["rows"] == 300 * 64
