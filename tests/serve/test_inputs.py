"""Shares of values that arrive at a server unlike in training."""

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch

import persia
from persia import Batch
from persia.batching.id_column import IdColumn
from persia.metrics import DriftCounts, count_ids
from persia.publish import PublishOptions
from persia.schema import Buckets, IdFeature, Schema, Tokens
from persia.serve import Predictor, ServeOptions
from persia.serve.inputs import HALVED_AT, MAX_WAITING, SAMPLED, InputCounts
from persia.types import Packed

SCHEMA = Schema(
    [
        IdFeature("item", 4),
        IdFeature("tags", 4, split="|"),
        IdFeature("price_bucket", 4, bucketize=Buckets("price", width=1)),
        IdFeature("words", 4, tokens=Tokens("title")),
    ],
    dense_features=["age"],
)
ITEMS = ["a|b", "c", None, ""]
COLUMNS = {
    "item": ITEMS,
    "tags": ["a|b", "c", "d", "e"],
    "price": [1.5, None, 2, 3],
    "title": ["a, b", "c", "d", "e"],
    "age": [1.0, 2.0, np.nan, 3.0],
    "other": [None] * 4,
}


def counted(*requests):
    counts = InputCounts(SCHEMA)
    for request in requests:
        counts.note_columns(request)
        counts.count(None)
    return counts


def test_shares_by_column():
    found = counted(*[COLUMNS] * 25).result
    assert found == {"item": {"missing": 0.5, "separator": 0.25}, "price": {"missing": 0.25}, "age": {"missing": 0.25}}
    assert counted(*[COLUMNS] * 24).result == {}  # Too few rows.


@pytest.mark.parametrize(
    "items",
    [
        tuple(ITEMS),
        np.array(ITEMS, object),
        pa.array(ITEMS),
        pa.chunked_array([pa.array(ITEMS[:1]), pa.array(ITEMS[1:], pa.string())]),
        pd.Series(ITEMS, index=[9, 8, 7, 6]),
        pl.Series(ITEMS),
    ],
    ids=lambda items: type(items).__name__,
)
def test_every_kind_of_column(items):
    assert counted(*[{"item": items}] * 25).result == {"item": {"missing": 0.5, "separator": 0.25}}


def test_lists_and_ids():
    ids = IdColumn(np.arange(3, dtype=np.uint64), np.array([0, 2, 2, 3, 3]))
    for column in (ids, (ids.values, ids.offsets), [[1, 2], [], [3], None], pa.array([[1, 2], [], [3], None])):
        assert counted(*[{"tags": column}] * 25).result == {"tags": {"missing": 0.5}}
    assert counted(*[{"item": IdColumn(ids.values)}] * 40).result == {}


def test_a_sample_is_spread_over_a_request():
    half = np.where(np.arange(100 * SAMPLED) < 50 * SAMPLED, np.nan, 1.0)
    counts = counted(*[{"age": half}, {"age": [1.0] * SAMPLED}] * 2)
    assert counts._counts["age"]["rows"] == 4 * SAMPLED
    assert counts.result == {"age": {"missing": 0.25}}


def test_recent_requests_weigh_more():
    counts = counted({"age": [np.nan]})
    counts._counts["age"].update(rows=HALVED_AT - 1, missing=HALVED_AT - 1)
    counts.note_columns({"age": [1.0]})
    counts.count(None)
    assert counts._counts["age"]["rows"] == HALVED_AT // 2


def test_waiting_requests_are_bounded():
    counts = InputCounts(SCHEMA)
    for _ in range(2 * MAX_WAITING):
        counts.note_columns({"age": [np.nan] * SAMPLED})
    counts.count(None)
    assert counts._counts["age"]["rows"] == MAX_WAITING * SAMPLED


def test_missing_values_in_training():
    reference = DriftCounts(["item"], [], [])
    offsets = np.array([0, *np.minimum(np.arange(1, 1001), 900)])
    reference.add_rows(np.zeros((1000, 0), np.float32), count_ids([(np.zeros(900, np.uint64), offsets)]))
    counts = InputCounts(SCHEMA)
    counts.load(reference.reference())
    counts.load(None)
    for _ in range(4):
        counts.note_columns({"item": ["a", None] * 16})
    counts.count(None)
    assert counts.result == {"item": {"missing": 0.5, "missing_in_training": 0.1}}


def test_unseen_ids():
    class Rows:
        def lookup(self, ids: Packed[np.uint64]):
            return {ids.names[0]: ids.buffer < 90}, {}

    counts = InputCounts(Schema([IdFeature("item", 4)]))
    for start in (0, 30, 60, 90):
        ids = np.arange(start, start + 30, dtype=np.uint64)
        counts.note_batch(Batch({"item": IdColumn(ids)}, np.zeros((30, 0), np.float32), np.zeros((30, 0), np.float32)))
    counts.count(Rows())
    assert counts.result == {"item": {"unseen": 0.25}}


def test_a_server_reports_them(tmp_path):
    rng = np.random.default_rng(0)
    rows = {"item": rng.integers(0, 50, 400), "tags": rng.integers(0, 9, 400), "age": rng.normal(0, 1, 400)}
    schema = Schema([IdFeature("item", 4), IdFeature("tags", 4)], dense_features=["age"], labels=["click"])
    batch = Batch.from_columns(schema, {**rows, "click": rng.integers(0, 2, 400)})
    url = str(tmp_path / "log")
    persia.Trainer(
        persia.nn.models.FFNN(schema, hidden=(4,)),
        schema,
        optimizer=lambda params: torch.optim.SGD(params, 1e-6),
        embedding_optimizer=persia.optim.Adagrad(lr=1e-6),
        options=persia.TrainerOptions(progress=False, publish=PublishOptions(url, seconds=0.05)),
    ).fit([batch] * 35)
    options = ServeOptions(poll_seconds=3600.0)
    with Predictor(url, persia.nn.models.FFNN(schema, hidden=(4,)), options) as predictor:
        assert predictor.state().inputs == {}
        for start in (0, 32, 64, 96):
            columns = {"item": np.arange(start, start + 32), "tags": ["1|2", None] * 16, "age": np.zeros(32)}
            predictor.predict(columns)
        predictor.refresh()
        inputs = predictor.state().inputs
    assert inputs["tags"] == {"missing": 0.5, "separator": 0.5, "missing_in_training": 0.0}
    assert inputs["item"] == {"unseen": (128 - 50) / 128}
