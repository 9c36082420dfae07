"""`run.json`: what a run leaves for `persia report`."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import persia
from persia.errors import DataError
from persia.metrics import AUC
from persia.telemetry.live import LiveLine
from persia.telemetry.run_record import MOST_POINTS, CurvePoint, RunRecord, read_run, write_run
from support.cluster_samples import BATCH, make_trainer, reader


def point(step: int) -> CurvePoint:
    return CurvePoint(step, float(step), 1.0, 0.5, 0.6, 0.7, 0.0, 9)


def test_a_run_leaves_its_curves_and_its_end(tmp_path):
    trainer = make_trainer(None, persia.modes.Hybrid(2, warmup=0, refresh=False), checkpoint_dir=str(tmp_path))
    result = trainer.fit(reader(120), reader(4, 9))
    record = read_run(tmp_path)
    assert record.complete
    assert record.step == 120
    assert [p.step for p in record.curve] == [1, 2, 4, 8, 16, 32, 51, 101]
    assert record.curve[0].hit_rate < record.curve[-1].hit_rate <= 1
    assert all(0 < p.loss < 5 and p.rows_per_second > 0 for p in record.curve)
    assert sum(g.rows for g in record.calibration["click"]) == 120 * BATCH
    assert max(record.staleness) == result.staleness_max == 2
    assert sum(record.staleness.values()) == 120
    mean = sum(staleness * count for staleness, count in record.staleness.items()) / 120
    assert mean == pytest.approx(result.staleness_mean)
    assert sum(t["rows"] for t in record.tables.values()) == result.stored_rows
    assert record.evaluation["click"]["auc"] == pytest.approx(result.evaluation.auc)
    assert {f.name for f in record.features} == {"id_0", "id_1", "id_2", "id_3"}
    assert all(f.ids == f.samples == BATCH and f.seconds > 0 for f in record.features)
    assert sorted(record.features, key=lambda f: -f.seconds) == record.features


def test_line_and_record_show_the_same_rate(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(LiveLine, "due", lambda self: True)
    monkeypatch.setattr(LiveLine, "shown", True)
    monkeypatch.setattr(LiveLine, "show", lambda self, snapshot: shown.append(snapshot))
    make_trainer(None, checkpoint_dir=str(tmp_path), eval_every_steps=1).fit(reader(9), reader(2))
    assert len(shown) == 18  # After each batch, and after each evaluation, when there are no new rows.
    assert all(snapshot.rows_per_second > 0 for snapshot in shown)
    rates = {snapshot.step: snapshot.rows_per_second for snapshot in shown}
    assert len(rates) == 9
    assert all(p.rows_per_second == rates[p.step] for p in read_run(tmp_path).curve)


def test_evaluations_are_shown_and_recorded(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(LiveLine, "show", lambda self, snapshot: shown.append(snapshot.text()))
    options = {"checkpoint_dir": str(tmp_path), "eval_every_steps": 4}
    trainer = make_trainer(None, **options)
    monkeypatch.setattr(LiveLine, "shown", True)
    result = trainer.fit(reader(9), reader(3))
    points = read_run(tmp_path).held_out
    assert [point.step for point in points] == [4, 8, 9]
    assert points[-1].value == result.evaluation.auc
    assert {point.step for point in points if point.best and point.value == result.best} == {result.best_step}
    assert f"held-out AUC {points[0].value:.4f} at step 4, best" in shown[0]
    assert f"held-out AUC {points[1].value:.4f} at step 8" in shown[1]
    found = {m.name: m for m in trainer.monitor.observe().metrics}["nn_held_out"]
    assert (found.value, found.labels) == (points[-1].value, {"metric": "auc"})
    again = make_trainer(None, **options)
    again.load(str(tmp_path))
    again.fit(reader(9), reader(3), epochs=2, max_steps=4)
    assert [point.step for point in read_run(tmp_path).held_out] == [4, 8, 9, 12, 13]


def test_the_curves_continue_over_a_resume(tmp_path):
    pytest.importorskip("tensorboard", reason='TensorBoard is not installed: pip install "persia-recsys[tensorboard]"')
    trainer = make_trainer(None, checkpoint_dir=str(tmp_path))
    trainer.fit(reader(20), max_steps=10)
    again = make_trainer(None, checkpoint_dir=str(tmp_path))
    again.load(str(tmp_path))
    again.fit(reader(20))
    assert [p.step for p in read_run(tmp_path).curve] == [1, 2, 4, 8, 11, 12, 14, 18]
    # Another run in this directory begins anew.
    make_trainer(None, log_dir=str(tmp_path)).fit(reader(2))
    assert {p.step for p in read_run(tmp_path).curve} == {1, 2}


def test_a_run_that_fails_leaves_what_there_was(tmp_path):
    pytest.importorskip("tensorboard", reason='TensorBoard is not installed: pip install "persia-recsys[tensorboard]"')
    trainer = make_trainer(None, log_dir=str(tmp_path))
    batches = list(reader(8).batches())
    batches[6].dense[:] = np.nan
    with pytest.raises(persia.errors.PersiaError):
        trainer.fit(batches)
    record = read_run(tmp_path)
    assert not record.complete
    assert [p.step for p in record.curve][:3] == [1, 2, 4]


def test_nothing_is_written_without_a_directory_or_to_a_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_trainer(None).fit(reader(2))
    make_trainer(None, checkpoint_dir="memory://run").fit(reader(2))
    assert not list(tmp_path.rglob("run.json*"))


def test_a_record_that_cannot_be_written_is_only_a_warning(tmp_path, caplog):
    (tmp_path / "run.json").mkdir()
    with caplog.at_level(logging.WARNING, "persia.trainer"):
        assert make_trainer(None, checkpoint_dir=str(tmp_path)).fit(reader(2)).steps == 2
    assert "could not be written" in caplog.text


def test_points_are_bounded_and_of_rising_steps(tmp_path):
    record = RunRecord("", 1, 0.0, 0)
    for step in range(1, 3 * MOST_POINTS):
        record.add(point(step))
    steps = [p.step for p in record.curve]
    assert len(steps) <= MOST_POINTS
    assert (steps[0], steps[-1]) == (1, 3 * MOST_POINTS - 1)
    assert steps == sorted(set(steps))
    record.add(point(7))
    assert record.curve[-1].step == 7
    write_run(tmp_path / "new" / "folder", record)
    assert read_run(tmp_path / "new" / "folder") == record


def test_what_is_no_record(tmp_path):
    with pytest.raises(DataError, match=r"There is no run\.json"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text('{"mode": 3}')
    with pytest.raises(DataError, match="is not the record of a run"):
        read_run(tmp_path)


def test_calibration_groups_are_those_of_the_samples():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, 50_000).astype(np.float32)
    probabilities = 1 / (1 + np.exp(-logits))
    labels = (rng.random(50_000) < probabilities / 2).astype(np.float32)
    auc = AUC()
    auc.update(logits, labels)
    groups = auc.reliability(10)
    assert sum(rows for *_, rows in groups) == 50_000
    order = np.argsort(logits)
    for (predicted, observed, rows), mine in zip(groups, np.array_split(order, 10), strict=True):
        assert rows == pytest.approx(5000, abs=20)
        assert predicted == pytest.approx(probabilities[mine].mean(), abs=0.002)
        assert observed == pytest.approx(labels[mine].mean(), abs=0.005)
    assert AUC().reliability() == []
