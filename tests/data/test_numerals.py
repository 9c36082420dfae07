"""Numbers with a decimal comma, and dates with points, in delimited text."""

import datetime

import pyarrow as pa
import pytest

import persia
from persia.data.numerals import Numerals
from persia.data.values import times_of_text
from persia.errors import ConfigError, DataError


def test_only_whole_numbers_are_rewritten():
    column = pa.array(["1.234,50", "-5", " 3,5 ", "12.5", "1,2,3", "1.23,4", "k.A.", "", None, ",5"])
    assert Numerals(",", ".").normalized(column).to_pylist() == [
        "1234.50", "-5", " 3.5 ", "12.5", "1,2,3", "1.23,4", "k.A.", "", None, ",5",
    ]  # fmt: skip
    assert Numerals(",").normalized(pa.array([b"1.234,5", b"0,5"])).to_pylist() == [b"1.234,5", b"0.5"]
    assert Numerals(".", " ").normalized(pa.array(["1 234.5", "1 23"])).to_pylist() == ["1234.5", "1 23"]
    french = ["1 234,5", "1\u00a0234,5", "12\u202f345\u202f678", "12 34"]
    plain = ["1234.5", "1234.5", "12345678", "12 34"]
    assert Numerals(",", " ").normalized(pa.array(french)).to_pylist() == plain
    column = pa.array([text.encode() for text in french])
    assert Numerals(",", " ").normalized(column).to_pylist() == [text.encode() for text in plain]
    numbers = pa.array([1, 2])
    assert Numerals(",").normalized(numbers) is numbers


def test_reader_with_decimal_commas(tmp_path):
    rows = "".join(f"{i},5;1.000,5;a{i % 2};0,{i % 3}\n" for i in range(6))
    (tmp_path / "data.csv").write_text("price;weight;item;stars\n" + rows)
    schema = persia.Schema(
        [persia.IdFeature("item", dim=2)], dense_features=["price", "weight"], labels=["liked", "stars"]
    )
    reader = persia.data.csv(
        tmp_path / "data.csv",
        schema,
        delimiter=";",
        decimal=",",
        thousands=".",
        labels={"liked": "stars >= 0.1"},
        where="price > 1",
    )
    (batch,) = reader
    assert batch.dense.tolist() == [[i + 0.5, 1000.5] for i in range(1, 6)]
    assert batch.labels.tolist() == [[float(i % 3 >= 1), pytest.approx(i % 3 / 10)] for i in range(1, 6)]
    with pytest.raises(DataError, match="a decimal comma"):
        list(persia.data.csv(tmp_path / "data.csv", schema, delimiter=";", labels={"liked": "item == 'a1'"}))


@pytest.mark.parametrize(
    ("decimal", "thousands", "message"),
    [(";", "", "Invalid decimal = ';'"), (",", "x", "Invalid thousands = 'x'"), (",", ",", "are both ','")],
)
def test_invalid_separators(tmp_path, decimal, thousands, message):
    schema = persia.Schema([persia.IdFeature("item", dim=2)])
    with pytest.raises(ConfigError, match=message):
        persia.data.csv(tmp_path, schema, decimal=decimal, thousands=thousands)


def test_dates_with_the_day_first():
    times = times_of_text("at", pa.array(["1.5.2024", " 31.12.2023, 23:59:10", "01.02.2024 9:05", "", None]))
    assert times.to_pylist() == [
        datetime.datetime(2024, 5, 1),
        datetime.datetime(2023, 12, 31, 23, 59, 10),
        datetime.datetime(2024, 2, 1, 9, 5),
        None,
        None,
    ]
    for wrong in ("31.02.2024", "05/31/2024", "1.5.24"):
        with pytest.raises(DataError, match=f"has '{wrong}' at row 1"):
            times_of_text("at", pa.array(["01.02.2024", wrong]))
