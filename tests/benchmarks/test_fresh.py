"""Fresh rows: runs that read the same rows are trained once, and each kind is paired with Sync by seed."""

import pytest
from benchmarks.fresh_runs import KINDS, LATENCIES, Case, Learned, learned

from benchmarks import fresh, modes_runs
from persia import data
from persia.modes import Hybrid, Sync
from persia.replay import Summary

LEAST = {"500_1.05": 8_192, "avazu": 4_096, "globo_in_order": 10_240}


@pytest.fixture(autouse=True)
def _no_rows_of_other_tests(monkeypatch):
    monkeypatch.setattr("persia.data.generator.RATE_ROWS", 8_192)  # The rate of clicks does not matter here.


def test_runs_that_read_the_same_rows_are_trained_once(monkeypatch):
    trained = []
    plain = modes_runs.train_through_along
    monkeypatch.setattr(
        modes_runs, "train_through_along", lambda plan, timeline: trained.append(timeline) or plain(plan, timeline)
    )
    found = learned(Case("500_1.05", 0, LEAST["500_1.05"]))
    assert set(found) == {f"{latency}.{kind}" for latency in LATENCIES for kind in KINDS}
    for latency in LATENCIES:
        areas = {kind: found[f"{latency}.{kind}"].areas for kind in KINDS}
        assert areas["sync_ahead"] == areas["sync"] == found["quarter.sync"].areas
        assert areas["hybrid_16_refresh"] == areas["hybrid_4_refresh"] == areas["hybrid_1_refresh"] == areas["hybrid_1"]
        assert len({areas["sync"], areas["hybrid_1"], areas["hybrid_4"], areas["hybrid_16"]}) == 4
        assert len(areas["sync"]) == 8
    assert [timeline.mode for timeline in trained[:4]] == [Sync(), *(Hybrid(n, warmup=0) for n in (1, 4, 16))]
    assert len(trained) == len({one.areas for one in found.values()})


@pytest.mark.parametrize("name", ["avazu", "globo_in_order"])
def test_data_of_other_kinds(name):
    if name == "globo_in_order" and data.find("globo_ctr") is None:
        pytest.skip("globo_ctr is not here")
    found = learned(Case(name, 1, LEAST[name]))
    assert all(len(one.areas) == 1 for one in found.values())
    assert found["whole.sync_ahead"].areas == found["quarter.sync"].areas
    assert found["quarter.hybrid_4_refresh"].summary.row_staleness_max == 1
    assert found["quarter.hybrid_4"].summary.row_staleness_max > 1
    assert found["whole.sync"].summary.rate < found["quarter.sync"].summary.rate


def test_gaps_are_paired_by_seed(monkeypatch):
    def everywhere(function, cases, result):
        assert (function, result) == (learned, dict[str, Learned])
        assert [case.seed for case in cases] == [0, 1, 2, 3, 4]
        assert {(case.data, case.rows) for case in cases} == {("100000_0.7", 262_144)}
        rate = dict.fromkeys(KINDS, 1.5) | {"sync": 1.0, "sync_ahead": 1.25}
        gap = dict.fromkeys(KINDS, -0.001) | {"sync": 0.0, "sync_ahead": 0.0, "hybrid_4_refresh": -0.0004}
        return [
            {
                f"{latency}.{kind}": Learned(
                    (0.7 + case.seed / 100, 0.7 + case.seed / 100 + 2 * gap[kind]),
                    Summary(1.0, int(100 * rate[kind]), 4, 0, 0, 0, 0.0, 0, 0.5, 1),
                )
                for latency in LATENCIES
                for kind in KINDS
            }
            for case in cases
        ]

    monkeypatch.setattr(fresh, "everywhere", everywhere)
    found = {m.name.removeprefix("fresh.replay.100000_0.7."): m for m in fresh.replay("laptop", data="100000_0.7")}
    assert set(found) == {f"{latency}.{kind}" for latency in LATENCIES for kind in KINDS if kind != "sync"}
    assert found["quarter.hybrid_4"].value == pytest.approx(-0.001)
    assert found["quarter.hybrid_4"].details["per_day"] == [0.0, -0.002]
    assert found["whole.hybrid_4_refresh"].at_least == -0.0005
    assert found["whole.hybrid_4_refresh"].holds
    assert found["whole.hybrid_4"].holds is None
    assert found["quarter.sync_ahead"].holds
    assert found["quarter.sync_ahead"].details["rate_of_sync"] == 1.25


def test_without_globo_its_data_are_skipped(monkeypatch):
    monkeypatch.setattr(data, "find", lambda name: None)
    assert list(fresh.replay("laptop", data="globo_in_order")) == []
