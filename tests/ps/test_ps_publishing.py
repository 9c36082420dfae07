"""A PS that publishes: which epoch it is in, what ends it, and which step its rows contain."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from persia import rpc
from persia.errors import CheckpointError
from persia.modes import Sync
from persia.optim import Adagrad
from persia.ps import EmbeddingServer, ServerOptions
from persia.schema import Table
from persia.services import EmbeddingPS
from persia.store import NativeStore
from persia.types import Gradients, PublishOptions, PublishOrder, PublishStatus, PushHeader
from support.change_log import unwritable
from support.twins.store import ReferenceStore

IDS = np.arange(20, dtype=np.uint64)


@contextmanager
def served(how):
    options = ServerOptions(store=ReferenceStore if how == "reference" else NativeStore)
    server = EmbeddingServer({"t": Table("t", 4)}, Adagrad(0.1), Sync(), 1, 1, options)
    if how != "rpc":
        yield server
        return
    with rpc.serve(server, protocol=EmbeddingPS) as port:
        stub = rpc.connect(port.address, EmbeddingPS, peer="embedding PS 0", timeout=20.0)
        try:
            yield stub
        finally:
            rpc.close(stub)


def train(ps, step):
    ps.lookup({"t": IDS}, train=True)
    gradients = {"t": Gradients(IDS, np.ones((len(IDS), 4), np.float32))}
    ps.push(PushHeader(1, 0, step + 1, step, len(IDS)), gradients)


def order(path, epoch=0, step=0):
    return PublishOrder(PublishOptions(str(path), seconds=0.02), epoch, f"{epoch:032x}", 0, step)


def published(ps, condition):
    deadline = time.monotonic() + 20
    while not condition(status := ps.published()):
        assert time.monotonic() < deadline, status
        time.sleep(0.01)
    return status


@pytest.mark.parametrize("how", ["here", "rpc", "reference"])
def test_epochs_begin_and_end(how, tmp_path):
    with served(how) as ps:
        assert ps.published() == PublishStatus()
        train(ps, 0)
        ps.publish(order(tmp_path))
        assert published(ps, lambda status: status.sequence >= 0)[:4] == (0, 0, 1, 20)
        train(ps, 1)
        ps.publish(order(tmp_path))  # A repetition changes nothing.
        status = published(ps, lambda status: status.step == 2)
        assert status.sequence >= 1  # Perhaps 2: an entry may be due amid a push.
        assert (status.epoch, status.rows) == (0, 40)
        ps.publish(order(tmp_path, 1))
        assert published(ps, lambda status: status.sequence >= 0)[:4] == (1, 0, 2, 20)
        train(ps, 2)
        ended = ps.end_publishing(True)
        assert (ended.step, ended.complete) == (3, True)
        assert ps.published() == PublishStatus()
        again = ps.end_publishing(True)  # By a caller that lost the answer.
        assert again._replace(age=0) == ended._replace(age=0)


@pytest.mark.parametrize("what", ["rows", "state"])
def test_rows_that_go_back_end_the_epoch(what, tmp_path):
    with served("here") as ps:
        train(ps, 0)
        train(ps, 1)
        chunk, pieces = next(ps.export_rows()), next(ps.export_state())
        ps.publish(order(tmp_path, step=5))
        assert published(ps, lambda status: status.sequence >= 0).step == 5
        if what == "rows":
            ps.import_rows(chunk)
        else:
            ps.import_state(pieces)
        assert ps.publish(order(tmp_path)).epoch == ps.end_publishing(True).epoch == -1
        assert ps.published().epoch == -1
        ps.publish(order(tmp_path, 1))
        assert published(ps, lambda status: status.sequence >= 0).step == 0


def test_rows_that_are_set_are_published_in_the_same_epoch(tmp_path):
    with served("here") as ps:
        ps.publish(order(tmp_path))
        published(ps, lambda status: status.sequence >= 0)
        ps.set_rows(1, "t", IDS[:3], np.ones((3, 4), np.float32), None)
        train(ps, 0)
        assert published(ps, lambda status: status.step == 1).epoch == 0
        ps.end_publishing(False)


def test_metrics_say_how_old_published_rows_are(tmp_path):
    with served("here") as ps:
        assert not [figure for figure in ps.observe().metrics if figure.name.startswith("ps_publish")]
        ps.publish(order(tmp_path))
        published(ps, lambda status: status.sequence >= 0)
        found = {figure.name: figure.value for figure in ps.observe().metrics}
        assert found["ps_publish_failing"] == 0
        assert 0 <= found["ps_publish_age_seconds"] < 20
        ps.end_publishing(False)


def test_a_place_that_cannot_be_is_refused_at_once():
    with served("here") as ps, pytest.raises(CheckpointError, match="file system"):
        ps.publish(order("nonsense://there"))


def test_health_does_not_wait_for_the_last_entry(tmp_path, monkeypatch):
    monkeypatch.setattr("persia.publish.publisher.LAST_SECONDS", 60.0)  # Longer than all that is asked meanwhile.
    with served("here") as ps:
        ps.publish(order(tmp_path))
        published(ps, lambda status: status.sequence >= 0)
        with unwritable(tmp_path / "epoch-0000000000" / "rows-0"):
            train(ps, 0)
            ended: list[PublishStatus] = []
            ending = threading.Thread(target=lambda: ended.append(ps.end_publishing(True)))
            ending.start()
            published(ps, lambda status: status.error)
            ps.observe()
            assert ending.is_alive()
            ps._publishing._publisher._ended.set()  # As if the time were over.
            ending.join(20)
        (status,) = ended
        assert not status.complete
        assert "Not a directory" in status.error
