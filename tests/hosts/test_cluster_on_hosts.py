"""Tests of `tests/cluster`, which run on one host, again over three: the same programs, with another `ray_here`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from persia import rpc
from support.hosts import UnavailableError

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from support.ray_hosts import RayHosts

pytestmark = [pytest.mark.hosts, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]

HOSTS = 3
SECONDS = 600.0

ON_HOSTS = (
    "test_ray.py::test_the_same_numbers_as_in_one_process",
    "test_ray.py::test_two_nn_workers_a_bare_loop_resizing_and_deaths",
    "test_ray.py::test_an_own_loop_with_uneven_data_ends",
    "test_ray_coordinator.py",
    "test_ray_data.py",
    "test_ray_fresh_rows.py",
    "test_ray_modes.py",
    "test_ray_nn_deaths.py",
    "test_ray_ps.py",
    "test_ray_rows.py",
    "test_ray_streams.py",
)
"""Not among them: what asks for GPUs, for another form of rows, or for processes and files of one host."""


@pytest.fixture(scope="module")
def ray_hosts(tmp_path_factory) -> Iterator[RayHosts]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    rpc.make_keys(keys)
    try:
        hosts = RayHosts(HOSTS, 1.0, keys, cpus=4)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    with hosts:
        yield hosts


@pytest.mark.parametrize("tests", ON_HOSTS)
def test_over_three_hosts(tests, ray_hosts, tmp_path):
    own = ("-m", "", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", f"--basetemp={tmp_path / 'there'}")
    arguments = ("-m", "pytest", *own, f"tests/cluster/{tests}")
    done = ray_hosts.run(0, *arguments, env={"PERSIA_TESTS_RAY": "auto"}, seconds=SECONDS)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout[-2000:]
    assert "skipped" not in done.stdout, done.stdout[-2000:]
