"""The Grafana dashboard asks for metrics and labels that the exporters have."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import persia
from persia.data import EventBatches, KeyedEvents
from persia.publish import PublishOptions
from persia.telemetry.catalogue import CATALOGUE
from persia.telemetry.metrics import BOUNDS, Health, Latency, Metric
from persia.telemetry.prometheus import Endpoint
from support.cluster_samples import make_trainer, reader
from support.trained_logs import TOWERS, columns, serve, train

DASHBOARD = json.loads((Path(__file__).parents[2] / "docs" / "assets" / "grafana.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"], target["legendFormat"]) for panel in PANELS for target in panel["targets"]]
ELSEWHERE = re.compile(r"_(disk|rpc|tokens|loader|stream|join|serve)_|auc")
"""Metrics that a run in one process, without rows on disk or a stream, lacks; or has after somebody has looked."""


def scraped(url: str) -> dict[str, set[str]]:
    """Labels by name of sample, as Prometheus reads them."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return labels_in(answer.read().decode())


def labels_in(text: str) -> dict[str, set[str]]:
    """Labels by name of sample in the text of an exporter."""
    families = list(text_string_to_metric_families(text))
    found: dict[str, set[str]] = {}
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.fixture(scope="module")
def exported():
    """Every metric of the catalogue, from a real endpoint."""
    labels = {"ps": "table", "nn_dropped": "reason", "worker_row": "codec", "worker_gradient_bytes": "codec"}
    figures, latencies = [], []
    for name, kind in CATALOGUE.items():
        extra = {label: "x" for prefix, label in labels.items() if name.startswith(prefix + "_")}
        extra |= {"topic": "x", "partition": "0"} if name == "stream_lag" else {}
        extra |= {"route": "x", "status": "200"} if name == "serve_requests" else {}
        extra |= {"feature": "x"} if name == "serve_psi" else {}
        if kind.type == "histogram":
            method = {"method": "lookup"} if name.startswith("rpc") else {}
            method |= {"route": "x"} if name == "serve_request_seconds" else {}
            latencies.append(Latency(name, method, [1] * (len(BOUNDS) + 1), 1.0))
        else:
            figures.append(Metric(name, 1.0, extra))
    endpoint = Endpoint(0, "127.0.0.1", lambda: Health("nn_worker", 0, 1, 7, "host", 1.0, "", figures, latencies))
    yield scraped(f"http://127.0.0.1:{endpoint.port}/metrics")
    endpoint.close()


def names_of(expression: str) -> set[str]:
    return set(re.findall(r"\bpersia_\w+", expression))


def labels_of(expression: str, legend: str) -> set[str]:
    used = {label.strip() for by in re.findall(r"by \(([^)]*)\)", expression) for label in by.split(",")}
    return used | set(re.findall(r"\{(\w+)[!=]", expression)) | set(re.findall(r"\{\{(\w+)\}\}", legend))


@pytest.mark.processes
@pytest.mark.parametrize(("title", "expression", "legend"), QUERIES)
def test_a_query_names_what_is_exported(exported, title, expression, legend):
    names = names_of(expression)
    assert names
    assert names <= exported.keys(), title
    for name in names:
        assert labels_of(expression, legend) <= exported[name], (title, name)
    assert expression.count("(") == expression.count(")")


def test_counters_are_shown_as_rates_and_gauges_are_not():
    for title, expression, _ in QUERIES:
        for name in names_of(expression):
            counter = name.endswith(("_total", "_sum", "_bucket"))
            assert bool(re.search(rf"rate\({name}\b", expression)) == counter, (title, name)


def missing_of(found: dict[str, set[str]]) -> set[str]:
    """Names of the dashboard that were not found. Those that were have the labels that are asked for."""
    for title, expression, legend in QUERIES:
        for name in names_of(expression) & found.keys():
            assert labels_of(expression, legend) <= found[name], (title, name)
    return {name for _, expression, _ in QUERIES for name in names_of(expression)} - found.keys()


@pytest.mark.processes
def test_a_real_run_that_publishes_fills_the_dashboard(tmp_path):
    cluster = persia.cluster.Embedded(1, prometheus_port=0)
    trainer = make_trainer(cluster, publish=PublishOptions(str(tmp_path / "log"), seconds=0.05))
    found = {}

    def batches():
        yield from reader(4)
        deadline = time.monotonic() + 60
        while not {"persia_ps_publish_age_seconds", "persia_nn_publish_age_seconds"} <= found.keys():
            assert time.monotonic() < deadline
            found.update(scraped(cluster.health().metrics_url))  # Afterwards the PS publishes no more.

    trainer.fit(batches())
    missing = missing_of(found | scraped(cluster.health().metrics_url))
    cluster.close()
    assert {name for name in missing if not ELSEWHERE.search(name)} == {"persia_nn_checkpoint_age_seconds"}


def test_a_real_server_fills_its_panels(tmp_path):
    testclient = pytest.importorskip("starlette.testclient", reason='pip install "persia-recsys[serve]"')
    pytest.importorskip("usearch", reason='pip install "persia-recsys[usearch]"')
    from persia.serve.http.app import create_app
    from persia.serve.http.limits import ServeLimits

    train(TOWERS, str(tmp_path / "log"))
    predictor, retriever = serve(TOWERS, str(tmp_path / "log"))
    app = create_app(predictor, limits=ServeLimits(deadline_ms=60_000), retriever=retriever)
    with testclient.TestClient(app, base_url="http://localhost") as client:
        deadline = time.monotonic() + 60
        while client.get("/health").status_code != 200 or retriever.state() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        features = {name: np.asarray(each, object).tolist() for name, each in columns(TOWERS).items()}
        assert client.post("/predict", json={"features": features}).status_code == 200
        predictor.refresh()  # Compares with training.
        missing = missing_of(labels_in(client.get("/metrics").text))
    assert not {name for name in missing if "_serve_" in name}


@pytest.mark.processes
def test_a_real_join_fills_its_panels():
    schema = persia.Schema([persia.IdFeature("item", dim=2)], labels=["click"])
    ids = np.arange(4, dtype=np.uint64)
    batch = persia.Batch({"item": persia.IdColumn(ids)}, np.empty((4, 0), np.float32), np.zeros((4, 1), np.float32))
    impressions, clicks = (
        EventBatches(name, [KeyedEvents(ids, np.arange(4) * 1000, batch)], schema, 2, 0) for name in ("views", "clicks")
    )
    joined = persia.data.join(impressions, clicks, on="key", window=1, flush=True)
    assert sum(len(batch) for batch in joined) == 4
    health = Health("loader", 0, 1, 7, "host", 1.0, "", joined.observe(), [])
    endpoint = Endpoint(0, "127.0.0.1", lambda: health)
    missing = missing_of(scraped(f"http://127.0.0.1:{endpoint.port}/metrics"))
    endpoint.close()
    assert not {name for name in missing if "_join_" in name}


def test_panels_have_numbers_and_places_of_their_own():
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
