"""The charts of the page on performance: names that they need are those of measures, and bars are as long as ratios."""

import json
import re

import pytest
from benchmarks.plot_performance import ASSETS, LOOKUP, SIZES, STEPS, UPDATES, Ratios

from benchmarks import plot_performance, runner


def test_measures_of_the_charts_exist():
    assert not {*LOOKUP, *UPDATES, *STEPS, *SIZES} - set(runner.names())


def test_charts_are_up_to_date(tmp_path):
    plot_performance.main(ASSETS / "measures.jsonl", tmp_path)
    for chart in tmp_path.iterdir():
        message = "run: python -m benchmarks.plot_performance"
        assert chart.read_text() == (ASSETS / chart.name).read_text(), message


def test_a_bar_is_as_long_as_its_ratio():
    picture = Ratios("", {"slower": 0.5, "faster": 2.0}).svg()
    (_, short), (_, long) = re.findall(r'<rect x="(\d+)" y="\d+" width="([\d.]+)"', picture)
    assert float(long) == pytest.approx(4 * float(short), abs=0.2)
    assert picture.index(plot_performance.SLOWER) < picture.index(plot_performance.FASTER)


def test_what_is_not_measured_is_left_out(tmp_path, capsys):
    lines = [
        {"name": "step.vs_torch", "value": 1.0},
        {"name": "step.vs_torch", "value": 2.0},
        {"name": "store.bytes_per_row", "value": 36.0, "by_size": [[1_000_000, 36.0], [2_000_000, 30.0]]},
    ]
    (tmp_path / "lines").write_text("\n".join(map(json.dumps, lines)))
    plot_performance.main(tmp_path / "lines", tmp_path / "charts")
    assert sorted(path.name for path in (tmp_path / "charts").iterdir()) == ["size.svg", "step.svg"]
    assert "lookup: its measures are not in" in capsys.readouterr().err
    assert "2x" in (tmp_path / "charts" / "step.svg").read_text()
