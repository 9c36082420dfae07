"""Negative sampling: which rows and items, replayable, shards, errors."""

from __future__ import annotations

import pickle
import sys
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from persia import data
from persia.batching.batch import Batch
from persia.data.reader import share_of
from persia.errors import ConfigError, DataError
from persia.schema import IdFeature, Label, Quotient, Remainder, Schema

catalogs_module = sys.modules[data.ItemCatalog.__module__]

SCHEMA = Schema(
    [IdFeature("user", dim=2), IdFeature("item", dim=2), IdFeature("shop", dim=2), IdFeature("past", dim=2)],
    dense_features=["x"],
)
ITEM = ["item", "shop"]


@dataclass(frozen=True)
class Clicks:
    """Batches of 8; item i is of shop i % 3, and every fourth row is negative already."""

    schema: Schema = SCHEMA
    count: int = 20
    items: int = 12
    share: tuple[int, int] = (0, 1)

    def batches(self, epoch=0, start=0):
        index, every = self.share
        for number in range(start * every + index, self.count, every):
            row = np.arange(8) + 8 * number
            item = row * row % self.items
            past = [[1] * (i % 3) for i in row]
            columns = {"user": row, "item": item, "shop": item % 3, "past": past, "x": row, "label": row % 4 != 3}
            yield Batch.from_columns(self.schema, columns, day=number)

    def __iter__(self):
        return self.batches()

    def shard(self, index, count):
        return replace(self, share=share_of(self.share, index, count))


class WithoutShard:
    """As a reader of a user, which need not have `shard`."""

    schema = SCHEMA

    def batches(self, epoch=0, start=0):
        return Clicks().batches(epoch, start)

    def __iter__(self):
        return self.batches()


CATALOG = data.item_catalog(Clicks(), ITEM)


def same(a: Batch, b: Batch) -> bool:
    ids = all(np.array_equal(a.id_features[n].values, b.id_features[n].values) for n in a.id_features)
    return ids and np.array_equal(a.labels, b.labels) and np.array_equal(a.dense, b.dense)


def made(by: str, **options: Any) -> data.NegativeSampling:
    catalog = None if by == "in_batch" else CATALOG
    return data.negatives(Clicks(), ITEM, **{"count": 3, "by": by, "catalog": catalog, "seed": 5} | options)


@pytest.mark.parametrize("by", ["in_batch", "uniform", "popularity"])
def test_negatives_stand_behind_their_positive_sample(by):
    for before, after in zip(Clicks(), made(by), strict=True):
        after.validate(SCHEMA)
        at = 0
        for row in range(8):
            positive = before.labels[row, 0] > 0
            rows = slice(at, at + (4 if positive else 1))
            at = rows.stop
            assert set(after.id_features["user"].values[rows].tolist()) == {before.id_features["user"].values[row]}
            assert set(after.dense[rows, 0].tolist()) == {before.dense[row, 0]}
            assert after.labels[rows, 0].tolist() == [float(positive), 0, 0, 0][: rows.stop - rows.start]
            items = after.id_features["item"].values[rows].tolist()
            assert items[0] == before.id_features["item"].values[row]
            assert items[0] not in items[1:]
            past = after.id_features["past"]
            assert set(np.diff(past.offsets)[rows].tolist()) == {row_length(before, row)}
        assert at == len(after)
        # The parts of an item stay together.
        assert np.array_equal(after.id_features["shop"].values, after.id_features["item"].values % 3)
        assert after.day.tolist() == [before.day[0]] * len(after)
        own = before.id_features["item"].values.tolist()
        known = own if by == "in_batch" else [*own, *CATALOG.ids["item"].tolist()]
        assert set(after.id_features["item"].values.tolist()) <= set(known)


def row_length(batch: Batch, row: int) -> int:
    offsets = batch.id_features["past"].offsets
    return int(offsets[row + 1] - offsets[row])


@pytest.mark.parametrize("by", ["in_batch", "uniform", "popularity"])
def test_batches_can_be_read_again_from_the_middle_and_in_shards(by):
    reader = made(by)
    whole = list(reader)
    assert all(same(a, b) for a, b in zip(whole[4:], reader.batches(start=4), strict=True))
    for index in range(3):
        part = pickle.loads(pickle.dumps(reader.shard(index, 3)))
        assert all(same(a, b) for a, b in zip(whole[index::3], part, strict=True))
        assert all(same(a, b) for a, b in zip(whole[index + 3 :: 3], part.batches(start=1), strict=True))
    halves = reader.shard(1, 2).shard(1, 3)
    assert len(whole[3::6]) == 3
    assert all(same(a, b) for a, b in zip(whole[3::6], halves, strict=True))
    assert not all(same(a, b) for a, b in zip(whole, reader.batches(epoch=1), strict=True))
    assert not all(same(a, b) for a, b in zip(whole, made(by, seed=6), strict=True))


def test_several_data_loaders_can_share_a_reader_without_shard():
    whole = list(made("in_batch"))
    reader = data.negatives(WithoutShard(), ITEM, 3, seed=5)
    assert all(same(a, b) for a, b in zip(whole, reader, strict=True))
    part = reader.shard(1, 2)
    assert all(same(a, b) for a, b in zip(whole[1::2], part, strict=True))
    assert all(same(a, b) for a, b in zip(whole[5::2], part.batches(start=2), strict=True))
    assert all(same(a, b) for a, b in zip(whole[3::6], part.shard(1, 3), strict=True))


def test_the_catalog_counts_positive_samples():
    counts: Counter[int] = Counter()
    for batch in Clicks():
        counts.update(batch.id_features["item"].values[batch.labels[:, 0] > 0].tolist())
    assert dict(zip(CATALOG.ids["item"].tolist(), CATALOG.counts.tolist(), strict=True)) == counts
    assert np.array_equal(CATALOG.ids["shop"], CATALOG.ids["item"] % 3)


@pytest.mark.parametrize(
    ("by", "power"), [("uniform", 1.0), ("popularity", 1.0), ("popularity", 0.5), ("popularity", 0.0)]
)
def test_items_are_drawn_as_asked(by, power):
    catalog = data.ItemCatalog(
        {"item": np.arange(100, 104, dtype=np.uint64), "shop": np.arange(4, dtype=np.uint64)}, np.array([1, 4, 16, 64])
    )
    reader = data.negatives(Clicks(), ITEM, 1_000, by=by, catalog=catalog, power=power)
    items = np.concatenate([batch.id_features["item"].values for batch in reader])
    found = np.bincount(items[items >= 100].astype(np.int64) - 100)
    weights = catalog.counts**power if by == "popularity" else np.ones(4)
    np.testing.assert_allclose(found / found.sum(), weights / weights.sum(), atol=0.01)


def test_an_item_without_any_other_has_no_negatives():
    reader = data.negatives(Clicks(items=1), ITEM, 3)
    assert [len(batch) for batch in reader] == [8] * 20


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"features": ["nope"]}, "no ID-type feature 'nope'"),
        ({"features": []}, "list of the item's features"),
        ({"features": "item"}, "list of the item's features"),
        ({"count": 0}, "count"),
        ({"by": "other"}, "by = 'other'"),
        ({"by": "uniform"}, "needs a catalog"),
        ({"catalog": CATALOG}, "takes no catalog"),
        ({"by": "uniform", "catalog": CATALOG, "features": ["user"]}, "lacks feature 'user'"),
        ({"power": -1.0}, "power"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_arguments_are_refused(options, match):
    with pytest.raises(ConfigError, match=match):
        data.negatives(Clicks(), **{"features": ITEM, "count": 1} | options)


COMPUTED = Schema(
    [
        *SCHEMA.id_features,
        IdFeature("both", dim=2, cross=("user", "item")),
        IdFeature("item_q", dim=2, of="item", mapping=Quotient(2)),
        IdFeature("item_r", dim=2, of="item", mapping=Remainder(2)),
        IdFeature("both_q", dim=2, of="both", mapping=Quotient(2**60)),
        IdFeature("user_q", dim=2, of="user", mapping=Quotient(2)),
    ],
    dense_features=["x"],
)


@pytest.mark.parametrize("by", ["in_batch", "uniform"])
def test_computed_features_are_those_of_the_drawn_items(by):
    catalog = None if by == "in_batch" else CATALOG
    for after in data.negatives(Clicks(COMPUTED), ITEM, 3, by=by, catalog=catalog):
        after.validate(COMPUTED)
        plain = {name: after.id_features[name] for name in ("user", "item", "shop", "past")}
        columns = {**plain, "x": after.dense[:, 0], "label": after.labels[:, 0]}
        assert same(after, Batch.from_columns(COMPUTED, columns))
        assert list(after.id_features) == [f.name for f in COMPUTED.id_features]


@pytest.mark.parametrize(("name", "of"), [("both", "user, item"), ("item_q", "item")])
def test_computed_features_are_not_drawn_themselves(name, of):
    with pytest.raises(ConfigError, match=f"'{name}' is computed from {of}; name"):
        data.negatives(Clicks(COMPUTED), ["shop", name], 1)


IDS = np.arange(3, dtype=np.uint64)
ONES = np.ones(3, np.int64)


@pytest.mark.parametrize(
    ("ids", "counts", "match"),
    [
        ({}, ONES, "ids has no feature"),
        ([IDS], ONES, "ids has no feature"),
        ({"item": IDS[:0]}, ONES[:0], r"counts is int64\[0\]; give int64\[items\]"),
        ({"item": IDS.astype(np.int64)}, ONES, r"ids\['item'\] is int64\[3\]; give uint64\[3\]"),
        ({"item": IDS, "shop": IDS[:2]}, ONES, r"ids\['shop'\] is uint64\[2\]; give uint64\[3\]"),
        ({"item": IDS[:, None]}, ONES, r"ids\['item'\] is uint64\[3, 1\]"),
        ({"item": [0, 1, 2]}, ONES, r"ids\['item'\] is list"),
        ({"item": IDS}, np.array([1.0, np.nan, 2.0]), r"counts is float64\[3\]; give int64"),
        ({"item": IDS}, [1, 2, 3], "counts is list"),
        ({"item": IDS}, np.array([1, -4, 2]), "counts has -4 for item 1"),
    ],
)
def test_catalogs_that_do_not_fit_are_refused(ids, counts, match):
    with pytest.raises(ConfigError, match=match):
        data.ItemCatalog(ids, counts)


def test_a_catalog_without_counts_has_no_popular_items():
    catalog = data.ItemCatalog({"item": IDS, "shop": IDS}, np.zeros(3, np.int64))
    data.negatives(Clicks(), ITEM, 1, by="uniform", catalog=catalog)
    with pytest.raises(ConfigError, match=r"All counts of the catalog are 0.*uniform"):
        data.negatives(Clicks(), ITEM, 1, by="popularity", catalog=catalog)


def test_large_counts_and_powers_are_drawn():
    catalog = data.ItemCatalog({"item": IDS + np.uint64(100), "shop": IDS}, np.array([1, 2**62, 2**62]))
    reader = data.negatives(Clicks(), ITEM, 100, by="popularity", catalog=catalog, power=1000.0)
    items = np.concatenate([batch.id_features["item"].values for batch in reader])
    assert set(items[items >= 100].tolist()) == {101, 102}


@pytest.mark.parametrize("merged", [1, 7, 50, 10**6])
def test_the_catalog_is_the_same_however_often_it_is_merged(merged, monkeypatch):
    monkeypatch.setattr(catalogs_module, "MERGED_ROWS", merged)
    found = data.item_catalog(Clicks(), ITEM)
    np.testing.assert_array_equal(found.counts, CATALOG.counts)
    for name in ITEM:
        np.testing.assert_array_equal(found.ids[name], CATALOG.ids[name])


def test_the_catalog_is_sorted_seldom(monkeypatch):
    """Samples wait until there are as many as items: 150 positive ones in 25 batches, 6 in each."""
    sizes = []

    def counting(rows, **options):
        sizes.append(len(rows))
        return unique(rows, **options)

    unique = np.unique
    monkeypatch.setattr(catalogs_module, "MERGED_ROWS", 1)
    monkeypatch.setattr(np, "unique", counting)
    catalog = data.item_catalog(Clicks(count=25, items=10**6), ITEM)
    assert catalog.counts.tolist() == [1] * 150
    assert sizes == [6, 12, 24, 48, 96, 150]


def test_items_without_one_id_or_data_without_labels_are_refused():
    with pytest.raises(DataError, match=r"'past' of the item has 0 ids at row 0 of batch 0"):
        next(iter(data.negatives(Clicks(), ["past"], 1)))
    (batch,) = Clicks(count=1)
    unlabelled = replace(batch, labels=np.zeros((8, 0), np.float32))

    class Unlabelled(Clicks):
        def batches(self, epoch=0, start=0):
            yield unlabelled

    with pytest.raises(DataError, match="Batch 0 has no labels"):
        next(iter(data.negatives(Unlabelled(), ITEM, 1)))
    with pytest.raises(DataError, match="No sample is positive"):
        data.item_catalog(Clicks(count=0), ITEM)


def test_negatives_of_labels_that_are_not_binary_are_refused():
    pa = pytest.importorskip("pyarrow")
    schema = Schema(
        [IdFeature("user", dim=2), IdFeature("item", dim=2)],
        labels=[Label("watch", kind="regression")],
    )
    reader = data.arrow(pa.table({"user": [1, 2], "item": [3, 4], "watch": [0.5, 2.0]}), schema, 2)
    with pytest.raises(ConfigError, match=r"Label\('watch'\) is of kind 'regression'"):
        data.negatives(reader, ["item"], 1)
