"""Scripts wait for the hosts of a cluster, and for the end of the roles on a host."""

import inspect
import os

import pytest
from typer.testing import CliRunner

from persia.cli.app import app
from persia.cluster.ray import waiting
from persia.errors import DeadlineError

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from persia.cluster.ray import hosts, nn_worker, placing, processes, server_host
from persia.cluster.ray.layout import RayNode


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0.0)


@pytest.fixture
def joining(monkeypatch):
    """Hosts of Ray, of which one more has joined at each look, up to three."""
    seen = []

    def nodes():
        seen.append(RayNode(f"n{len(seen)}", f"10.0.0.{len(seen)}", {}, {}, {}))
        return seen[:3]

    monkeypatch.setattr(processes, "connect", lambda address: seen.clear())
    monkeypatch.setattr(placing, "ray_nodes", nodes)
    return seen


def test_waits_until_as_many_hosts_have_joined(joining):
    waiting.wait_for_hosts(3, "auto", 60.0)
    assert len(joining) == 3


def test_names_the_hosts_that_have_joined(joining):
    with pytest.raises(DeadlineError, match=r"of 4 hosts have joined Ray within 0 s: 10\.0\.0\.0"):
        waiting.wait_for_hosts(4, "auto", 0.0)
    result = CliRunner().invoke(app, ["cluster", "wait-hosts", "4", "--timeout", "0"])
    assert isinstance(result.exception, DeadlineError)


def test_roles_are_known_by_the_titles_of_their_processes(tmp_path):
    for number, title in enumerate(
        [
            b"ray::EmbeddingServerHost",
            b"ray::NNWorkerHost.run",
            b"ray::IDLE",
            b"ray::EmbeddingServerHostess",
            b"bash\0-c",
        ]
    ):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "cmdline").write_bytes(title)
    (tmp_path / "9").mkdir()  # Ends between the listing and the reading.
    os.symlink("gone", tmp_path / "9" / "cmdline")
    assert sorted(waiting.roles_on_this_host(str(tmp_path))) == ["EmbeddingServerHost", "NNWorkerHost"]


def test_every_role_is_known():
    classes = [
        value for module in (hosts, nn_worker, server_host) for _, value in inspect.getmembers(module, inspect.isclass)
    ]
    found = {each.__name__ for each in classes if issubclass(each, hosts.Host) and each.role}
    assert found == set(waiting.ROLE_PROCESSES)


def test_waits_until_no_role_runs(monkeypatch):
    running = [["NNWorkerHost", "EmbeddingServerHost"], ["EmbeddingServerHost"], []]
    monkeypatch.setattr(waiting, "roles_on_this_host", lambda: running.pop(0))
    assert CliRunner().invoke(app, ["cluster", "wait-end"]).exit_code == 0
    assert running == []
    monkeypatch.setattr(waiting, "roles_on_this_host", lambda: ["EmbeddingServerHost"] * 2)
    with pytest.raises(DeadlineError, match=r"after 0 s: 2 EmbeddingServerHost\. Stop the program that trains"):
        waiting.wait_for_the_end(0.0)
