"""A training goes on with the same bits while the keys of its roles are rotated in the middle of their calls."""

from __future__ import annotations

import threading

from persia import rpc
from persia.modes import Sync
from persia.optim import Adagrad
from persia.ps import EmbeddingServer
from persia.services import EmbeddingPS, EmbeddingWorker
from persia.worker import Worker
from support.cluster_samples import losses, reader
from support.roles_apart import Apart
from support.waiting import wait_until

BATCHES = 12
CALLS = (2, 7, 8)
"""Numbers of the calls of each method during which the keys are rotated."""
METHODS = ("lookup", "lookup_ahead", "refresh", "push")


class Rotating:
    """Calls the methods of a role, and rotates the keys during some of them."""

    def __init__(self, service, rotate):
        self._service = service
        self._rotate = rotate
        self._calls = {}

    def __getattr__(self, name):
        method = getattr(self._service, name)

        def call(*arguments, **named):
            number = self._calls[name] = self._calls.get(name, 0) + 1
            if number in CALLS and name in METHODS:
                self._rotate()
            return method(*arguments, **named)

        return call


def test_the_same_losses(tmp_path, monkeypatch):
    monkeypatch.setattr("persia.rpc.server.TICK_SECONDS", 0.02)
    path = tmp_path / "keys"
    rpc.make_keys(path)
    monkeypatch.setenv("PERSIA_CURVE_KEYS", str(path))
    rotations, lock = [], threading.Lock()

    def rotate():
        with lock:
            rpc.add_key(path)
            rpc.promote_key(path)
            rotations.append(1)
            for server in servers:
                wait_until(lambda server=server: server.statistics()["key_changes"] == len(rotations))
            rpc.retire_keys(path)

    schema = reader(1).schema

    def trained(rotate):
        ps = Rotating(EmbeddingServer(schema.resolved_tables(), Adagrad(lr=0.05), Sync(), 0, 1), rotate)
        with rpc.serve(ps, protocol=EmbeddingPS) as server:
            servers[:] = [server]
            stub = rpc.connect(server.address, EmbeddingPS, timeout=60.0)
            with rpc.serve(Rotating(Worker(schema, [stub]), rotate), protocol=EmbeddingWorker) as worker:
                servers.append(worker)
                found = losses(Apart(server.address, worker.address), BATCHES)
                assert server.statistics()["errors"] == worker.statistics()["errors"] == 0
            rpc.close(stub)
        return found

    servers = []
    expected = trained(lambda: None)
    assert trained(rotate) == expected
    assert len(rotations) >= 2 * 2 * len(CALLS)  # Of two roles, at least a kind of lookup and pushes.
