"""Frames, tables and data sets of other libraries: one reader, the same batches."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from persia import data
from persia.batching.batch import Batch
from persia.data import from_arrow
from persia.errors import DataError
from persia.schema import IdFeature, Schema

SCHEMA = Schema([IdFeature("user", dim=2), IdFeature("tags", dim=2)], dense_features=["age"], labels=["click"])
ROWS = 23
COLUMNS: dict[str, list[Any]] = {
    "uid": [f"user {i % 7}" if i % 5 else None for i in range(ROWS)],
    "tags": [list(range(i % 3)) for i in range(ROWS)],
    "age": [i / 4 for i in range(ROWS)],
    "click": [i % 2 for i in range(ROWS)],
    "hour": [48 * i for i in range(ROWS)],
    "other": ["x"] * ROWS,
}
TABLE = pa.table(COLUMNS)


class Stream:
    """As a connection to a data base may offer it."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return TABLE.__arrow_c_stream__(requested_schema)


def hugging_face() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        datasets = pytest.importorskip("datasets", reason="datasets is not installed: pip install datasets")
    return datasets.Dataset.from_dict(COLUMNS)


def lance(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = pytest.importorskip("lance", reason="Lance is not installed: pip install pylance")
        return library.write_dataset(TABLE, str(path / "rows.lance"))


def files(path: Path) -> Any:
    pq.write_table(TABLE, path / "rows.parquet", row_group_size=4)
    return pyarrow.dataset.dataset(path / "rows.parquet")


SOURCES: dict[str, Callable[[Path], Any]] = {
    "table": lambda path: TABLE,
    "chunks": lambda path: pa.concat_tables([TABLE.slice(0, 9), TABLE.slice(9)]),
    "record batch": lambda path: TABLE.to_batches()[0],
    "pandas": lambda path: pd.DataFrame(COLUMNS),
    "polars": lambda path: pl.DataFrame(COLUMNS),
    "stream": lambda path: Stream(),
    "function of a reader": lambda path: lambda: TABLE.to_reader(5),
    "function of a frame": lambda path: lambda: pl.DataFrame(COLUMNS),
    "pyarrow data set": files,
    "Lance": lance,
    "Hugging Face": lambda path: hugging_face(),
    "Hugging Face, stream": lambda path: hugging_face().to_iterable_dataset(),
}


def same(batch: Batch, other: Batch) -> None:
    for name, column in other.id_features.items():
        mine = batch.id_features[name]
        np.testing.assert_array_equal(mine.values, column.values)
        assert (mine.offsets is None) == (column.offsets is None)
        if mine.offsets is not None and column.offsets is not None:
            np.testing.assert_array_equal(mine.offsets, column.offsets)
    np.testing.assert_array_equal(batch.dense, other.dense)
    np.testing.assert_array_equal(batch.labels, other.labels)
    assert batch.day is not None
    assert other.day is not None
    np.testing.assert_array_equal(batch.day, other.day)


OPTIONS: dict[str, Any] = {"rename": {"user": "uid"}, "day": "hour", "shuffle_rows": 10, "seed": 3}


@pytest.mark.filterwarnings("ignore")  # Of the other libraries.
@pytest.mark.parametrize("name", SOURCES)
def test_batches_are_those_of_the_same_rows_in_a_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(from_arrow, "_CHUNK_ROWS", 6)
    pq.write_table(TABLE, tmp_path / "expected.parquet")
    expected = data.parquet(tmp_path / "expected.parquet", SCHEMA, 4, **OPTIONS)
    reader = data.arrow(SOURCES[name](tmp_path), SCHEMA, 4, **OPTIONS)
    assert isinstance(reader, data.Reader)
    for epoch, start in ((0, 0), (1, 0), (1, 3)):
        found = list(reader.batches(epoch, start))
        assert len(found) == 6 - start
        for mine, theirs in zip(found, expected.batches(epoch, start), strict=True):
            same(mine, theirs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_ray_data(ray_here: None) -> None:
    import ray.data

    ray.data.DataContext.get_current().execution_options.preserve_order = True
    ray.data.DataContext.get_current().enable_progress_bars = False
    reader = data.arrow(ray.data.from_arrow([TABLE.slice(0, 9), TABLE.slice(9)]), SCHEMA, 4, **OPTIONS)
    expected = data.arrow(TABLE, SCHEMA, 4, **OPTIONS)
    for mine, theirs in zip(reader, expected, strict=True):
        same(mine, theirs)


@pytest.mark.filterwarnings("ignore")
def test_splits_of_hugging_face_are_named() -> None:
    rows = hugging_face()
    import datasets

    splits = datasets.DatasetDict({"train": rows})
    with pytest.raises(DataError, match=r"given as DatasetDict; give .* a data set"):
        data.arrow(splits, SCHEMA)


def test_pieces_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame is one record batch, whatever its size."""
    monkeypatch.setattr(from_arrow, "_CHUNK_ROWS", 6)
    reader = data.arrow(pl.DataFrame(COLUMNS), SCHEMA, rename={"user": "uid"})
    assert [len(chunk) for chunk in reader.source.chunks(0)] == [6, 6, 6, 5]


@pytest.mark.parametrize("as_frame", [pl.DataFrame, pd.DataFrame, pa.table])
def test_rows_with_texts_are_selected(as_frame: Callable[[Any], Any]) -> None:
    """Polars has texts as views, which pyarrow selects no rows of; in lists, too."""
    columns = {"user": ["a", "b", None], "tags": [["x"], ["y", "z"], None], "age": [1.0, 2.0, 3.0], "click": [0, 1, 0]}
    frame = as_frame(columns)
    kinds = [frame]
    if isinstance(frame, pl.DataFrame):
        kinds.append(frame.with_columns(pl.col("user").cast(pl.Categorical)))
    for each in kinds:
        (batch,) = data.arrow(each, SCHEMA, where="age > 1")
        other = Batch.from_columns(SCHEMA, {name: column[1:] for name, column in columns.items()})
        for name, column in other.id_features.items():
            np.testing.assert_array_equal(batch.id_features[name].values, column.values)


def test_codes_of_views_are_compared() -> None:
    codes = pa.array([0, 1, None, *[0] * 20], pa.int32())
    for views in (pa.array(["a", "b"], pa.string_view()), pa.array([b"a", b"b"], pa.binary_view())):
        table = TABLE.set_column(0, "user", pa.DictionaryArray.from_arrays(codes, views))
        (batch,) = data.arrow(table, SCHEMA, where="user == 'b'")
        assert batch.dense.tolist() == [[0.25]]
        (batch,) = data.arrow(table, SCHEMA, where="age < 0.5")
        other = Batch.from_columns(SCHEMA, {name: TABLE[name][:2] for name in SCHEMA_NAMES} | {"user": ["a", "b"]})
        np.testing.assert_array_equal(batch.id_features["user"].values, other.id_features["user"].values)


SCHEMA_NAMES = ("tags", "age", "click")


def test_lists_of_one_length_are_selected() -> None:
    """Polars calls them Array."""
    columns = {"user": [1, 2, 3], "tags": [["x", "y"], ["z", "x"], None], "age": [1.0, 2.0, 3.0], "click": [0, 1, 0]}
    frame = pl.DataFrame(columns, schema_overrides={"tags": pl.Array(pl.String, 2)})
    (batch,) = data.arrow(frame, SCHEMA, where="age > 1")
    other = Batch.from_columns(SCHEMA, {name: column[1:] for name, column in columns.items()})
    np.testing.assert_array_equal(batch.id_features["tags"].values, other.id_features["tags"].values)
    np.testing.assert_array_equal(batch.id_features["tags"].offsets, other.id_features["tags"].offsets)  # type: ignore[arg-type]


def test_rows_that_cannot_be_selected_are_told() -> None:
    encoded = pa.RunEndEncodedArray.from_arrays([ROWS], ["x"])
    table = TABLE.set_column(0, "user", encoded)
    with pytest.raises(DataError, match=r"pyarrow\.Table: Column 'user' holds run_end_encoded.*; cast it to plain"):
        list(data.arrow(table, SCHEMA, where="age > 1"))


@pytest.mark.parametrize("as_frame", [pl.DataFrame, pd.DataFrame])
def test_remedies_do_not_speak_of_files(as_frame: Callable[[Any], Any]) -> None:
    columns = {"uid": [1], "tags": [2], "age": [3.0], "click": [1]}
    for options, changed, error in (
        ({}, {"click": [7]}, "outside"),
        ({}, {"uid": [float("inf")]}, "In the source, the column is 'uid'"),
        ({"where": "age > 5"}, {}, "select no rows; correct them, or give another source"),
        ({}, {name: [] for name in columns}, "is empty: there are no rows; give another source"),
    ):
        with pytest.raises(DataError, match=rf"DataFrame.*{error}") as refused:
            list(data.arrow(as_frame(columns | changed), SCHEMA, rename={"user": "uid"}, **options))
        assert "file" not in str(refused.value)
        assert "path" not in str(refused.value)


def test_queries_of_duckdb_can_be_read_at_the_same_time() -> None:
    duckdb = pytest.importorskip("duckdb", reason="DuckDB is not installed: pip install duckdb")
    connection = duckdb.connect()
    connection.sql(
        "CREATE TABLE clicks AS SELECT range AS user, [range] AS tags, range AS age, 1 AS click FROM range(23)"
    )
    query = "SELECT * FROM clicks ORDER BY age"
    reader = data.arrow(lambda: connection.cursor().sql(query), SCHEMA, 4)
    first, second = reader.batches(), reader.batches()
    for mine, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(mine.dense, other.dense)
    assert sum(map(len, reader)) == ROWS


def test_an_error_names_the_row_of_the_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_arrow, "_CHUNK_ROWS", 6)
    frame = pl.DataFrame(COLUMNS).with_columns(click=pl.Series([0.0] * 15 + [2.0] + [0.0] * 7))
    with pytest.raises(DataError, match=r"polars\.DataFrame: .*at row 15"):
        list(data.arrow(frame, SCHEMA, rename={"user": "uid"}))


def test_only_columns_that_are_needed_are_read(tmp_path: Path) -> None:
    read: list[list[str]] = []

    class Recorded:
        schema = TABLE.schema

        def get_fragments(self) -> None: ...

        def to_batches(self, columns: list[str], batch_size: int) -> Any:
            read.append(columns)
            return TABLE.select(columns).to_batches(max_chunksize=batch_size)

    list(data.arrow(Recorded(), SCHEMA, rename={"user": "uid"}))
    assert read == [["uid", "tags", "age", "click"]]


def test_where_split_labels_and_fill_are_those_of_files() -> None:
    frame = pd.DataFrame({"user": [1, 2, 3, 4], "tags": 0, "age": [1.0, None, 3.0, 4.0], "stars": [1, 2, 4, 5]})
    reader = data.arrow(frame, SCHEMA, labels={"click": "stars >= 4"}, fill={"age": -1}, where="user > 1")
    (batch,) = reader
    assert batch.id_features["user"].values.tolist() == [2, 3, 4]
    assert batch.dense[:, 0].tolist() == [-1, 3, 4]
    assert batch.labels[:, 0].tolist() == [0, 1, 1]


def test_a_reader_of_a_frame_can_be_pickled() -> None:
    reader = data.arrow(pd.DataFrame(COLUMNS), SCHEMA, 4, rename={"user": "uid"})
    for mine, theirs in zip(pickle.loads(pickle.dumps(reader)), reader, strict=True):
        np.testing.assert_array_equal(mine.dense, theirs.dense)


def test_a_function_has_to_open_a_new_reader_in_each_call() -> None:
    opened = TABLE.to_reader(5)
    reader = data.arrow(lambda: opened, SCHEMA, 4, rename={"user": "uid"})
    assert len(list(reader)) == 6
    # Nothing is left of it, which must not look like the end of the data.
    with pytest.raises(DataError, match="open a new one in each call"):
        list(reader.batches(1, start=1))
    with pytest.raises(DataError, match="open a new one in each call"):
        list(reader.shard(0, 2))


class Once:
    """A stream that is empty when it is read again."""

    def __init__(self) -> None:
        self.left = [TABLE, TABLE.slice(0, 0)]

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return (self.left.pop(0) if len(self.left) > 1 else self.left[0]).__arrow_c_stream__(requested_schema)


def test_a_stream_that_has_been_read_is_not_the_end_of_the_data() -> None:
    reader = data.arrow(Once(), SCHEMA, 4, rename={"user": "uid"})
    assert len(list(reader)) == 6
    for start in (0, 2):
        with pytest.raises(DataError, match=r"is empty: there are no rows; .* a function that opens a new one"):
            list(reader.batches(1, start=start))


def test_a_reader_that_has_been_read_can_be_pickled() -> None:
    reader = data.arrow(_opened_anew, SCHEMA, 4, rename={"user": "uid"})
    batches = reader.batches()
    next(batches)
    assert len(list(pickle.loads(pickle.dumps(reader)))) == 6


def _opened_anew() -> Any:
    return TABLE.to_reader(5)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ([1, 2], "given as list"),
        (pl.LazyFrame(COLUMNS), "given as LazyFrame"),
        (TABLE.to_reader(), "only once"),
        (pa.ipc.open_stream(pa.ipc.serialize_pandas(pd.DataFrame(COLUMNS))), "only once"),
    ],
)
def test_other_sources_are_refused(source: Any, error: str) -> None:
    with pytest.raises(DataError, match=error):
        data.arrow(source, SCHEMA)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        (lambda: lambda: None, "returned another function"),
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: 5, "given as int"),
        (TABLE.slice(0, 0), "there are no rows"),
        (TABLE, "no column 'user'"),
        (pd.DataFrame({**COLUMNS, "user": [1, "x", 2.5, *range(20)]}), "cannot be read as Arrow data"),
        (TABLE.append_column("user", TABLE["other"]).set_column(2, "age", pa.array(["x"] * ROWS)), "at row 0"),
    ],
)
def test_rows_that_cannot_be_read_are_told(source: Any, error: str) -> None:
    with pytest.raises(DataError, match=error):
        list(data.arrow(source, SCHEMA))


LATER_TYPES: dict[str, Any] = {
    "numbers after texts": [pa.array(["5", "x"]), pa.array([978867001940.0, np.nan])],
    "large floats after whole numbers": [pa.array([1, 2]), pa.array([2.5, 978867001940.0])],
    "wider numbers": [pa.array([1, 2], pa.int8()), pa.array([2**62 + 1, -1])],
    "lists of texts": [pa.array([[1], []]), pa.array([["1", "y"], None])],
}


@pytest.mark.parametrize("name", LATER_TYPES)
@pytest.mark.parametrize("filtered", [False, True])
def test_each_file_of_a_data_set_has_its_own_types(name: str, filtered: bool, tmp_path: Path) -> None:
    schema = Schema([IdFeature("item", dim=2), IdFeature("part", dim=2)], dense_features=["age"], labels=[])
    for number, values in enumerate(LATER_TYPES[name]):
        folder = tmp_path / f"part=p{number}"
        folder.mkdir()
        age = pa.array([1, 2], pa.int16()) if number == 0 else pa.array([0.5, 1.5])
        pq.write_table(pa.table({"item": values, "age": age}), folder / "rows.parquet")
    rows = pyarrow.dataset.dataset(tmp_path, partitioning=pyarrow.dataset.partitioning(flavor="hive"))
    if filtered:
        rows = rows.filter(pyarrow.dataset.field("age") != 1.5)
    found = Batch.concat(list(data.arrow(rows, schema)))
    expected = Batch.concat(list(data.parquet(tmp_path, schema, where="age != 1.5" if filtered else None)))
    for feature in ("item", "part"):
        assert found.id_features[feature].values.tolist() == expected.id_features[feature].values.tolist()
    np.testing.assert_array_equal(found.dense, expected.dense)


def test_a_type_that_a_data_set_declares_counts(tmp_path: Path) -> None:
    """Here it is not that of the first file, so somebody has chosen it."""
    schema = Schema([IdFeature("item", dim=2)], labels=[])
    for number, values in enumerate((["007"], ["08"])):
        pq.write_table(pa.table({"item": values}), tmp_path / f"{number}.parquet")
    declared = pa.schema([("item", pa.int64())])
    (batch,) = data.arrow(pyarrow.dataset.dataset(tmp_path, schema=declared), schema)
    assert batch.id_features["item"].values.tolist() == [7, 8]

    text = tmp_path / "text"
    text.mkdir()
    (text / "0.csv").write_text("item\n007\n")
    codes = pyarrow.dataset.dataset(text, format="csv", schema=pa.schema([("item", pa.string())]))
    (batch,) = data.arrow(codes, schema)
    (expected,) = data.csv(text, schema)
    assert batch.id_features["item"].values.tolist() == expected.id_features["item"].values.tolist()


def test_errors_name_the_file_of_a_data_set(tmp_path: Path) -> None:
    schema = Schema([IdFeature("item", dim=2, kind="number")], labels=[])
    pq.write_table(pa.table({"item": [1, 2, 3]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"item": ["4", "x"]}), tmp_path / "1.parquet")
    with pytest.raises(DataError, match=r"1\.parquet: Feature 'item' has 'x' at row 1"):
        list(data.arrow(pyarrow.dataset.dataset(tmp_path), schema))
