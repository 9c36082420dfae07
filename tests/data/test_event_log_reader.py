"""Event logs of users' own: samples against a slow reference, formats, times, and what does not fit."""

import datetime
import itertools

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset
import pyarrow.json
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia import data
from persia.data import from_csv
from persia.errors import ConfigError, DataError
from persia.schema import DenseFeature, IdFeature, Schema, Table

SCHEMA = Schema(
    [
        IdFeature("item", dim=4),
        IdFeature("shop", dim=4),
        IdFeature("history", table="item", pooling=None, max_length=3, keep="last"),
        IdFeature("shops", table="shop", pooling=None, max_length=3, keep="last"),
    ],
    dense_features=["price", DenseFeature("ages", size=3), "size"],
    labels=["chosen"],
)
EVENTS = st.lists(st.tuples(st.integers(0, 4), st.integers(-5, 6), st.booleans()), min_size=1, max_size=25)


def table(owners, times, chosen=None):
    """Event i has item i, shop i + 100, price i / 2 and size -i."""
    numbers = np.arange(len(owners))
    return pa.table(
        {
            "who": owners, "when": times, "item": numbers, "shop": numbers + 100,
            "price": numbers / 2, "size": -numbers.astype(float), "chosen": np.ones(len(owners)),
            "kept": np.ones(len(owners), int) if chosen is None else np.array(chosen, int),
        }
    )  # fmt: skip


def log(source, schema=SCHEMA, **options):
    return data.event_log(source, schema, **{"owner": "who", "time": "when", "ages": "ages"} | options)


def rows_of(batches):
    """Returns each sample: its item, histories, and dense values."""
    rows = []
    for batch in batches:
        for row in range(len(batch)):
            ids = {name: column.slice(row, row + 1).values.tolist() for name, column in batch.id_features.items()}
            rows.append((ids, batch.dense[row].tolist(), batch.labels[row].tolist()))
    return rows


@given(
    EVENTS, st.sampled_from([None, "train", "validation", "test"]), st.booleans(), st.integers(0, 2), st.integers(1, 9)
)
def test_samples_against_a_slow_reference(events, part, newest_only, min_history, batch_size):
    owners, times, kept = zip(*events, strict=True)
    expected = {}
    for owner in set(owners):
        past = sorted((e for e in range(len(owners)) if owners[e] == owner), key=lambda e: (times[e], e))
        selected = [e for e in past if kept[e]]
        parts = {"train": selected[:-2], "validation": selected[-2:-1], "test": selected[-1:]}
        own = [e for e in parts.get(part, selected) if past.index(e) >= min_history]
        for event in own[-1:] if newest_only else own:
            expected[event] = past[: past.index(event)][-3:]
    options = {"leave_one_out": part, "newest_only": newest_only, "min_history": min_history, "where": "kept == 1"}
    reader = log(table(owners, times, kept), batch_size=batch_size, **options)
    if not expected:
        with pytest.raises(DataError, match="there are no samples"):
            list(reader)
        return
    found = []
    for ids, dense, labels in rows_of(reader):
        (item,) = ids["item"]
        assert ids == {
            "item": [item],
            "shop": [item + 100],
            "history": expected[item],
            "shops": [e + 100 for e in expected[item]],
        }
        ages = [float(times[item] - times[e]) for e in expected[item]]
        assert dense == [item / 2, *ages, *[0.0] * (3 - len(ages)), -item]
        assert labels == [1.0]
        found.append(item)
    for batch in reader:
        batch.validate(SCHEMA)
        assert batch.day is None
    assert found == sorted(expected, key=lambda e: (times[e], e))
    assert rows_of(reader.batches(start=1)) == rows_of(reader)[batch_size:]


def write(path, events):
    match path.suffix:
        case ".parquet":
            pq.write_table(events, path)
        case ".csv":
            pa.csv.write_csv(events, path)
        case ".jsonl":
            path.write_text("".join(f"{row}\n".replace("'", '"') for row in events.to_pylist()))
    return path


def test_formats_give_the_same_samples(tmp_path):
    events = table([1, 2, 1, 2, 1], [5, 4, 3, 2, 1])
    expected = rows_of(log(events, leave_one_out="test"))
    assert [ids["history"] for ids, *_ in expected] == [[3], [4, 2]]
    for name in ("log.parquet", "log.csv", "log.jsonl"):
        path = write(tmp_path / name, events)
        assert rows_of(log(path, leave_one_out="test")) == expected, name
        assert rows_of(log([str(path)], leave_one_out="test")) == expected, name
    half = tmp_path / "half"
    half.mkdir()
    write(half / "a.parquet", events[:2])
    write(half / "b.parquet", events[2:])  # An owner's events are in both.
    assert rows_of(log(half, leave_one_out="test")) == expected
    write(half / "c.csv", events)
    with pytest.raises(ConfigError, match="all of one format"):
        log(half)


def test_csv_files_of_other_forms(tmp_path):
    events = table([1, 2, 1, 2, 1], [5, 4, 3, 2, 1])
    expected = rows_of(log(events))
    write(tmp_path / "log.csv", events)
    (tmp_path / "log.tsv").write_text((tmp_path / "log.csv").read_text().replace(",", "\t"))
    with pytest.raises(DataError, match="separated by '\\\\t': set delimiter="):
        rows_of(log(tmp_path / "log.tsv"))
    assert rows_of(log(tmp_path / "log.tsv", delimiter="\t")) == expected
    (tmp_path / "bare.csv").write_text((tmp_path / "log.csv").read_text().partition("\n")[2])
    assert rows_of(log(tmp_path / "bare.csv", column_names=events.column_names)) == expected
    for options in ({"delimiter": ";"}, {"column_names": ["who"]}):
        with pytest.raises(ConfigError, match="are of CSV files"):
            log(events, **options)
    with pytest.raises(ConfigError, match="give a list of texts"):
        log(tmp_path / "bare.csv", column_names="who")


def test_the_owner_may_be_a_feature_and_columns_may_be_renamed():
    events = table(["a", "b", "a"], [1, 2, 3])
    schema = Schema(
        [
            IdFeature("user", dim=2),
            IdFeature("thing", dim=4),
            IdFeature("past", table="thing", pooling="mean", max_length=9, keep="last"),
        ],
        labels=["chosen"],
    )
    options = {"rename": {"user": "who", "thing": "item"}, "histories": {"past": "thing"}, "ages": None}
    found = rows_of(log(events, schema, **options))
    assert [ids["past"] for ids, *_ in found] == [[], [], [0]]
    assert found[0][0]["user"] == found[2][0]["user"] != found[1][0]["user"]
    labelled = Schema(schema.id_features, labels=["good"])
    rule = {"labels": {"good": "item is not None"}}
    assert [labels for *_, labels in rows_of(log(events, labelled, **options, **rule))] == [[1.0]] * 3


def test_the_dim_may_be_that_of_the_history_or_of_the_table():
    history = IdFeature("history", dim=4, table="item", pooling=None, max_length=3, keep="last")
    for schema in (
        Schema([IdFeature("item"), history], labels=["chosen"]),
        Schema([IdFeature("item"), history], labels=["chosen"], tables=[Table("item", 4)]),
    ):
        *_, (ids, *_) = rows_of(log(table([1, 1], [1, 2]), schema, ages=None))
        assert ids == {"item": [1], "history": [0]}


DAYS = [datetime.datetime(2024, 5, 1, 12), datetime.datetime(2024, 5, 1), datetime.datetime(1960, 5, 1)]
SECONDS = [(day - datetime.datetime(1970, 1, 1)).total_seconds() for day in DAYS]


@pytest.mark.parametrize(
    ("times", "options"),
    [
        (pa.array(SECONDS, pa.int64()), {}),
        (pa.array(SECONDS, pa.float64()), {}),
        (pa.array([int(each * 1000) for each in SECONDS], pa.int64()), {"time_unit": "ms"}),
        (pa.array(DAYS, pa.timestamp("us")), {}),
        (pa.array(DAYS, pa.timestamp("s", "UTC")), {"time_unit": "ms"}),
        (pa.array([str(day) for day in DAYS]), {}),
        (pa.array([str(int(each)) for each in SECONDS]).dictionary_encode(), {}),
    ],
)
def test_times_of_any_type(times, options):
    *_, (ids, dense, _) = rows_of(log(table(["a"] * 3, times), **options))
    assert ids["history"] == [2, 1]
    assert dense[1:4] == [np.float32(SECONDS[0] - SECONDS[2]), 43_200.0, 0.0]


def test_days_are_those_of_a_column():
    days = [batch.day.tolist() for batch in log(table([1, 2, 1], [3, 2, 1]), batch_size=2, day="when")]
    assert days == [[1, 2], [3]]


def test_times_differ_by_less_than_a_second():
    times = pa.array([1_700_000_000_000_000_002, 1_700_000_000_000_000_001], pa.int64())
    (*_, (ids, *_)) = rows_of(log(table(["a", "a"], times), time_unit="ns"))
    assert (ids["item"], ids["history"]) == ([0], [1])


@pytest.mark.parametrize(
    ("times", "message"),
    [
        (pa.array([1_700_000_000_000] * 2), r'time out of range.*read with time_unit="s", and fit time_unit="ms": set'),
        (pa.array([1.7e15, 1.7e15]), r'column \'when\' has a time out of range.*and fit time_unit="us"'),
        (pa.array(["1700000000000000000"] * 2), r'column \'when\' has a time out of range.*and fit time_unit="ns"'),
        (pa.array([1e300, 0.0]), r'read with time_unit="s"; correct them'),
        (pa.array([datetime.date(2900, 1, 1)] * 2), r"to 2261\. Correct it, or leave the row out"),
        (pa.array([1, None]), r"column 'when' has no time at row 1"),
        (pa.array([1, float("nan")]), r"column 'when' has no time at row 1"),
        (pa.array([True, False]), r"column 'when' is bool; give integers"),
    ],
)
def test_times_that_do_not_fit(times, message):
    with pytest.raises(DataError, match=message) as found:
        list(log(table([1, 1], times)))
    assert found.value.fields["column"] == "when"


def test_missing_columns_and_values_are_named(tmp_path):
    events = table([1, 2], [1, 2])
    with pytest.raises(DataError, match="no column 'what'"):
        list(log(events, time="what"))
    with pytest.raises(DataError, match="column 'who' has no value at row 1"):
        list(log(table([1, None], [1, 2])))
    without = events.drop_columns(["chosen"])
    remedy = r"If each event has the label 1, set labels=\{'chosen': 'item is not None'\}\."
    for source in (without, *(write(tmp_path / f"log.{kind}", without) for kind in ("csv", "parquet", "jsonl"))):
        with pytest.raises(DataError, match=rf"no column 'chosen'.*{remedy}"):
            list(log(source))
    with pytest.raises(DataError, match="can be read only once"):
        log(events.to_reader())
    with pytest.raises(DataError, match="There is no file"):
        log(tmp_path / "nothing.parquet")


@pytest.mark.parametrize(("column", "bad"), [("when", "soon"), ("when", ""), ("who", ""), ("item", "")])
def test_the_row_of_a_bad_value_in_a_later_block(tmp_path, monkeypatch, column, bad):
    monkeypatch.setattr(from_csv, "_BLOCK_BYTES", 200)
    lines = write(tmp_path / "log.csv", table([1] * 50, range(50))).read_text().splitlines()
    place = [name.strip('"') for name in lines[0].split(",")].index(column)
    values = lines[42].split(",")
    lines[42] = ",".join([*values[:place], bad, *values[place + 1 :]])
    (tmp_path / "log.csv").write_text("\n".join(lines))
    at = rf"log\.csv: .olumn '{column}' has .* at row 41[;,].* Rows are counted from 0, without header and blank"
    with pytest.raises(DataError, match=at) as found:
        list(log(tmp_path / "log.csv"))
    assert found.value.fields["row"] == 41


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"leave_one_out": "all"}, "leave_one_out"),
        ({"newest_only": 1}, "newest_only"),
        ({"min_history": -1}, "min_history"),
        ({"time_unit": "h"}, "time_unit"),
        ({"owner": None}, "owner"),
        ({"histories": {"past": "item"}}, "'past', which is no ID-type feature"),
        ({"histories": {"history": "shops", "shops": "shop"}}, "as a history and as what one collects"),
        ({"histories": {"history": "item", "item": "shop"}}, "as a history and as what one collects"),
        ({"histories": {"shop": "item"}}, "Histories need one max_length"),
        ({"ages": "price"}, r"declare it as DenseFeature\('price', size=3\)"),
        ({"owners": "who"}, "Unknown option 'owners'"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ConfigError, match=message):
        log(table([1], [1]), **options)


def test_schemas_that_do_not_fit():
    events = table([1], [1])
    without = Schema([IdFeature("item", dim=2)], labels=["chosen"])
    with pytest.raises(ConfigError, match="The schema has no history"):
        log(events, without, ages=None)
    oldest = IdFeature("history", table="item", pooling=None, max_length=3)
    with pytest.raises(ConfigError, match=r"'history' has the newest events.*keeps the first ids.*keep=.last."):
        log(events, Schema([IdFeature("item", dim=2), oldest], labels=["chosen"]), ages=None)
    for field in ("sample_weight", "group"):
        with pytest.raises(ConfigError, match=f"no {field}"):
            log(events, Schema(SCHEMA.id_features, SCHEMA.dense_features, ["chosen"], **{field: "who"}))


def test_each_choice_of_samples_is_other_data():
    events = table([1, 1, 1, 1], [1, 2, 3, 4])
    choices = [
        {"leave_one_out": part, "newest_only": newest, "min_history": least}
        for part, newest, least in itertools.product((None, "train", "test"), (False, True), (0, 1))
    ]
    assert len({str(log(events, **each).fingerprint()) for each in choices}) == len(choices)
    assert log(lambda: events).fingerprint() is None


def test_a_fingerprint_tells_tables_and_their_columns_apart():
    events = table([1, 1, 2], [1, 2, 3])
    renamed = events.append_column("whose", events["who"]).append_column("then", events["when"])
    logs = [
        log(events), log(table([1, 1, 3], [1, 2, 3])), log(events.slice(0, 2)),
        log(renamed), log(renamed, owner="whose"), log(renamed, time="then"),
    ]  # fmt: skip
    keys = [tuple(each.fingerprint().keys()) for each in logs]
    assert len(set(keys)) == len(keys)
    assert keys[0] == tuple(log(table([1, 1, 2], [1, 2, 3])).fingerprint().keys())


def test_a_fingerprint_tells_more_files_from_fewer(tmp_path):
    for name in "abc":
        pq.write_table(table([1, 1], [1, 2]), tmp_path / f"{name}.parquet")
    paths = [str(tmp_path / f"{name}.parquet") for name in "abc"]
    two, three = (log(pa.dataset.dataset(paths[:count])).fingerprint().keys() for count in (2, 3))
    assert two != three
    assert log(paths[:2]).fingerprint().keys() != log(paths).fingerprint().keys()


def test_rules_read_texts_as_other_readers_do():
    events = pa.table(
        {
            "who": ["a", "a", "a"], "when": pa.array(["3", "-", "1"]), "item": [1, 2, 3], "shop": [1, 2, 3],
            "price": ["0,5", "0,1", "0,3"], "size": ["1", "1", "1"], "chosen": [1.0, 1.0, 1.0],
            "kind": ["x", "y", "-"],
        }
    )  # fmt: skip
    options = {"null_values": ["-"], "decimal": ","}
    with pytest.raises(DataError, match="has no time at row 1"):
        list(log(events, **options))
    timed = events.set_column(1, "when", pa.array(["3", "2", "1"]))
    kept = rows_of(log(timed, where="kind is not None and price > 0.2", **options))
    assert [ids["item"] for ids, _, _ in kept] == [[1]]
    assert kept[0][0]["history"] == [3, 2]
