"""Parquet: columns, days, hive keys, skipping by metadata, bounded memory, bad files."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from persia import data
from persia.errors import ConfigError, DataError, MissingExtraError
from persia.schema import IdFeature, Schema

SCHEMA = Schema([IdFeature("user", dim=2), IdFeature("tags", dim=2)], dense_features=["age"], labels=["click"])


def write(path: Path, rows: int = 10, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = {
        "user": pa.array(range(rows)),
        "tags": pa.array([["x"] * (i % 2) for i in range(rows)]),
        "age": pa.array([1.0] * rows),
        "click": pa.array([0] * rows),
    }
    pq.write_table(pa.table(table | columns), path, row_group_size=4)
    return path


def users(reader: data.Reader) -> list[int]:
    return [int(i) for b in reader for i in b.id_features["user"].values]


def days(reader: data.Reader) -> list[int]:
    return [int(d) for b in reader if b.day is not None for d in b.day]


def test_paths_may_be_a_file_a_glob_a_directory_a_url_or_a_list(tmp_path: Path) -> None:
    one, two = write(tmp_path / "a.parquet"), write(tmp_path / "b.parquet")
    write(tmp_path / "_hidden" / "c.parquet")
    (tmp_path / "notes.txt").write_text("no data")
    for paths in (tmp_path, str(tmp_path), [one, two], str(tmp_path / "*.parquet"), tmp_path.as_uri(), [two, str(one)]):
        assert users(data.parquet(paths, SCHEMA, 7)) == [*range(10), *range(10)]
    assert users(data.parquet(one, SCHEMA)) == list(range(10))


def test_rename_and_other_columns_are_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", uid=pa.array(range(100, 110)), other=pa.array([None] * 10))
    assert users(data.parquet(path, SCHEMA, rename={"user": "uid"})) == list(range(100, 110))
    with pytest.raises(ConfigError, match="'uid', which is not a column of the schema"):
        data.parquet(path, SCHEMA, rename={"uid": "user"})


def test_day_from_a_hive_key_a_number_a_timestamp_or_a_date(tmp_path: Path) -> None:
    for day in (3, 11):
        write(tmp_path / f"day={day:02}.parquet", 2)
        write(tmp_path / "dates" / f"day=1970-01-{day:02}" / "part.parquet", 2)
    assert days(data.parquet(tmp_path / "day=*", SCHEMA, 3, day="day")) == [3, 3, 11, 11]
    assert days(data.parquet(tmp_path / "dates", SCHEMA, day="day")) == [2, 2, 10, 10]
    ms = [5 * 86_400_000, 6 * 86_400_000 - 1]
    date = datetime.date(1970, 1, 8)
    for column, unit, expected in (
        (pa.array([4, 5]), "day", [4, 5]),
        (pa.array(ms), "ms", [5, 5]),
        (pa.array(ms, pa.timestamp("ms")), "day", [5, 5]),
        (pa.array([date, date]), "day", [7, 7]),
        (pa.array([date, date], pa.date64()), "day", [7, 7]),
    ):
        path = write(tmp_path / "day.parquet", 2, when=column)
        assert days(data.parquet(path, SCHEMA, day="when", day_unit=unit)) == expected  # type: ignore[arg-type]


def test_texts_may_be_views(tmp_path: Path) -> None:
    """Which polars writes; pyarrow selects no rows of them."""
    texts = pa.array([str(i) for i in range(10)], pa.string_view())
    path = write(tmp_path / "a.parquet", user=texts, at=pa.array(["1970-01-03"] * 10, pa.string_view()))
    reader = data.parquet(path, SCHEMA, where="user != '3'", day="at")
    assert users(reader) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert set(days(reader)) == {2}
    assert days(data.parquet(path, SCHEMA, day="at")) == [2] * 10


def test_a_hive_key_may_be_a_feature(tmp_path: Path) -> None:
    schema = Schema([IdFeature("region", dim=2), IdFeature("hour", dim=2)], labels=["click"])
    write(tmp_path / "region=eu" / "hour=07" / "a.parquet", 2)
    write(tmp_path / "region=__HIVE_DEFAULT_PARTITION__" / "hour=08" / "a.parquet", 1)
    (batch,) = list(data.parquet(sorted(map(str, tmp_path.glob("region=e*")), reverse=True), schema))
    assert batch.id_features["hour"].values.tolist() == [7, 7]
    assert len(set(batch.id_features["region"].values.tolist())) == 1
    (batch,) = list(data.parquet(tmp_path / "region=__HIVE_DEFAULT_PARTITION__", schema))
    assert len(batch.id_features["region"].values) == 0


def test_resuming_reads_neither_earlier_files_nor_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = write(tmp_path / "a.parquet"), write(tmp_path / "b.parquet")
    read: list[list[int]] = []
    original = pq.ParquetFile.iter_batches

    def spy(self: Any, size: int, groups: list[int], *args: Any, **kwargs: Any) -> Any:
        read.append(groups)
        return original(self, size, groups, *args, **kwargs)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", spy)
    reader = data.parquet([one, two], SCHEMA, 5)
    assert [int(b.id_features["user"].values[0]) for b in reader.batches(start=3)] == [5]
    assert read == [[1, 2]]  # of the second file's groups of rows 0-3, 4-7, 8-9
    assert list(reader.batches(start=4)) == []
    assert len(read) == 1


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    def peak(rows: int) -> int:
        path = tmp_path / f"{rows}.parquet"
        numbers = np.arange(rows)
        pq.write_table(pa.table({"user": numbers, "click": numbers % 2}), path, row_group_size=1 << 20)
        reader = data.parquet(path, Schema([IdFeature("user", dim=2)], labels=["click"]), 1024, shuffle_rows=4096)
        highest = 0
        before = pa.total_allocated_bytes()
        for _ in reader:
            highest = max(highest, pa.total_allocated_bytes() - before)
        return highest

    small, large = peak(200_000), peak(2_000_000)
    assert large < 2 * small + (8 << 20)


def test_labels_may_be_absent(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"user": [1], "tags": [["x"]], "age": [1.0]}), path)
    with pytest.raises(DataError, match="no column 'click'"):
        list(data.parquet(path, SCHEMA))
    (batch,) = list(data.parquet(path, SCHEMA, require_labels=False))
    assert batch.labels.shape == (1, 0)


# --- bad input ---------------------------------------------------------------------------------------------------


def test_missing_files(tmp_path: Path) -> None:
    for paths, problem in (
        (tmp_path / "none.parquet", f"There is no file or directory {tmp_path}/none.parquet; correct the path"),
        (str(tmp_path / "*.parquet"), f"No file matches {tmp_path}/*.parquet; correct the path"),
        (tmp_path, f"{tmp_path} has no file whose name ends in .parquet, .pq; correct the path"),
    ):
        with pytest.raises(DataError, match=re.escape(problem)) as caught:
            data.parquet(paths, SCHEMA)
        assert caught.value.fields["path"] == str(paths)
    with pytest.raises(DataError, match="empty"):
        data.parquet([], SCHEMA)
    path = write(tmp_path / "a.parquet")
    reader = data.parquet(path, SCHEMA)
    path.unlink()
    with pytest.raises(DataError, match=r"a\.parquet: there is no such file"):
        list(reader)


def test_truncated_and_foreign_files(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", 1000)
    content = path.read_bytes()
    broken = bytearray(content)
    broken[10 : len(content) // 2] = bytes(len(content) // 2 - 10)
    for wrong in (content[: len(content) // 2], b"", b"not parquet at all", bytes(broken)):
        path.write_bytes(wrong)
        with pytest.raises(DataError, match=r"a\.parquet cannot be read, it may be truncated") as caught:
            list(data.parquet(path, SCHEMA))
        assert caught.value.fields["path"].endswith("a.parquet")


def test_missing_column(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet has no column 'uid' \(for 'user'\).*it has user, tags") as caught:
        list(data.parquet(path, SCHEMA, rename={"user": "uid"}))
    assert caught.value.fields["column"] == "uid"
    with pytest.raises(DataError, match="no column 'when'"):
        list(data.parquet(path, SCHEMA, day="when"))


def test_bad_values_name_file_and_row(tmp_path: Path) -> None:
    ages = [1.0] * 9 + [float("nan")]
    path = write(tmp_path / "a.parquet", age=pa.array(ages))
    for start in range(2):
        with pytest.raises(DataError, match=r"a\.parquet: Dense feature 'age' is nan at row 9") as caught:
            list(data.parquet(path, SCHEMA, 5).batches(start=start))
        assert caught.value.fields["row"] == 9
        assert caught.value.fields["path"].endswith("a.parquet")


@pytest.mark.parametrize("column", [pa.array([1, None]), pa.array([0.5, 1.5])])
def test_bad_days(column: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", 2, when=column)
    with pytest.raises(DataError, match="Day column 'when'"):
        list(data.parquet(path, SCHEMA, day="when"))
    write(tmp_path / "day=soon.parquet", 2)
    with pytest.raises(DataError, match="day=soon is neither"):
        list(data.parquet(tmp_path / "day=soon.parquet", SCHEMA, day="day"))


def test_bad_day_unit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="day_unit"):
        data.parquet(write(tmp_path / "a.parquet"), SCHEMA, day_unit="week")  # type: ignore[arg-type]


def test_missing_extra_and_unknown_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def fail(*_: Any, **__: Any) -> Any:
        raise ImportError("Install s3fs to access S3")

    with pytest.raises(DataError, match="correct the protocol"):
        data.parquet("nonsense://x/y.parquet", SCHEMA)
    monkeypatch.setattr(fsspec.core, "url_to_fs", fail)
    with pytest.raises(MissingExtraError, match=r'pip install "persia-recsys\[s3\]"'):
        data.parquet("s3://bucket/*.parquet", SCHEMA)


def test_a_memory_file_system_works() -> None:
    import fsspec

    with fsspec.open("memory://clicks/day=05/a.parquet", "wb") as stream:
        pq.write_table(pa.table({"user": [1, 2], "tags": [["x"], []], "age": [1.0, 2.0], "click": [0, 1]}), stream)
    reader = data.parquet("memory://clicks", SCHEMA, day="day")
    assert users(reader) == [1, 2]
    assert days(reader) == [5, 5]
