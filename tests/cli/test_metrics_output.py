"""Tables and JSON of metrics: the figures of each label's kind, and binary ones as they always were."""

import io
import json
import math

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import persia
from persia.cli import ui
from persia.cli.app import app
from persia.cli.continual import DayRecord, table
from persia.metrics import GroupedFigures, GroupedMetrics, Metrics
from persia.metrics.result import MetricsResult
from persia.schema import Label

REGRESSION = Label("watch", "regression", unit="s")


def result(labels):
    rng = np.random.default_rng(0)
    targets = [Label(each) if isinstance(each, str) else each for each in labels]
    metrics = Metrics(labels)
    most = [len(each.class_names) or 2 for each in targets]
    y = np.column_stack([rng.integers(0, count, 50) for count in most])
    metrics.update(rng.normal(size=(50, sum(each.outputs for each in targets))), y, np.arange(50) // 25)
    return metrics.result()


def printed(found, monkeypatch, capsys):
    text = io.StringIO()
    monkeypatch.setattr(ui, "CONSOLE", Console(file=text, width=150))
    ui.print_metrics("evaluation", found)
    return text.getvalue() + capsys.readouterr().out


def header(text, word):
    return next(line for line in text.splitlines() if word in line).split()


def test_a_binary_label_has_the_columns_that_it_had(monkeypatch, capsys):
    found = result(["click"])
    text = printed(found, monkeypatch, capsys)
    assert [word for word in header(text, "rows") if word.isalnum() or "-" in word] == [
        "rows", "AUC", "log-loss", "NE", "calibration"
    ]  # fmt: skip
    assert f"{found.labels['click'].normalized_entropy:.4f}" in text
    assert set(ui.metrics_record(found)) == {
        "rows", "auc", "auc_mean_of_days", "log_loss", "calibration", "normalized_entropy", "labels", "per_day",
        "buckets", "grouped",
    }  # fmt: skip
    assert set(ui.metrics_record(found)["labels"]["click"]) == {
        "rows", "auc", "log_loss", "calibration", "normalized_entropy"
    }  # fmt: skip


def test_labels_of_one_class_have_no_auc(monkeypatch, capsys):
    metrics = Metrics(["chosen"])
    metrics.update(np.array([0.5, 1.0, 2.0]), np.ones(3), [1, 1, 2])
    found = metrics.result()
    text = printed(found, monkeypatch, capsys)
    assert "AUC" not in text
    assert "nan" not in text
    assert f"{found.log_loss:.4f}" in text
    assert found.summary() == f"log loss {found.log_loss:.4f}"
    assert math.isnan(ui.metrics_record(found)["auc"])
    metrics.update(np.array([-1.0]), np.zeros(1), [2])
    text = printed(metrics.result(), monkeypatch, capsys)
    assert [line.count(" - ") for line in text.splitlines() if "day 1" in line] == [2]  # AUC and NE.
    assert "nan" not in text


def test_a_regression_has_no_auc(monkeypatch, capsys):
    found = result([REGRESSION])
    text = printed(found, monkeypatch, capsys)
    for shown in ("RMSE", "MAE", "mean ratio", f"{found.labels['watch'].rmse:.5g}", "watch, day 1"):
        assert shown in text
    for absent in ("AUC", "nan", "log-loss", "accuracy"):
        assert absent not in text
    record = ui.metrics_record(found)
    assert set(record) == {"rows", "labels", "per_day", "buckets", "grouped"}
    assert set(record["labels"]["watch"]) == {"rows", "rmse", "mae", "mean_ratio"}


def test_labels_of_several_kinds_are_in_one_table(monkeypatch, capsys):
    found = result(["click", REGRESSION, Label("genre", "multiclass", classes=7)])
    text = printed(found, monkeypatch, capsys)
    for shown in ("AUC", "RMSE", "accuracy", "top-5 accuracy", "log-loss"):
        assert shown in text
    assert "nan" not in text
    assert {"auc", "log_loss"} <= set(ui.metrics_record(found))
    assert found.summary().startswith("click AUC ")
    assert "watch RMSE" in found.summary()
    assert "genre accuracy" in found.summary()


def test_values_of_a_column_have_their_own_lines(monkeypatch, capsys):
    whole = result([REGRESSION])
    labels = {**whole.labels, "low": whole.labels["watch"]}
    grouped = {
        "watch": GroupedFigures(3, 50, math.nan, {10: math.nan}, {10: 0.5}),
        "low": GroupedFigures(3, 50, math.nan, {10: math.nan}, {10: math.nan}),
    }
    found = MetricsResult(
        50, math.nan, math.nan, math.nan, math.nan, labels, grouped=grouped, by={"DE": whole, "(other)": whole}
    )
    text = printed(found, monkeypatch, capsys)
    assert "evaluation by value" in text
    assert "DE" in text
    assert "(other)" in text
    assert "watch, 3 groups: NDCG@10 0.5000" in text
    assert "low, 3" not in text
    assert "nan" not in text
    assert set(ui.metrics_record(found)["by"]) == {"DE", "(other)"}


def test_a_group_of_a_binary_label_prints_as_before(monkeypatch, capsys):
    grouped = GroupedMetrics()
    grouped.update([1, 1], [0.0, 1.0], [0, 1])
    whole = result(["click"])
    found = MetricsResult(50, 0.5, 0.5, 0.5, 0.5, whole.labels, grouped={"click": grouped.result()})
    text = printed(found, monkeypatch, capsys)
    assert "click, 1 groups: GAUC 1.0000, recall@10 1.0000, NDCG@10 1.0000" in text


CONFIG = """
[model]
kind = "ffnn"
options = {hidden = [4]}

[data]
kind = "csv"
path = "rated.csv"
batch_size = 64

[schema]
id_features = [{name = "user", dim = 4}]
dense_features = ["age"]
labels = ["click"]

[trainer]
progress = false
"""


@pytest.mark.slow
def test_evaluate_by_a_column_of_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    country = rng.choice(["DE", "FR", "PL"], 400, p=[0.5, 0.3, 0.2])
    with open("rated.csv", "w") as file:
        file.write("user,age,click,country\n")
        file.writelines(f"{i % 9},{i % 7},{i % 2},{country[i]}\n" for i in range(400))
    (tmp_path / "run.toml").write_text(CONFIG)
    runner = CliRunner()
    assert runner.invoke(app, ["train", "run.toml", "--output", "out"]).exit_code == 0
    command = [
        "evaluate",
        "run.toml",
        "--checkpoint",
        "out",
        "--by",
        "country",
        "--max-values",
        "2",
        "--json",
        "e.json",
    ]
    done = runner.invoke(app, command)
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "e.json").read_text())
    counts = {name: int((country == name).sum()) for name in ("DE", "FR", "PL")}
    assert {name: of["rows"] for name, of in record["by"].items()} == {
        "DE": counts["DE"],
        "FR": counts["FR"],
        "(other)": counts["PL"],
    }


def test_days_of_a_regression_have_no_columns_of_auc():
    sync = persia.modes.Sync()
    text = io.StringIO()
    days = [DayRecord(3, sync, 0, 10, 0, 5, 2.0, others={"watch:rmse": 1.25}), DayRecord(4, sync, 10, 10, 5)]
    Console(file=text, width=200).print(table(days))
    assert "watch RMSE" in text.getvalue()
    assert "1.25" in text.getvalue()
    assert "AUC" not in text.getvalue()
    text = io.StringIO()
    Console(file=text, width=200).print(table([DayRecord(3, sync, 0, 10, 0)]))
    assert "progressive AUC" in text.getvalue()
