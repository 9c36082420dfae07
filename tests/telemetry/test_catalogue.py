"""Histograms, the catalogue, and the page that shows it."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia.telemetry.catalogue import CATALOGUE
from persia.telemetry.metrics import BOUNDS, Histogram, WaitClock, metrics_of

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "observed.md"


@given(st.lists(st.floats(0, 300), max_size=200), st.floats(0.01, 1.0))
def test_a_histogram_counts_as_numpy_does(seconds, share):
    histogram = Histogram()
    for value in seconds:
        histogram.add(value)
    latency = histogram.latency("nn_step_seconds")
    # A value that equals a bound is below it: Prometheus's `le`.
    expected = np.bincount(np.searchsorted(BOUNDS, seconds, side="left"), minlength=len(BOUNDS) + 1)
    assert latency.counts == list(expected)
    assert latency.seconds == pytest.approx(sum(seconds))
    if not seconds:
        assert math.isnan(latency.quantile(share))
    else:
        exact = sorted(seconds)[max(0, math.ceil(share * len(seconds)) - 1)]
        bound = latency.quantile(share)
        assert exact <= bound
        if bound != BOUNDS[0]:
            assert exact > (BOUNDS[-1] if math.isinf(bound) else BOUNDS[BOUNDS.index(bound) - 1])


def test_a_block_that_raises_is_timed():
    histogram = Histogram()
    with pytest.raises(ZeroDivisionError), histogram.timed():
        1 / 0  # noqa: B018
    assert sum(histogram.latency("x").counts) == 1


def test_a_wait_that_goes_on_counts_until_now(monkeypatch):
    now = 10.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    waits = WaitClock()
    assert waits.seconds == 0
    for expected in (3.0, 6.0):
        with pytest.raises(ZeroDivisionError), waits.waiting():
            now += 2.0
            assert waits.seconds == expected - 1.0
            now += 1.0
            1 / 0  # noqa: B018
        now += 100.0
        assert waits.seconds == expected


def test_threads_lose_no_count():
    histogram = Histogram()
    threads = [threading.Thread(target=lambda: [histogram.add(0.002) for _ in range(5000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    latency = histogram.latency("x")
    assert sum(latency.counts) == 20_000
    assert latency.seconds == pytest.approx(40.0)


def test_counters_become_figures():
    found = metrics_of("ps", {"hits": 3, "rows": 2}, table="ads")
    assert [tuple(figure) for figure in found] == [
        ("ps_hits", 3.0, {"table": "ads"}),
        ("ps_rows", 2.0, {"table": "ads"}),
    ]


def test_the_page_shows_the_catalogue():
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `persia_")]
    total = {"counter": "_total"}
    assert lines == [
        f"| `persia_{name}{total.get(kind.type, '')}` | {kind.type} | {kind.meaning} |"
        for name, kind in CATALOGUE.items()
    ]
