"""Runs in virtual time are comparable: the same rows, however many NN workers share them."""

import pytest
from benchmarks.modes_runs import NNWorkers, Plan, Rates, seconds_to, train, train_through

from persia.modes import Gba, Hybrid, Sync

PLAN = Plan((Sync(),) * 2, Rates(3e-3, 0.1), 0, 3_200, drift=0.1, local=100)
FEW, MANY = NNWorkers((1.0,) * 2, 400, 1.0), NNWorkers((1.0,) * 8, 100, 0.25)


def aucs(plan):
    return [day.auc for day in train(plan)]


def test_nn_workers_of_a_day_share_the_same_global_batches():
    few = aucs(PLAN._replace(by_day=(FEW, FEW)))
    assert aucs(PLAN._replace(by_day=(FEW, MANY))) == pytest.approx(few, abs=1e-4)
    switched = PLAN._replace(modes=(Sync(), Gba(800)), by_day=(FEW, MANY))
    assert aucs(switched) == pytest.approx(few, abs=1e-4)
    assert aucs(switched._replace(seed=1)) != pytest.approx(few, abs=1e-3)


def test_a_run_through_all_days_is_tested_after_each():
    plan = PLAN._replace(drift=0.0, factors=(1.0,) * 8, latency=0.25)
    sync = train_through(plan)
    assert sync.areas[-1] == pytest.approx(aucs(plan)[-1], abs=1e-6)  # Draining in between changes nothing in Sync.
    assert sync.ends == pytest.approx((4 * 1.5 - 0.125, 8 * 1.5 - 0.125))  # Less the way of the last answer.
    hybrid = train_through(plan._replace(modes=(Hybrid("auto", warmup=0),) * 2))
    assert len(hybrid.areas) == 2
    assert hybrid.summary.rate > 1.2 * sync.summary.rate


def test_seconds_to_an_auc_lie_between_the_points_of_a_curve():
    curve = [(10.0, 0.6), (20.0, 0.7), (30.0, 0.65)]
    assert seconds_to(curve, 0.55) == pytest.approx(5.0)
    assert seconds_to(curve, 0.6) == pytest.approx(10.0)
    assert seconds_to(curve, 0.675) == pytest.approx(17.5)
    assert seconds_to(curve, 0.71) is None
