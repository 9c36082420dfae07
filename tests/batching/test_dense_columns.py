"""Rules of non-ID-type features: forms of vectors, errors that name the row, and the same results as scikit-learn."""

from __future__ import annotations

import math
import sys

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from sklearn.preprocessing import MinMaxScaler, QuantileTransformer, StandardScaler

import persia
from persia import DenseFeature, IdFeature, Label, Schema
from persia.batching.dense_columns import transformed
from persia.batching.native import features_core
from persia.errors import ConfigError, DataError
from support.twins.features import log1p as twin_log1p

ROWS = [[1.0, 2.0, 3.0], None, [4.0, 5.0, 6.0]]
VECTOR = DenseFeature("v", size=3, fill=9, missing_indicator=True)
EXPECTED = [[1, 2, 3, 0], [9, 9, 9, 1], [4, 5, 6, 0]]


def dense(feature, column):
    rows = len(column[1]) - 1 if isinstance(column, tuple) else len(column)
    schema = Schema([IdFeature("id", dim=4)], dense_features=[feature])
    columns = {"id": list(range(rows)), feature if isinstance(feature, str) else feature.name: column}
    return persia.Batch.from_columns(schema, columns, require_labels=False).dense


@pytest.mark.parametrize(
    "column",
    [
        ROWS,
        pa.array(ROWS),
        pa.array(ROWS, pa.large_list(pa.float32())),
        pa.array(ROWS, pa.list_(pa.int8(), 3)),
        pa.array([[[9.0]], *([[x] for x in row] if row else None for row in ROWS)])[1:],
        pa.array([bytes([1, 2, 3]), None, bytes([4, 5, 6])], pa.binary(3)),
        pa.chunked_array([ROWS[:1], ROWS[1:]], pa.list_(pa.float64())),
        ["[1, 2, 3]", "", "4 5 6"],
        pa.array([b"1|2|3", b"NA", b"(4;5;6)"]),
        pd.Series(ROWS),
        pd.Series([None if row is None else np.array(row) for row in ROWS]),
        pl.Series(ROWS),
        pl.Series(ROWS, dtype=pl.Array(pl.Float32, 3)),
        [[["1"], [2], [3.0]], None, np.array([4, 5, 6], np.uint8)],
    ],
    ids=lambda column: str(getattr(column, "type", type(column).__name__)),
)
def test_vectors_of_any_form(column):
    np.testing.assert_array_equal(dense(VECTOR, column), EXPECTED)


@pytest.mark.parametrize("convert", [np.asarray, torch.tensor, lambda x: np.asarray(x, np.uint8)])
def test_tensors_are_read_row_by_row(convert):
    images = np.arange(24).reshape(2, 3, 4)
    feature = DenseFeature("v", size=(3, 4), scale=(0, 2))
    np.testing.assert_array_equal(dense(feature, convert(images)), images.reshape(2, 12) / 2)


def test_values_and_offsets():
    np.testing.assert_array_equal(
        dense(DenseFeature("v", size=2), (np.arange(4), np.array([0, 2, 4]))), [[0, 1], [2, 3]]
    )


@pytest.mark.parametrize(
    ("feature", "column", "message"),
    [
        (VECTOR, [[1, 2, 3], [1, 2]], r"2 values at row 1, but its size is 3"),
        (VECTOR, pa.array([[1, 2, 3], [1, 2]]), r"2 values at row 1"),
        (VECTOR, [[1, 2, 3], [1, None, 2]], r"missing value at row 1 \(position 1\)"),
        (VECTOR, pa.array([[1, 2, 3], [1, None, 2]]), r"missing value at row 1 \(position 1\)"),
        (VECTOR, np.array([[1, 2, 3], [1, np.nan, 2]]), r"missing value at row 1 \(position 1\)"),
        (VECTOR, [[1, 2, 3], ["1", "x", "2"]], r"'x' at row 1 \(position 1\)"),
        (VECTOR, [[1, 2, 3], 7], r"single value 7 at row 1"),
        (VECTOR, np.arange(3), r"shape \[3\]; its size is 3"),
        (VECTOR, pa.array([1, 2]), r"holds int64, but its DenseFeature has a size"),
        (DenseFeature("v", size=3), ROWS, r"missing value at row 1.*fill=0"),
        (DenseFeature("v"), [1, None], r"missing value at row 1.*fill=0"),
        (DenseFeature("v"), [1, float("nan")], r"missing value at row 1"),
        (DenseFeature("v", clip=(0, 1)), np.array([1, np.inf]), r"is inf at row 1"),
        (DenseFeature("v", scale=(0, 1e-38)), [1e38, 1.0], r"is inf at row 0 after its rules.*a larger width"),
        (DenseFeature("v"), [0, 2**24 + 1], r"16777217 at row 1.*scale=\(0, 1.67772e\+07\)"),
        (DenseFeature("v"), ["0", "1700000001"], r"1700000001 at row 1"),
    ],
)
def test_errors_name_the_row_and_the_remedy(feature, column, message):
    with pytest.raises(DataError, match=message):
        dense(feature, column)


def test_whole_numbers_that_float32_cannot_hold_are_rescaled():
    times = np.array([1_700_000_000, 1_700_000_001])
    np.testing.assert_array_equal(
        dense(DenseFeature("v", scale=(1_700_000_000, 10)), times)[:, 0], np.float32([0, 0.1])
    )
    assert dense("v", times)[0] == dense("v", times)[1]  # A plain string only warns.


@pytest.mark.parametrize(
    ("scale", "reference"),
    [
        ("standard", StandardScaler()),
        ("minmax", MinMaxScaler()),
        ("quantile", QuantileTransformer(n_quantiles=257, subsample=None)),
    ],
)
@pytest.mark.parametrize("ties", [False, True])
def test_scales_are_those_of_scikit_learn(scale, reference, ties):
    rng = np.random.default_rng(0)
    train = rng.lognormal(size=5000) if not ties else np.maximum(rng.integers(-5, 9, 5000), 0).astype(float)
    new = np.concatenate([train[:50], [-100.0, 0.0, 0.5, 100.0]])
    schema = Schema([IdFeature("id", dim=4)], dense_features=[DenseFeature("v", scale=scale)])
    feature = persia.fit_features(schema, {"v": train}).dense[0]
    expected = reference.fit(train[:, None]).transform(new[:, None])
    np.testing.assert_allclose(dense(feature, new), expected, atol=1e-6)


def test_names_of_classes_are_compared_as_ids():
    schema = Schema(
        [IdFeature("id", dim=4)], labels=[Label("y", kind="multiclass", classes=("low", "5"), missing="mask")]
    )
    for column in (["low", 5, None], ["low", "5", ""], pa.array([b"low", b"5.0", None])):
        labels = persia.Batch.from_columns(schema, {"id": [1, 2, 3], "y": column}).labels
        np.testing.assert_array_equal(labels[:, 0], [0, 1, np.nan])
    with pytest.raises(DataError, match=r"'high' at row 1, which is none of its classes: 'low', '5'"):
        persia.Batch.from_columns(schema, {"id": [1, 2], "y": ["low", "high"]})
    same = Schema([IdFeature("id", dim=4)], labels=[Label("y", kind="multiclass", classes=("1", "1.0"))])
    with pytest.raises(ConfigError, match="same number"):
        persia.Batch.from_columns(same, {"id": [1], "y": ["1"]})


def test_weights_and_groups():
    schema = Schema([IdFeature("id", dim=4)], sample_weight="w", group="g")
    columns = {"id": [1, 2], "label": [0, 1], "w": ["0.5", 2], "g": ["a", 7]}
    batch = persia.Batch.from_columns(schema, columns)
    batch.validate(schema)
    assert batch.weights.tolist() == [0.5, 2]
    assert batch.groups[1] == 7
    assert batch.groups[0] > 7
    alone = persia.Batch.from_columns(schema, {"id": [1, 2]}, require_labels=False)
    assert alone.weights is None
    assert alone.groups is None
    for name, value, message in (
        ("w", -1, "Weight 'w' is -1.0 at row 0"),
        ("g", None, "no value at row 0"),
        ("w", None, "missing value at row 0"),
    ):
        with pytest.raises(DataError, match=message):
            persia.Batch.from_columns(schema, {**columns, name: [value, 1]})


def test_an_unfitted_schema_is_refused():
    schema = Schema([IdFeature("id", dim=4)], dense_features=[DenseFeature("price", scale="standard")])
    with pytest.raises(ConfigError, match=r"'price' need statistics.*persia.fit_features"):
        persia.Batch.from_columns(schema, {"id": [1], "price": [1], "label": [1]})
    with pytest.raises(ConfigError, match=r"persia.fit_features"):
        persia.Trainer(
            torch.nn.Linear(1, 1), schema, optimizer=torch.optim.Adam, embedding_optimizer=persia.optim.Adagrad(lr=0.1)
        )


@given(st.floats(0, allow_infinity=False))
@example(math.sqrt(2) - 1)
@example(sys.float_info.max)
def test_logarithms_have_the_bits_of_the_twin(x):
    values = transformed(DenseFeature("x", log=True), np.array([x, -x]))
    expected = twin_log1p(x)
    assert values.tolist() == [expected, -expected]
    assert abs(expected - math.log1p(x)) <= math.ulp(expected)


@pytest.mark.parametrize("dtype", ["<f8", ">f8", ">f4", "f2", "<i8", ">i4", "u8", "u2", "?"])
def test_types_of_numbers(dtype):
    values = np.frombuffer(
        np.array([0, 1, 1], dtype).tobytes(), np.dtype(dtype).newbyteorder(dtype[0] if dtype[0] in "<>" else "=")
    )
    feature = DenseFeature("x", scale=(1, 2))
    assert dense(feature, values).tolist() == [[-0.5], [0], [0]]
    assert dense(feature, values[::2]).tolist() == [[-0.5], [0]]


@pytest.mark.parametrize("dtype", [">f8", "<f8", ">f4"])
def test_errors_name_the_wrong_column_in_any_byte_order(dtype):
    schema = Schema(
        [IdFeature("user", dim=2)],
        dense_features=[DenseFeature("price", log=True), DenseFeature("age", log=True)],
        labels=[],
    )
    columns = {"user": [1, 2], "price": np.array([1, 2], dtype), "age": np.array([3, np.inf], dtype)}
    with pytest.raises(DataError, match="'age' is inf at row 1"):
        persia.Batch.from_columns(schema, columns)
    assert columns["price"].tolist() == [1, 2]


@pytest.mark.parametrize(("size", "at"), [(2**63, 2**63), (1, 2**64 - 1), (1, 1)])
def test_the_core_refuses_columns_outside_of_the_matrix(size, at):
    matrix = np.zeros((2, 1), np.float32)
    with pytest.raises(ValueError, match="must have"):
        features_core.dense_columns([(np.zeros(2), None, size, None, False, at, (None, False, None))], matrix)
    assert not matrix.any()
