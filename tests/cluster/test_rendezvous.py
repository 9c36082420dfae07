"""The store at which the NN workers of a run meet; without a cluster."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia[ray]"')

from persia.cluster.ray.nn_worker import NNWorkerHost
from persia.cluster.ray.options import RayOptions


def nn_worker():
    """An NN worker, as far as it meets others."""
    made = object.__new__(NNWorkerHost)
    made.plan = SimpleNamespace(loopback=True, options=RayOptions(timeout=60.0))
    made._served = None
    return made


@pytest.mark.processes
def test_the_port_of_the_store_is_held_from_the_start():
    """A port that is only known to be free may be taken until the process group is made."""
    first = nn_worker()
    address = first.rendezvous()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(address)
    nn_worker()._store_at(*address).set("key", "value")
    assert first._served.get("key") == b"value"
    assert first.rendezvous() != address  # Of the next run, whose keys are others.
    assert not first._served.check(["key"])
