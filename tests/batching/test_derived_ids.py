"""Ids derived from raw columns: the same from every kind of column, and as the slow twin."""

import re
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from persia import Batch
from persia.batching import derived_ids as derived
from persia.batching.derived_ids import derived_ids, filled
from persia.errors import ConfigError, DataError
from persia.schema import Buckets, DenseFeature, HashTo, IdFeature, Quotient, Remainder, Schema, TimePart, Tokens
from support.twins import derived as twin

EDGES = (-1.5, 0.1, 0.7, 3.0, 1e6)
PARTS = ("minute", "hour", "weekday", "hour_of_week", "day", "week", "month", "year")
ZONES = (None, "UTC", "Europe/Berlin", "America/New_York", "Asia/Kathmandu", "Africa/Monrovia", "Australia/Lord_Howe")
BUCKETS = st.sampled_from(
    [Buckets("x", edges=EDGES), Buckets("x", width=0.25), Buckets("x", quantiles=9, fitted=EDGES)]
)
NUMBERS = st.one_of(
    st.floats(-1e6, 1e6).map(lambda x: round(x, 3)), st.integers(-(10**6), 10**6), st.sampled_from(EDGES), st.none()
)
TIMES = st.datetimes(datetime(1, 1, 3), datetime(9999, 12, 28))
RECENT = st.datetimes(datetime(1950, 1, 1), datetime(2100, 1, 1))
TEXTS = st.text(st.sampled_from("aZ9_ .,ÄßΣİKé日\u2019‌‍🔥\x00\n "), max_size=12) | st.text(max_size=6)


def feature(**rule):
    return IdFeature("f", 4, **rule)


def rows(feature, column):
    """The ids of each sample, after `fill`."""
    ids = derived_ids(feature, column)[1]
    ids = ids if feature.fill is None else filled(feature, ids)
    return [ids.slice(i, i + 1).values.tolist() for i in range(len(ids))]


def twin_rows(feature, values):
    return [twin.ids_of_row(feature, value) for value in values]


# --- buckets


@given(BUCKETS, st.lists(NUMBERS, max_size=8), st.none() | st.integers(0, 2**64 - 1))
def test_buckets_of_every_kind_of_column(buckets, values, fill):
    f = feature(bucketize=buckets, fill=fill)
    expected = twin_rows(f, values)
    floats = [None if x is None else float(x) for x in values]
    texts = [None if x is None else str(x) for x in values]
    assert rows(f, values) == expected
    assert rows(f, texts) == expected
    assert rows(f, [None if x is None else x.encode() for x in texts]) == expected
    assert rows(f, np.array([np.nan if x is None else x for x in floats])) == expected
    assert rows(f, pa.array(floats, pa.float64())) == expected
    assert rows(f, pa.array(texts, pa.string())) == expected
    assert rows(f, pa.array(texts, pa.string()).dictionary_encode()) == expected
    chunks = [pa.array(texts[:3], pa.large_string()), pa.array(texts[3:], pa.large_string())]
    assert rows(f, pa.chunked_array(chunks)) == expected
    assert rows(f, pl.Series(floats, dtype=pl.Float64)) == expected
    assert rows(f, pd.Series(texts, dtype=object)) == expected
    assert rows(f, pd.Series(floats, dtype="Float64")) == expected


@given(BUCKETS, st.lists(st.decimals(-1000, 1000, places=2), min_size=1))
@example(Buckets("x", edges=EDGES), [Decimal("0.7")])
@example(Buckets("x", width=0.1), [Decimal("0.3")])
def test_float32_is_the_decimal_number_it_prints(buckets, values):
    f = feature(bucketize=buckets)
    expected = rows(f, [float(x) for x in values])
    narrow = np.array([float(x) for x in values], np.float32)
    assert rows(f, narrow) == expected
    assert rows(f, list(narrow)) == expected
    assert rows(f, pa.array(narrow)) == expected
    assert rows(f, pa.array(values)) == expected
    assert rows(f, values) == expected


def test_edges_and_widths():
    assert rows(feature(bucketize=Buckets("x", edges=(1.0, 2.0))), [0, 1, 1.5, 2, 3]) == [[0], [1], [1], [2], [2]]
    assert rows(feature(bucketize=Buckets("x", width=10)), [0, -1, 10, -11, 25]) == [[0], [1], [2], [3], [4]]


@given(st.lists(st.lists(NUMBERS, max_size=3), max_size=5))
def test_buckets_of_lists(values):
    f = feature(bucketize=Buckets("x", width=0.5), fill=7)
    expected = twin_rows(f, values)
    floats = [[None if x is None else float(x) for x in row] for row in values]
    flat = [np.nan if x is None else x for row in floats for x in row]
    offsets = np.cumsum([0, *map(len, values)])
    assert rows(f, values) == expected
    assert rows(f, pa.array(floats, pa.list_(pa.float64()))) == expected
    assert rows(f, (np.array(flat, np.float64), offsets)) == expected


@pytest.mark.parametrize("bad", ["abc", float("inf"), date(2024, 1, 1), [{}], "1,5"])
def test_what_is_no_number_is_refused(bad):
    with pytest.raises(DataError, match=r"'x' has .* at row 1, but feature 'f' needs finite decimal numbers"):
        derived_ids(feature(bucketize=Buckets("x", width=1)), [1, bad])
    with pytest.raises(DataError, match=r"at row 0, .*2\*\*53 times the width"):
        derived_ids(feature(bucketize=Buckets("x", width=1e-9)), np.array([1e10]))


def test_quantiles_that_are_not_fitted():
    with pytest.raises(ConfigError, match=r"'f' need statistics .* persia\.fit_features"):
        batch([feature(bucketize=Buckets("x", quantiles=4))], {"x": [1.0]})


# --- times


@given(st.sampled_from(PARTS), st.sampled_from(ZONES), st.lists(TIMES | RECENT | st.none(), max_size=8))
@example("hour", "Africa/Monrovia", [datetime(1972, 1, 7, 0, 44, 29), datetime(1972, 1, 7, 0, 44, 30)])
@example("minute", "Asia/Riyadh", [datetime(1947, 3, 13, 20, 53, 7)])
@example("hour", "Europe/Berlin", [datetime(2024, 3, 31, 0, 59, 59, 999999), datetime(2024, 3, 31, 1), None])
@example("hour", "Europe/Berlin", [datetime(2024, 10, 27, 0, 59, 59), datetime(2024, 10, 27, 1)])
def test_times_of_every_kind_of_column(part, zone, values):
    f = feature(time=TimePart("x", part, zone=zone))
    expected = twin_rows(f, values)
    aware = [x and x.replace(tzinfo=UTC) for x in values]
    tokyo = [x and x.astimezone(timezone(timedelta(hours=9, minutes=30))) for x in aware]
    seconds = [None if x is None else (x - twin.EPOCH) // timedelta(seconds=1) for x in aware]
    assert rows(f, values) == expected
    assert rows(f, aware) == rows(f, tokyo) == expected
    assert rows(f, [x and x.isoformat() for x in values]) == expected
    assert rows(f, [x and x.isoformat(" ") for x in tokyo]) == expected
    assert rows(f, [x and x.isoformat().replace("+00:00", "Z").encode() for x in aware]) == expected
    assert rows(f, [x and f"{x.day}.{x.month}.{x.year:04}, {x:%H:%M:%S.%f}" for x in values]) == expected
    assert rows(f, np.array([np.datetime64("NaT") if x is None else x for x in values], "datetime64[us]")) == expected
    assert rows(f, pa.array(values, pa.timestamp("us"))) == expected
    assert rows(f, pa.array(aware, pa.timestamp("us", "America/New_York"))) == expected
    assert rows(f, pa.array([x and x.isoformat() for x in tokyo], pa.string())) == expected
    assert rows(f, pl.Series(values, dtype=pl.Datetime("us"))) == expected
    assert rows(f, seconds) == expected
    assert rows(f, [None if x is None else str(x) for x in seconds]) == expected
    assert rows(f, pa.array(seconds, pa.int64())) == expected
    assert rows(f, [None if x is None else x + 0.5 for x in seconds]) == expected
    assert rows(f, np.array([np.nan if x is None else x for x in seconds], np.float64)) == expected


@given(st.sampled_from(["s", "ms", "us", "ns"]), st.lists(st.integers(-(2**32), 2**32)), st.integers(0, 999))
def test_units(unit, seconds, less):
    f = feature(time=TimePart("x", "minute", unit=unit))
    numbers = [second * twin.UNITS[unit] + less * twin.UNITS[unit] // 1000 for second in seconds]
    expected = twin_rows(f, numbers)
    assert rows(f, numbers) == expected
    assert rows(f, np.array(numbers, np.int64)) == expected
    assert rows(f, pa.array([str(x) for x in numbers], pa.string())) == expected
    assert expected == twin_rows(feature(time=TimePart("x", "minute")), seconds)


@given(st.sampled_from(PARTS), st.lists(st.dates(date(1, 1, 3), date(9999, 12, 28))))
def test_dates(part, values):
    f = feature(time=TimePart("x", part))
    expected = twin_rows(f, values)
    assert rows(f, values) == expected
    assert rows(f, [x.isoformat() for x in values]) == expected
    assert rows(f, [f"{x.day}.{x.month:02}.{x.year:04}" for x in values]) == expected
    assert rows(f, pa.array(values, pa.date32())) == expected
    assert rows(f, np.array(values, "datetime64[D]")) == expected
    assert rows(f, pd.Series(values, dtype=object)) == expected


@given(st.text("0123456789-:T .+Z,", max_size=26) | st.from_regex(twin.ISO, fullmatch=True))
@example("2024-05-01T10:30:15.")
@example("2024-02-30")
@example("1.5e9")
@example("0000-01-01")
def test_texts_of_times_are_taken_or_refused_as_by_the_twin(text):
    f = feature(time=TimePart("x", "minute"))
    try:
        expected = twin_rows(f, [text])
    except (ValueError, OverflowError):
        with pytest.raises(DataError, match="at row 0"):
            rows(f, [text])
        return
    try:
        assert rows(f, [text]) == expected
    except DataError:  # Beyond what the native code holds, or the years.
        assert abs(twin.seconds_of(text)) > 2**37


@pytest.mark.parametrize(
    ("bad", "unit"),
    [("5/1/2024", "s"), (True, "s"), (1714550400000, "s"), (2.0**60, "ns"), (np.float32(1.7e9), "s"), ([{}], "s")],
)
def test_what_is_no_time_is_refused(bad, unit):
    f = feature(time=TimePart("x", "hour", unit=unit))
    with pytest.raises(DataError, match=rf"'x' has .* at row 1, but feature 'f' needs times .* unit, '{unit}'"):
        derived_ids(f, [0, bad])


def test_arrays_that_are_no_times_are_refused():
    for bad in (np.array([True]), np.array([1.7e9], np.float32), np.array([2**63], np.uint64)):
        with pytest.raises(DataError, match="at row 0, but feature 'f' needs times"):
            derived_ids(feature(time=TimePart("x", "hour")), bad)


def test_a_clock_that_changes_twice_in_a_day_has_both_changes():
    zone = ZoneInfo("Africa/Casablanca")
    f = feature(time=TimePart("x", "hour_of_week", zone=zone.key))
    hours = [datetime(2012, 1, 1) + timedelta(minutes=45 * i) for i in range(12_000)]
    assert rows(f, hours) == twin_rows(f, hours)


# --- tokens


@given(
    st.lists(TEXTS | st.none(), max_size=5),
    st.sampled_from([(1,), (2,), (1, 2), (3, 1)]),
    st.booleans(),
)
@example(["ΟΔΟΣ", "ΣΑΣ", "Σ", "aΣ‌b"], (1,), True)
def test_words_of_every_kind_of_column(values, ngrams, lower):
    f = feature(tokens=Tokens("x", ngrams=ngrams, lower=lower))
    expected = twin_rows(f, values)
    assert rows(f, values) == expected
    assert rows(f, np.array(values, object)) == expected
    assert rows(f, pa.array(values, pa.string())) == expected
    assert rows(f, pa.array(values, pa.string()).dictionary_encode()) == expected
    assert rows(f, pa.array([None, *values], pa.large_string())[1:]) == expected
    assert rows(f, pl.Series(values, dtype=pl.String)) == expected
    assert rows(f, pa.array([x and x.encode() for x in values], pa.binary())) == expected


@given(st.lists(st.binary(max_size=12)), st.booleans())
@example([b"a\xe2\x28\xa1b", b"\xed\xa0\x80x", b"\xf0\x9f", b"\xc0\xafa", b"\xf4\x90\x80\x80"], True)
def test_bytes_that_are_not_utf8_separate_words(values, lower):
    f = feature(tokens=Tokens("x", lower=lower))
    assert rows(f, values) == twin_rows(f, values)
    assert rows(f, pa.array(values, pa.binary())) == twin_rows(f, values)


def test_every_character_is_inside_or_outside_as_in_the_twin():
    texts = [f"a{chr(code)}b" for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    f = feature(tokens=Tokens("x", lower=False))
    ids = derived_ids(f, pa.array(texts))[1]
    expected = [len(twin.WORD.findall(text)) for text in texts]
    assert np.diff(ids.offsets).tolist() == expected


def test_a_word_is_the_id_of_its_text():
    words = rows(feature(tokens=Tokens("x", ngrams=(1, 2))), ["New York, 2024"])[0]
    texts = Batch.from_columns(
        Schema([IdFeature("f", 4, kind="text")]),
        {"f": ["new", "new york", "york", "york 2024", "2024"]},
        require_labels=False,
    )
    assert words == texts.id_features["f"].values.tolist()


@given(st.lists(st.lists(TEXTS, max_size=3), max_size=4))
def test_words_of_lists(values):
    f = feature(tokens=Tokens("x", ngrams=(2, 1)))
    assert rows(f, pa.array(values, pa.list_(pa.string()))) == twin_rows(f, values)


def test_numbers_are_words_and_fractions_are_refused():
    f = feature(tokens=Tokens("x"))
    assert rows(f, [5, "5"]) == rows(f, np.array([5, 5])) == rows(f, pa.array([5, 5])) == twin_rows(f, ["5", "5"])
    assert rows(f, pa.nulls(2)) == [[], []]
    for bad in ([1.5], np.array([1.5]), [True], pa.array([1.5])):
        with pytest.raises(DataError, match=r"at row 0, but feature 'f' needs texts \(tokens\)"):
            derived_ids(f, bad)


# --- split, fill, crosses and maps


def batch(features, columns):
    return Batch.from_columns(Schema(features), columns, require_labels=False).id_features


def lists(column):
    return [column.slice(i, i + 1).values.tolist() for i in range(len(column))]


PIECES = st.text("ab5 |", max_size=8) | st.none()


@given(
    st.lists(st.none() | st.text("01a|, .\u00e4", max_size=12)),
    st.sampled_from(["|", ", ", "0", "\u00e4"]),
    st.sampled_from(["auto", "number", "text"]),
)
def test_parts_have_the_ids_of_lists(values, separator, kind):
    f = IdFeature("x", 4, split=separator, kind=kind)
    for column in (
        pa.array(values, pa.string()),
        pa.array(values, pa.large_string())[1:],
        pa.array(values, pa.string()).dictionary_encode(),
    ):
        try:
            expected = derived_ids(f, column)[1]
        except DataError as error:
            with pytest.raises(DataError, match=re.escape(error.message)):
                derived_ids(f, column, lists=False)
        else:
            found = derived_ids(f, column, lists=False)[1]
            assert found.values.tolist() == expected.values.tolist()
            assert found.offsets.tolist() == expected.offsets.tolist()


def test_a_column_is_converted_once_for_all_features(monkeypatch):
    calls = []
    convert = derived.text_numbers
    monkeypatch.setattr(derived, "text_numbers", lambda texts: calls.append(texts) or convert(texts))
    features = [IdFeature(f"b{i}", 4, bucketize=Buckets("x", edges=[float(i)])) for i in range(3)]
    schema = Schema(features, dense_features=[DenseFeature("x", fill=7, missing_indicator=True)], labels=[])
    made = Batch.from_columns(schema, {"x": pa.array(["0", "NA", "1.5", None])})
    assert len(calls) == 1
    assert made.dense.tolist() == [[0, 0], [7, 1], [1.5, 0], [7, 1]]
    assert [made.id_features[f.name].values.tolist() for f in features] == [[1, 1], [0, 1], [0, 0]]


@given(st.lists(PIECES, min_size=1, max_size=6))
def test_split_lists_are_the_lists(values):
    split, plain = IdFeature("x", 4, split="|"), IdFeature("x", 4)
    parts = [[] if x is None else [part for part in x.split("|") if part] for x in values]
    expected = lists(batch([plain], {"x": pa.array(parts, pa.list_(pa.string()))})["x"])
    for column in (values, pa.array(values, pa.string()), pl.Series(values, dtype=pl.String), np.array(values, object)):
        assert lists(batch([split], {"x": column})["x"]) == expected
    assert lists(batch([split], {"x": [["a|b"], ["c"]]})["x"]) == lists(batch([plain], {"x": [["a|b"], ["c"]]})["x"])


def test_fill_is_the_id_of_a_sample_without_ids():
    fill = IdFeature("x", 4, fill="none", split="|")
    found = lists(batch([fill], {"x": ["a|b", None, "", "c"]})["x"])
    assert found == lists(batch([IdFeature("x", 4)], {"x": [["a", "b"], ["none"], ["none"], ["c"]]})["x"])
    number = batch([IdFeature("x", 4, fill=0)], {"x": np.array([5, np.nan, 7])})["x"]
    assert number.values.tolist() == [5, 0, 7]
    assert number.offsets is None
    assert batch([IdFeature("x", 4, fill=3)], {"x": [None, None]})["x"].values.tolist() == [3, 3]


@pytest.mark.parametrize(
    "wrong",
    [
        {"fill": ""},
        {"fill": -1, "kind": "number"},
        {"fill": "a", "kind": "number"},
        {"fill": True},
        {"fill": -1, "bucketize": Buckets("x", width=1)},
        {"fill": "a", "time": TimePart("x", "hour")},
        {"fill": 2**64, "time": TimePart("x", "hour")},
        {"fill": 1, "tokens": Tokens("x")},
        {"fill": 1, "cross": ("a", "b")},
        {"split": "|", "tokens": Tokens("x")},
        {"split": ""},
    ],
)
def test_rules_that_cannot_work_are_refused(wrong):
    with pytest.raises(ConfigError, match="IdFeature"):
        IdFeature("f", 4, **wrong)


def test_a_cross_has_an_id_for_each_id_of_its_list():
    hour = IdFeature("hour", 4, time=TimePart("ts", "hour"))
    tags = IdFeature("tags", 4, split="|")
    price = IdFeature("price_bucket", 4, bucketize=Buckets("price", width=10))
    both = IdFeature("both", 4, cross=("hour", "tags", "price_bucket"))
    columns = {"ts": [0, 3600, 7200, 0], "tags": ["a|b", "c", "", "d"], "price": [5, 15, 5, None]}
    found = batch([hour, tags, price, both], columns)
    single = {"ts": [0, 0, 3600], "tags": ["a", "b", "c"], "price": [5, 5, 15]}
    expected = batch([hour, tags, price, both], single)["both"].values.tolist()
    assert lists(found["both"]) == [expected[:2], expected[2:], [], []]


def test_a_cross_of_two_lists_is_refused():
    features = [IdFeature("a", 4), IdFeature("b", 4), IdFeature("both", 4, cross=("a", "b"))]
    found = batch(features, {"a": [[1, 2], [3]], "b": [[4], [5, 6]]})  # One list in each row.
    assert np.diff(found["both"].offsets).tolist() == [2, 2]
    with pytest.raises(DataError, match=r"row 1 has 2 of 'a' and 3 of 'b' ids"):
        batch(features, {"a": [[1], [2, 3]], "b": [[1], [4, 5, 6]]})
    with pytest.raises(ConfigError, match=r"'a' and 'b', which have lists"):
        Schema([IdFeature("a", 4, split="|"), IdFeature("b", 4, tokens=Tokens("t")), features[2]])


def test_maps_of_derived_ids():
    features = [
        IdFeature("bucket", 4, bucketize=Buckets("price", width=0.01)),
        IdFeature("q", 4, of="bucket", mapping=Quotient(10)),
        IdFeature("r", 4, of="bucket", mapping=Remainder(10)),
        IdFeature("words", 4, tokens=Tokens("title")),
        IdFeature("h", 4, of="words", mapping=HashTo(8)),
    ]
    found = batch(features, {"price": ["1.25", None], "title": ["one two", "one"]})
    assert (lists(found["q"]), lists(found["r"])) == ([[25], []], [[0], []])
    one, other = lists(found["h"])
    assert one[:1] == other
    assert max(one) < 8


@pytest.mark.parametrize("rule", [{"fill": 0}, {"tokens": Tokens("t")}])
def test_rules_that_change_aligned_lists_are_refused(rule):
    with pytest.raises(ConfigError, match="changes the number of its ids"):
        Schema([IdFeature("a", 4), IdFeature("b", 4, aligned_with="a", **rule)])


def test_aligned_buckets_of_lists_must_be_complete():
    features = [IdFeature("items", 4), IdFeature("ages", 4, bucketize=Buckets("age", width=1), aligned_with="items")]
    assert lists(batch(features, {"items": [[1, 2]], "age": [[0.5, 1.5]]})["ages"]) == [[0, 2]]
    with pytest.raises(DataError, match="missing value in its list at row 0"):
        batch(features, {"items": [[1, 2]], "age": [[0.5, None]]})


def test_ids_in_place_of_raw_values_are_refused():
    ids = batch([IdFeature("x", 4)], {"x": [1]})["x"]
    with pytest.raises(DataError, match="give the raw values"):
        derived_ids(feature(bucketize=Buckets("x", width=1)), ids)
