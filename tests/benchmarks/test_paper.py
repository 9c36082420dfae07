"""The papers' tables: how rows are split and paired, what each mode trains on, the states of the cluster."""

import numpy as np
import pytest
from benchmarks.modes_runs import FIRST
from benchmarks.paper_runs import LOCAL, WORKERS, Outcome, Run, dataset, train_and_test

from benchmarks import paper, paper_runs
from persia import data
from persia.modes import Async, Hybrid, Sync
from persia.replay import Summary

ROWS = 10_000


@pytest.fixture(autouse=True)
def _no_rows_of_other_tests(monkeypatch):
    monkeypatch.setattr("persia.data.generator.RATE_ROWS", 8_192)  # The rate of clicks does not matter here.
    dataset.cache_clear()


def test_a_fifth_of_the_rows_is_for_tests():
    whole = dataset("taobao", ROWS, 0)
    assert len(whole.rows) == ROWS
    assert not set(whole.train) & set(whole.test)
    assert len(whole.test) / ROWS == pytest.approx(0.2, abs=0.01)
    # What neither part has are the last training rows, less than a global batch.
    assert 0 <= ROWS - len(whole.train) - len(whole.test) < WORKERS * LOCAL
    assert len(whole.train) % (WORKERS * LOCAL) == 0
    assert len(set(whole.train)) == len(whole.train)


def test_parts_depend_only_on_the_seed_and_the_row_number():
    first = dataset("taobao", ROWS, 0)
    dataset.cache_clear()
    again = dataset("taobao", ROWS, 0)
    assert again is not first
    np.testing.assert_array_equal(again.train, first.train)
    np.testing.assert_array_equal(again.rows.labels, first.rows.labels)
    fewer, other = dataset("avazu", ROWS // 2, 0), dataset("taobao", ROWS, 1)
    np.testing.assert_array_equal(fewer.test, first.test[first.test < ROWS // 2])
    assert set(other.test) != set(first.test)


def test_training_rows_are_shuffled_and_cut_to_batches():
    whole = dataset("taobao", ROWS, 0)
    assert (np.diff(whole.train) < 0).mean() == pytest.approx(0.5, abs=0.03)
    users = whole.rows.id_features["id_0"].values
    np.testing.assert_array_equal(whole.batch(3).id_features["id_0"].values, users[whole.train[3 * LOCAL : 4 * LOCAL]])


@pytest.mark.parametrize("network", paper.NETWORKS)
def test_every_mode_trains_on_the_same_rows_once(network, monkeypatch):
    fed = []
    plain = paper_runs.Dataset.batch
    monkeypatch.setattr(paper_runs.Dataset, "batch", lambda self, number: fed.append(number) or plain(self, number))
    found = {}
    for mode in (Sync(), Hybrid(4, warmup=0), Hybrid("auto", warmup=0), Async()):
        found[mode] = train_and_test(Run("taobao", network, mode, FIRST, 0, 8_000))
        assert sorted(fed) == list(range(found[Sync()].train_rows // LOCAL))
        fed.clear()
        assert found[mode].summary.applied_rows == found[mode].train_rows == found[Sync()].train_rows
        assert found[mode].test_rows == found[Sync()].test_rows
    assert len({one.auc for one in found.values()}) == 4
    stale = {mode: (one.summary.row_staleness_max, one.summary.staleness_max) for mode, one in found.items()}
    assert stale[Sync()] == (0, 0)
    assert stale[Hybrid(4, warmup=0)][0] in (3, 4)
    assert 1 <= stale[Hybrid("auto", warmup=0)][0] <= stale[Hybrid(4, warmup=0)][0]
    assert stale[Hybrid(4, warmup=0)][1] == stale[Hybrid("auto", warmup=0)][1] == 0
    assert min(stale[Async()]) >= WORKERS - 1


def test_a_run_repeats_itself():
    run = Run("avazu", "ffnn", Hybrid(4, warmup=0), FIRST, 3, 3_000)
    first = train_and_test(run)
    dataset.cache_clear()
    assert train_and_test(run) == first
    assert train_and_test(run._replace(seed=4)).auc != first.auc


def test_gaps_are_paired_by_seed_at_the_rates_of_sync(monkeypatch):
    asked = []
    hybrid = {
        Hybrid(4): -0.0002,
        Hybrid("auto"): 0.0001,
        Hybrid(4, warmup=0): -0.0004,
        Hybrid("auto", warmup=0): -0.0003,
    }
    gain = {Sync(): 0.0, **hybrid, Async(): -0.01}

    def everywhere(function, plans, result):
        assert function is train_and_test
        asked.extend(plans)
        # The best rates of Sync are those of the grid's middle; Async learns best with twice the rate of rows.
        best = {Sync(): 0.2, Async(): 0.4}
        short = [abs(np.log(p.rates.rows / best.get(p.mode, 0.2))) + abs(np.log(p.rates.dense / 3e-3)) for p in plans]
        seconds = Summary(1.0, 1024, 4, 0, 0, 0, 0.0, 0, 0.0, 0)
        return [
            Outcome(0.7 + p.seed / 100 + gain[p.mode] - (far if p.seed == 99 else 0.0), seconds, 819_200, 200_000)
            for p, far in zip(plans, short, strict=True)
        ]

    monkeypatch.setattr(paper, "everywhere", everywhere)
    found = {one.name.rsplit(".", 1)[1]: one for one in paper.table2("laptop", source="criteo", network="ffnn")}
    tuning = [run for run in asked if run.seed == 99]
    runs = [run for run in asked if run.seed != 99]
    assert {run.mode for run in tuning} == {Sync(), Async()}
    assert len(runs) == len(set(runs)) == 5 * 7
    assert {(run.source, run.network, run.rows) for run in runs} == {("criteo", "ffnn", paper.ROWS["laptop"])}
    assert {run.seed for run in runs} == {0, 1, 2, 3, 4}
    by_mode = {mode: {run.rates for run in runs if run.mode == mode} for mode in gain}
    assert all(by_mode[mode] == by_mode[Sync()] for mode in hybrid)
    assert [rates.rows for rates in by_mode[Sync()]] == [0.2]
    assert {rates.rows for rates in by_mode[Async()]} == {0.2, 0.4}
    names = ("hybrid_4", "hybrid_auto", "hybrid_4_cold", "hybrid_auto_cold")
    gaps = {**dict(zip(names, hybrid.values(), strict=True)), "async": -0.01, "async_own": -0.01}
    for kind, gap in gaps.items():
        assert found[kind].details["per_seed"] == pytest.approx([gap] * 5)
    assert found["async"].details["rates"][1] == 0.2
    assert found["async_own"].details["rates"][1] == 0.4
    assert (found["hybrid_4"].at_least, found["hybrid_auto"].at_least, found["async"].at_least) == (-0.001, -5e-4, None)
    assert found["hybrid_4"].details["paper"] == {"hybrid": 0.8047, "sync": 0.8051, "async": 0.8001}


def test_data_that_are_not_here_are_skipped_with_a_line(monkeypatch, capsys):
    monkeypatch.setattr(data, "find", lambda name: None)
    assert list(paper.table2("smoke", source="globo", network="ffnn")) == []
    assert list(paper.table2("smoke", source="criteo_file", network="ffnn")) == []
    assert [line.split(" ")[0] for line in capsys.readouterr().err.splitlines()] == ["globo_ctr", "criteo"]


def test_states_of_the_cluster_have_the_spread_of_the_paper():
    for deviation, _ in paper.STATES.values():
        trace = paper.cluster(50, deviation, 0.0, 200)
        speeds = np.concatenate([[1 / part.factor for part in worker] for worker in trace.workers])
        assert speeds.std() / speeds.mean() == pytest.approx(deviation, rel=0.05)
        assert np.log([part.factor for part in trace.workers[0]]).mean() == pytest.approx(0.0, abs=0.1)
    stalled = paper.cluster(50, 0.1, 0.02, 200)
    factors = np.concatenate([[part.factor for part in worker] for worker in stalled.workers])
    assert (factors >= paper.STALL[0]).mean() == pytest.approx(0.02, abs=0.005)
    assert factors.max() <= paper.STALL[1]


def test_backup_workers_exclude_more_than_gba(monkeypatch):
    monkeypatch.setitem(paper.NN_WORKERS, "smoke", 40)
    found = {one.name.removeprefix("paper.gba_excluded."): one for one in paper.gba_excluded("smoke")}
    for state in paper.STATES:
        dropped, decayed = found[f"{state}.hop_bw"].value, found[f"{state}.gba"].value
        assert dropped == pytest.approx(0.25, abs=0.05)
        assert decayed < dropped / 10
        assert found[f"{state}.hop_bs"].value == found[f"{state}.bsp"].value == 0.0
        assert found[f"{state}.hop_bw"].details["staleness_max"] == 0
    assert found["strained.gba"].value > found["quiet.gba"].value
