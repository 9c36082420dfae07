"""Table 2 with refreshed rows: what is trained, and what it is compared with."""

import pytest
from benchmarks.paper_arrival import RATES
from benchmarks.paper_runs import Outcome, train_and_test

from benchmarks import paper_fresh
from persia.modes import Hybrid, Sync
from persia.replay import Summary


def test_runs_are_paired_by_seed_at_the_rates_of_sync(monkeypatch):
    asked = []

    def everywhere(function, plans, result):
        asked.append((function, plans))
        better = 0.002 if function is paper_fresh.train_fresh else 0.0
        summary = Summary(1.0, 1024, 4, 0, 0, 0, 0.0, 0, 0.0, 0)
        return [Outcome(0.7 + plan.seed / 100 + better, summary, 819_200, 200_000) for plan in plans]

    monkeypatch.setattr(paper_fresh, "everywhere", everywhere)
    (found,) = paper_fresh.table2("laptop", source="avazu", network="deepfm")
    assert found.name == "paper.table2.avazu.deepfm.fresh"
    assert found.details["per_seed"] == pytest.approx([0.002] * 5)
    assert (found.holds, found.at_least) == (True, -0.001)
    (sync, syncs), (fresh, ours) = asked
    assert (sync, fresh) == (train_and_test, paper_fresh.train_fresh)
    assert {plan.mode for plan in syncs} == {Sync()}
    assert {plan.mode for plan in ours} == {Hybrid(4, warmup=0)}
    for plans in (syncs, ours):
        assert [plan.seed for plan in plans] == [0, 1, 2, 3, 4]
        assert {(plan.source, plan.network, plan.rates) for plan in plans} == {
            ("avazu", "deepfm", RATES["avazu", "deepfm"])
        }


def test_rows_are_those_of_one_step_before(monkeypatch):
    monkeypatch.setattr("persia.data.generator.RATE_ROWS", 8_192)  # The rate of clicks does not matter here.
    plan = paper_fresh.Run("taobao", "ffnn", Hybrid(4, warmup=0), RATES["taobao", "ffnn"], 0, 16_384)
    fresh = paper_fresh.train_fresh(plan)
    one = train_and_test(plan._replace(mode=Hybrid(1, warmup=0)))
    stale = train_and_test(plan)
    assert fresh.auc == one.auc != stale.auc
    assert fresh.summary.row_staleness_max == 1 < stale.summary.row_staleness_max
