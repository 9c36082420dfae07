"""Commands for a running job need its keys; `persia keys` makes and rotates them."""

import os

import pytest
from typer.testing import CliRunner

from persia import rpc
from persia.cli.app import app
from persia.cli.control import control_app
from persia.errors import ConfigError, DeadlineError
from persia.modes import Sync
from persia.rpc.key_file import KeyFile
from persia.services import TokenService

ARGUMENTS = {"switch": ["sync"], "scale": ["ps=4"]}
"""Arguments of each command after the address of the job."""


class Job:
    """Takes any request of `persia control`."""

    def __init__(self):
        self.requests = []

    def request(self, mode):
        self.requests.append(mode)


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys"
    rpc.make_keys(path)
    return path


def invoke(*arguments):
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.mark.parametrize("command", [one.name or one.callback.__name__ for one in control_app.registered_commands])
def test_a_job_with_keys_obeys_only_those_who_have_them(command, keys, tmp_path, monkeypatch):
    assert command in ARGUMENTS, f"add arguments of `persia control {command}` to ARGUMENTS"
    monkeypatch.setattr("persia.cli.control.CONTROL_SECONDS", 0.5)
    monkeypatch.delenv("PERSIA_CURVE_KEYS", raising=False)
    other = tmp_path / "other"
    rpc.make_keys(other)
    job = Job()
    with rpc.serve(job, protocol=TokenService, keys=keys) as server:
        for found in (None, other):
            if found is not None:
                monkeypatch.setenv("PERSIA_CURVE_KEYS", str(found))
            with pytest.raises(DeadlineError, match="PERSIA_CURVE_KEYS"):
                invoke("control", command, server.address, *ARGUMENTS[command])
        assert server.statistics()["calls"] == 0
        assert job.requests == []
        if command == "switch":
            monkeypatch.setenv("PERSIA_CURVE_KEYS", str(keys))
            monkeypatch.setattr("persia.cli.control.CONTROL_SECONDS", 20.0)
            assert "switches to" in invoke("control", command, server.address, *ARGUMENTS[command])
            assert job.requests == [Sync()]


def test_keys_are_made_and_rotated(tmp_path):
    path = str(tmp_path / "keys")
    assert "every host" in invoke("keys", "make", path)
    (first,) = KeyFile(path).pairs
    with pytest.raises(ConfigError, match="File exists"):
        invoke("keys", "make", path)
    assert f"persia keys promote {path}" in invoke("keys", "add", path)
    assert len(KeyFile(path).pairs) == 2
    assert f"persia keys retire {path}" in invoke("keys", "promote", path)
    assert KeyFile(path).pairs[1] == first
    invoke("keys", "retire", path)
    assert first not in KeyFile(path).pairs
    assert os.stat(path).st_mode & 0o777 == 0o600
