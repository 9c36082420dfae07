"""The Grafana dashboard asks for metrics and labels that the exporter has."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import persia
from persia.telemetry.catalogue import CATALOGUE
from persia.telemetry.metrics import BOUNDS, Health, Latency, Metric
from persia.telemetry.prometheus import Endpoint
from support.cluster_samples import make_trainer, reader

DASHBOARD = json.loads((Path(__file__).parents[2] / "docs" / "assets" / "grafana.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"], target["legendFormat"]) for panel in PANELS for target in panel["targets"]]
ELSEWHERE = re.compile(r"_(disk|rpc|tokens|loader|stream)_|auc")
"""Metrics that a run in one process, without rows on disk or a stream, lacks; or has after somebody has looked."""


def scraped(url: str) -> dict[str, set[str]]:
    """Labels by name of sample, as Prometheus reads them."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
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
        if kind.type == "histogram":
            method = {"method": "lookup"} if name.startswith("rpc") else {}
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


def test_a_real_run_fills_the_dashboard():
    cluster = persia.cluster.Embedded(1, prometheus_port=0)
    trainer = make_trainer(cluster)
    trainer.fit(reader(4))
    found = scraped(cluster.health().metrics)
    cluster.close()
    missing = {name for _, expression, _ in QUERIES for name in names_of(expression)} - found.keys()
    for title, expression, legend in QUERIES:
        for name in names_of(expression) & found.keys():
            assert labels_of(expression, legend) <= found[name], (title, name)
    assert {name for name in missing if not ELSEWHERE.search(name)} == {"persia_nn_checkpoint_age_seconds"}


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
