"""Readers of public data sets: with and without header line and labels, in all separators, filtered and split."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from persia import data
from persia.batching.batch import Batch
from persia.errors import DataError

Make = Callable[..., data.StreamReader]


def only(reader: data.StreamReader) -> Batch:
    (batch,) = reader
    batch.validate(reader.schema, require_labels=False)
    return batch


def criteo(rows: int) -> list[list[str]]:
    return [[str(i % 2), *[str(i)] * 13, *[f"{i:08x}"] * 26] for i in range(rows)]


CRITEO = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
AVAZU = ["id", "click", "hour", "C1", "banner_pos"]
AVAZU += [f"{place}_{part}" for place in ("site", "app") for part in ("id", "domain", "category")]
AVAZU += [f"device_{part}" for part in ("id", "ip", "model", "type", "conn_type")]
AVAZU += [f"C{i}" for i in range(14, 22)]
ADULT = ["age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation", "relationship"]
ADULT += ["race", "sex", "capital_gain", "capital_loss", "hours_per_week", "native_country", "income"]
PERSON = "39, State-gov, 77516, Bachelors, 13, Never-married, ?, Unmarried, White, Male, 2174, 0, 40, Cuba, <=50K"


def avazu(rows: int) -> list[list[str]]:
    return [[str(i), str(i % 2), f"1410210{i}", *[str(i)] * 21] for i in range(rows)]


def adult(rows: int) -> list[list[str]]:
    return [[str(20 + i), *PERSON.split(",")[1:14], [" <=50K", " >50K"][i % 2]] for i in range(rows)]


FORMATS: dict[str, tuple[Make, str, list[str], Callable[[int], list[list[str]]], str]] = {
    "criteo": (data.criteo, "\t", CRITEO, criteo, "label"),
    "avazu": (data.avazu, ",", AVAZU, avazu, "click"),
    "adult": (data.adult, ",", ADULT, adult, "income"),
}
named = pytest.mark.parametrize("name", FORMATS)


def write(path: Path, name: str, rows: int, *, header: bool, labels: bool) -> Path:
    _, delimiter, names, make, label = FORMATS[name]
    lines = [*([names] if header else []), *make(rows)]
    at = names.index(label)
    kept = [line if labels else line[:at] + line[at + 1 :] for line in lines]
    path.write_text("".join(delimiter.join(line) + "\n" for line in kept))
    return path


@named
@pytest.mark.parametrize("header", [True, False])
def test_with_and_without_header_line_and_labels(tmp_path: Path, name: str, header: bool) -> None:
    make = FORMATS[name][0]
    whole = only(make(write(tmp_path / "a.txt", name, 6, header=header, labels=True)))
    assert whole.labels[:, 0].tolist() == [0, 1, 0, 1, 0, 1]
    path = write(tmp_path / "b.txt", name, 6, header=header, labels=False)
    bare = only(make(path, require_labels=False))
    assert bare.labels.shape == (6, 0)
    assert (bare.dense == whole.dense).all()
    for feature, column in whole.id_features.items():
        assert bare.id_features[feature].values.tolist() == column.values.tolist()
    assert only(make(tmp_path / "a.txt", require_labels=False)).labels.shape == (6, 1)
    with pytest.raises(DataError, match=r"no column '\w+'; it has .* set require_labels=False") as caught:
        list(make(path))
    assert caught.value.fields == {"path": str(path), "column": FORMATS[name][4]}


@named
def test_other_formats_are_refused(tmp_path: Path, name: str) -> None:
    make, delimiter, names, rows, _ = FORMATS[name]
    count = len(names)
    for text in (delimiter.join(rows(1)[0][2:]), rows(1)[0][0], "|".join(rows(1)[0])):
        (tmp_path / "a.txt").write_text(text + "\n")
        with pytest.raises(DataError, match=rf"the first line has \d+ fields, the format {count} or {count - 1}"):
            list(make(tmp_path / "a.txt"))
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="is empty: there are no rows"):
        list(make(tmp_path / "a.txt"))
    header = [*names[:3], *names[3:].copy()]
    header[names.index("C2" if "C2" in names else names[-2])] = names[1]
    (tmp_path / "a.txt").write_text(delimiter.join(header) + "\n" + delimiter.join(rows(1)[0]) + "\n")
    with pytest.raises(DataError, match=r"has 2 columns named|no column"):
        list(make(tmp_path / "a.txt"))


@pytest.mark.parametrize(
    ("name", "where", "split", "kept"),
    [
        ("criteo", "I1 > 2 and C3 != '00000004'", {"by": "time", "column": "I2", "at": 4}, {"train": [3], "test": [5]}),
        ("avazu", "hour >= 14102102", {"by": "time", "column": "C1", "at": 4}, {"train": [2, 3], "test": [4, 5]}),
    ],
)
def test_filtered_and_split(
    tmp_path: Path, name: str, where: str, split: dict[str, Any], kept: dict[str, list[int]]
) -> None:
    path = write(tmp_path / "a.txt", name, 6, header=False, labels=True)
    everything = only(FORMATS[name][0](path)).id_features["C1"].values
    for part, rows in kept.items():
        batch = only(FORMATS[name][0](path, where=where, split={"part": part, **split}))
        assert batch.id_features["C1"].values.tolist() == everything[rows].tolist()
    with pytest.raises(DataError, match="no column 'nope'"):
        list(FORMATS[name][0](path, where="nope > 1"))


def test_adult_filtered_with_comments(tmp_path: Path) -> None:
    path = write(tmp_path / "a.data", "adult", 4, header=False, labels=True)
    path.write_text("|1x3 Cross validator\n" + path.read_text() + "|\n")
    assert only(data.adult(path, where="age >= 21 and income == ' >50K'")).labels[:, 0].tolist() == [1, 1]
    path.write_text(path.read_text() + "|\n1,2\n")
    with pytest.raises(DataError, match="at row 4 has 2 fields instead of 15"):
        list(data.adult(path))
    path.write_bytes(PERSON.replace("Cuba", "C\xfcba").encode("latin-1") + b"\n")
    with pytest.raises(DataError, match=r"a\.data: the rows from 0 on cannot be converted"):
        list(data.adult(path))


@pytest.mark.parametrize("hour", ["2014-10-21", "14102199", "14102107.5", "", "NA", "-1", "14992107"])
def test_hours_of_avazu(tmp_path: Path, hour: str) -> None:
    path = write(tmp_path / "a.txt", "avazu", 3, header=False, labels=True)
    path.write_text(path.read_text().replace("14102102", hour))
    with pytest.raises(DataError, match=r"Column 'hour' has .* at row 2") as caught:
        list(data.avazu(path))
    assert (caught.value.fields["column"], caught.value.fields["row"]) == ("hour", 2)


SEPARATORS = [",", "\t", "::"]


@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("separator", SEPARATORS)
def test_movielens(tmp_path: Path, separator: str, header: bool) -> None:
    rows = [["userId", "movieId", "rating", "timestamp"]] if header else []
    rows += [["1", "31", "2.5", "86400"], ["7", "1029", "4.0", "172800"], ["8", "31", "5", "172800"]]
    path = tmp_path / "ratings of May.bin"
    path.write_text("".join(separator.join(row) + "\n" for row in rows))
    batch = only(data.movielens(path))
    assert batch.id_features["user"].values.tolist() == [1, 7, 8]
    assert batch.id_features["movie"].values.tolist() == [31, 1029, 31]
    assert batch.labels[:, 0].tolist() == [0, 1, 1]
    assert batch.day is not None
    assert batch.day.tolist() == [1, 2, 2]
    by_time = {"by": "time", "column": "timestamp", "at": 100_000}
    assert only(data.movielens(path, split={"part": "train", **by_time})).id_features["user"].values.tolist() == [1]
    test = only(data.movielens(path, where="movieId == 31", split={"part": "test", **by_time}))
    assert test.id_features["user"].values.tolist() == [8]
    path.write_text(path.read_text() + separator.join(["9", "3", "good", "1"]) + "\n")
    with pytest.raises(DataError, match="Column 'rating' has 'good' at row 3"):
        list(data.movielens(path))


@pytest.mark.parametrize("separator", SEPARATORS)
def test_movielens_without_ratings(tmp_path: Path, separator: str) -> None:
    rows = [["userId", "movieId", "timestamp"], ["1", "31", "86400"]]
    path = tmp_path / "pairs.csv"
    path.write_text("".join(separator.join(row) + "\n" for row in rows))
    assert only(data.movielens(path, require_labels=False)).labels.shape == (1, 0)
    with pytest.raises(DataError, match=r"no column 'rating'.*require_labels=False"):
        list(data.movielens(path))


def test_movielens_of_other_files(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1;2;3;4\n")
    with pytest.raises(DataError, match=re.escape("'1;2;3;4\\n' is not a rating")):
        data.movielens(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_text("movieId,title,genres\n1,Toy Story (1995),Comedy\n")
    with pytest.raises(DataError, match="no column 'userId'"):
        list(data.movielens(tmp_path / "a.csv"))
    (tmp_path / "a.csv").write_text("\n")
    with pytest.raises(DataError, match="is empty: there are no rows"):
        list(data.movielens(tmp_path / "a.csv"))
    (tmp_path / "b.csv").write_text("1\t2\t5\t86400\n")  # The first file with a line decides on the separator.
    assert only(data.movielens(str(tmp_path / "*.csv"))).labels.tolist() == [[1]]


def test_globo(tmp_path: Path) -> None:
    contexts = {name: [1, 2] for name in ("environment", "device_group", "os", "country", "region", "referrer")}
    columns = {"timestamp_ms": [1, 2], "user_id": [5, 6], "article_id": [7, 8], "history": [[], [7, 9]], **contexts}
    pq.write_table(pa.table(columns), tmp_path / "day=04.parquet")
    assert only(data.globo(tmp_path, require_labels=False)).labels.shape == (2, 0)
    with pytest.raises(DataError, match=r"no column 'label'.*require_labels=False"):
        list(data.globo(tmp_path))
    pq.write_table(pa.table({"label": [1, 0], **columns}), tmp_path / "day=04.parquet")
    early = {"part": "train", "by": "time", "column": "timestamp_ms", "at": 2}
    assert only(data.globo(tmp_path, split=early)).id_features["user_id"].values.tolist() == [5]
    batch = only(data.globo(tmp_path, where="article_id > 7 and day == 4"))
    assert batch.id_features["user_id"].values.tolist() == [6]
    assert batch.labels.tolist() == [[0]]
