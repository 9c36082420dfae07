"""Each kind of socket that the package opens is on the page of ports, with what a stranger sees.

`tests/hosts/test_hosts_security.py` does the same for a training over three hosts.
"""

import contextlib
import os
import re
import threading
from pathlib import Path

import pytest

from persia import rpc, services
from persia.dashboard.server import serve_page
from persia.telemetry.metrics import Readings
from persia.telemetry.process import ObservedProcess
from support.listening import seen_by_a_stranger, sockets
from support.ports_page import rows
from support.served import FakePredictor
from support.waiting import wait_until

PACKAGE = Path(__file__).parents[2] / "src" / "persia"
OPENS = re.compile(
    r"_socket\.bind\(|listener\.bind\(|create_server\(|HTTPServer\(|start_http_server\(|start_server\b|TCPStore\("
    r"|init_process_group\(|new_group\(|rpc\.serve[(,]|\.listen\(\)"
)
KINDS = {
    "rpc/port.py": "calls between roles",
    "rpc/__init__.py": "calls between roles",  # An example.
    "cluster/ray/host.py": "calls between roles",
    "cluster/ray/nn_worker.py": "rendezvous store",
    "dense/all_reduce.py": "gradients of the network",
    "dense/group.py": "gradients of the network",
    "optim/exchange.py": "gradients of the network",
    "telemetry/prometheus.py": "metrics",
    "serve/http/run.py": "persia serve",
    "serve/row_server.py": "persia serve-rows",  # An example.
    "cli/serve_rows.py": "persia serve-rows",
    "dashboard/server.py": "persia train --ui",
    "plan/measure.py": "persia bench rates",
}
"""Modules that open sockets which listen, and the rows of the page for them."""


def row(what):
    (found,) = [one for one in rows() if one.what.partition(",")[0] == what]
    return found


def test_the_page_has_each_module_that_listens():
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if OPENS.search(path.read_text(encoding="utf-8"))
    }
    assert found == set(KINDS), "add the row of what it opens to docs/reference/ports.md, and the module to KINDS"
    whats = [one.what for one in rows()]
    for kind in [*KINDS.values(), "Ray itself"]:
        assert [what for what in whats if what.startswith(kind)], f"{kind} is not on the page"
    assert len(set(KINDS.values())) + 1 == len(whats), "the page has a row that no module opens"


@contextlib.contextmanager
def opened():
    """Yields a function that returns the one socket which was opened in the block."""
    before = set(sockets(os.getpid()))

    def new():
        (found,) = set(sockets(os.getpid())) - before
        return found

    yield new


ROLES = (
    services.EmbeddingPS,
    services.EmbeddingWorker,
    services.DataLoader,
    services.DensePS,
    services.ControlPlane,
    services.Observable,
)


@pytest.mark.parametrize("protocol", [*ROLES, services.ServedRows], ids=lambda protocol: protocol.__name__)
@pytest.mark.parametrize("with_keys", [True, False], ids=["keys", "password"])
def test_a_role_shows_a_stranger_its_greeting_only(protocol, with_keys, tmp_path, monkeypatch):
    monkeypatch.delenv("PERSIA_CURVE_KEYS", raising=False)
    if with_keys:
        monkeypatch.setenv("PERSIA_CURVE_KEYS", str(tmp_path / "keys"))
        rpc.make_keys(tmp_path / "keys")
    mechanism = "CURVE" if with_keys else "PLAIN"
    page = row("persia serve-rows" if protocol is services.ServedRows else "calls between roles")
    assert page.stranger.startswith("64 bytes")
    with opened() as socket, rpc.serve(object(), protocol=protocol) as server:
        found = socket()
        assert server.address == f"tcp://{found.address}:{found.port}" == f"tcp://127.0.0.1:{found.port}"
        assert seen_by_a_stranger(found) == mechanism
        if with_keys or protocol is services.ServedRows:
            assert mechanism in page.protocol
            assert mechanism in page.stranger
        wait_until(lambda: server.statistics()["handshakes_failed"] >= 1)
        assert server.statistics()["calls"] == server.statistics()["malformed"] == 0


def test_metrics():
    pytest.importorskip("prometheus_client")
    process = ObservedProcess("embedding_ps", 0, lambda: Readings([], []))
    for host in ("127.0.0.1", "0.0.0.0"):
        with opened() as socket:
            process.expose(0, host)
            found = socket()
            seen = seen_by_a_stranger(found)
            process.close()
        assert found.address == host
        assert row("metrics").covers("ray::NNWorkerHost", host, "192.0.2.1", seen)


def test_the_page_of_a_run():
    with opened() as socket, serve_page(list, 0) as url:
        found = socket()
        assert url == f"http://{found.address}:{found.port}/"
        assert row("persia train --ui").covers("persia", found.address, "192.0.2.1", seen_by_a_stranger(found))


def test_predictions():
    pytest.importorskip("fastapi")
    from persia.serve.http.options import HttpOptions
    from persia.serve.http.run import run_server

    ready, listening = threading.Event(), []

    def on_listening(at):
        listening.append(at)
        ready.set()

    with opened() as socket:
        thread = threading.Thread(target=run_server, args=(FakePredictor(), HttpOptions(port=0), on_listening))
        thread.start()
        assert ready.wait(60)
        try:
            found = socket()
            assert row("persia serve").covers("persia", found.address, "192.0.2.1", seen_by_a_stranger(found))
        finally:
            listening[0].stop()
            thread.join(60)
    assert not thread.is_alive()


def test_a_socket_that_is_not_on_the_page_is_found():
    page = rows()

    def covered(title, address, seen):
        return [row.what.partition(",")[0] for row in page if row.covers(title, address, "192.0.2.1", seen)]

    assert covered("ray::EmbeddingServerHost", "192.0.2.1", "CURVE") == ["calls between roles"]
    assert covered("ray::NNWorkerHost", "192.0.2.1", "other")[:2] == [
        "rendezvous store of the NN workers", "gradients of the network between NN workers",
    ]  # fmt: skip
    assert covered("gcs_server", "0.0.0.0", "other") == ["Ray itself"]
    for unknown in (
        ("ray::EmbeddingServerHost", "0.0.0.0", "CURVE"),  # On all interfaces.
        ("ray::EmbeddingServerHost", "192.0.2.1", "NULL"),  # Without keys.
        ("ray::EmbeddingServerHost", "192.0.2.1", "PLAIN"),
        ("persia", "0.0.0.0", "HTTP"),
        ("sshd", "0.0.0.0", "other"),
        ("redis-server", "192.0.2.1", "other"),
    ):
        assert covered(*unknown) == [], unknown
