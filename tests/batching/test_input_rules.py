"""The rules of a reader give the same values for columns of any kind: of files, of frames and of requests."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import persia
from persia.batching.derived_ids import split_count
from persia.batching.input_rules import apply_rules
from persia.errors import ConfigError, DataError
from persia.schema import InputRules
from support.examples import examples

SCHEMA = persia.Schema([persia.IdFeature("tags", 4), persia.IdFeature("code", 4)], ["age"])
RULES = InputRules(fill={"age": 31.5}, lists={"tags": "|"}, null_values=("?", "-1"))


def made(columns, rules=RULES):
    return persia.Batch.from_columns(SCHEMA, apply_rules(rules, columns), require_labels=False)


def same(found, wanted):
    for name, column in wanted.id_features.items():
        np.testing.assert_array_equal(found.id_features[name].values, column.values, strict=True)
        bounds = [
            np.arange(len(wanted) + 1) if c.offsets is None else c.offsets for c in (found.id_features[name], column)
        ]
        np.testing.assert_array_equal(*bounds)
    np.testing.assert_array_equal(found.dense, wanted.dense, strict=True)


def test_texts_are_split_and_missing_values_are_filled_in():
    found = made({"tags": ["drama|comedy", None, "drama"], "code": ["?", "a", "-1"], "age": [None, 2, "-1"]})
    wanted = made({"tags": [["drama", "comedy"], [], ["drama"]], "code": [None, "a", None], "age": [31.5, 2, 31.5]})
    same(found, wanted)
    assert found.id_features["tags"].offsets.tolist() == [0, 2, 2, 3]
    assert found.id_features["code"].offsets.tolist() == [0, 0, 1, 1]


TEXTS = st.none() | st.text("ab|?-1", max_size=6)
AGES = st.none() | st.sampled_from(["?", "-1", "2", "0.5", ""])


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.tuples(TEXTS, TEXTS, AGES), min_size=1, max_size=6), st.sampled_from(["large", "dictionary", "bytes"])
)
def test_lists_arrays_and_arrow_columns_give_the_same(rows, form):
    tags, code, age = (list(column) for column in zip(*rows, strict=True))
    wanted = made({"tags": tags, "code": code, "age": age})

    def arrow(values):
        array = pa.array(values, pa.large_string() if form == "large" else pa.string())
        if form == "dictionary":
            return array.dictionary_encode()
        return pa.chunked_array([array.cast(pa.binary())]) if form == "bytes" else array

    same(made({"tags": arrow(tags), "code": arrow(code), "age": arrow(age)}), wanted)
    same(made(pa.table({"tags": tags, "code": code, "age": pa.array(age, pa.string())})), wanted)
    same(made({"tags": np.array(tags, object), "code": np.array(code, object), "age": age}), wanted)
    assert (
        split_count(arrow(tags), "|") >= sum(t.count("|") + 1 for t in tags if t is not None) == split_count(tags, "|")
    )


NUMBERS = [3, -1, 7, -1]


@pytest.mark.parametrize(
    "column",
    [
        NUMBERS,
        np.array(NUMBERS),
        np.array(NUMBERS, np.float32),
        pa.array(NUMBERS, pa.int32()),
        pa.array(NUMBERS, pa.float64()),
        torch.tensor(NUMBERS),
    ],
    ids=["list", "int64", "float32", "arrow ints", "arrow floats", "torch"],
)
def test_numbers_that_texts_of_missing_values_name_are_missing(column):
    found = made({"tags": [1, 2, 3, 4], "code": column, "age": column})
    assert found.dense[:, 0].tolist() == [3, 31.5, 7, 31.5]
    assert found.id_features["code"].values.tolist() == [3, 7]
    assert found.id_features["code"].offsets.tolist() == [0, 1, 1, 2, 2]
    unsigned = made({"tags": [1], "code": np.array([2**64 - 1], np.uint64), "age": pa.array([1], pa.uint8())})
    assert unsigned.id_features["code"].values.tolist() == [2**64 - 1]


def test_lists_and_ids_stay_as_they_are():
    pair = np.array([5, 6]), np.array([0, 2])
    for tags in ([["a|b", "?"]], pa.array([["a|b", "?"]])):
        found = made({"tags": tags, "code": [True], "age": [1]})
        assert (
            found.id_features["tags"].values.tolist()
            == persia.Batch.from_columns(
                SCHEMA, {"tags": [["a|b", "?"]], "code": [1], "age": [1]}, require_labels=False
            )
            .id_features["tags"]
            .values.tolist()
        )
    for tags in (pair, persia.IdColumn(*pair), np.array([[5, 6]])):
        assert made({"tags": tags, "code": [1], "age": [1]}).id_features["tags"].values.tolist() == [5, 6]


def test_without_rules_columns_stay_the_objects_that_they_are():
    columns = {"tags": ["a|b"], "code": [1], "age": [None]}
    assert apply_rules(InputRules(), columns) is columns
    with pytest.raises(DataError, match="missing value at row 0"):
        made(columns, InputRules())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fill": {"age": float("nan")}}, "fill of 'age'"),
        ({"fill": {"age": "much"}}, "fill of 'age'"),
        ({"lists": {"tags": ""}}, "separator of lists in 'tags' is empty"),
        ({"lists": {"tags": 3}}, "Invalid lists = 3"),
    ],
)
def test_rules_that_are_none_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        InputRules(**options)
