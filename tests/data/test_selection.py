"""Which rows are read, and labels by rule: `where`, `split`, `labels`, `fill`, `null_values`."""

from __future__ import annotations

import datetime
import itertools
import pickle
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from persia import Batch, data
from persia.cli.run_config import RunConfig
from persia.config import convert
from persia.data import Split, from_csv, from_parquet
from persia.data.expressions import Expression
from persia.errors import ConfigError, DataError
from persia.schema import IdFeature, Schema

SCHEMA = Schema([IdFeature("row", dim=2, kind="number")], dense_features=["rating"], labels=["click"])
ROWS = 200


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_csv, "_BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr(from_parquet, "_CHUNK_ROWS", 16)


def table(rows: int = ROWS, first: int = 0) -> pa.Table:
    numbers = range(first, first + rows)
    return pa.table(
        {
            "row": pa.array(numbers, pa.int64()),
            "rating": [float(i % 6) for i in numbers],
            "country": [["BR", "PT", "DE", ""][i % 4] for i in numbers],
            "user": [None if i % 50 == 49 else i % 17 for i in numbers],
            "time": pa.array(
                [datetime.datetime(2024, 5, 1) + datetime.timedelta(hours=i) for i in numbers], pa.timestamp("us")
            ),
            "click": [i % 2 for i in numbers],
            "odd name": pa.array(numbers, pa.int64()),
        }
    )


def write(directory: Path, tables: list[pa.Table]) -> None:
    for number, one in enumerate(tables):
        pq.write_table(one, directory / f"{number}.parquet", row_group_size=50)
        pyarrow.csv.write_csv(one, directory / f"{number}.csv", pyarrow.csv.WriteOptions(quoting_style="needed"))


READERS = {"csv": data.csv, "parquet": data.parquet}
both = pytest.mark.parametrize("form", READERS)


def rows_of(reader: data.StreamReader, **position: int) -> list[int]:
    return [int(x) for batch in reader.batches(**position) for x in batch.id_features["row"].values]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    write(tmp_path, [table(120), table(80, first=120)])
    return tmp_path


# --- where ------------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ("rating >= 4", lambda i: i % 6 >= 4),
        ("rating >= 4 and country == 'BR' or row < 3", lambda i: (i % 6 >= 4 and i % 4 == 0) or i < 3),
        ("not (rating < 4 or country in ('PT', 'DE'))", lambda i: i % 6 >= 4 and i % 4 == 0),
        ("country is None", lambda i: i % 4 == 3),
        ("country is not None and user is not None", lambda i: i % 4 != 3 and i % 50 != 49),
        ("country != 'BR'", lambda i: i % 4 in (1, 2)),  # What is missing is neither equal nor unequal.
        ("user not in (1, 2)", lambda i: i % 50 != 49 and i % 17 not in (1, 2)),
        ("10 <= row < 20", lambda i: 10 <= i < 20),
        ("1 + rating * 2 == 11", lambda i: i % 6 == 5),
        ("-row > -5", lambda i: i < 5),
        ("row / 2 < 1.5", lambda i: i < 3),
        ("rating", lambda i: i % 6 != 0),
        ('column("odd name") < 4', lambda i: i < 4),
        ("time >= '2024-05-08'", lambda i: i >= 7 * 24),
        ("rating >= 4\n  and  # over\n  row < 30", lambda i: i % 6 >= 4 and i < 30),
    ],
)
def test_where(files: Path, form: str, rule: str, kept: Any) -> None:
    reader = READERS[form](files / f"*.{form}", SCHEMA, 32, where=rule)
    assert rows_of(reader) == [i for i in range(ROWS) if kept(i)]


@both
def test_rows_that_are_left_out_are_not_looked_at(tmp_path: Path, form: str) -> None:
    bad = table(40).set_column(1, "rating", pa.array(["oops" if i == 3 else "1" for i in range(40)]))
    write(tmp_path, [bad])
    path = tmp_path / f"0.{form}"
    assert len(rows_of(READERS[form](path, SCHEMA, where="row != 3"))) == 39
    with pytest.raises(DataError, match="'oops' at row 3"):
        list(READERS[form](path, SCHEMA))


def over(rating: Any) -> Any:
    return pc.greater_equal(pc.cast(rating, "float64"), 4.0)


@both
def test_functions_and_pickling(files: Path, form: str) -> None:
    reader = READERS[form](files / f"*.{form}", SCHEMA, 32, where=over, labels={"click": over})
    copy = pickle.loads(pickle.dumps(reader))
    assert rows_of(copy) == rows_of(reader) == [i for i in range(ROWS) if i % 6 >= 4]
    assert all(batch.labels.all() for batch in copy)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda row: [True], r"function of row gives 1 values for 16 rows"),
        (lambda row: 1 / 0, r"cannot be evaluated \(ZeroDivisionError: division by zero\)"),
        (lambda row: None, r"cannot be evaluated \(TypeError"),
    ],
)
def test_a_function_that_fails_is_named(files: Path, function: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        list(data.parquet(files / "*.parquet", SCHEMA, where=function))
    assert str(caught.value.fields["path"]).endswith("0.parquet")


# --- expressions ------------------------------------------------------------------------------------------------------


def evaluated(rule: str, **columns: Any) -> list[Any]:
    arrays = {name: pa.array(values) for name, values in columns.items()}
    result: list[Any] = Expression("where", rule).evaluate(arrays, len(next(iter(arrays.values())))).to_pylist()
    return result


def test_precedence_and_missing_values() -> None:
    missing, nan = [1, None, 3], [1.0, float("nan"), 3.0]
    for column in (missing, nan, ["1", "", "3"], ["1", None, "3"], [b"1", b"NA", b"3"]):
        assert evaluated("a > 1", a=column) == [False, None, True]
        assert evaluated("not a > 1", a=column) == [True, None, False]
        assert evaluated("a > 1 or a == 1", a=column) == [True, None, True]
        assert evaluated("a + 2 * a - 1 == 8", a=column) == [False, None, True]
        assert evaluated("a in (1, 5)", a=column) == [True, None, False]
    assert evaluated("a > 1 or b", a=missing, b=[True, True, False]) == [True, True, True]
    assert evaluated("a > 1 and b", a=missing, b=[True, False, True]) == [False, False, True]
    assert evaluated("a == b == 1", a=[1, 1, 0], b=[1, 0, 0]) == [True, False, False]


def test_texts_numbers_truths_and_times_compare_by_meaning() -> None:
    assert evaluated("a == 'x'", a=pa.array(["x", "y"]).dictionary_encode()) == [True, False]
    assert evaluated("a < 'b'", a=["a", "b"]) == [True, False]
    for truths in ([True, False], ["true", "False"], [1, 0]):
        assert evaluated("a == True", a=truths) == [True, False]
        assert evaluated("not a", a=truths) == [False, True]
    big = pa.array([2**64 - 1, 5], pa.uint64())
    assert evaluated("a == 18446744073709551615", a=big) == [True, False]
    assert evaluated("a > -1", a=big) == [True, True]
    assert evaluated("a > b", a=big, b=[-1, 7]) == [True, False]
    days = [datetime.date(2024, 5, 1), datetime.date(2024, 5, 2)]
    for times in (days, [datetime.datetime(2024, 5, d) for d in (1, 2)]):
        assert evaluated("a >= '2024-05-02'", a=times) == [False, True]
        assert evaluated("a >= '2024-05-01 00:00:01'", a=times) == [False, True]
    zoned = pa.array([datetime.datetime(2024, 5, d, tzinfo=datetime.UTC) for d in (1, 2)])
    assert evaluated("a >= '2024-05-02'", a=zoned) == [False, True]
    assert evaluated("a >= '2024-05-02T02:00:00+02:00'", a=zoned) == [False, True]


@pytest.mark.parametrize(
    ("rule", "columns", "message"),
    [
        ("a > 1", {"a": ["2", "oops"]}, "Column 'a' has 'oops' at row 1"),
        ("a > 'x'", {"a": [1, 2]}, "numbers are compared with the text 'x'"),
        ("a > 5", {"a": [datetime.date(2024, 5, 1)]}, "a time is compared with a number"),
        ("a > 'noon'", {"a": [datetime.date(2024, 5, 1)]}, "'noon'"),
        ("a + 'x' > 1", {"a": [1]}, "'x' is not a number"),
        ("a == 9007199254740993", {"a": ["1"]}, "does not hold it"),
        ("a > 1", {"a": [[1], [2]]}, r"column 'a' holds list<.*use a function"),
    ],
)
def test_what_cannot_be_compared_is_named(rule: str, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        evaluated(rule, **columns)
    assert caught.value.message.startswith(f"where = {rule!r}")


@pytest.mark.parametrize(
    "rule",
    [
        "", "  ", "a >", "a; b", "True", "1 == 1", "a.b > 1", "a[0]", "lambda: a", "(b := a)", "[x for x in a]",
        "f'{a}'",
        "a if b else c", "*a", "a, b", "(a, b)", "a == (1, 2)", "a in b", "a in ()", "a is 1", "a is b", "a == None",
        "a in (1, None)", "a == ''", "a == b'x'", "a == 1j", "a == ...", "a % 2", "a ** 9", "~a", "a @ b",
        "print(a)", "column(a)", "column(5)", "column('a', 'b')", "column(name='a')", "a == 1e999",
        "a == 99999999999999999999", "__import__('os').system('true')", "().__class__", "await a", "yield", "\0a",
        "not " * 10_000 + "a", "(" * 500 + "a" + ")" * 500, "a" + " + a" * 150, "a" + " + a" * 10_000,
        "-" * 5_000 + "a", "a == 1" + "0" * 9_000,
        5, None.__class__, print, int, lambda: 1, lambda *a: a, lambda **a: a,
    ],
    ids=lambda rule: "function" if callable(rule) else repr(rule)[:30],  # Not its address.
)  # fmt: skip
def test_other_input_is_refused(rule: Any) -> None:
    with pytest.raises(ConfigError, match="where") as caught:
        data.csv(__file__, SCHEMA, where=rule)
    assert caught.value.fields == {"field": "where"}
    assert len(caught.value.message) < 700


def test_columns_of_a_rule_must_be_there(files: Path) -> None:
    for form, make in READERS.items():
        with pytest.raises(DataError, match=r"no column 'nope' \(for 'where or split'\)"):
            list(make(files / f"*.{form}", SCHEMA, where="nope > 1"))
        with pytest.raises(DataError, match=r"no column 'stars' \(for 'click'\)"):
            list(make(files / f"*.{form}", SCHEMA, labels={"click": "stars > 1"}))


# --- split ------------------------------------------------------------------------------------------------------------

SPLITS = {
    "random": {"by": "random", "test": 0.3, "seed": 3},
    "hash": {"by": "hash", "column": "user", "test": 0.3},
    "hash of texts": {"by": "hash", "column": "country", "test": 0.5},
    "time": {"by": "time", "column": "time", "at": "2024-05-08"},
    "time by number": {"by": "time", "column": "row", "at": 150},
}


@both
@pytest.mark.parametrize("split", SPLITS)
def test_parts_are_disjoint_complete_and_independent_of_reading(files: Path, form: str, split: str) -> None:
    def part(name: str, size: int = 32, **options: Any) -> data.StreamReader:
        return READERS[form](files / f"*.{form}", SCHEMA, size, split={"part": name, **SPLITS[split]}, **options)

    train, test = rows_of(part("train")), rows_of(part("test"))
    assert sorted(train + test) == list(range(ROWS))
    assert train
    assert test
    other = "csv" if form == "parquet" else "parquet"
    assert train == rows_of(READERS[other](files / f"*.{other}", SCHEMA, split={"part": "train", **SPLITS[split]}))
    for size in (1, 7, 1_000):
        assert rows_of(part("train", size)) == train
    for start in (1, 2):
        assert rows_of(part("train"), start=start) == train[32 * start :]
    shards = [list(part("train", 8, shard=(i, 3))) for i in range(3)]
    merged = [b for group in itertools.zip_longest(*shards) for b in group if b is not None]
    assert [int(x) for b in merged for x in b.id_features["row"].values] == train
    shuffled = part("train", shuffle_rows=50)
    assert sorted(rows_of(shuffled, epoch=1)) == train != rows_of(shuffled, epoch=1)
    assert rows_of(shuffled, epoch=1)[64:] == rows_of(shuffled, epoch=1, start=2)


@both
def test_a_filter_does_not_change_the_part_of_a_row(files: Path, form: str) -> None:
    split = Split("test", seed=5)
    whole = rows_of(READERS[form](files / f"*.{form}", SCHEMA, split=split))
    filtered = rows_of(READERS[form](files / f"*.{form}", SCHEMA, split=split, where="rating > 2"))
    assert filtered == [row for row in whole if row % 6 > 2]


def test_hash_keeps_rows_of_a_value_together_time_is_a_threshold(files: Path) -> None:
    def read(part: str, name: str) -> list[int]:
        return rows_of(data.parquet(files / "*.parquet", SCHEMA, split={"part": part, **SPLITS[name]}))

    def users(part: str) -> set[int]:
        return {-1 if row % 50 == 49 else row % 17 for row in read(part, "hash")}

    assert users("train") | users("test") == {-1, *range(17)}
    assert not users("train") & users("test") - {-1, 0}  # A missing value goes with id 0.
    assert read("test", "time") == list(range(7 * 24, ROWS))
    assert read("test", "time by number") == list(range(150, ROWS))


def test_the_share_and_the_seed_of_a_random_split(tmp_path: Path) -> None:
    write(tmp_path, [pa.table({"row": range(6_000), "rating": [0.0] * 6_000, "click": [0] * 6_000})])
    one, two = (
        set(rows_of(data.parquet(tmp_path / "0.parquet", SCHEMA, split=Split("test", test=0.1, seed=seed))))
        for seed in (1, 2)
    )
    assert 540 < len(one) < 660
    assert 540 < len(two) < 660
    assert 36 < len(one & two) < 84  # Independent draws.


@both
@pytest.mark.parametrize(
    ("change", "split", "message", "row"),
    [
        ({"time": [None] * 3}, {"at": "2024-05-02"}, "missing value at row 20", 20),
        ({"time": ["5/1/2024"] * 3}, {"at": "2024-05-02"}, "has '5/1/2024' at row 20", 20),
        ({"time": ["17"] * 3}, {"at": "2024-05-02"}, "'17' at row 20|holds numbers", None),
    ],
)
def test_times_that_cannot_be_split(
    tmp_path: Path, form: str, change: dict[str, Any], split: dict[str, Any], message: str, row: int | None
) -> None:
    times = ["2024-05-01"] * 20 + change["time"]
    if "17" in times:
        times = ["17"] * 23
    whole = pa.table({"row": range(23), "rating": [0.0] * 23, "click": [0] * 23, "time": times})
    write(tmp_path, [whole])
    reader = READERS[form](
        tmp_path / f"0.{form}", SCHEMA, split=Split("train", by="time", column="time", at=split["at"])
    )
    with pytest.raises(DataError, match=message) as caught:
        list(reader)
    fields = caught.value.fields
    assert (fields["column"], str(fields["path"])[-5:]) == ("time", f"0.{form}"[-5:])
    assert fields.get("row") == row


@pytest.mark.parametrize(
    ("split", "field"),
    [
        ({"part": "dev"}, "part"),
        ({"part": "test", "by": "user"}, "by"),
        ({"part": "test", "test": 1.5}, "test"),
        ({"part": "test", "test": True}, "test"),
        ({"part": "test", "seed": -1}, "seed"),
        ({"part": "test", "column": "user"}, "column"),
        ({"part": "test", "by": "hash"}, "column"),
        ({"part": "test", "by": "time", "column": "t"}, "at"),
        ({"part": "test", "by": "hash", "column": "t", "at": 3}, "at"),
        ({"part": "test", "by": "time", "column": "t", "at": datetime.date(2024, 5, 1)}, "at"),
        ({"part": "test", "size": 0.2}, "split"),
        ({}, "split"),
    ],
)
def test_splits_that_do_not_fit(split: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        data.csv(__file__, SCHEMA, split=split)
    if field != "split":
        with pytest.raises(ConfigError, match=field):
            Split(**split)


def test_a_selection_of_no_rows_is_an_error(files: Path) -> None:
    for form, make in READERS.items():
        with pytest.raises(DataError, match="`where` and `split` select no rows"):
            list(make(files / f"*.{form}", SCHEMA, where="row > 1000"))


# --- labels, fill, null_values ----------------------------------------------------------------------------------------


@both
def test_label_rules(files: Path, form: str) -> None:
    two = Schema(SCHEMA.id_features, SCHEMA.dense_features, labels=["like", "share"])
    rules = {"like": "rating >= 4 and country != 'DE' or row == 2", "share": "rating / 5"}
    reader = READERS[form](files / f"*.{form}", two, 32, labels=rules, where="country == 'BR'", split=Split("train"))
    for batch in reader:
        rows = batch.id_features["row"].values
        assert (rows % 4 == 0).all()
        assert batch.labels[:, 0].tolist() == [float(row % 6 >= 4 or row == 2) for row in rows]
        assert np.allclose(batch.labels[:, 1], rows % 6 / 5)


@both
def test_a_label_by_rule_may_be_missing_or_wrong(files: Path, form: str) -> None:
    def read(rule: Any, **options: Any) -> list[Any]:
        return list(READERS[form](files / f"*.{form}", SCHEMA, 32, labels={"click": rule}, **options))

    with pytest.raises(DataError, match=r"Column 'click' has a missing value at row 49.*fill=\{'click': 0.0\}"):
        read("user > 3")
    filled = np.concatenate([batch.labels[:, 0] for batch in read("user > 3", fill={"click": 1})])
    assert filled[49] == 1.0
    assert filled[48] == float(48 % 17 > 3)
    with pytest.raises(DataError, match=r"Label 'click' is 2\.0 at row 2, outside"):
        read("row")
    assert len(read("row > 5", require_labels=False)) > 0
    assert read("stars > 5", require_labels=False)[0].labels.shape == (32, 0)


@pytest.mark.parametrize(
    "options",
    [
        {"labels": {"rating": "row > 1"}},
        {"labels": {"click": "row > 1"}, "rename": {"click": "x"}},
        {"labels": {"click": "import os"}},
        {"fill": {"row": 0}},
        {"rename": {"x": "y"}},
        {"day_unit": "week"},
    ],
    ids=str,
)
def test_options_that_do_not_fit_the_schema(options: dict[str, Any]) -> None:
    for make in READERS.values():
        with pytest.raises(ConfigError):
            make(__file__, SCHEMA, **options)


def test_fill_and_null_values(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("row,rating,click\n1,NA,1\n?,,0\n3,?,\n")
    missing = {"null_values": ["?"], "fill": {"rating": -1, "click": 0.5}}
    (batch,) = data.csv(tmp_path / "a.csv", SCHEMA, **missing)
    assert batch.dense[:, 0].tolist() == [-1, -1, -1]
    assert batch.labels[:, 0].tolist() == [1, 0, 0.5]
    assert batch.id_features["row"].values.tolist() == [1, 3]
    pq.write_table(
        pa.table({"row": [1, 2, 3], "rating": [float("nan"), None, 2.0], "click": [1, 0, 0]}), tmp_path / "a.parquet"
    )
    (batch,) = data.parquet(tmp_path / "a.parquet", SCHEMA, fill={"rating": 7})
    assert batch.dense[:, 0].tolist() == [7, 7, 2]


@both
def test_errors_after_a_filter_name_the_row_of_the_file(tmp_path: Path, form: str) -> None:
    """In the second file, a later piece, and behind rows that are left out."""
    ratings = pa.array(["oops" if i == 71 else "1.5" for i in range(80)])
    write(tmp_path, [table(120), table(80, first=120).set_column(1, "rating", ratings)])
    for options in ({}, {"where": "row not in (185, 188)"}, {"split": Split("train", seed=1)}):
        reader = READERS[form](tmp_path / f"*.{form}", SCHEMA, 32, **options)
        with pytest.raises(DataError, match=r"1\.(csv|parquet): Column 'rating' has 'oops' at row 71") as caught:
            list(reader)
        fields = caught.value.fields
        assert (fields["row"], fields["column"], fields["value"]) == (71, "rating", "oops")


# --- configuration ----------------------------------------------------------------------------------------------------

TOML = """
[data]
kind = "{form}"
path = "{path}"
[data.options]
where = "rating > 2 and country is not None"
split = {{ part = "train", by = "hash", column = "user", test = 0.3, seed = 4 }}
labels = {{ click = "rating >= 4" }}
fill = {{ rating = 0.0 }}
[schema]
id_features = [{{ name = "row", dim = 2, kind = "number" }}]
dense_features = ["rating"]
labels = ["click"]
"""


@both
def test_configurations_reach_the_readers(files: Path, form: str) -> None:
    text = TOML.format(form=form, path=files / f"*.{form}")
    config = convert(tomllib.loads(text), RunConfig, "config")
    reader = config.reader()
    split = Split("train", by="hash", column="user", test=0.3, seed=4)
    expected = READERS[form](files / f"*.{form}", SCHEMA, where="rating > 2 and country is not None", split=split)
    assert rows_of(reader) == rows_of(expected)
    assert {float(x) for batch in reader for x in batch.labels[:, 0]} == {0.0, 1.0}
    again = convert(config.dump(), RunConfig, "config")
    assert rows_of(again.reader()) == rows_of(reader)
    for wrong, message in [('part = "train"', "part"), ("seed = 4", "seed"), ("rating > 2", "where")]:
        broken = text.replace(wrong, {"part": 'part = "dev"', "seed": 'seed = "x"', "where": "rating >"}[message])
        with pytest.raises(ConfigError, match=message):
            convert(tomllib.loads(broken), RunConfig, "config").reader()


def test_texts_are_not_ordered_where_numbers_or_times_are_meant(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("row,rating,a,b,t\n0,1,9,10,31/01/2024\n1,1,10,9,02/12/2024\n")
    for rule in ("a >= b", 'a < "10"'):
        with pytest.raises(DataError, match="compared by order"):
            list(data.csv(tmp_path / "a.csv", SCHEMA, where=rule, require_labels=False))
    for where, kept in (("a + 0 >= b + 0", [1]), ("a > b + 0", [1]), ("a != b", [0, 1])):
        assert rows_of(data.csv(tmp_path / "a.csv", SCHEMA, where=where, require_labels=False)) == kept
    with pytest.raises(DataError, match=r"'t' has '31/01/2024' at row 0; it takes whole numbers, or dates"):
        list(data.csv(tmp_path / "a.csv", SCHEMA, where='t >= "2024-12-01"', require_labels=False))


def test_dates_with_points_are_ordered_as_dates(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("row,rating,t\n0,1,31.01.2024\n1,1,02.12.2024\n")
    assert rows_of(data.csv(tmp_path / "a.csv", SCHEMA, where='t >= "2024-12-01"', require_labels=False)) == [1]


def test_times_of_a_csv_are_ordered_as_times(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("row,rating,t\n0,1,2024-05-01T09:00:00\n1,1,2024-05-01 10:30:00\n2,1,2024-05-02\n")
    assert rows_of(data.csv(tmp_path / "a.csv", SCHEMA, where='t >= "2024-05-01 10:00:00"', require_labels=False)) == [
        1,
        2,
    ]


def test_hive_keys_are_decoded_and_stay_texts_for_the_kind_text(tmp_path: Path) -> None:
    path = tmp_path / "city=Sao%20Paulo" / "code=007" / "a.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"click": [0, 1]}), path)
    texts = Schema([IdFeature("city", dim=2), IdFeature("code", dim=2, kind="text")], labels=["click"])
    (found,) = list(data.parquet(path, texts))
    expected = Batch.from_columns(texts, {"city": ["Sao Paulo"] * 2, "code": ["007"] * 2, "click": [0, 1]})
    for name in ("city", "code"):
        assert found.id_features[name].values.tolist() == expected.id_features[name].values.tolist()


def test_errors_of_rules_name_columns_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("row,cost,rating,click\n0,1,oops,0\n")
    with pytest.raises(DataError) as caught:
        list(data.csv(tmp_path / "a.csv", SCHEMA, rename={"rating": "cost"}, where="rating > 3"))
    assert caught.value.fields["column"] == "rating"
    assert "In the file" not in caught.value.message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"null_values": "NA"}, "null_values = 'NA' is one text"),
        ({"column_names": "row,click"}, "column_names = 'row,click' is one text"),
        ({"lists": {"usr": "|"}}, "Invalid key 'usr' in lists"),
        ({"split": "train"}, r"split = 'train': give Split"),
    ],
)
def test_arguments_of_a_wrong_kind(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    (tmp_path / "a.csv").write_text("row,rating,click\n")
    with pytest.raises(ConfigError, match=message):
        data.csv(tmp_path / "a.csv", SCHEMA, **options)
