"""Targets and rates of benchmarks/modes_figures.py, with runs made up."""

from types import SimpleNamespace

import pytest
from benchmarks.gba_runs import StalledDay, scored_after
from benchmarks.modes_runs import TUNING_SEED, Day, Rates

from benchmarks import modes_figures
from persia.modes import Sync
from persia.replay import Setting, simulate, steady

SUMMARY = simulate(Sync(), Setting(steady([1.0] * 8), local_batch=128), 64).summary()


def test_the_best_tolerance_is_chosen_by_other_seeds(monkeypatch):
    def area(plan):
        name = next((n for n, mode in modes_figures.TOLERATED.items() if mode == plan.mode), "sync")
        lucky = plan.seed < 2
        return {"tolerance_4": 0.72 if lucky else 0.69, "tolerance_3": 0.71, "unlimited": 0.70}.get(name, 0.6)

    def everywhere(function, plans, result):
        return [[StalledDay(area(plan), SUMMARY, 0.0)] * plan.days for plan in plans]

    monkeypatch.setattr(modes_figures, "everywhere", everywhere)
    monkeypatch.setattr(modes_figures, "stalled_rate", lambda preset, kind: 0.1)
    found = {one.name: one for one in modes_figures.tolerance("laptop")}
    between = found["modes.tolerance.adam_32_1x.between"]
    assert (between.details["between"], between.details["end"]) == ("tolerance_4", "unlimited")
    assert (between.details["chosen_by_seeds"], between.details["seeds"]) == ([0, 1], [2, 3, 4])
    assert between.value == pytest.approx(-0.01)
    assert between.interval == pytest.approx((-0.01, -0.01))
    assert between.holds is False


def test_rates_on_globo_are_tuned_on_as_many_other_rows(monkeypatch):
    asked = []

    def everywhere(function, plans, result):
        assert function is scored_after
        asked.extend(plans)
        return [modes_figures.Scored(-abs(p.rates.rows - 0.2) - abs(p.rates.dense - 3e-3), SUMMARY) for p in plans]

    monkeypatch.setattr(modes_figures, "everywhere", everywhere)
    modes_figures.globo_tuned.cache_clear()
    assert modes_figures.globo_tuned("laptop") == Rates(3e-3, 0.2)
    modes_figures.globo_tuned.cache_clear()
    assert {(plan.seed, plan.rows) for plan in asked} == {(TUNING_SEED, modes_figures.GLOBO_ROWS["laptop"])}
    assert all(2 * rows <= 5_800_000 for rows in modes_figures.GLOBO_ROWS.values())


def test_scaling_has_no_target_where_it_is_compared_with_itself(monkeypatch):
    def everywhere(function, plans, result):
        days = {"base": 0.7, "8": 0.7, "20": 0.7002, "100": 0.7, "200": 0.7 - 0.01}
        return [{name: [Day(auc + plan.seed * 1e-5, SUMMARY, 1.0)] for name, auc in days.items()} for plan in plans]

    monkeypatch.setattr(modes_figures, "everywhere", everywhere)
    monkeypatch.setattr(modes_figures, "scaling_rate", lambda preset, kind, reduction: 0.1)
    monkeypatch.setattr(modes_figures, "simulate", lambda *_: SimpleNamespace(summary=lambda: SUMMARY))
    found = {one.name.removeprefix("modes.scaling."): one for one in modes_figures.scaling("laptop")}
    holds = {name: found[f"adam.global.gba_{name}"].holds for name in (8, 20, 100, 200)}
    assert holds == {8: None, 20: True, 100: True, 200: False}
    assert found["adam.per_id.gba_200"].holds is None
    assert found["adam.global.gba_20"].interval == pytest.approx((2e-4, 2e-4))
