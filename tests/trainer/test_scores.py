"""Metrics of training: of this call of `fit`, of passes over rows that were seen, and of all calls."""

from __future__ import annotations

import io
import json
import re

import numpy as np
import pytest
import torch
from rich.console import Console

import persia
from persia.cli import ui
from persia.dashboard.report import report
from persia.telemetry.live import LiveLine
from persia.telemetry.run_record import read_run
from persia.telemetry.tracking import MLflow
from persia.trainer.driver import _merged_metrics
from persia.trainer.scores import TrainingScores
from support.listed import Listed
from support.twins.auc import exact_auc

SCHEMA = persia.Schema([persia.IdFeature("item", 4), persia.IdFeature("user", 4)], labels=["click"])
ROWS = 50


def day(number, batches=20, flipped=False):
    """Clicks on the even items, or of flipped labels on the odd ones."""
    rng = np.random.default_rng(number)
    found = []
    for _ in range(batches):
        item, user = rng.integers(0, 40, ROWS), rng.integers(0, 30, ROWS)
        click = ((item % 2 == 0) != flipped) ^ (rng.random(ROWS) < 0.05)
        columns = {"item": item, "user": user, "click": click.astype(np.float32)}
        found.append(persia.Batch.from_columns(SCHEMA, columns))
    return found


def trainer(**options):
    torch.manual_seed(0)
    return persia.Trainer(
        persia.nn.models.FFNN(SCHEMA, hidden=(8,)),
        SCHEMA,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2),
        embedding_optimizer=persia.optim.Adagrad(lr=0.3),
        mode=persia.modes.Sync(),
        options=persia.TrainerOptions(**{"progress": False, **options}),
    )


def printed(result, monkeypatch, **options):
    text = io.StringIO()
    monkeypatch.setattr(ui, "CONSOLE", Console(file=text, width=100))
    ui.print_fit(result, "runs/first", **options)
    return text.getvalue()


def test_a_bad_day_after_good_ones_shows(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason='TensorBoard is not installed: pip install "persia-recsys[tensorboard]"')
    t = trainer(log_dir=str(tmp_path))
    for number in range(5):
        good = t.fit(day(number)).progressive
    assert good.rows == 20 * ROWS
    assert good.auc > 0.85
    before = t.evaluate(day(5, flipped=True)).auc
    bad = t.fit(day(5, flipped=True))
    assert before < 0.15
    assert bad.progressive.rows == 20 * ROWS
    assert bad.progressive.auc < 0.5 < 0.7 < bad.history.auc
    assert bad.history.rows == t.metrics.rows == 6 * 20 * ROWS
    assert f"AUC {bad.progressive.auc:.4f}" in str(bad)
    text = printed(bad, monkeypatch)
    assert f"{bad.progressive.auc:.4f}" in text
    assert "since the first run" in text
    record = json.loads(json.dumps(ui.fit_record(bad), default=str))
    assert record["progressive"]["auc"] == bad.progressive.auc
    assert record["history"]["rows"] == 6 * 20 * ROWS
    last = read_run(tmp_path).curve[-1]
    assert last.auc < 0.5
    assert f"{last.auc:.4f}" in report(read_run(tmp_path), "run")
    assert sum(group.rows for group in read_run(tmp_path).calibration["click"]) == 20 * ROWS


def test_later_passes_have_training_metrics(monkeypatch):
    data, t = day(0), trainer()
    result = t.fit(data, epochs=3)
    first = trainer().fit(data, epochs=1)
    assert result.progressive == first.progressive
    assert (result.progressive.rows, result.training.rows, result.history.rows) == (1_000, 2_000, 1_000)
    assert result.training.auc > result.progressive.auc
    assert "; training AUC " in str(result)
    text = printed(result, monkeypatch)
    for name in ("progressive", "training"):
        metrics = getattr(result, name)
        for figure in (f"AUC {metrics.auc:.4f}", f"log-loss {metrics.log_loss:.4f}"):
            assert f"{name} {figure}" in re.sub("[│ ]+", " ", text)
        assert f"{name} calibration {metrics.calibration:.3f}" in re.sub("[│ ]+", " ", text)
    assert "training" not in str(first)
    assert "training AUC" not in printed(first, monkeypatch)


def test_logits_that_only_rank_have_no_log_loss(monkeypatch):
    result = trainer().fit(day(0))
    text = printed(result, monkeypatch, log_odds=False)
    assert "progressive AUC" in text
    assert "log-loss" not in text
    assert "calibration" not in text


def test_labels_of_one_class_have_no_auc(monkeypatch):
    data = day(0)
    for batch in data:
        batch.labels[:] = 1
    result = trainer().fit(data)
    text = printed(result, monkeypatch)
    assert "AUC" not in text
    assert "nan" not in text
    assert f"{result.progressive.log_loss:.4f}" in text
    assert "AUC" not in str(result)


def test_a_call_within_a_later_pass_has_no_progressive_rows(tmp_path):
    data, t = day(0), trainer(checkpoint_dir=str(tmp_path))
    t.fit(data, epochs=2, max_steps=25)
    result = t.fit(data, epochs=2)
    assert "Training calibration of the last call" in report(read_run(tmp_path), "run")
    assert (result.progressive.rows, result.training.rows) == (0, 15 * ROWS)
    assert np.isnan(result.progressive.auc)
    assert result.history.rows == 1_000
    assert str(result).splitlines()[1].startswith("training AUC 0.")


def test_passes_with_new_rows_are_progressive():
    data = persia.data.synthetic(400, id_features=2, ids_per_feature=20, dense_features=0, batch_size=50)
    t = persia.Trainer(
        persia.nn.models.FFNN(data.schema, hidden=(4,)),
        data.schema,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2),
        embedding_optimizer=persia.optim.Adagrad(lr=0.1),
        options=persia.TrainerOptions(progress=False),
    )
    result = t.fit(data, epochs=3)
    assert (result.progressive.rows, result.training.rows) == (1_200, 0)


def test_a_resumed_call_begins_with_no_rows(tmp_path):
    data, whole = Listed(day(0)), trainer()
    expected = whole.fit(data)
    first = trainer()
    before = first.fit(data, max_steps=12).progressive
    first.save(str(tmp_path))
    second = persia.Trainer.resume(
        str(tmp_path), first.model, optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2)
    )
    assert second.metrics.rows == before.rows == 12 * ROWS
    result = second.fit(data)
    assert result.progressive.rows == 8 * ROWS
    assert result.history.rows == 20 * ROWS
    assert result.history.auc == expected.history.auc
    assert result.history.log_loss == pytest.approx(expected.history.log_loss, rel=1e-12)


class Logged:
    def __init__(self):
        self.points = []

    def begin(self, parameters):
        pass

    def log(self, values, step):
        self.points.append((step, values))

    def end(self, failed):
        pass


def test_curves_are_of_windows(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason='TensorBoard is not installed: pip install "persia-recsys[tensorboard]"')
    logged, shown = Logged(), []
    monkeypatch.setattr(MLflow, "tracker", lambda _: logged)
    monkeypatch.setattr(LiveLine, "due", lambda self: True)
    monkeypatch.setattr(LiveLine, "show", lambda self, snapshot: shown.append(snapshot))
    t = trainer(trackers=[MLflow()], log_dir=str(tmp_path))
    good, bad = day(0, 60), day(1, 60, flipped=True)
    t.fit(good)
    result = t.fit(bad, epochs=2)
    points = [values for step, values in logged.points if step > 60]
    progressive = [p for p in points if "train/progressive_auc" in p]
    training = [p for p in points if "train/training_auc" in p]
    assert len(progressive) + len(training) == len(points)
    assert progressive[0]["train/progressive_auc_of_window"] < 0.2  # Of the first batch of flipped labels alone.
    assert progressive[-1]["train/progressive_auc_of_window"] > progressive[-1]["train/progressive_auc"]
    assert training[-1]["train/training_auc"] == result.training.auc
    assert "  AUC 0." in shown[70].text()
    assert "training AUC 0." not in shown[70].text()
    assert "training AUC 0." in shown[-1].text()
    curve = read_run(tmp_path).curve
    assert [p.seen for p in curve] == sorted(p.seen for p in curve)
    assert [p.window_auc for p in curve if p.step > 60 and not p.seen] == [
        p["train/progressive_auc_of_window"] for p in progressive
    ]
    page = report(read_run(tmp_path), "run")
    assert "training: rows seen in an earlier pass" in page
    assert "training AUC of the last call" in page
    assert "Progressive calibration of the last call" in page  # Of the rows of the first pass.


def test_windows_have_each_row_once():
    """A window ends where the pass does, so that it is of rows of one kind."""
    rng = np.random.default_rng(0)
    scores = TrainingScores(["click"])
    scores.begin([])
    scores.begin_window()
    x, y = rng.normal(size=(40, 1)).astype(np.float32), (rng.random((40, 1)) < 0.5).astype(np.float32)
    scores.update(x[:20], y[:20], None, 0)
    scores.update(x[20:30], y[20:30], None, 0)
    assert scores.end_window().auc == exact_auc(x[:30, 0], y[:30, 0])
    scores.update(x[30:35], y[30:35], None, 0)
    scores.update(x[35:], y[35:], None, 1)
    assert scores.seen
    assert scores.end_window().auc == pytest.approx(exact_auc(x[35:, 0], y[35:, 0]), nan_ok=True)


def test_a_call_continues_after_a_restart_of_nn_workers():
    """The state that NN workers restart with has the rows of the call, of all of them, and those of earlier calls."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 1)).astype(np.float32), (rng.random((60, 1)) < 0.5).astype(np.float32)
    parts = [TrainingScores(["click"]) for _ in range(2)]
    for rank, scores in enumerate(parts):
        scores.begin([])
        if rank == 0:
            scores.update(x[:10], y[:10], None, 0)
            scores.begin([])
        mine = slice(10 + 20 * rank, 30 + 20 * rank)
        scores.update(x[mine], y[mine], None, 0)
        scores.update(x[50 + 5 * rank : 55 + 5 * rank], y[50 + 5 * rank : 55 + 5 * rank], None, 1)
    states = [scores.state_dict(lambda payload: [payload]) for scores in parts]
    again = TrainingScores(["click"])
    again.load_state_dict(
        {
            part: _merged_metrics([state[part] for state in states], ["click"])
            for part in ("earlier", "progressive", "training")
        }
    )
    assert (again.progressive.rows, again.training.rows, again.history().rows) == (40, 10, 50)
    assert again.progressive.auc() == exact_auc(x[10:50, 0], y[10:50, 0])
    assert again.history().auc() == exact_auc(x[:50, 0], y[:50, 0])
