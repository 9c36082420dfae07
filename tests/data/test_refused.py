"""Bad data: what is refused, with file, row, column and value; and what looks odd but is read."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from persia import data
from persia.batching.batch import Batch
from persia.data import from_csv, from_parquet
from persia.data.rows import COUNTED
from persia.errors import ConfigError, DataError
from persia.schema import IdFeature, Schema

SCHEMA = Schema(
    [IdFeature("user", dim=2), IdFeature("site", dim=2, kind="text"), IdFeature("item", dim=2, kind="number")],
    dense_features=["age"],
    labels=["click"],
)
NAMES = ("user", "site", "item", "age", "click")
GOOD = {"user": "7", "site": "a", "item": "3", "age": "0.5", "click": "1"}
HEAD = ",".join(NAMES) + "\n"
LINE = ",".join(GOOD.values()) + "\n"


def fields(error: DataError) -> dict[str, Any]:
    return {name: value for name, value in error.fields.items() if name in ("path", "row", "column", "value")}


def refused(make: Callable[[], Any]) -> DataError:
    with pytest.raises(DataError) as caught:
        list(make())
    return caught.value


# --- values: the same row and message in CSV and Parquet, in the first piece and in later ones ------------------------

BAD_VALUES = {
    "text in a number": ("age", "oops", "it takes decimal numbers"),
    "decimal comma": ("age", "1,5", r"\(a decimal comma\?\)"),
    "percent": ("age", "5%", "it takes decimal numbers"),
    "infinity": ("age", "inf", "it takes decimal numbers"),
    "above float64": ("age", "1e999", "it takes decimal numbers"),
    "hexadecimal": ("age", "0x10", "it takes decimal numbers"),
    "no-break space": ("age", "\u00a05", "it takes decimal numbers"),
    "minus sign of typesetters": ("age", "\u22125", "it takes decimal numbers"),
    "NUL": ("age", "1\0", "it takes decimal numbers"),
    "missing number": ("age", "", r"missing value.*fill=\{'age': 0.0\}"),
    "marker of a missing number": ("age", "NA", "missing value"),
    "above float32": ("age", "1e39", "is inf at row"),
    "label outside": ("click", "2", r"outside \[0, 1\]"),
    "negative label": ("click", "-1", r"outside \[0, 1\]"),
    "label in words": ("click", "yes", "true and false"),
    "missing label": ("click", "", "missing value"),
    "negative id of kind number": ("item", "-1", 'of the kind "number": whole numbers from 0'),
    "leading zeros": ("item", "007", 'of the kind "number"'),
    "fraction": ("item", "1.5", 'of the kind "number"'),
    "exponent": ("item", "1e3", 'of the kind "number"'),
    "too large": ("item", "18446744073709551616", 'of the kind "number"'),
    "text of kind number": ("item", "abc", 'kind="auto" or kind="text"'),
    "other digits": ("item", "٣", 'of the kind "number"'),
}


@pytest.mark.parametrize("where", [0, 5, 45])
@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, where: int) -> None:
    monkeypatch.setattr(from_csv, "_BLOCK_BYTES", 256)
    monkeypatch.setattr(from_parquet, "_CHUNK_ROWS", 16)
    column, value, message = BAD_VALUES[name]
    rows = [GOOD | ({column: value} if i == where else {}) for i in range(50)]
    quoted = [",".join(f'"{x}"' if "," in x else x for x in row.values()) for row in rows]
    (tmp_path / "a.csv").write_text(HEAD + "\n".join(quoted) + "\n")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=20)
    for path, make in ((tmp_path / "a.csv", data.csv), (tmp_path / "a.parquet", data.parquet)):
        error = refused(lambda path=path, make=make: make(path, SCHEMA, 8))
        resumed = refused(lambda path=path, make=make: make(path, SCHEMA, 8).batches(start=where // 8))
        assert resumed.fields == error.fields
        assert error.fields["path"] == str(path)
        assert (error.fields["column"], error.fields["row"]) == (column, where)
        assert f"at row {where}" in error.message
        assert error.message.endswith(COUNTED)
        if value and "missing" not in error.message and "inf at" not in error.message and "Label" not in error.message:
            assert error.fields["value"] == value
        assert re.search(message, error.message), error.message


def test_a_renamed_column_is_named_as_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(HEAD.replace("age", "years") + LINE + LINE.replace("0.5", "old"))
    error = refused(lambda: data.csv(tmp_path / "a.csv", SCHEMA, rename={"age": "years"}))
    assert fields(error) == {"path": str(tmp_path / "a.csv"), "row": 1, "column": "years", "value": "old"}
    assert "In the source, the column is 'years'." in error.message


def test_the_second_file_counts_its_own_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(HEAD + LINE * 5)
    (tmp_path / "b.csv").write_text(HEAD + LINE * 2 + LINE.replace("0.5", "old"))
    error = refused(lambda: data.csv(tmp_path, SCHEMA))
    assert fields(error) == {"path": str(tmp_path / "b.csv"), "row": 2, "column": "age", "value": "old"}


@pytest.mark.parametrize(
    ("column", "type_", "message"),
    [
        ("user", pa.timestamp("us"), r"holds timestamp\[us\]; a feature takes whole numbers"),
        ("user", pa.struct([("a", pa.int64())]), "holds struct"),
        ("age", pa.date32(), r"holds date32\[day\]; a dense feature or label takes whole numbers"),
        ("age", pa.list_(pa.float64()), "holds list"),
        ("click", pa.struct([("a", pa.int64())]), "holds struct"),
    ],
)
def test_types_of_parquet(tmp_path: Path, column: str, type_: pa.DataType, message: str) -> None:
    table = pa.table(
        {"user": [1], "site": ["a"], "item": [1], "age": [0.5], "click": [1]} | {column: pa.nulls(1, type_)}
    )
    pq.write_table(table, tmp_path / "a.parquet")
    error = refused(lambda: data.parquet(tmp_path, SCHEMA))
    assert fields(error) == {"path": str(tmp_path / "a.parquet"), "column": column}
    assert re.search(message, error.message), error.message


# --- lines ------------------------------------------------------------------------------------------------------------

CUT = LINE.rsplit(",", 1)[0] + "\n"
RAGGED = {
    "too few fields": (LINE + CUT, 1, "4 fields instead of 5"),
    "too many fields": (LINE + LINE.strip() + ",9,9\n", 1, "7 fields instead of 5"),
    "a delimiter at the end": (LINE + LINE.strip() + ",\n", 1, "6 fields instead of 5"),
    "after blank lines": (LINE + "\n\n" + LINE + "\n" + CUT, 2, "4 fields instead of 5"),
    "after a quoted line break": (LINE.replace("a", '"a\nb"') * 3 + CUT, 3, "4 fields instead of 5"),
    "in a later block": (LINE * 100 + "\n" + LINE * 20 + CUT + LINE * 100, 120, "4 fields instead of 5"),
    "cut off": (LINE * 3 + "7,a", 3, "restore the file if it is cut off here"),
    "an open quote": (LINE * 2 + '7,"a,3,0.5,1\n' + LINE * 3, 2, "close open quotes"),
    "another delimiter": (LINE + LINE.replace(",", ";"), 1, "set delimiter=';'"),
    "a comment": (LINE + "# ratings of May\n", 1, "1 fields instead of 5"),
}


@pytest.mark.parametrize("name", RAGGED)
def test_ragged_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(from_csv, "_BLOCK_BYTES", 512)
    text, row, message = RAGGED[name]
    for head, names in ((HEAD, None), ("", NAMES)):
        (tmp_path / "a.csv").write_text(head + text)
        error = refused(lambda names=names: data.csv(tmp_path / "a.csv", SCHEMA, column_names=names))
        assert (error.fields["path"], error.fields["row"]) == (str(tmp_path / "a.csv"), row)
        assert message in error.message
        assert error.message.endswith(COUNTED)
        assert len(error.message) < 600


def test_a_line_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_csv, "_BLOCK_BYTES", 1 << 20)
    (tmp_path / "a.csv").write_text(HEAD + LINE * 3 + LINE.replace("a", "a" * (3 << 20)) + LINE)
    error = refused(lambda: data.csv(tmp_path / "a.csv", SCHEMA))
    assert fields(error) == {"path": str(tmp_path / "a.csv"), "row": 3}
    assert "longer than 1 MiB. Close a quote" in error.message


# --- columns ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (HEAD.replace(",", ";"), r"separated by ';': set delimiter=';'"),
        (HEAD.replace(",", "\t"), r"separated by '\\t': set delimiter='\\t'"),
        (HEAD.replace(",", "|"), r"separated by '\|'"),
        (HEAD.replace(",", ", "), r"has no column 'site'; it has user, ' site', .*' site' differs in case or spaces"),
        (HEAD.replace("user", "User"), "'User' differs in case or spaces"),
        (HEAD.replace(",click", ""), "has no column 'click'.*require_labels=False"),
        (HEAD.replace("age", "years"), r"has no column 'age'; it has user, site, item, years, click\. Correct the"),
        (LINE, "give column_names"),
        ('[{"user": 1}]\n', "give column_names"),
        ("<!DOCTYPE html>\n", "give column_names"),
    ],
)
def test_first_lines(tmp_path: Path, head: str, message: str) -> None:
    (tmp_path / "a.csv").write_text(head + LINE)
    error = refused(lambda: data.csv(tmp_path / "a.csv", SCHEMA))
    assert error.fields["path"] == str(tmp_path / "a.csv")
    assert error.fields["column"] in NAMES
    assert re.search(message, error.message), error.message


def test_duplicate_columns(tmp_path: Path) -> None:
    def check(make: Callable[[], Any], column: str = "age") -> None:
        error = refused(make)
        assert error.fields["column"] == column
        assert f"2 columns named {column!r}; rename or remove all but one" in error.message

    (tmp_path / "a.csv").write_text(HEAD.strip() + ",age\n" + LINE.strip() + ",9\n")
    check(lambda: data.csv(tmp_path / "a.csv", SCHEMA))
    table = pa.table([pa.array([x]) for x in (*GOOD.values(), "9")], names=[*NAMES, "age"])
    pq.write_table(table, tmp_path / "a.parquet")
    check(lambda: data.parquet(tmp_path / "a.parquet", SCHEMA))
    check(lambda: [Batch.from_columns(SCHEMA, table)])
    check(lambda: [Batch.from_columns(SCHEMA, table.to_batches()[0])])
    check(lambda: [Batch.from_columns(SCHEMA, pd.DataFrame([[*GOOD.values(), 9]], columns=[*NAMES, "age"]))])
    with pytest.raises(ConfigError, match="column_names has 'age' twice"):
        data.csv(tmp_path / "a.csv", SCHEMA, column_names=[*NAMES, "age"])
    (tmp_path / "b.csv").write_text(HEAD.strip() + ",x,x\n" + LINE.strip() + ",8,9\n")
    (batch,) = data.csv(tmp_path / "b.csv", SCHEMA)  # Two columns that nobody reads are harmless.
    assert len(batch) == 1
    check(lambda: data.csv(tmp_path / "b.csv", SCHEMA, where="x > 1"), "x")


def test_column_names_that_are_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(HEAD + LINE)
    error = refused(lambda: data.csv(tmp_path / "a.csv", SCHEMA, column_names=NAMES))
    assert "the first line has the names of the columns; leave column_names out" in error.message


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (pl.DataFrame({"user": [1]}).lazy(), r"LazyFrame.*call collect\(\)"),
        ([{"user": 1}], "given as list; give a dict of columns"),
        ({"user": pd.DataFrame({"a": [1]})}, "'user' is a whole DataFrame; give one column"),
        ({"user": (i for i in [1])}, "'user' is a generator"),
        ({"user": "abc"}, "'user' is a str"),
        ({"user": np.array([np.inf])}, "is inf at row 0, which is not an id"),
        ({"user": np.array([1j])}, "is complex128; ids are whole numbers, texts or floats"),
        ({"user": np.zeros((1, 2, 3))}, r"has shape \[1, 2, 3\]"),
        ({"user": [[1, [2]]]}, r"list \[2\] at row 0"),
        ({"user": pl.Series([1], dtype=pl.Date)}, r"holds date32\[day\]"),
        ({"user": [1], "site": [2.5]}, 'of the kind "text", and such a value has several spellings'),
        ({"user": [1], "site": [True]}, 'of the kind "text"'),
        ({"user": [1, 1], "site": pd.Series([0, 0.0], dtype=object)}, "has the float64 0.0 at row 1"),
        ({"user": [1], "site": ["a"], "item": [1], "age": [10**400]}, "beyond the range of float64"),
        ({"user": [1], "site": ["a"], "item": [1], "age": [1], "click": pa.array([None], pa.bool_())}, "missing value"),
    ],
)
def test_columns_of_a_batch(columns: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Batch.from_columns(SCHEMA, columns)


def test_frames_by_any_class_and_gaps_in_booleans() -> None:
    class Named(pd.DataFrame):  # As geopandas does.
        pass

    schema = Schema([IdFeature("user", dim=2)], dense_features=["age"], labels=["click"])
    batch = Batch.from_columns(schema, Named({"user": [2**64, 2], "age": ["1", 2.5], "click": [True, False]}))
    assert batch.id_features["user"].values.tolist() == [xxhash.xxh64_intdigest(str(2**64).encode()), 2]
    assert batch.dense[:, 0].tolist() == [1, 2.5]


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="NumPy 1 has no texts of any length")
def test_texts_of_numpy() -> None:
    schema = Schema([IdFeature("user", dim=2)], labels=["click"])
    texts = np.array(["5", "x"], dtype=np.dtypes.StringDType())
    assert Batch.from_columns(schema, {"user": texts, "click": [0, 0]}).id_features["user"].values[0] == 5


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "\n\n", HEAD, HEAD.strip(), "\ufeff" + HEAD])
def test_files_without_rows(tmp_path: Path, text: str) -> None:
    for path in (tmp_path / "a.csv", tmp_path / "b.csv"):
        path.write_text(text)
    with gzip.open(tmp_path / "c.csv.gz", "wt") as stream:
        stream.write(text)
    for paths, names in ((tmp_path / "a.csv", ("a.csv is empty",)), (tmp_path, ("a.csv, ", "c.csv.gz are empty"))):
        error = refused(lambda paths=paths: data.csv(paths, SCHEMA))
        assert all(name in error.message for name in (*names, "there are no rows; give another source"))
    (tmp_path / "d.csv").write_text(HEAD + LINE)
    assert sum(map(len, data.csv(tmp_path, SCHEMA))) == 1  # An empty file among others is none.
    assert list(data.csv(tmp_path, SCHEMA, shard=(1, 2))) == []  # Nor is a shard without a batch an error.


def test_empty_files_with_given_names_and_of_parquet(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("")
    assert "is empty" in refused(lambda: data.csv(tmp_path, SCHEMA, column_names=NAMES)).message
    pq.write_table(pa.table({name: pa.array([], pa.string()) for name in NAMES}), tmp_path / "a.parquet")
    assert "is empty" in refused(lambda: data.parquet(tmp_path, SCHEMA)).message
    pq.write_table(pa.table({name: [value] for name, value in GOOD.items()}), tmp_path / "b.parquet")
    assert sum(map(len, data.parquet(tmp_path, SCHEMA))) == 1


BINARY = {
    "UTF-16": (HEAD + LINE).encode("utf-16"),
    "gzip without its suffix": gzip.compress((HEAD + LINE).encode()),
    "zip": b"PK\x03\x04\0\0\0\0",
    "Parquet": b"PAR1\x15\x04\x15\0",
    "a first line in Latin-1": "usér,".encode("latin-1") + HEAD.replace("user", "x").encode(),
}


@pytest.mark.parametrize("name", BINARY)
def test_files_that_are_not_text(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.csv").write_bytes(BINARY[name])
    error = refused(lambda: data.csv(tmp_path / "a.csv", SCHEMA))
    assert "not UTF-8 text: convert" in error.message.replace("; convert", ": convert")
    assert len(error.message) < 500


@pytest.mark.parametrize("compressed", [gzip.compress((HEAD + LINE * 5_000).encode())[:-30], (HEAD + LINE).encode()])
def test_broken_compression(tmp_path: Path, compressed: bytes) -> None:
    (tmp_path / "a.csv.gz").write_bytes(compressed)
    error = refused(lambda: data.csv(tmp_path, SCHEMA))
    assert "a.csv.gz cannot be read, it may be truncated, corrupt or of another format" in error.message


# --- odd, but clear ---------------------------------------------------------------------------------------------------

ODD = {
    "byte order mark": ("\ufeff" + HEAD + LINE).encode(),
    "CRLF": (HEAD + LINE).replace("\n", "\r\n").encode(),
    "CR": (HEAD + LINE).replace("\n", "\r").encode(),
    "no line break at the end": (HEAD + LINE).strip().encode(),
    "quoted": (HEAD + ",".join(f'"{x}"' for x in GOOD.values()) + "\n").encode(),
    "blank lines": (f"\n{HEAD}\n\n{LINE}\n").encode(),
    "spaces around numbers": (HEAD + "7,a, 3 ,\t0.5 , 1\n").encode(),
    "point and zeros": (HEAD + "7.0,a,3.00,0.5,1.0\n").encode(),
    "truths": (HEAD + LINE).replace(",1\n", ",True\n").encode(),
    "exponent and sign": (HEAD + LINE).replace("0.5", "+5e-1").encode(),
    "other columns in Latin-1": "é,".encode("latin-1") + HEAD.encode() + "ü,".encode("latin-1") + LINE.encode(),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.csv").write_bytes(ODD[name])
    (batch,) = data.csv(tmp_path / "a.csv", SCHEMA)
    assert [int(batch.id_features[n].values[0]) for n in ("user", "item")] == [7, 3]
    assert int(batch.id_features["site"].values[0]) == xxhash.xxh64_intdigest(b"a")
    assert (batch.dense.tolist(), batch.labels.tolist()) == ([[0.5]], [[1.0]])


def test_texts_are_bytes(tmp_path: Path) -> None:
    texts = ["caf\u00e9", 'a"b', "a\nb", "a\0b", " a", "NA", "true", "5", "x" * 100_000]
    raw = [text.encode() for text in texts] + [b"caf\xe9"]
    quoted = [b'"' + text.replace(b'"', b'""') + b'"' for text in raw]
    (tmp_path / "a.csv").write_bytes(HEAD.encode() + b"".join(b"1," + text + b",1,1,1\n" for text in quoted))
    (batch,) = data.csv(tmp_path / "a.csv", SCHEMA)
    assert batch.id_features["site"].values.tolist() == [xxhash.xxh64_intdigest(text) for text in raw]


@pytest.mark.parametrize("block", [64, 100, 1 << 20])
def test_quoted_line_breaks_may_lie_at_the_end_of_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(from_csv, "_BLOCK_BYTES", block)
    (tmp_path / "a.csv").write_text(HEAD + LINE.replace("a", '"a\n\nb"') * 40)
    assert sum(map(len, data.csv(tmp_path / "a.csv", SCHEMA))) == 40


# --- days and hive keys -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("days", "row", "message"),
    [
        (["2024-05-01", "oops"], 1, "'oops' at row 1; it takes whole numbers, or dates and times"),
        (["5", "2024-05-01"], 1, "of one kind in all rows"),
        (["2024-05-01", ""], 1, "missing value at row 1"),
        (["5/1/2024"], 0, "'5/1/2024' at row 0"),
    ],
)
def test_days(tmp_path: Path, days: list[str], row: int, message: str) -> None:
    text = HEAD.strip() + ",day\n" + "".join(f"{LINE.strip()},{day}\n" for day in days)
    (tmp_path / "a.csv").write_text(text)
    error = refused(lambda: data.csv(tmp_path / "a.csv", SCHEMA, day="day"))
    assert (error.fields["column"], error.fields["row"]) == ("day", row)
    assert message in error.message


def test_days_in_other_forms(tmp_path: Path) -> None:
    for day in ("1970-01-03", "1970-01-03 10:00:00", "1970-01-03T10:00:00Z", " 2 "):
        (tmp_path / "a.csv").write_text(f"{HEAD.strip()},day\n{LINE.strip()},{day}\n")
        (batch,) = data.csv(tmp_path / "a.csv", SCHEMA, day="day")
        assert batch.day is not None
        assert batch.day.tolist() == [2]
    (tmp_path / "a.csv").write_bytes((f"{HEAD.strip()},day\n{LINE.strip()},".encode()) + b"\xe9\n")
    error = refused(lambda: data.csv(tmp_path / "a.csv", SCHEMA, day="day"))
    assert "the rows from 0 on cannot be converted" in error.message


def test_hive_keys_are_values_like_others(tmp_path: Path) -> None:
    schema = Schema([IdFeature("key", dim=2), IdFeature("user", dim=2)], labels=[])
    for key in ("03", "18446744073709551616", "x"):
        folder = tmp_path / f"key={key}"
        folder.mkdir()
        pq.write_table(pa.table({"user": [1]}), folder / "a.parquet")
        (batch,) = data.parquet(folder, schema)
        expected = 3 if key == "03" else xxhash.xxh64_intdigest(key.encode())
        assert batch.id_features["key"].values.tolist() == [expected]
