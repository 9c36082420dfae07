"""Evaluation with weights, masks, groups and other kinds of labels; its figures in results, curves and trackers."""

import dataclasses
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.metrics import mean_squared_error, ndcg_score, roc_auc_score

import persia
from persia.batching.batch import Batch
from persia.errors import ConfigError, DataError
from persia.metrics import Metrics
from persia.metrics.by_value import OTHER, MetricsByValue
from persia.modes import Sync
from persia.optim import Adagrad
from persia.schema import Label
from persia.telemetry.live import Snapshot
from persia.telemetry.run_record import read_run
from persia.telemetry.tracking import MLflow
from persia.testing import Threads

SCHEMA = persia.Schema(
    [persia.IdFeature("user", dim=4), persia.IdFeature("item", dim=4)],
    ["age"],
    labels=[Label("click", missing="mask"), Label("watch", "regression", missing="mask", unit="s")],
    sample_weight="w",
    group="session",
)


class Network(torch.nn.Module):
    """A linear network."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(9, 2)

    def forward(self, dense, embeddings):
        return self.linear(torch.cat([dense, *(embeddings[name] for name in ("user", "item"))], dim=1))


def batches(count=6, rows=50, seed=0, missing=0.2):
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        labels = np.column_stack([rng.integers(0, 2, rows), rng.normal(5, 2, rows)]).astype(np.float32)
        labels[rng.random(labels.shape) < missing] = np.nan
        columns = {
            "user": rng.integers(0, 9, rows),
            "item": rng.integers(0, 30, rows),
            "age": rng.normal(size=rows).astype(np.float32),
            "click": labels[:, 0],
            "watch": labels[:, 1],
            "w": rng.choice([0, 1, 2.5], rows),
            "session": rng.integers(0, 12, rows),
        }
        batch = Batch.from_columns(SCHEMA, columns)
        groups, weights = columns["session"].astype(np.uint64), columns["w"].astype(np.float32)
        found.append(dataclasses.replace(batch, groups=groups, weights=weights))
    return found


def trainer(cluster=None, schema=SCHEMA, **options):
    torch.manual_seed(0)
    return persia.Trainer(
        Network(),
        schema,
        optimizer=lambda p: torch.optim.Adam(p, 1e-2),
        embedding_optimizer=Adagrad(lr=0.1),
        mode=Sync(),
        cluster=cluster,
        options=persia.TrainerOptions(**{"progress": False} | options),
    )


def joined(data, predictions):
    labels, weights, groups = (
        np.concatenate([getattr(b, part) for b in data]) for part in ("labels", "weights", "groups")
    )
    return np.concatenate(predictions), labels, weights, groups


@pytest.mark.parametrize("nn_workers", [1, 2])
def test_evaluation_is_weighted_masked_and_by_group(nn_workers):
    data = batches()

    def work(member):
        t = trainer(member)
        t.fit(data)
        return t.evaluate(data, at=(3,), metrics_by="user", max_values=4), list(t.predict(data))

    result, predictions = Threads(nn_workers=nn_workers, timeout=60.0).run(work)[0]
    answers, labels, weights, groups = joined(data, predictions)
    known = ~np.isnan(labels)
    k = known[:, 0]
    auc = roc_auc_score(labels[k, 0], answers[k, 0], sample_weight=weights[k])
    assert result.labels["click"].auc == pytest.approx(auc, abs=1e-5)
    k = known[:, 1]
    rmse = math.sqrt(mean_squared_error(labels[k, 1], answers[k, 1], sample_weight=weights[k]))
    assert result.labels["watch"].rmse == pytest.approx(rmse, rel=1e-5)
    assert result.value("watch:rmse") == result.labels["watch"].rmse

    gains, shares = [], []
    for group in np.unique(groups[k]):
        rows = k & (groups == group)
        assert labels[rows, 1].min() >= 0 or math.isnan(result.grouped["watch"].ndcg[3])
        gains.append(ndcg_score([labels[rows, 1]], [answers[rows, 1]], k=3) if labels[k, 1].min() >= 0 else math.nan)
        shares.append(weights[rows].mean())
    expected = np.average(gains, weights=shares)
    assert result.grouped["watch"].ndcg[3] == pytest.approx(expected, rel=1e-5, nan_ok=True)
    assert 0 < result.value("click:gauc") < 1
    # Each value has the metrics of its rows alone.
    users = np.concatenate([b.id_features["user"].values for b in data])
    assert list(result.by)[-1] == OTHER
    assert len(result.by) == 5
    values, counts = np.unique(users, return_counts=True)
    assert result.by[OTHER].rows == np.sort(counts)[:-4].sum()
    for value, found in list(result.by.items())[:-1]:
        rows = users == int(value)
        assert found.rows == rows.sum() == dict(zip(values, counts, strict=True))[int(value)]
        k = known[:, 1] & rows
        rmse = math.sqrt(mean_squared_error(labels[k, 1], answers[k, 1], sample_weight=weights[k]))
        assert found.labels["watch"].rmse == pytest.approx(rmse, rel=1e-5)
        assert found.grouped["click"].rows == (known[:, 0] & rows).sum()


def test_a_reader_gives_columns_that_the_schema_lacks(tmp_path):
    rng = np.random.default_rng(0)
    rows = 500
    country = rng.choice(["DE", "FR", None, "other"], rows, p=[0.5, 0.3, 0.1, 0.1])
    schema = persia.Schema(
        [persia.IdFeature("user", dim=4), persia.IdFeature("item", dim=4)], ["age"], ["click", "buy"]
    )
    table = {
        "user": rng.integers(0, 9, rows),
        "item": rng.integers(0, 9, rows),
        "age": rng.normal(size=rows),
        "click": rng.integers(0, 2, rows),
        "buy": rng.integers(0, 2, rows),
        "country": country,
    }
    pq.write_table(pa.table(table), tmp_path / "a.parquet", row_group_size=77)
    data = persia.data.parquet(str(tmp_path / "a.parquet"), schema, batch_size=64)
    t = trainer(schema=schema)
    result = t.evaluate(data, metrics_by="country")
    counts = {str(value): int((country == value).sum()) for value in ("DE", "FR", "other")}
    counts["(missing)"] = sum(value is None for value in country)
    assert {value: of.rows for value, of in result.by.items()} == counts
    answers = np.concatenate(list(t.predict(data)))
    rows_of = country == "FR"
    expected = roc_auc_score(table["buy"][rows_of], answers[rows_of, 1])
    assert result.by["FR"].labels["buy"].auc == pytest.approx(expected)
    assert list(t.evaluate(list(data), metrics_by="click").by) == sorted(
        ("0", "1"), key=lambda value: -(table["click"] == int(value)).sum()
    )
    with pytest.raises(ConfigError, match=r"no column 'country' .* the batches have user, item, click, buy"):
        t.evaluate(list(data), metrics_by="country")
    with pytest.raises(DataError, match="planet"):
        t.evaluate(data, metrics_by="planet")
    shuffled = persia.data.parquet(str(tmp_path / "a.parquet"), schema, batch_size=64, shuffle_rows=100)
    with pytest.raises(ConfigError, match="leave shuffle_rows and shard out"):
        t.evaluate(shuffled, metrics_by="country")
    with pytest.raises(ConfigError, match="max_values"):
        t.evaluate(data, metrics_by="country", max_values=0)


def test_values_of_nn_workers_merge_whatever_each_has_seen():
    rng = np.random.default_rng(0)
    labels = (Label("click"),)
    parts, whole = [], MetricsByValue(labels, 2)
    for names in (["a", "b"], ["c", "b"], [], ["a"]):
        part = MetricsByValue(labels, 2)
        for _ in range(2 * bool(names)):
            rows = rng.integers(0, len(names), 40), rng.normal(size=(40, 1)).astype(np.float32)
            y = rng.integers(0, 2, (40, 1)).astype(np.float32)
            weights = rng.random(40).astype(np.float32) if names == ["a"] else None
            for metrics in (part, whole):
                metrics.update(names, *rows, y, weights)
        parts.append(part)
    payloads = []
    for part in parts:
        part.merged(lambda own: payloads.append(own) or [own])
    assert parts[0].merged(lambda _: payloads).result() == whole.result()


def test_curves_results_and_trackers_name_the_metrics_of_labels(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason='TensorBoard is not installed: pip install "persia-recsys[tensorboard]"')
    logged = {}

    class Tracker:
        def begin(self, parameters):
            pass

        def log(self, values, step):
            logged.update(values)

        def end(self, failed):
            pass

    monkeypatch.setattr(MLflow, "tracker", lambda _: Tracker())
    data = batches()
    t = trainer(log_dir=str(tmp_path), trackers=[MLflow()])
    result = t.fit(data, eval_data=data)
    progressive = result.progressive
    assert f"progressive click AUC {progressive.auc:.4f}, watch RMSE" in str(result)
    metrics = Metrics(SCHEMA.labels)
    assert progressive.labels["watch"].rows == sum(np.count_nonzero(b.mask[:, 1]) for b in data)
    assert metrics.headlines().keys() == {"watch:rmse"}
    assert logged["eval/rmse/watch"] == result.evaluation.labels["watch"].rmse
    assert logged["train/progressive_rmse/watch"] == pytest.approx(progressive.labels["watch"].rmse)
    assert {"train/progressive_auc", "train/progressive_rmse_of_window/watch", "eval/auc"} <= logged.keys()
    record = read_run(tmp_path)
    assert record.evaluation["watch"].keys() == {"rmse", "mae", "mean_ratio"}
    assert record.evaluation["click"].keys() == {"auc", "log_loss"}
    assert record.curve[0].others.keys() == {"watch:rmse"}
    assert list(record.calibration) == ["click"]


def test_the_live_line_has_no_nan_for_a_regression():
    snapshot = Snapshot(7, 100, 50.0, 0.5, math.nan, 9, 0.0, others={"watch:rmse": 2.5})
    assert "loss 0.5000 watch RMSE 2.5 store" in " ".join(snapshot.text().split())
    assert "AUC" not in snapshot.text()
    assert "AUC" not in snapshot._replace(others={}).text()  # All labels are 1, as of a next-item model.
    assert "AUC 0.7" in snapshot._replace(auc=0.7).text()
