"""The modes on globo_ctr: the rate is tuned on days that are not compared."""

import pytest
from benchmarks.globo import Run

from benchmarks import globo
from persia.modes import Hybrid, Sync


def test_days_of_the_tuning_are_left_out(monkeypatch):
    def one_pass(plan):
        if plan.rows is not None:
            assert plan.mode == Sync()
            near = -abs(plan.optimizer.lr - 0.2)
            return Run(1.0, near, (near,) * 2, 0.0)
        assert plan.optimizer.lr == 0.2
        gap = {Sync(): 0.0, Hybrid("auto", warmup=0): -0.001}.get(plan.mode, -0.01)
        return Run(1.0, 0.5, (0.9 if plan.mode == Sync() else 0.1,) * 2 + (0.7 + gap,) * 3, 0.0)

    monkeypatch.setattr(globo, "is_here", lambda name: True)
    monkeypatch.setattr(globo, "everywhere", lambda function, plans, result, processes: [one_pass(p) for p in plans])
    globo.tuned_rate.cache_clear()
    measures = globo.modes("laptop")
    found = {one.name: one for one in (next(measures) for _ in globo.CANDIDATES)}
    globo.tuned_rate.cache_clear()
    auto = found["globo.modes.auto"]
    assert auto.value == pytest.approx(-0.001)
    assert (auto.details["tuning_days"], auto.details["rate_of_rows"], auto.holds) == (2, 0.2, True)
    assert found["globo.modes.hybrid_4"].value == pytest.approx(-0.01)
