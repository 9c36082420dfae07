"""The store at which the NN workers of a run meet; without a cluster."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')


import persia
from persia.cluster.ray.nn_worker import NNWorkerHost, await_connected, interface_of
from persia.cluster.ray.options import RayOptions
from support.cluster_samples import make_trainer, options, reader
from support.listening import addresses, descendants, title


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
    assert addresses(os.getpid()) == {"127.0.0.1"}, "the store is not open to the network"


def test_a_function_ends_once_all_are_connected():
    """Whoever ends before closes the connections that another one is making."""
    first, second = nn_worker(), nn_worker()
    address = first.rendezvous()
    store = first._served
    store.set("persia/connected/0", "")
    waits = threading.Thread(target=await_connected, args=(store, 2, 60.0))
    waits.start()
    waits.join(0.2)
    assert waits.is_alive()
    second._store_at(*address).set("persia/connected/1", "")
    waits.join(60)
    assert not waits.is_alive()
    await_connected(store, 3, 0.01)  # One that has died is reported by the driver.


def test_the_interface_of_an_address():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None  # Of documentation: no host has it.
    assert interface_of("::1") is None


def train(cluster):
    make_trainer(cluster).fit(reader(4))


@pytest.mark.processes
@pytest.mark.usefixtures("ray_here")
def test_all_that_listens_is_on_the_page_of_ports():
    """Ray of these tests is started as `connect` starts it."""
    page = (Path(__file__).parents[2] / "docs/reference/ports.md").read_text(encoding="utf-8")
    here = os.getpid()

    def during() -> list[tuple[str, set[str]]]:
        train(cluster)  # Gloo listens, too.
        return [(title(pid), found) for pid in descendants(here) if (found := addresses(pid))]

    with persia.cluster.Ray(1, 1, 1, 2, options(prometheus_port=0)) as cluster:
        found, _ = cluster.run(during)
    assert {name for name, _ in found} >= {"ray::NNWorkerHost", "gcs_server", "raylet"}
    for name, where in found:
        assert where == {"127.0.0.1"}, f"{name} listens at {where}"
        assert name in page
