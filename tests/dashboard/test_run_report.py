"""The HTML report of a run."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import msgspec
import pytest
from typer.testing import CliRunner

from persia.cli.app import app
from persia.dashboard.charts import bars, lines, short
from persia.dashboard.report import report
from persia.telemetry.run_record import CalibrationBin, CurvePoint, FeatureCost, RunRecord
from support.cluster_samples import make_trainer, reader

HOSTILE = "</td><script>alert(1)</script>\"'&"


class Reader(HTMLParser):
    """Collects the tags, the attributes and the text of a page; fails if tags do not nest."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def record(name: str = "item") -> RunRecord:
    groups = [CalibrationBin(0.1, 0.12, 5.0), CalibrationBin(0.8, 0.7, 5.0)]
    curve = [CurvePoint(step, step / 10, 1000.0 + step, 1 / step, None, 0.5, 0.1, step * 7) for step in range(1, 90)]
    counters = {"rows": 12_345, "bytes": 3 << 20, "lookups": 200, "hits": 150, "evicted": 5}
    return RunRecord(
        "Sync()", 2, 1.7e9, 95, curve, dict.fromkeys((name, "like"), groups),
        {0: 7, 3: 2}, {name: counters}, [FeatureCost(name, name, 640, 64, 0.002)], [], {name: {"auc": 0.75}}, True,
    )  # fmt: skip


def test_a_report_shows_what_the_record_has():
    page = Reader(report(record(), "run 7"))
    for shown in ("run 7", "95", "Sync()", "2 NN workers", "0.7500", "12,345", "75.0%", "10.00", "2.000", "2023-11-14"):
        assert shown in page.text, shown
    assert page.tags.count("svg") == 6  # Without AUC: it was never a number.
    assert "No data." not in page.text
    assert "AUC of the" not in page.text


def test_a_regression_has_its_own_curve_and_no_auc():
    run = record()
    run.curve = [msgspec.structs.replace(p, others={"watch:rmse": 1 + 1 / p.step, HOSTILE: None}) for p in run.curve]
    run.evaluation = {"watch": {"rmse": 1234.5678, "mean_ratio": 1.01, HOSTILE: 1.0}}
    page = Reader(report(run, "run"))
    for shown in ("progressive watch RMSE of the last samples", "1.0112", "evaluation RMSE", "1234.6", "1.010"):
        assert shown in page.text, shown
    assert "AUC" not in page.text
    assert "watch RMSE of the samples since the previous point" in page.text
    assert "script" not in page.tags


def test_names_are_text():
    page = Reader(report(record(HOSTILE), HOSTILE))
    assert "script" not in page.tags
    assert page.text.count(HOSTILE) >= 4


def test_nothing_is_loaded():
    page = Reader(report(record(), "run"))
    assert not {"script", "link", "img", "iframe", "a"} & set(page.tags)
    assert not {"href", "src"} & {name for name, _ in page.attributes}
    assert "url(" not in report(record(), "run")
    assert "prefers-color-scheme: dark" in report(record(), "run")


def test_a_run_that_failed_at_once():
    page = Reader(report(RunRecord("", 1, 0.0, 0), "run"))
    assert "did not return" in page.text
    assert page.text.count("No data.") == 7


def test_a_chart_has_its_points_inside_and_in_proportion():
    figure = ElementTree.fromstring(
        lines("Loss", {"loss": [(0, 1.0), (5, None), (10, 3.0), (20, float("nan"))]}, "step")
    )
    (line,) = figure.iter("polyline")
    (x0, y0), (x1, y1) = (map(float, pair.split(",")) for pair in line.attrib["points"].split())
    assert (x0, y0, x1, y1) == (52, 192, 408, 12)
    ticks = [text.text for text in figure.iter("text")]
    assert ticks == ["1", "1.5", "2", "2.5", "3", "0", "2", "4", "6", "8", "10", "step"]
    assert [title.text for title in figure.iter("title")] == ["loss: 1 at step 0", "loss: 3 at step 10"]


def test_a_constant_is_a_line_in_the_middle():
    figure = ElementTree.fromstring(lines("Rows", {"rows": [(0, 5.0), (1, 5.0)]}, "step"))
    (line,) = figure.iter("polyline")
    assert line.attrib["points"] == "52.0,102.0 408.0,102.0"


def test_columns_are_as_high_as_their_values():
    figure = ElementTree.fromstring(bars("Staleness", {"0": 4.0, "1": 1.0}, "steps"))
    heights = [float(box.attrib["height"]) for box in figure.iter("rect")]
    assert heights == [180.0, 45.0]


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.12345, "0.123"), (1234, "1.23k"), (5.6e6, "5.6M"), (-2e9, "-2G"), (1e-5, "1e-05")]
)
def test_short_numbers(value, text):
    assert short(value) == text


def test_the_command_writes_one_file(tmp_path):
    make_trainer(None, checkpoint_dir=str(tmp_path / "my run")).fit(reader(3))
    done = CliRunner().invoke(app, ["report", str(tmp_path / "my run")])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "my run" / "report.html").read_text()
    assert re.search("<h1>my run</h1>", page)
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 1
    assert "run.json" in str(done.exception)
