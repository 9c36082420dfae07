"""The endpoint as Prometheus reads it."""

from __future__ import annotations

import builtins
import socket
import urllib.request

import pytest

from persia.errors import ConfigError, MissingExtraError
from persia.telemetry.metrics import Health, Histogram, Metric
from persia.telemetry.prometheus import Endpoint

parser = pytest.importorskip("prometheus_client.parser", reason='pip install "persia-recsys[prometheus]"')

pytestmark = pytest.mark.processes


def health() -> Health:
    times = Histogram()
    for seconds in (0.0005, 0.002, 0.002, 200.0):
        times.add(seconds)
    figures = [
        Metric("ps_rows", 7.0, {"table": "ads"}),
        Metric("ps_rows", 8.0, {"table": 'us"er\n'}),
        Metric("ps_hits", 5.0, {"table": "ads"}),
    ]
    return Health(
        "embedding_ps", 3, 2, 1, "here", 12.5, "", figures, [times.latency("rpc_call_seconds", {"method": "push"})]
    )


@pytest.fixture
def endpoint():
    made = Endpoint(0, "127.0.0.1", health)
    yield made
    made.close()


def read(port: int) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    samples = [s for family in parser.text_string_to_metric_families(text) for s in family.samples]
    found = {(s.name, frozenset(s.labels.items())): s.value for s in samples}
    assert len(found) == len(samples)
    return found


def test_what_prometheus_reads(endpoint):
    found = read(endpoint.port)

    def value(name: str, **labels: str) -> float:
        return found[name, frozenset({"role": "embedding_ps", "rank": "3", **labels}.items())]

    assert value("persia_ps_rows", table="ads") == 7
    assert value("persia_ps_rows", table='us"er\n') == 8
    assert value("persia_ps_hits_total", table="ads") == 5
    assert value("persia_rpc_call_seconds_count", method="push") == 4
    assert value("persia_rpc_call_seconds_sum", method="push") == pytest.approx(200.0045)
    assert value("persia_rpc_call_seconds_bucket", method="push", le="0.001") == 1
    assert value("persia_rpc_call_seconds_bucket", method="push", le="0.003") == 3
    assert value("persia_rpc_call_seconds_bucket", method="push", le="100.0") == 3
    assert value("persia_rpc_call_seconds_bucket", method="push", le="+Inf") == 4
    assert value("persia_uptime_seconds", incarnation="2") == 12.5


def test_processes_of_a_host_take_ports_in_turn(endpoint):
    other = Endpoint(endpoint.port, "127.0.0.1", health)
    try:
        assert endpoint.port < other.port
        assert read(other.port) == read(endpoint.port)
    finally:
        other.close()
    again = Endpoint(other.port, "127.0.0.1", health)  # Closing gives the port back.
    assert again.port == other.port
    again.close()


def test_no_free_port():
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # Another run of this test may have it, too.
        taken.bind(("127.0.0.1", 65535))
        taken.listen()
        with pytest.raises(ConfigError, match=r"No free port on .* among the 256"):
            Endpoint(65535, "127.0.0.1", health)


def test_without_the_library(monkeypatch):
    real = builtins.__import__

    def missing(name, *args):
        if name == "prometheus_client":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(MissingExtraError, match=r"persia-recsys\[prometheus\]"):
        Endpoint(0, "127.0.0.1", health)
