"""Bad input: each names its place and the remedy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.errors import DataError
from persia.schema import IdFeature, Schema

SCHEMA = Schema([IdFeature("a", dim=2), IdFeature("b", dim=2)], dense_features=["p"], labels=["y"])
GOOD: dict[str, Any] = {"a": [1, 2, 3], "b": [[1], [2], [3]], "p": [1.0, 2.0, 3.0], "y": [0, 1, 0]}
BAD: dict[str, tuple[dict[str, Any], str, int | None]] = {
    "not an id": ({"a": [1, "x", {}]}, "'a' has dict {} at row 2", 2),
    "inexact float": ({"a": np.array([1, 2, 2.0**53])}, "float64 9007199254740992.0 at row 2.*tell", 2),
    "inexact float32 in arrow": (
        {"b": pa.array([[1], None, [2.0**24]], pa.list_(pa.float32()))},
        "16777216.0 at row 2",
        2,
    ),
    "infinite id": ({"a": [1.0, None, float("inf")]}, "inf at row 2", 2),
    "inexact float among others": ({"a": ["x", 1e300, 1]}, "1e\\+300 at row 1", 1),
    "unusable kind": ({"a": np.zeros(3, "M8[s]")}, "'a' is datetime64", None),
    "unusable arrow kind": ({"a": pa.array([1, 2, 3], pa.timestamp("ms"))}, "holds timestamp", None),
    "no column at all": ({"a": 5}, "'a' is a int", None),
    "ids of three dimensions": ({"a": np.zeros((3, 1, 1), int)}, "shape \\[3, 1, 1\\]", None),
    "offsets not from 0": ({"b": ([1, 2, 3], [1, 2, 3, 3])}, "start at 1", 0),
    "falling offsets": ({"b": ([1, 2, 3], [0, 2, 1, 3])}, "fall from 2 to 1 at row 1", 1),
    "short offsets": ({"b": ([1, 2, 3], [0, 1, 2, 2])}, "end at 2, but there are 3 ids", 2),
    "long offsets": ({"b": ([1, 2, 3], [0, 1, 2, 4])}, "end at 4", 2),
    "no offsets": ({"b": ([], [])}, "Offsets of feature 'b'", None),
    "fractional offsets": ({"b": ([1, 2, 3], [0.0, 1, 2, 3])}, "whole numbers", None),
    "lengths": ({"b": [1, 2]}, "'b' has 2 rows, but 'a' has 3", 2),
    "length of dense": ({"p": [1.0] * 4}, "'p' has 4 rows", 3),
    "NaN in dense": ({"p": np.array([1, 2, np.nan])}, "'p' is nan at row 2", 2),
    "infinity in dense": ({"p": np.array([1, np.inf, 2])}, "'p' is inf at row 1", 1),
    "beyond float32": ({"p": [1.0, 1e300, 2.0]}, "'p' is inf at row 1", 1),
    "missing dense value": ({"p": [1.0, None, 2.0]}, "'p' has a missing value at row 1", 1),
    "null in arrow": ({"p": pa.array([1.0, 2.0, None])}, "'p' has a missing value at row 2", 2),
    "text in dense": ({"p": ["x", "y", "z"]}, "'p' has 'x' at row 0; it takes decimal numbers", 0),
    "decimal comma": ({"p": ["1", "2.5", "1,5"]}, "'1,5' at row 2 \\(a decimal comma", 2),
    "object in dense": ({"p": [1, {}, 2]}, "'p' has dict {} at row 1", 1),
    "dense of a wrong shape": ({"p": np.zeros((3, 2))}, "shape \\[3, 2\\]", None),
    "dense of a wrong dtype": ({"p": np.zeros(3, complex)}, "complex128", None),
    "missing decimal": ({"p": pa.array([1, None, 3], pa.decimal128(5))}, "missing value at row 1", 1),
    "bfloat16": ({"p": torch.zeros(3, dtype=torch.bfloat16)}, "convert it to numpy", None),
    "label outside": ({"y": [0, 1, 2]}, "'y' is 2.0 at row 2, outside \\[0, 1\\]", 2),
    "negative label": ({"y": [-1, 1, 1]}, "'y' is -1.0 at row 0", 0),
    "NaN label": ({"y": np.array([0.0, np.nan, 1.0])}, "'y' is nan at row 1", 1),
    "missing label": ({"y": [0, None, 1]}, "'y' has a missing value at row 1", 1),
    "empty": ({"a": [], "b": [], "p": [], "y": []}, "empty", None),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_columns(name: str) -> None:
    change, message, row = BAD[name]
    with pytest.raises(DataError, match=message) as caught:
        Batch.from_columns(SCHEMA, {**GOOD, **change})
    assert caught.value.fields.get("row") == row


NUMBER, TEXT = (Schema([IdFeature("a", dim=2, kind=kind)], labels=["y"]) for kind in ("number", "text"))
REFUSED: dict[str, tuple[Schema, Any, str, int]] = {
    "negative": (NUMBER, np.array([1, -2, 3]), "-2", 1),
    "negative in a list": (NUMBER, [[1, 2], [], [-3]], "-3", 2),
    "negative in arrow": (NUMBER, pa.array([[1, 2], [-5], []]), "-5", 1),
    "too large": (NUMBER, [1, 2, 2**64], "18446744073709551616", 2),
    "text": (NUMBER, pa.array([None, "7", "x"]), "x", 2),
    "text in a dictionary": (NUMBER, pa.array([None, "7", "x"]).dictionary_encode(), "x", 2),
    "fraction": (NUMBER, np.array([np.nan, 2.0, 2.5]), "2.5", 2),
    "negative float": (NUMBER, [1.0, None, -2.0], "-2.0", 2),
    "mixed": (NUMBER, [1, "2", "oops"], "oops", 2),
    "float as text": (TEXT, np.array([np.nan, np.nan, 5.0]), "5.0", 2),
    "boolean as text": (TEXT, [None, "x", True], "True", 2),
    "booleans as text": (TEXT, np.array([True, False, True]), "True", 0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_do_not_fit_the_kind(name: str) -> None:
    schema, column, value, row = REFUSED[name]
    with pytest.raises(DataError, match=f"at row {row}.* kind ") as caught:
        Batch.from_columns(schema, {"a": column, "y": [0, 1, 0]})
    assert caught.value.fields == {"feature": "a", "row": row, "value": value}


@pytest.mark.parametrize("name", ["a", "p", "y"])
def test_missing_column(name: str) -> None:
    columns = {k: v for k, v in GOOD.items() if k != name}
    with pytest.raises(DataError, match=f"'{name}' .* is missing; rename or add it") as caught:
        Batch.from_columns(SCHEMA, columns)
    assert caught.value.fields["column"] == name


@pytest.mark.parametrize(
    ("day", "message"),
    [
        ([1, 2], "'day' has 2 rows"),
        ([0.5, 1.5, 2.5], "whole numbers"),
        ([1, 2, 1 << 40], "int32"),
        ("x", "day"),
        (pa.array([1, None, 2]), "day is missing at row 1"),
    ],
)
def test_bad_day(day: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Batch.from_columns(SCHEMA, GOOD, day=day)


def test_crossing_two_lists() -> None:
    schema = Schema([IdFeature("c", dim=2, cross=("a", "b")), IdFeature("a", dim=2), IdFeature("b", dim=2)])
    with pytest.raises(DataError, match="'c' crosses lists: row 1 has 2 of 'a' and 3 of 'b' ids"):
        Batch.from_columns(schema, {"a": [1, [2, 3]], "b": [[1], [1, 2, 3]], "label": [0, 1]})


def good() -> Batch:
    return Batch.from_columns(SCHEMA, GOOD, day=1)


def features(**columns: Any) -> dict[str, Any]:
    return {**good().id_features, **columns}


IDS = np.arange(3, dtype=np.uint64)
HAND_BUILT: dict[str, tuple[dict[str, Any], str]] = {
    "unknown feature": ({"id_features": features(c=IdColumn(IDS))}, "feature 'c' that the schema lacks"),
    "missing feature": ({"id_features": {"a": IdColumn(IDS)}}, "lacks feature 'b'"),
    "no IdColumn": ({"id_features": features(a=IDS)}, "'a' is a ndarray; give an IdColumn"),
    "signed ids": ({"id_features": features(a=IdColumn(IDS.astype(np.int64)))}, "'a' are int64\\[3\\]"),
    "strided ids": ({"id_features": features(a=IdColumn(np.arange(6, dtype=np.uint64)[::2]))}, "contiguous"),
    "wrong number of ids": ({"id_features": features(a=IdColumn(IDS[:2]))}, "'a' has 2 rows, but the batch has 3"),
    "offsets of int32": ({"id_features": features(a=IdColumn(IDS, np.arange(4, dtype=np.int32)))}, "int64 array"),
    "falling offsets": (
        {"id_features": features(a=IdColumn(IDS, np.array([0, 2, 1, 3])))},
        "fall from 2 to 1 at row 1",
    ),
    "offsets not from 0": ({"id_features": features(a=IdColumn(IDS, np.array([1, 2, 3, 3])))}, "start at 1"),
    "offsets past the end": ({"id_features": features(a=IdColumn(IDS, np.array([0, 2, 3, 4])))}, "end at 4"),
    "dense of float64": ({"dense": np.zeros((3, 1))}, "Batch.dense is float64\\[3, 1\\]"),
    "dense of a wrong shape": ({"dense": np.zeros((3, 2), np.float32)}, "must be float32\\[3, 1\\]"),
    "NaN in dense": ({"dense": np.array([[0], [np.nan], [0]], np.float32)}, "'p' is nan at row 1"),
    "labels of a wrong shape": ({"labels": np.zeros((3, 2), np.float32)}, "Batch.labels"),
    "no labels": ({"labels": np.zeros((3, 0), np.float32)}, "Batch.labels"),
    "label outside": ({"labels": np.array([[0], [1.5], [0]], np.float32)}, "'y' is 1.5 at row 1"),
    "NaN label": ({"labels": np.array([[0], [1], [np.nan]], np.float32)}, "'y' is nan at row 2"),
    "day of int64": ({"day": np.zeros(3, np.int64)}, "int32\\[3\\]"),
    "empty": ({"labels": np.zeros((0, 1), np.float32)}, "empty"),
}


@pytest.mark.parametrize("name", HAND_BUILT)
def test_bad_hand_built_batches(name: str) -> None:
    change, message = HAND_BUILT[name]
    with pytest.raises(DataError, match=message):
        replace(good(), **change).validate(SCHEMA)


def test_concat_needs_batches_of_one_kind() -> None:
    with pytest.raises(DataError, match="no batches"):
        Batch.concat([])
    with pytest.raises(DataError, match="different columns"):
        Batch.concat([good(), replace(good(), day=None)])
