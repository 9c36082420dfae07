"""The charts of the pages on modes: names that they need are those of measures, and points lie where they belong."""

import re

import pytest
from benchmarks.plot_modes import Chart

from benchmarks import plot_capacity, plot_modes, runner

LINE = {
    "value": 0.1, "per_day": [0.1, 0.2], "rate_per_day": [1, 2], "virtual_s_per_day": [1, 2], "quantiles": {"0.5": 0.1},
    "ids_within": {"0.1": 0.5}, "costs": [[1.0, 4, 2.0, 9.0]], "curves": {"sync": {"seconds": [1], "auc": [0.5]}},
    "rows_per_virtual_s": 9.0, "test": {"1e-06": {"0.1": 0.7}, "0.01": {"0.1": 0.6}},
    "by_hour": [0.5, 1.0], "load": [0.2, 0.9],
    "areas": {way: [0.5, 0.6] for way in ("base", "stay", "to_async", "to_async_tuned", "to_sync", "to_sync_tuned")},
    "by_size": [{"rows": 1, "samples_per_s": 2, "uniform_samples_per_s": 3}],
}  # fmt: skip
"""What a chart may read of any measure."""


@pytest.mark.parametrize("make", [*plot_modes.CHARTS, plot_capacity.measured])
def test_measures_of_a_chart_exist(make):
    """A chart whose measures are missing is left out, so a name that has changed would pass unseen."""
    pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')
    assert "<path" in make(dict.fromkeys(runner.names(), LINE)).svg()


def heights(chart):
    return [float(y) for y in re.findall(r'cy="([\d.]+)"', chart.svg())]


def test_a_logarithmic_axis_has_equal_steps_for_equal_ratios():
    first, second, third = heights(Chart("", "", "", {"a": [(1, 1.0), (10, 10.0), (100, 100.0)]}, True, True))
    assert first - second == pytest.approx(second - third, abs=0.2)
    assert first > second > third  # Upwards is down in an SVG.


def test_a_linear_axis_has_room_for_large_numbers():
    first, second, third = heights(Chart("", "", "", {"a": [(400 * n + 0.123456, float(n)) for n in range(3)]}))
    assert first - second == pytest.approx(second - third, abs=0.2)


def test_costs_below_zero_have_no_place():
    costs = [[1.0, 4, 2.0, 9.0], [0.01, 4, -0.1, 9.0]]
    lines = {name: {"costs": costs} for name in ("paper.theorem1", "paper.theorem1_one_rate")}
    chart = plot_modes.theorem1(lines)
    assert chart.series == {"rate 0.5, 1": [(4.0, 2.0)], "theorem, 1": [(4.0, 2.0)]}
    assert len(heights(chart)) == 2


def test_what_a_mode_gains_is_in_rates_of_sync():
    kinds = [*plot_modes.LATE.values(), *plot_modes.STRAGGLING.values(), "sync"]
    lines = {f"modes.auc_hybrid.rate.{kind}": {"value": 1.5} for kind in kinds}
    lines |= {f"modes.auc_hybrid.{plot_modes.DATA}.{kind}": {"value": -0.001} for kind in kinds}
    lines |= {f"modes.auc_others.{plot_modes.DATA}.{k}": {"value": -0.002, "rows_per_virtual_s": 5.0} for k in kinds}
    lines[f"modes.auc_others.{plot_modes.DATA}.gba"]["rows_per_virtual_s"] = 20.0
    series = plot_modes.which_mode(lines).series
    assert series["Hybrid(auto), cold"] == [(1.5, -0.001)]
    assert series["Gba"] == [(4.0, -0.002)]
    assert series["HopBs(2)"] == [(1.0, -0.002)]


def test_ways_begin_where_the_base_ends():
    areas = {"base": [0.5, 0.6], "stay": [0.7, 0.8], "to_async": [0.4, 0.5], "to_async_tuned": [0.6, 0.7]}
    areas |= {"to_sync": [0.4, 0.5], "to_sync_tuned": [0.6, 0.7]}
    kinds = [f"paper.gba_figure2.{plot_modes.DATA}.to_{mode}.first" for mode in ("async", "sync")]
    series = plot_modes.figure_2({kind: {"areas": areas} for kind in kinds}).series
    assert series["Sync"] == [(25.0, 0.5), (50.0, 0.6), (75.0, 0.7), (100.0, 0.8)]
    assert series["to Async, same"] == [(50.0, 0.6), (75.0, 0.4), (100.0, 0.5)]
    assert len(series) == 6


def test_areas_by_learning_rate_are_below_the_best_of_all():
    areas = {"1e-08": {"0.05": 0.75, "0.1": 0.8}, "1e-06": {"0.1": 0.7, "0.05": 0.6}, "0.01": {"0.05": 0.5, "0.1": 0.4}}
    lines = {f"quality.adagrad.{data}": {"test": areas} for data in ("sparse", "dense", "globo", "adult")}
    series = plot_modes.adagrad_rates(lines).series
    assert [rate for rate, _ in series["globo, 1e-06"]] == [0.05, 0.1]
    assert [area for _, area in series["globo, 1e-06"]] == pytest.approx([-0.2, -0.1])
    assert [area for _, area in series["sparse, 0.01"]] == pytest.approx([-0.3, -0.4])
