"""The chart of the models: a mark for each measure, coloured by its target."""

import json

from benchmarks import plot_zoo, runner


def line(name, value, interval=None):
    return {"name": name, "value": value, "interval": interval}


def test_the_lines_of_the_page_are_measures():
    lines = (plot_zoo.ASSETS / "measures.jsonl").read_text().splitlines()
    assert not {json.loads(each)["name"] for each in lines} - set(runner.names())


def test_an_interval_that_reaches_below_the_target_is_marked(tmp_path, capsys):
    lines = [
        line("zoo.auc.adult.ffnn", 0.0, [-0.0005, 0.0005]),
        line("zoo.rate.adult.ffnn", 1.2, [0.2, 9.0]),
        line("zoo.rate.adult.dlrm", 1.5),
    ]
    (tmp_path / "lines").write_text("\n".join(map(json.dumps, lines)))
    plot_zoo.main(tmp_path / "lines", tmp_path)
    assert "globo: its measures are not in" in capsys.readouterr().err
    picture = (tmp_path / "adult.svg").read_text()
    assert picture.count(f'r="4" fill="{plot_zoo.HOLDS}"') == 2
    assert picture.count(f'r="4" fill="{plot_zoo.MISSES}"') == 1
    right = plot_zoo.LEFT + 8 + plot_zoo.PANEL + plot_zoo.GAP
    assert f"M{right:.1f} " in picture  # Cut at the border of its panel.
    assert f"H{right + plot_zoo.PANEL:.1f}" in picture
    assert picture.index(">dlrm<") < picture.index(">ffnn<")  # The faster one first.
