"""`persia control scale` asks the driver of a running job, through its coordinator, and waits for the answer."""

import threading

import pytest
from typer.testing import CliRunner

from persia import rpc
from persia.cli.app import app
from persia.coordinator import CoordinatorServer
from persia.errors import ConfigError, PersiaError
from persia.services import BucketMaps, MoveProgress

SECONDS = 20.0


@pytest.fixture
def job():
    with rpc.serve(coordinator := CoordinatorServer(), protocol=BucketMaps) as server:
        yield coordinator, server.address


def invoke(*arguments):
    result = CliRunner().invoke(app, ["control", "scale", *arguments])
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.mark.parametrize("error", ["", "no host has a place"])
def test_the_driver_answers(job, error, monkeypatch):
    monkeypatch.setattr("persia.cli.control.POLL_SECONDS", 0.01)
    coordinator, address = job
    asked = []

    def drive():
        request = coordinator.scale_request(SECONDS)
        asked.append((request.counts, request.keep_global_batch))
        coordinator.report_move(MoveProgress(1, 1, 1234))
        coordinator.answer_scale(request.ticket, error)

    driver = threading.Thread(target=drive)
    driver.start()
    if error:
        with pytest.raises(PersiaError, match=f"have changed: {error}"):
            invoke(address, "ps=4")
    else:
        found = invoke(address, "ps=4", "nn_workers=2", "--keep-global-batch")
        assert f"The run at {address} has ps=4, nn_workers=2." in found
    driver.join(SECONDS)
    assert asked == [({"ps": 4}, False) if error else ({"ps": 4, "nn_workers": 2}, True)]


def test_numbers_that_cannot_be_are_refused(job):
    _, address = job
    for wrong in ("ps", "ps=", "ps=many", "ps=-1"):
        with pytest.raises(ConfigError, match=f"Invalid '{wrong}'; expected ROLE=N"):
            invoke(address, wrong)
    with pytest.raises(ConfigError, match="Invalid role 'nn_worker'; expected any of: ps"):
        invoke(address, "nn_worker=2")
