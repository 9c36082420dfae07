"""JSON lines have the batches of the same rows in Parquet, and a value means the same beside any other."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from persia import data
from persia.batching.batch import Batch
from persia.data import json_lines
from persia.errors import DataError
from persia.schema import IdFeature, IdKind, Schema
from support.examples import examples

SCHEMA = Schema(
    [IdFeature("user", dim=2), IdFeature("tags", dim=2), IdFeature("code", dim=2, kind="text")],
    dense_features=["age"],
    labels=["click"],
)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def same(mine: Batch, theirs: Batch) -> None:
    for name, column in theirs.id_features.items():
        np.testing.assert_array_equal(mine.id_features[name].values, column.values)
        offsets = mine.id_features[name].offsets
        assert (offsets is None) == (column.offsets is None), name
        if offsets is not None and column.offsets is not None:
            np.testing.assert_array_equal(offsets, column.offsets)
    np.testing.assert_array_equal(mine.dense, theirs.dense)
    np.testing.assert_array_equal(mine.labels, theirs.labels)
    if theirs.day is not None:
        np.testing.assert_array_equal(mine.day, theirs.day)  # type: ignore[arg-type]


NUMBERS = st.integers(0, 2**64 - 1)
SIGNED = st.integers(-(2**63), 2**63 - 1)
TEXTS = st.sampled_from(["Oslo", "5", "", "007", "2024-05-01", "2024-05-01 10:00:00", "é", "true", "1e3"])
FLOATS = st.one_of(st.floats(-1e9, 1e9, width=32), st.integers(-50, 50).map(float))
IDS: list[tuple[Any, Any]] = [
    (NUMBERS, pa.uint64()),
    (SIGNED, pa.int64()),
    (TEXTS, pa.string()),
    (FLOATS, pa.float64()),
]


@given(data=st.data())
@settings(deadline=None, max_examples=examples(50), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_batches_are_those_of_the_same_rows_in_parquet(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    from persia import data as readers

    folder = tmp_path_factory.mktemp("rows")
    count = data.draw(st.integers(1, 12))

    def column(values: Any, last: Any = None) -> list[Any]:
        return [*data.draw(st.lists(st.none() | values, min_size=count, max_size=count)), last]

    (user, user_type), (tag, tag_type) = (data.draw(st.sampled_from(IDS)) for _ in range(2))
    columns = {
        "user": pa.array(column(user, data.draw(user.filter(bool))), user_type),
        "tags": pa.array(column(st.lists(st.none() | tag, max_size=3)), pa.list_(tag_type)),
        "code": pa.array(column(TEXTS), pa.string()),
        "age": pa.array(column(FLOATS, 1.5), pa.float64()),
        "click": pa.array([*data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), True]),
        "time": pa.array(["2024-05-01 10:00:00"] * (count + 1)),
        "other": pa.array([{"a": 1}] * (count + 1)),
    }
    table = pa.table(columns)
    pq.write_table(table, folder / "rows.parquet")
    write(folder / "rows.jsonl", table.to_pylist())
    options: dict[str, Any] = {"fill": {"age": 0.5}, "day": "time", "shuffle_rows": 5, "seed": 1}
    # The last row is always selected.
    options["where"] = data.draw(st.sampled_from([None, "age > 0 or age <= 0", "click", "user is not None"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_lines, "_BLOCK_BYTES", data.draw(st.integers(20, 2_000)))
        lines = readers.jsonl(folder / "rows.jsonl", SCHEMA, 4, **options)
        rows = readers.parquet(folder / "rows.parquet", SCHEMA, 4, **options)
        expected = list(rows.batches(1))
        for start in (0, 1):
            found = list(lines.batches(1, start))
            assert len(found) == len(expected) - start
            for mine, theirs in zip(found, expected[start:], strict=True):
                same(mine, theirs)


MIXED: dict[str, list[Any]] = {
    "numbers and texts": [5, "5", 2**63, -1, "x", None, 5.0, True],
    "large and negative": [2**63, -1, 5],
    "large and fractions": [2**53 + 1, 5.0, 1.5],
    "beyond 64 bits": [2**64, -(2**63) - 1, 2**70],
    "one and several": [[1, "1"], 1, None, ["x", 2**63]],
}


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("block", [10, 1 << 20])
def test_the_value_alone_counts(name: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "_BLOCK_BYTES", block)
    schema = Schema([IdFeature("item", dim=2)], dense_features=["age"], labels=[])
    rows = [{"item": value, "age": [0.5, "0.5", 1, True][i % 4]} for i, value in enumerate(MIXED[name])]
    found = Batch.concat(list(data.jsonl(write(tmp_path / "a.jsonl", rows), schema)))
    same(found, Batch.from_columns(schema, {name: [row[name] for row in rows] for name in ("item", "age")}))


@pytest.mark.parametrize(
    ("values", "kind", "row"),
    [
        ([5, 2.0**60, "x"], "auto", 1),
        ([5, "x", 1.5], "text", 2),
        (["5", 5, "x"], "number", 2),
        ([1, {"a": 1}], "auto", 1),
    ],
)
def test_a_value_that_is_no_id_is_named(values: list[Any], kind: IdKind, row: int, tmp_path: Path) -> None:
    schema = Schema([IdFeature("item", dim=2, kind=kind)], labels=[])
    path = write(tmp_path / "a.jsonl", [{"item": value} for value in values])
    with pytest.raises(DataError, match=rf"a\.jsonl: Feature 'item' .*at row {row}") as raised:
        list(data.jsonl(path, schema))
    assert raised.value.fields["row"] == row


def test_keys_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = Schema([IdFeature("item", dim=2), IdFeature("tags", dim=2)], labels=["click"])
    path = write(tmp_path / "a.jsonl", [{"item": 1, "tags": [1, 2]}, {"tags": None, "item": 3}, {"item": 4}])
    monkeypatch.setattr(json_lines, "_BLOCK_BYTES", 20)
    reader = data.jsonl(path, schema, require_labels=False)
    batch = Batch.concat(list(reader))
    assert batch.id_features["tags"].offsets.tolist() == [0, 2, 2, 2]  # type: ignore[union-attr]
    assert batch.labels.shape == (3, 0)
    with pytest.raises(DataError, match=r"a\.jsonl has no column 'click'; it has item, tags"):
        list(data.jsonl(path, schema))


def test_files_in_a_directory(tmp_path: Path) -> None:
    schema = Schema([IdFeature("item", dim=2), IdFeature("day", dim=2)], labels=[])
    for day in (1, 2):
        (tmp_path / f"day={day}").mkdir()
    (tmp_path / "day=1" / "a.ndjson").write_bytes('\ufeff{"item": 1}\n\n{"item": 2}'.encode())
    (tmp_path / "day=2" / "b.jsonl.gz").write_bytes(gzip.compress(b'{"item": 3}\r\n{"item": 4}\r\n'))
    batch = Batch.concat(list(data.jsonl(tmp_path, schema)))
    assert batch.id_features["item"].values.tolist() == [1, 2, 3, 4]
    assert batch.id_features["day"].values.tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"item": 1}\n{"item": 2', "cannot be read as JSON lines"),
        ('[{"item": 1}, {"item": 2}]', "one JSON object in each line"),
        ('{"item": 1}\n[1]\n', "one JSON object in each line"),
        ('{"item": 1}\n"x"\n', "one JSON object in each line"),
        ("item,label\n1,2\n", "one JSON object in each line"),
        ("", "is empty: there are no rows"),
    ],
)
def test_files_that_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(DataError, match=rf"a\.jsonl.*{message}"):
        list(data.jsonl(tmp_path / "a.jsonl", Schema([IdFeature("item", dim=2)], labels=[])))
