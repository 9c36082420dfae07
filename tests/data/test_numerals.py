"""Numbers with a decimal comma, amounts with a unit, and dates with points, in texts of files, frames and requests."""

import datetime
import json
import re
import tempfile
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import persia
from persia.batching.input_rules import apply_rules
from persia.batching.numerals import Numerals
from persia.data.column_values import times_of_text
from persia.data.from_csv import CsvSource
from persia.errors import ConfigError, DataError
from persia.schema import Buckets, InputRules, WrittenNumbers
from support.examples import examples


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


AMOUNTS = {
    "$": (Numerals(".", ","), {"$12.30": "12.30", "$1,234.50": "1234.50", "-$5": "-5", "$-5": "-5", "5": "5"}),
    "€": (Numerals(",", "."), {"12,30 €": "12.30", "1.234,50\u00a0€": "1234.50", "-0,5€": "-0.5", "€ 7": "7"}),
    "%": (Numerals(), {"17 %": "17", "0.5%": "0.5", "+3 %": "+3"}),
    "CHF": (Numerals(".", "'"), {"CHF 1'234.50": "1234.50", "12 CHF": "12"}),
    "kr.": (Numerals(",", " "), {"1\u202f234,5 kr.": "1234.5", "1 234 kr.": "1234"}),
}


@pytest.mark.parametrize("unit", AMOUNTS)
def test_units_are_left_out(unit):
    numerals, texts = AMOUNTS[unit]
    others = ["$$5", "5 $ 6", "ten $", "1,2,3 €", "", None]
    column = pa.array([*texts, *others])
    assert numerals.normalized(column, unit).to_pylist() == [*texts.values(), *others]
    column = pa.array([None if text is None else text.encode() for text in [*texts, *others]])
    read = [None if text is None else text.decode() for text in numerals.normalized(column, unit).to_pylist()]
    assert read == [*texts.values(), *others]


def test_reader_of_amounts(tmp_path):
    file = tmp_path / "data.csv"
    file.write_text('item,price,off,stars\na,"$1,234.50",17 %,5 pt\nb,$12.30,0.5%,\nb,7,1 %,3 pt\n')
    schema = persia.Schema([persia.IdFeature("item", dim=2)], dense_features=["cost", "off"], labels=["liked"])
    options = {
        "thousands": ",",
        "rename": {"cost": "price"},
        "labels": {"liked": "stars > 4"},
        "fill": {"liked": 0.0},
        "units": {"cost": "$", "off": "%", "stars": "pt"},
    }
    (batch,) = persia.data.csv(file, schema, **options)
    assert batch.dense.tolist() == [[1234.5, 17.0], [pytest.approx(12.3), 0.5], [7.0, 1.0]]
    assert batch.labels[:, 0].tolist() == [1, 0, 0]
    with pytest.raises(DataError, match=r"'\$12.30' at row 1 \(an amount in \$\? The reader's option units takes it"):
        list(persia.data.csv(file, schema, **{**options, "where": "item == 'b'", "units": {"off": "%", "stars": "pt"}}))
    with pytest.raises(ConfigError, match="Invalid key 'item' in units; expected a dense feature"):
        persia.data.csv(file, schema, units={"item": "$"})
    with pytest.raises(ConfigError, match="units has '5' for 'off'"):
        persia.data.csv(file, schema, units={"off": "5"})


ORDERS = {
    "item": ["a", "b", "c", "d", "e"],
    "price": ["1.234,50 €", "12,30 €", "k.A.", "7", "-0,5€"],
    "off": ["17 %", "0,5%", "1 %", "k.A.", "3 %"],
    "stars": ["5 pt", "4,5 pt", "3 pt", "5 pt", "1 pt"],
}
ORDERED = persia.Schema(
    [persia.IdFeature("item", dim=2), persia.IdFeature("band", dim=2, bucketize=Buckets("cost", edges=[10]))],
    [persia.DenseFeature("cost", fill="mean", scale="standard"), persia.DenseFeature("off", fill=0)],
    ["liked"],
)
OPTIONS = {
    "decimal": ",",
    "thousands": ".",
    "units": {"cost": "€", "off": "%", "stars": "pt"},
    "null_values": ["k.A."],
    "rename": {"cost": "price"},
    "labels": {"liked": "stars > 4"},
    "where": "price is None or price > 0",
}


def readers_of(folder, columns, schema, **options):
    """Returns a reader of each kind, with the same rows."""
    table = pa.table(columns)
    lines = "\n".join(";".join(row) for row in [tuple(columns), *zip(*columns.values(), strict=True)])
    (folder / "rows.csv").write_text(lines + "\n", encoding="utf-8")
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))
    pq.write_table(table, folder / "rows.parquet")
    large = pa.table({name: pa.array(texts, pa.large_string()) for name, texts in columns.items()})
    codes = pa.table({name: pa.array(texts).dictionary_encode() for name, texts in columns.items()})
    raw = pa.table({name: pa.array([text.encode() for text in texts]) for name, texts in columns.items()})
    large_raw = raw.cast(pa.schema([(name, pa.large_binary()) for name in columns]))
    frames = [pd.DataFrame(columns), pl.DataFrame(columns), table, large, codes, raw, large_raw]
    return [
        persia.data.csv(folder / "rows.csv", schema, delimiter=";", **options),
        persia.data.jsonl(folder / "rows.jsonl", schema, **options),
        persia.data.parquet(folder / "rows.parquet", schema, **options),
        *(
            persia.data.arrow(frame, schema, **options)
            for frame in (*frames, pd.DataFrame(columns), pl.DataFrame(columns))
        ),
    ]


def test_amounts_are_the_same_in_all_formats(tmp_path):
    found = []
    for reader in readers_of(tmp_path, ORDERS, ORDERED, **OPTIONS):
        fitted = persia.fit_features(ORDERED, reader)
        assert fitted.dense[0].fitted.mean == pytest.approx((1234.5 + 12.3 + 7) / 3)
        (batch,) = reader.with_schema(fitted)
        assert batch.dense[:, 1].tolist() == [17.0, 0.5, 1.0, 0.0]
        assert batch.labels[:, 0].tolist() == [1, 1, 0, 1]
        rules = reader.input_rules
        assert rules.numbers["cost"] == WrittenNumbers(decimal=",", thousands=".", unit="€")
        assert rules.null_values == ("k.A.",)
        raw = apply_rules(rules, {"item": ["a"], "cost": ["1.234,50 €"], "off": ["k.A."], "liked": [1]})
        assert persia.Batch.from_columns(fitted, raw).dense[0].tolist() == [batch.dense[0, 0], 0]
        found.append((fitted, batch.dense.tolist(), batch.id_features["band"].values.tolist(), rules))
    assert all(each == found[0] for each in found[1:])


def test_kept_columns_are_those_of_the_source(tmp_path):
    for reader in readers_of(tmp_path, ORDERS, ORDERED, **OPTIONS):
        (columns,) = reader.columns(["price"])
        kept = columns["price"].cast(pa.string()).to_pylist()
        assert kept == ["1.234,50 €", "12,30 €", None if isinstance(reader.source, CsvSource) else "k.A.", "7"]


def test_a_fraction_among_percents_is_refused(tmp_path):
    schema = persia.Schema([persia.IdFeature("item", dim=2)], dense_features=["off"])
    columns = {"item": ["a", "b"], "off": ["17 %", "0.17"], "label": ["1", "0"]}
    for reader in readers_of(tmp_path, columns, schema, units={"off": "%"}):
        with pytest.raises(DataError, match=r": Column 'off' has '0\.17' at row 1, without the %") as raised:
            list(reader)
        assert raised.value.fields["column"] == "off"


def test_what_is_no_amount_is_refused_with_its_row_and_columns_of_numbers_stay(tmp_path):
    schema = persia.Schema([persia.IdFeature("item", dim=2)], dense_features=["price"], labels=[])
    columns = {"item": ["a", "b"], "price": ["$5", "5 £"]}
    for reader in readers_of(tmp_path, columns, schema, units={"price": "$"}):
        with pytest.raises(DataError, match=r"Column 'price' has '5 £' at row 1 \(an amount in £\?"):
            list(reader)
    for numbers in (pa.array([0.17, 2.0]), pa.array([1, 2])):
        table = pa.table({"item": ["a", "b"], "price": numbers})
        (batch,) = persia.data.arrow(table, schema, units={"price": "%"}, decimal=",", thousands=".")
        assert batch.dense[:, 0].tolist() == [np.float32(x) for x in numbers.to_pylist()]
    for make in (persia.data.jsonl, persia.data.parquet):
        with pytest.raises(ConfigError, match="Invalid key 'item' in units; expected a dense feature"):
            make(tmp_path / "rows.*", schema, units={"item": "$"})
    with pytest.raises(ConfigError, match=r"null_values = '\?' is one text; give a list"):
        persia.data.arrow(pa.table(columns), schema, null_values="?")


def test_numbers_of_json_among_texts_are_numbers(tmp_path):
    schema = persia.Schema([persia.IdFeature("item", dim=2)], dense_features=["price"], labels=[])
    values = [1.234, "1.234,5 €", 1234, "7", 1e22, -0.5, True]
    lines = "".join(json.dumps({"item": 1, "price": value}) + "\n" for value in values)
    (tmp_path / "rows.jsonl").write_text(lines)
    (batch,) = persia.data.jsonl(tmp_path / "rows.jsonl", schema, decimal=",", thousands=".", units={"price": "€"})
    wanted = [1.234, 1234.5, 1234, 7, 1e22, -0.5, 1]
    assert batch.dense[:, 0].tolist() == [np.float32(number) for number in wanted]


WRITINGS = [
    WrittenNumbers(unit="$", thousands=","),
    WrittenNumbers(decimal=",", thousands=".", unit="€"),
    WrittenNumbers(decimal=",", thousands=" "),
    WrittenNumbers(unit="%"),
    WrittenNumbers(unit="kr.", decimal=","),
]


def written_text(number, written, before):
    """Writes a number with two digits as a file has it: 1.234,50 €."""
    whole, _, fraction = f"{abs(number):.2f}".partition(".")
    while written.thousands and (match := re.match(r"(\d+)(\d{3})(?!\d)", whole)):
        whole = f"{match[1]}{written.thousands}{match[2]}{whole[match.end() :]}"
    sign = "-" if number < 0 else ""
    text = f"{whole}{written.decimal}{fraction}"
    return f"{sign}{written.unit}{text}" if before else f"{sign}{text} {written.unit}".strip()


@given(
    st.lists(st.tuples(st.none() | st.integers(-(10**8), 10**8), st.booleans()), min_size=1, max_size=12),
    st.sampled_from(WRITINGS),
)
@settings(max_examples=examples(100))
def test_written_numbers_are_the_same_in_files_and_requests(numbers, written):
    values = [None if hundredths is None else hundredths / 100 for hundredths, _ in numbers]
    texts = [
        "" if value is None else written_text(value, written, before)
        for value, (_, before) in zip(values, numbers, strict=True)
    ]
    schema = persia.Schema(
        [persia.IdFeature("bucket", 2, bucketize=Buckets("price", width=0.5))],
        [persia.DenseFeature("price", fill=-1, missing_indicator=True)],
        labels=[],
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.csv")
        path.write_text("price;x\n" + "".join(f"{text};1\n" for text in texts), encoding="utf-8")
        reader = persia.data.csv(
            path, schema, delimiter=";", decimal=written.decimal, thousands=written.thousands,
            units={"price": written.unit} if written.unit else {},
        )  # fmt: skip
        rules = reader.input_rules
        wanted = next(iter(reader))
    assert rules.numbers == {"price": written}
    assert msgspec.convert(msgspec.to_builtins(rules), InputRules) == rules
    np.testing.assert_array_equal(wanted.dense[:, 0], np.float32([-1 if v is None else v for v in values]))
    mixed = [value if row % 2 else text for row, (value, text) in enumerate(zip(values, texts, strict=True))]
    forms = [
        texts, mixed, values, np.array(texts, object), np.array(texts), pa.array(texts), pa.array(texts).cast("binary"),
        pa.array(texts, pa.large_string()), pa.array(texts).dictionary_encode(), pd.Series(texts), pl.Series(texts),
        pa.chunked_array([texts, []], "string"), [text.encode() for text in texts],
    ]  # fmt: skip
    for form in forms:
        found = persia.Batch.from_columns(schema, apply_rules(rules, {"price": form}))
        np.testing.assert_array_equal(found.dense, wanted.dense, err_msg=repr(form))
        np.testing.assert_array_equal(found.id_features["bucket"].values, wanted.id_features["bucket"].values)


def test_a_percentage_of_a_request_needs_its_sign():
    rules = InputRules(numbers={"share": WrittenNumbers(unit="%")})
    for column in (["17 %", "0.17"], pa.array(["17 %", "0.17"]), [0.5, "0.17"]):
        with pytest.raises(DataError, match=r"'share' has '0.17' at row 1, without the % of its unit"):
            apply_rules(rules, {"share": column})
    assert apply_rules(rules, {"share": [0.17, None]})["share"] == [0.17, None]
    numbers = np.arange(2.0)
    assert apply_rules(rules, {"share": numbers})["share"] is numbers


def test_written_numbers_are_those_of_features_only(tmp_path):
    (tmp_path / "a.csv").write_text("item,price,cost,label\na,$1,$2,$1\n")
    schema = persia.Schema([persia.IdFeature("item", dim=2)], ["price", "paid"], ["label"])
    reader = persia.data.csv(
        tmp_path / "a.csv", schema, rename={"paid": "cost"}, units={"price": "$", "cost": "$", "label": "$"}
    )
    assert reader.input_rules.numbers == {"price": WrittenNumbers(unit="$"), "paid": WrittenNumbers(unit="$")}
    with pytest.raises(ConfigError, match=r"WrittenNumbers\.decimal"):
        WrittenNumbers(decimal=";")
