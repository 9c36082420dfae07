"""`Batch.from_columns`: every kind of column gives the same batch."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from persia.batching import dense_columns
from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.errors import DataError
from persia.schema import IdFeature, Schema

ID = Schema([IdFeature("a", dim=2)], labels=["y"])
IDS = st.integers(0, 2**64 - 1)


def build(column: Any, rows: int) -> IdColumn:
    batch = Batch.from_columns(ID, {"a": column, "y": np.zeros(rows)})
    batch.validate(ID)
    return batch.id_features["a"]


def as_lists(column: IdColumn) -> list[list[int]]:
    offsets = np.arange(len(column) + 1) if column.offsets is None else column.offsets
    return [column.values[a:b].tolist() for a, b in itertools.pairwise(offsets)]


def text_id(text: str) -> int:
    return xxhash.xxh64_intdigest(text.encode())


@given(st.lists(IDS, min_size=1))
def test_single_ids_pass_as_they_are(ids: list[int]) -> None:
    array = np.array(ids, np.uint64)
    for column in (array, ids, pa.array(ids, pa.uint64()), pa.array(ids, pa.uint64()).dictionary_encode()):
        result = build(column, len(ids))
        assert result.offsets is None
        assert result.values.tolist() == ids


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1))
def test_signed_ids_from_torch_numpy_and_arrow(ids: list[int]) -> None:
    for column in (torch.tensor(ids), torch.tensor(ids, dtype=torch.int32), np.array(ids, np.int32), pa.array(ids)):
        assert build(column, len(ids)).values.tolist() == ids


@given(st.lists(st.lists(IDS, max_size=4), min_size=1))
def test_lists_of_ids(rows: list[list[int]]) -> None:
    flat = np.array([x for row in rows for x in row], np.uint64)
    offsets = np.concatenate(([0], np.cumsum([len(row) for row in rows])))
    arrow = pa.array(rows, pa.list_(pa.uint64()))
    padded = pa.concat_arrays([pa.array([[7]], arrow.type), arrow])
    columns = [rows, (flat, offsets), (flat, offsets.astype(np.int32)), arrow, arrow.cast(pa.large_list(pa.uint64()))]
    columns += [padded.slice(1), pa.chunked_array([arrow[:1], arrow[1:]]), IdColumn(flat, offsets)]
    for column in columns:
        assert as_lists(build(column, len(rows))) == rows


WORDS = st.text().map(lambda text: f"x{text}")
"""Texts that are no numbers."""


@given(st.lists(st.none() | st.just("") | WORDS, min_size=1))
def test_texts_are_hashed_and_missing_ones_are_empty(texts: list[str | None]) -> None:
    expected = [[text_id(text)] if text else [] for text in texts]
    arrow = pa.array(texts, pa.string())
    padded = pa.concat_arrays([pa.array(["pad", None]), arrow]).slice(2)
    columns = [texts, arrow, padded, arrow.cast(pa.large_string()), arrow.dictionary_encode(), arrow.cast(pa.binary())]
    columns += [np.array(texts, object), pa.chunked_array([arrow, arrow.slice(0, 0)]), arrow.cast(pa.string_view())]
    for column in columns:
        result = build(column, len(texts))
        assert as_lists(result) == expected
        assert (result.offsets is None) == all(texts)


@given(st.lists(st.none() | st.lists(st.none() | st.text(max_size=3).map("x".__add__), max_size=3), min_size=1))
def test_lists_of_texts(rows: list[list[str | None] | None]) -> None:
    expected = [[text_id(t) for t in row or [] if t is not None] for row in rows]
    for column in (rows, pa.array(rows, pa.list_(pa.string()))):
        assert as_lists(build(column, len(rows))) == expected


@given(st.lists(st.integers(-(2**53) + 1, 2**53 - 1), min_size=1))
def test_whole_numbers_are_ids_negatives_hashed_in_any_column(values: list[int]) -> None:
    expected = [value if value >= 0 else text_id(str(value)) for value in values]
    floats, texts = np.array(values, np.float64), [str(value) for value in values]
    columns: list[Any] = [values, np.array(values), floats, texts, pa.array(texts), [f"{value}.0" for value in values]]
    columns += [pa.array(values), pa.array(floats), pa.array(texts).dictionary_encode(), floats.tolist()]
    columns += [[kind(v) for kind, v in zip(itertools.cycle([int, float, str]), values, strict=False)]]
    for column in columns:
        assert build(column, len(values)).values.tolist() == expected


@given(st.lists(st.floats(-(2.0**20), 2.0**20, width=32).filter(lambda x: x != int(x)), min_size=1))
def test_fractions_are_hashed_as_the_texts_that_python_prints(values: list[float]) -> None:
    single, double = np.array(values, np.float32), np.array(values, np.float64)
    for column, printed in (
        (single, [str(x) for x in single]),
        (pa.array(single), [str(x) for x in single]),
        (torch.from_numpy(single), [str(x) for x in single]),
        (double, [str(x) for x in values]),
        (values, [str(x) for x in values]),
    ):
        assert build(column, len(values)).values.tolist() == [text_id(x) for x in printed]
        assert build(printed, len(values)).values.tolist() == [text_id(x) for x in printed]


def test_decimals_are_numbers() -> None:
    for kind in (pa.decimal128(5), pa.decimal128(7, 2), pa.decimal256(50, 3)):
        assert as_lists(build(pa.array([5, None, 7], pa.int64()).cast(pa.decimal128(20)).cast(kind), 3)) == [
            [5],
            [],
            [7],
        ]
        schema = Schema([IdFeature("a", dim=2)], dense_features=["p"], labels=["y"])
        column = pa.array([1, 2]).cast(pa.decimal128(20)).cast(kind)
        assert Batch.from_columns(schema, {"a": [1, 2], "p": column, "y": [0, 1]}).dense.tolist() == [[1], [2]]


def test_floats_of_two_widths_in_a_list_keep_their_own_text() -> None:
    alone = build([np.float32(1.1)], 1).values[0]
    assert build([np.float32(1.1), 2.5], 2).values[0] == build([np.float32(1.1), np.float32(2.5)], 2).values[0] == alone


def test_booleans_are_one_and_zero_also_as_texts() -> None:
    for column in ([True, False], np.array([True, False]), pa.array([True, False]), ["True", "false"], ["1", "0"]):
        assert build(column, 2).values.tolist() == [1, 0]


def test_the_kind_text_hashes_numbers_as_texts() -> None:
    schema = Schema([IdFeature("a", dim=2, kind="text")], labels=["y"])
    for column in ([5, -7], np.array([5, -7]), pa.array([5, -7]), ["5", "-7"], pa.array(["5", "-7"]), [5, "-7"]):
        batch = Batch.from_columns(schema, {"a": column, "y": [0, 1]})
        assert batch.id_features["a"].values.tolist() == [text_id("5"), text_id("-7")]


def test_missing_floats_and_ints_are_empty() -> None:
    for column in ([1.5, None, 2.5], np.array([1.5, np.nan, 2.5]), pa.array([1.5, None, 2.5])):
        assert build(column, 3).offsets.tolist() == [0, 1, 1, 2]
    assert as_lists(build([3, None, 4], 3)) == as_lists(build(pa.array([3, None, 4]), 3)) == [[3], [], [4]]
    assert as_lists(build(pa.nulls(2), 2)) == as_lists(build([None, None], 2)) == [[], []]


def test_masked_values_are_missing() -> None:
    ids = np.ma.masked_array([7, 8, 9], [False, True, False])
    assert as_lists(build(ids, 3)) == [[7], [], [9]]
    assert as_lists(build(np.ma.masked_array([7, 8, 9]), 3)) == [[7], [8], [9]]
    pairs = np.ma.masked_array([[1.0, 2.0], [3.0, 4.5]], [[False, True], [False, False]], np.float32)
    assert as_lists(build(pairs, 2)) == [[1], [3, text_id("4.5")]]
    with pytest.raises(DataError, match="'y' has a missing value at row 1"):
        Batch.from_columns(ID, {"a": [1, 2], "y": np.ma.masked_array([1.0, 0.0], [False, True])})


def test_a_missing_value_of_a_pair_is_left_out() -> None:
    assert as_lists(build(([5, None, 6], [0, 2, 3]), 2)) == [[5], [6]]


def test_two_dimensional_ids_and_fixed_size_lists() -> None:
    ids = np.arange(6).reshape(3, 2)
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(range(6)), 2)
    for column in (ids, torch.from_numpy(ids), fixed, np.asfortranarray(ids)):
        assert as_lists(build(column, 3)) == ids.tolist()
    fixed_with_null = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2))
    assert as_lists(build(fixed_with_null, 3)) == [[1, 2], [], [3, 4]]


def test_non_contiguous_and_fixed_width_text_arrays() -> None:
    assert build(np.arange(10)[::2], 5).values.tolist() == [0, 2, 4, 6, 8]
    assert build(np.arange(10, dtype=np.uint64)[::2], 5).values.flags.c_contiguous
    for array in (np.array(["x", "yz"]), np.array([b"x", b"yz"])):
        assert build(array, 2).values.tolist() == [text_id("x"), text_id("yz")]


CROSS = Schema([IdFeature("c", dim=2, cross=("a", "b")), IdFeature("a", dim=2), IdFeature("b", dim=2)], labels=["y"])


def test_crosses_are_computed_from_their_parts() -> None:
    batch = Batch.from_columns(CROSS, {"a": [1, 2, None, 1], "b": ["x", None, "x", "x"], "y": [0, 1, 0, 1]})
    batch.validate(CROSS)
    assert list(batch.id_features) == ["c", "a", "b"]
    both = np.array([1, text_id("x")], np.uint64)
    assert as_lists(batch.id_features["c"]) == [[h := xxhash.xxh64_intdigest(both.tobytes())], [], [], [h]]
    assert Batch.from_columns(CROSS, {"a": [1], "b": ["x"], "y": [0]}).id_features["c"].offsets is None


NUMBERS = Schema([IdFeature("a", dim=2)], dense_features=["p", "q"], labels=["y", "z"])


@pytest.mark.parametrize("kind", ["list", "float64", "float16", "int8", "torch", "arrow", "column", "bool", "object"])
def test_dense_and_labels_of_any_kind(kind: str) -> None:
    values = [1, 0, 1]
    column: Any = {
        "list": values,
        "torch": torch.tensor(values, dtype=torch.float32, requires_grad=True),
        "arrow": pa.chunked_array([[1], [0, 1]]),
        "column": np.array(values)[:, None],
        "bool": np.array(values, bool),
        "object": np.array(values, object),
    }.get(kind)
    if column is None:
        column = np.array(values, kind)
    batch = Batch.from_columns(NUMBERS, {"a": [1, 2, 3], "p": column, "q": [5, 6, 7], "y": column, "z": [0.5] * 3})
    batch.validate(NUMBERS)
    assert batch.dense.tolist() == [[1, 5], [0, 6], [1, 7]]
    assert batch.labels.tolist() == [[1, 0.5], [0, 0.5], [1, 0.5]]


ROUNDED: dict[str, Any] = {
    "seconds": [1_714_564_801, 1_714_564_800],
    "seconds as floats": np.array([1_714_564_801.0, 3.5]),
    "ids as texts": ["5", "978867001941"],
    "ids of arrow": pa.array([5, None, 2**62 + 12_345]).fill_null(0),
    "small unsigned": np.array([2**24 + 1], np.uint32),
}
EXACT: dict[str, Any] = {
    "large but even": [2**24, 2**24 + 2],
    "fractions": [0.1, 123_456.789, 16_777_215.9],
    "powers": np.array([2.0**40, -(2.0**60)]),
    "float32": np.array([1.7e9], np.float32),
    "small": np.array([1, 2, 3], np.int8),
    "booleans": [True, False],
}


@pytest.mark.parametrize("name", [*ROUNDED, *EXACT])
def test_digits_that_float32_loses_are_named_once_by_column(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense_columns, "_ROUNDED", set())
    values = ROUNDED.get(name, EXACT.get(name))
    schema = Schema([], dense_features=["when", "other"], labels=[])
    for _ in range(2):
        Batch.from_columns(schema, {"when": values, "other": np.zeros(len(values))})
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == (name in ROUNDED)
    if name == "seconds":
        assert "Dense feature 'when' has 1714564801, which becomes 1714564864: float32 has about 7 digits" in texts[0]


def test_labels_may_be_absent_for_prediction() -> None:
    batch = Batch.from_columns(NUMBERS, {"a": [1, 2], "p": [1, 2], "q": [1, 2], "y": [0, 1]}, require_labels=False)
    assert batch.labels.shape == (2, 0)
    assert len(batch) == 2
    batch.validate(NUMBERS, require_labels=False)


@pytest.mark.parametrize("day", [3, [3, 3], np.array([3, 3]), pa.array([3, 3]), torch.tensor([3, 3])])
def test_day(day: Any) -> None:
    batch = Batch.from_columns(ID, {"a": [1, 2], "y": [0, 1], "unknown": None}, day=day)
    assert batch.day is not None
    assert batch.day.dtype == np.int32
    assert batch.day.tolist() == [3, 3]


def example(rows: int = 7, day: bool = True) -> Batch:
    columns = {"a": [[i] * (i % 3) for i in range(rows)], "b": list(range(rows)), "p": range(rows), "y": [0.5] * rows}
    columns["p"] = list(columns["p"])
    schema = Schema([IdFeature("a", dim=2), IdFeature("b", dim=2)], dense_features=["p"], labels=["y"])
    return Batch.from_columns(schema, columns, day=np.arange(rows) if day else None)


def equal(left: Batch, right: Batch) -> bool:
    return (
        all(as_lists(c) == as_lists(right.id_features[n]) for n, c in left.id_features.items())
        and np.array_equal(left.dense, right.dense)
        and np.array_equal(left.labels, right.labels)
        and (left.day is right.day or np.array_equal(left.day, right.day))
    )


@given(st.lists(st.integers(0, 9), max_size=4))
def test_slices_concatenate_to_the_whole(cuts: list[int]) -> None:
    batch = example(9)
    bounds = [0, *sorted(cuts), 9]
    parts = [batch.slice(a, b) for a, b in itertools.pairwise(bounds)]
    assert [len(p) for p in parts] == [b - a for a, b in itertools.pairwise(bounds)]
    assert equal(Batch.concat(parts), batch)


@given(st.lists(st.integers(0, 6)))
def test_take_is_slice_by_slice(rows: list[int]) -> None:
    batch = example()
    taken = batch.take(np.array(rows, np.int64))
    assert len(taken) == len(rows)
    if rows:
        assert equal(taken, Batch.concat([batch.slice(r, r + 1) for r in rows]))


def test_a_slice_is_a_view_and_clips() -> None:
    batch = example()
    part = batch.slice(2, 99)
    assert len(part) == 5
    assert part.id_features["a"].values.base is not None
    assert np.shares_memory(part.dense, batch.dense)
    assert len(batch.slice(5, 2)) == 0


def test_batches_survive_pickling_and_say_what_they_are() -> None:
    batch = example(day=False)
    assert equal(pickle.loads(pickle.dumps(batch)), batch)
    assert "7 rows: a, b" in repr(batch)


class _Loaded(torch.utils.data.IterableDataset[Batch]):
    def __iter__(self) -> Any:
        yield example()


@pytest.mark.processes
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_batches_pass_through_data_loader_workers(method: str) -> None:
    loader = torch.utils.data.DataLoader(_Loaded(), batch_size=None, num_workers=1, multiprocessing_context=method)
    (batch,) = list(loader)
    assert equal(batch, example())
