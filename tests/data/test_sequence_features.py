"""Histories: which events are kept, parts of one event, and ages."""

from __future__ import annotations

import itertools
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import persia
from persia import data
from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.errors import ConfigError, DataError
from persia.schema import HashTo, IdFeature, Schema
from persia.types import BucketMap
from persia.worker.routing import Router


def sequence(name: str, **options: Any) -> IdFeature:
    return IdFeature(name, **{"dim": 2, "pooling": None, "max_length": 3} | options)


@given(st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=5), st.integers(1, 4))
def test_the_first_or_last_ids_are_kept(lists: list[list[int]], most: int) -> None:
    schema = Schema([sequence("a", max_length=most), sequence("b", table="a", max_length=most, keep="last")])
    batch = Batch.from_columns(schema, {"a": lists, "b": lists, "label": [0] * len(lists)})
    routed = Router(schema, BucketMap.even(1), threads=1).route(batch.id_features)
    ids = routed.ids["a"]
    for name, expected in (("a", [one[:most] for one in lists]), ("b", [one[-most:] for one in lists])):
        offsets = routed.offsets.get(name)
        values = ids[routed.inverse[name]].tolist()
        if offsets is None:
            assert [[value] for value in values] == expected
        else:
            assert [values[low:high] for low, high in itertools.pairwise(offsets)] == expected


def test_a_model_gets_the_newest_events_in_order() -> None:
    schema = Schema([sequence("h", keep="last", dim=1)])
    embeddings = persia.nn.EmbeddingCollection(schema, optimizer=persia.optim.SGD(lr=0.1), mode=persia.modes.Sync())
    embeddings.set_rows("h", np.arange(10, dtype=np.uint64), np.arange(10, dtype=np.float32)[:, None])
    embeddings.eval()
    found = embeddings(Batch.from_columns(schema, {"h": [[1, 2, 3, 4, 5], [7]], "label": [0, 1]}))["h"]
    assert found.values.squeeze(2).tolist() == [[3, 4, 5], [7, 0, 0]]
    assert found.mask.tolist() == [[True] * 3, [True, False, False]]


ALIGNED = Schema([sequence("items"), sequence("shops", aligned_with="items")])


def test_parts_of_an_event_have_as_many_entries() -> None:
    columns = {"items": [[1, 2], [], [3]], "shops": [[5, 5], [], [6]], "label": [0, 1, 0]}
    batch = Batch.from_columns(ALIGNED, columns)
    batch.validate(ALIGNED)
    with pytest.raises(DataError, match=r"'shops' has 1 ids at row 2, but 'items', with which it is aligned, has 2"):
        Batch.from_columns(ALIGNED, columns | {"items": [[1, 2], [], [3, 4]]})
    by_hand = Batch({**batch.id_features, "shops": IdColumn(np.arange(3, dtype=np.uint64))}, batch.dense, batch.labels)
    with pytest.raises(DataError, match=r"'shops' has 1 ids at row 0, but 'items'.* has 2"):
        by_hand.validate(ALIGNED)


def arrow_lists(lists: Any, dictionary: bool = False) -> pa.Array:
    values = pa.array([value for one in lists for value in one or []])
    offsets = np.cumsum([0, *(len(one or []) for one in lists)])
    return pa.ListArray.from_arrays(offsets, values.dictionary_encode() if dictionary else values)


@pytest.mark.parametrize(
    "shops",
    [
        [[1, None], [], [None, 3]],
        [["a", ""], None, ["", "c"]],
        [[0.5, np.nan], [], [np.nan, 2.0]],
        arrow_lists([["a", None], [], [None, "c"]]),
        arrow_lists([["a", None], [], [None, "c"]], dictionary=True),
        pl.Series([[1, None], [], [None, 3]]),
        pd.Series([[1, None], [], [None, 3]]),
        (np.array([1.0, np.nan, np.nan, 3.0]), np.array([0, 2, 2, 4])),
    ],
    ids=["list", "texts", "floats", "arrow", "dictionary", "polars", "pandas", "pair"],
)
def test_a_missing_value_within_aligned_lists_is_refused(shops: Any) -> None:
    """Left out of both lists, as elsewhere, it would pair the events around it."""
    good = {"items": [[5, 6], [], [7, 8]], "label": [0, 1, 0]}
    for columns in ({"shops": shops}, {"items": shops, "shops": shops}):
        with pytest.raises(DataError, match=r"which is aligned, has a missing value in its list at row 0; fill it in"):
            Batch.from_columns(ALIGNED, good | columns)
    alone = Schema([sequence("shops")])
    column = Batch.from_columns(alone, good | {"shops": shops}).id_features["shops"]
    assert column.offsets is not None
    assert column.offsets.tolist() == [0, 1, 1, 2]


def test_aligned_lists_may_be_missing_as_a_whole() -> None:
    for missing in (None, []):
        columns = {"items": [[1, 2], missing], "shops": arrow_lists([[3, 4], missing]), "label": [0, 1]}
        found = Batch.from_columns(ALIGNED, columns).id_features
        assert [found[name].offsets.tolist() for name in ("items", "shops")] == [[0, 2, 2], [0, 2, 2]]  # type: ignore[union-attr]
    rows = np.array([[1.0, 2.0], [3.0, 4.0]])
    Batch.from_columns(ALIGNED, {"items": rows, "shops": rows, "label": [0, 1]})
    rows[1, 0] = np.nan
    with pytest.raises(DataError, match="'items', which is aligned, has a missing value in its list at row 1"):
        Batch.from_columns(ALIGNED, {"items": rows, "shops": rows, "label": [0, 1]})


def test_lists_that_mapped_features_are_aligned_by_are_complete() -> None:
    mapped = sequence("hashed", of="items", mapping=HashTo(9), aligned_with="shops")
    schema = Schema([sequence("items"), sequence("shops"), mapped])
    with pytest.raises(DataError, match="'items', which is aligned, has a missing value"):
        Batch.from_columns(schema, {"items": [[1, None]], "shops": [[2, None]], "label": [0]})


def test_a_missing_value_within_aligned_lists_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("items,shops,label\n1|2,1|2,0\n1||3,1||3,0\n")
    with pytest.raises(DataError, match=r"a\.csv: .*'items', which is aligned.* at row 1"):
        list(data.csv(tmp_path / "a.csv", ALIGNED, lists={"items": "|", "shops": "|"}))


AGES = Schema([IdFeature("item", dim=2), sequence("times", age_since="now")])


def test_ages_are_magnitudes() -> None:
    columns = {"item": [1, 2, 3], "times": [[0, 99, 100], [], [7]], "now": [100, 5, 3], "label": [0, 1, 0]}
    column = Batch.from_columns(AGES, columns).id_features["times"]
    assert column.values.tolist() == [6, 1, 0, 0]  # log2 of 101, 2, 1; the last event is in the future.
    assert column.offsets is not None
    assert column.offsets.tolist() == [0, 3, 3, 4]


def test_ages_of_single_events() -> None:
    schema = Schema([IdFeature("last_visit", dim=2, age_since="now")])
    batch = Batch.from_columns(schema, {"last_visit": [1_000, 2_000], "now": [1_003, 2_000 + 2**40], "label": [0, 1]})
    assert batch.id_features["last_visit"].values.tolist() == [2, 40]


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1))
def test_ages_are_exact(ages: list[int]) -> None:
    powers = [(1 << k) + d for k in range(1, 65) for d in (-2, -1, 0)]
    ages = [age for age in ages + powers if age < 2**64]
    schema = Schema([IdFeature("visit", dim=2, age_since="now")], labels=[])
    batch = Batch.from_columns(schema, {"visit": [0] * len(ages), "now": np.array(ages, np.uint64)})
    assert batch.id_features["visit"].values.tolist() == [(age + 1).bit_length() - 1 for age in ages]


def second(text: str) -> datetime:
    return datetime.fromisoformat(text)


NOW = [second("2024-05-01 12:00:00"), second("2024-05-01 12:00:00"), second("1969-12-31 23:59:59.5")]
TIMES = [
    [second("2024-05-01 11:59:58.999"), second("2024-05-01 11:00:00"), None],
    [],
    [second("1969-12-31 23:00:00"), second("1970-01-01 00:00:00")],
]
MAGNITUDES = [1, 11, 11, 0]  # log2 of 1 + 2, 3600 and 3599 seconds; the last event is in the future.


def in_tokyo(times: list[Any]) -> list[Any]:
    tokyo = timezone(timedelta(hours=9))
    return [in_tokyo(t) if isinstance(t, list) else t and t.replace(tzinfo=UTC).astimezone(tokyo) for t in times]


@pytest.mark.parametrize(
    ("times", "now"),
    [
        (TIMES, NOW),
        (in_tokyo(TIMES), NOW),
        (pa.array(TIMES, pa.list_(pa.timestamp("ms"))), pa.array(NOW, pa.timestamp("us"))),
        (pa.array(TIMES, pa.large_list(pa.timestamp("ns"))), pa.chunked_array([pa.array(NOW[:1]), pa.array(NOW[1:])])),
        (pa.array(in_tokyo(TIMES), pa.list_(pa.timestamp("ns", "Asia/Tokyo"))), np.array(NOW, "datetime64[ms]")),
        (pl.Series(TIMES), pl.Series(NOW)),
        (pl.Series(TIMES), pd.Series(NOW)),
        (pd.Series(TIMES), pd.Series(in_tokyo(NOW))),
        (TIMES, np.array(NOW, object)),
        (
            (np.array(TIMES[0] + TIMES[2], "datetime64[us]"), np.array([0, 3, 3, 5])),
            [np.datetime64(n, "ns") for n in NOW],
        ),
    ],
    ids=["list", "zones", "arrow", "arrow in ns", "numpy", "polars", "pandas", "pandas zones", "objects", "pair"],
)
def test_ages_of_timestamps_are_in_seconds(times: Any, now: Any) -> None:
    columns = {"item": [1, 2, 3], "times": times, "now": now, "label": [0, 1, 0]}
    column = Batch.from_columns(AGES, columns).id_features["times"]
    assert column.values.tolist() == MAGNITUDES
    assert column.offsets is not None
    assert column.offsets.tolist() == [0, 2, 2, 4]


def test_ages_of_dates_are_in_seconds() -> None:
    day, before = date(2024, 5, 1), date(2024, 4, 30)
    for days in ([[before], [day]], pa.array([[before], [day]]), np.array([[before], [day]], "datetime64[D]")):
        columns = {"item": [1, 2], "times": days, "now": [second("2024-05-01 00:00:01")] * 2, "label": [0, 1]}
        assert Batch.from_columns(AGES, columns).id_features["times"].values.tolist() == [16, 1]


def test_a_batch_without_events_has_times_of_any_kind() -> None:
    for empty in ([[], None], pa.array([[], None])):
        batch = Batch.from_columns(AGES, {"item": [1, 2], "times": empty, "now": NOW[:2], "label": [0, 1]})
        assert not len(batch.id_features["times"].values)


@pytest.mark.parametrize(
    ("times", "now", "match"),
    [
        ([[1]], NOW[:1], "'times' has whole numbers, but 'now' .its age_since. has timestamps; give both as"),
        (TIMES[:1], [1], "'times' has timestamps, but 'now' .its age_since. has whole numbers"),
        ([[NOW[0], 5]], NOW[:1], "'times' has int 5 at row 0 among timestamps"),
        ([[5, NOW[0]]], [5], "'times'.* at row 0"),
        ([[5]], ["2024-05-01"], "'now' has '2024-05-01' at row 0, which is not a time; give timestamps"),
        (TIMES[:1], [None], "lacks a time in some row"),
        (TIMES[:1], np.array(["NaT"], "datetime64[s]"), "lacks a time in some row"),
        ([[timedelta(1)]], NOW[:1], "'times'.* at row 0"),
    ],
)
def test_times_of_two_kinds_are_refused(times: Any, now: Any, match: str) -> None:
    with pytest.raises(DataError, match=match):
        Batch.from_columns(AGES, {"item": [1], "times": times, "now": now, "label": [0]})


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({"now": [1, None, 3]}, "'now' .age_since of 'times'. lacks a time in some row"),
        ({"now": [1, 2]}, "give one time for each of 3 samples"),
        ({"now": [1.5, 2, 3]}, "'now'"),
        ({"times": [["yesterday"], [], []]}, "'times'"),
    ],
)
def test_times_that_are_none(columns: dict[str, Any], match: str) -> None:
    good = {"item": [1, 2, 3], "times": [[1], [], [2]], "now": [2, 2, 2], "label": [0, 1, 0]}
    with pytest.raises(DataError, match=match):
        Batch.from_columns(AGES, good | columns)


def test_a_missing_time_column_is_named() -> None:
    with pytest.raises(DataError, match=r"'now'.*age_since of 'times'"):
        Batch.from_columns(AGES, {"item": [1], "times": [[1]], "label": [0]})


def test_files_have_times_too(tmp_path: Path) -> None:
    columns = {
        "item": pa.array([1, 2]),
        "times": pa.array([[10, 16], [3]]),
        "seen_at": pa.array([17, 10]),
        "label": pa.array([0, 1]),
    }
    pq.write_table(pa.table(columns), tmp_path / "clicks.parquet")
    (batch,) = data.parquet(tmp_path / "clicks.parquet", AGES, 10, rename={"now": "seen_at"})
    assert batch.id_features["times"].values.tolist() == [3, 1, 3]
    stamps = {
        "times": pa.array([[10, 16], [3]], pa.list_(pa.timestamp("s"))),
        "seen_at": pa.array([17_999, 10_000], pa.timestamp("ms")),
    }
    pq.write_table(pa.table(columns | stamps), tmp_path / "stamps.parquet")
    (same,) = data.parquet(tmp_path / "stamps.parquet", AGES, 10, rename={"now": "seen_at"})
    assert same.id_features["times"].values.tolist() == [3, 1, 3]
    with pytest.raises(DataError, match="has no column 'now'"):
        list(data.parquet(tmp_path / "clicks.parquet", AGES, 10))


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: sequence("a", keep="newest"), "keep = 'newest'"),
        (lambda: sequence("a", age_since="t", kind="text"), "leave cross and kind out"),
        (lambda: sequence("a", age_since=3), "age_since"),
        (lambda: Schema([sequence("a", aligned_with="b")]), "no ID-type feature 'b'"),
        (lambda: Schema([sequence("a", aligned_with="a")]), "aligned features are two"),
        (lambda: Schema([sequence("a"), sequence("b", aligned_with="a", max_length=4)]), "max_length is 3, not 4"),
        (lambda: Schema([sequence("a"), sequence("b", aligned_with="a", keep="last")]), "keep is 'first', not 'last'"),
    ],
)
def test_schemas_that_do_not_fit(build: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        build()
