"""Local all-reduce and the switch of DIEN and YouTubeDNN: which modes are trained when, and what is compared."""

import pytest
from benchmarks.gba_comparison_runs import Histories, days_of
from benchmarks.modes_runs import Day, Rates

from benchmarks import gba_comparisons
from persia.modes import Async, Gba, Sync
from persia.replay import LocalAllReduce, Summary

SUMMARY = Summary(1.0, 1024, 8, 0, 0, 0, 0.0, 0, 0.0, 0)


def test_days_are_paired_by_seed_and_compared_after_the_switch(monkeypatch):
    asked = []
    gain = {Sync(): 0.0, Gba(1024): -0.01, Async(): -0.1}

    def everywhere(function, plans, result):
        assert function is days_of
        asked.extend(plans)
        # The mode of the first half leaves a tenth of its loss to the second one.
        return [
            [
                Day(0.7 + plan.seed / 100 + gain[mode] + (gain[plan.modes[0]] / 10 if day >= 3 else 0.0), SUMMARY, 1.0)
                for day, mode in enumerate(plan.modes)
            ]
            for plan in plans
        ]

    monkeypatch.setattr(gba_comparisons, "everywhere", everywhere)
    found = {one.name: one for one in gba_comparisons.models("laptop", "dien")}
    assert {plan.seed for plan in asked} == {0, 1, 2, 3, 4}
    assert {plan.rates for plan in asked} == {Rates(3e-3, 0.1)}
    half = (Sync(),) * 3
    others = [(Gba(1024),) * 3, (Async(),) * 3]
    assert {plan.modes for plan in asked} == {half + half, *(half + o for o in others), *(o + half for o in others)}
    for part in ("first_day", "mean"):
        assert found[f"paper.switch.dien.to_gba.{part}"].details["per_seed"] == pytest.approx([-0.01] * 5)
        assert found[f"paper.switch.dien.from_async.{part}"].value == pytest.approx(-0.01)
        assert found[f"paper.switch.dien.to_gba.{part}"].at_least == -0.0005
        assert found[f"paper.switch.dien.to_async.{part}"].at_least is None


def test_a_day_in_every_mode_trains_its_rows():
    modes = (Sync(), Gba(1024), LocalAllReduce(8))
    for model in gba_comparisons.MODELS:
        days = days_of(Histories(model, modes, Rates(3e-3, 0.1), 0, 2_048))
        assert [day.summary.applied_rows for day in days] == [2_048] * 3
        assert days[0].end < days[1].end < days[2].end
        assert len({day.auc for day in days}) == 3


def test_local_all_reduce_is_switched_to_and_from(monkeypatch):
    plans = {}

    def switches(preset, throughout, switched):
        plans.update(switched)
        return ()

    monkeypatch.setattr(gba_comparisons, "switches", switches)
    list(gba_comparisons.local_all_reduce("smoke"))
    local = gba_comparisons.LOCAL["combined"]
    assert plans["paper.local_all_reduce.dense.to_combined"].modes == (Sync(),) * 2 + (local,) * 2
    assert plans["paper.local_all_reduce.dense.from_combined"].modes == (local,) * 2 + (Sync(),) * 2
    assert {mode.batches for mode in gba_comparisons.LOCAL.values()} == {1, 8}
