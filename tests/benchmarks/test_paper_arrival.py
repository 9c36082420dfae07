"""Algorithm 1 as printed: each gradient of rows is an update, compared with Sync of the same seed."""

import pytest
from benchmarks.modes_runs import Curve
from benchmarks.paper_runs import LOCAL, WORKERS, Outcome, dataset, train_and_test

from benchmarks import paper_arrival, paper_runs
from persia import data
from persia.modes import Async, Hybrid, Sync
from persia.replay import Summary

SUMMARY = Summary(2.0, 1024, 4, 0, 0, 0, 0.0, 0, 9.5, 15)


@pytest.fixture(autouse=True)
def _no_rows_of_other_tests(monkeypatch):
    monkeypatch.setattr("persia.data.generator.RATE_ROWS", 8_192)  # The rate of clicks does not matter here.
    dataset.cache_clear()


def test_rows_are_updated_by_each_gradient():
    run = paper_runs.Run("taobao", "ffnn", Hybrid(4, combine=False, warmup=0), paper_arrival.FIRST, 0, 10_000)
    ours = train_and_test(run)
    combined = train_and_test(run._replace(mode=Hybrid(4, warmup=0)))
    assert ours.summary.applied_rows == combined.summary.applied_rows == ours.train_rows
    assert ours.summary.row_staleness_max > combined.summary.row_staleness_max
    assert ours.auc != combined.auc


def test_table_2_is_paired_by_seed_at_the_rates_of_sync(monkeypatch):
    asked = []

    def everywhere(function, plans, result):
        assert (function, result) == (train_and_test, Outcome)
        asked.extend(plans)
        gain = {Sync(): 0.0, Hybrid(4, combine=False, warmup=0): -0.002}
        return [Outcome(0.7 + p.seed / 100 + gain[p.mode], SUMMARY, WORKERS * LOCAL * 10, 9) for p in plans]

    monkeypatch.setattr(paper_arrival, "everywhere", everywhere)
    (found,) = paper_arrival.table2("laptop", source="avazu", network="deepfm", kind="cold")
    assert found.name == "paper.arrival.table2.avazu.deepfm.cold"
    assert found.details["per_seed"] == pytest.approx([-0.002] * 5)
    assert (found.at_least, found.holds, found.details["global_steps"]) == (-0.001, False, 10)
    assert len(set(asked)) == 10
    assert {(p.rates, p.rows) for p in asked} == {(paper_arrival.RATES["avazu", "deepfm"], 500_000)}


def test_the_warm_up_is_half_of_the_run(monkeypatch):
    asked = []

    def everywhere(function, plans, result):
        asked.extend(plans)
        return [Outcome(0.7, SUMMARY, WORKERS * LOCAL * 10, 9) for _ in plans]

    monkeypatch.setattr(paper_arrival, "everywhere", everywhere)
    list(paper_arrival.table2("laptop", source="avazu", network="deepfm", kind="warm"))
    assert {p.mode for p in asked} == {Sync(), Hybrid(4, combine=False, warmup=195)}


def test_without_globo_its_cases_are_skipped(monkeypatch):
    monkeypatch.setattr(data, "find", lambda name: None)
    assert list(paper_arrival.table2("laptop", source="globo", network="ffnn", kind="warm")) == []


def test_figure_6_compares_times_to_the_auc_of_sync(monkeypatch):
    slower = {Sync(): 1.0, Hybrid("auto", combine=False, warmup=0): 0.5, Hybrid("auto", warmup=0): 0.8}

    def everywhere(function, plans, result):
        assert (function, result) == (paper_arrival.learned, Curve)
        curves = []
        for plan in plans:
            lost = 0.2 if plan.mode == Async() and plan.seed == 3 else 0.0  # It does not arrive.
            ends = [slower.get(plan.mode, 0.9) * 10 * (n + 1) for n in range(plan.pieces)]
            curves.append(Curve(tuple(0.6 + n / 100 - lost for n in range(plan.pieces)), tuple(ends), SUMMARY))
        return curves

    monkeypatch.setattr(paper_arrival, "everywhere", everywhere)
    found = {m.name.removeprefix("paper.arrival.figure6."): m for m in paper_arrival.figure6("laptop")}
    assert {name: m.value for name, m in found.items()} == pytest.approx(
        {
            "on_arrival": 2.0,
            "combined": 1.25,
            "async": 0.0,
            "on_arrival_auc": 0.0,
            "combined_auc": 0.0,
            "async_auc": -0.04,
        }
    )
    assert found["on_arrival"].interval == pytest.approx((2.0, 2.0))
    assert found["async"].details["times"]["async"][3] is None
    assert found["async"].holds is False
    assert found["combined"].details["curves"]["sync"]["seconds"] == pytest.approx([10.0 * n for n in range(1, 13)])


def test_a_run_of_figure_6_has_the_latency_of_the_network():
    sync = paper_arrival.learned(paper_arrival.Learning(Sync(), 0, 2, 2_048))
    arrival = paper_arrival.learned(paper_arrival.Learning(Hybrid(4, combine=False, warmup=0), 0, 2, 2_048))
    assert len(sync.areas) == len(sync.ends) == 2
    assert sync.ends[-1] > 4 * (1 + 2 * paper_arrival.NETWORK_LATENCY) - 0.5
    assert arrival.ends[-1] < sync.ends[-1]
