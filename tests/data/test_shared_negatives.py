"""Negatives that a batch shares: which items, how probable, replayable, shards, streams, errors."""

import pickle
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import persia
from persia import data
from persia.batching.batch import Batch
from persia.batching.computed_ids import mapped_ids
from persia.batching.id_column import IdColumn
from persia.data.item_catalogs import ItemDraws
from persia.data.reader import share_of
from persia.data.streams.recorded import LoggedStream
from persia.errors import ConfigError, DataError
from persia.schema import DenseFeature, HashTo, IdFeature, Label, Schema
from persia.services import NewBatch
from persia.types import OffsetRange, Partition, PartitionBounds

ITEM, HISTORY = ["item", "shop"], ["items", "shops"]
SCHEMA = Schema(
    [
        IdFeature("item", dim=2),
        IdFeature("shop", dim=2),
        IdFeature("items", table="item", pooling=None, max_length=3, keep="last"),
        IdFeature("shops", table="shop", pooling=None, max_length=3, keep="last"),
    ],
    dense_features=["x"],
)
ROWS = 8


def rows_of(first, count, schema=SCHEMA):
    """Item i is of shop i % 3; every fourth row is no choice; a row has 0 to 4 events."""
    row = np.arange(first, first + count)
    item = row * row % 12 + row // 40 * 100
    events = [[int(item[i] + 1 + each) for each in range(row[i] % 5)] for i in range(count)]
    columns = {"item": item, "shop": item % 3, "items": events, "shops": [[e % 3 for e in of] for of in events]}
    return Batch.from_columns(schema, {**columns, "x": row, "label": row % 4 != 3})


@dataclass(frozen=True)
class Clicks:
    """Batches of 8; every 5 batches, other items follow."""

    schema: Schema = SCHEMA
    count: int = 20
    share: tuple[int, int] = (0, 1)

    def batches(self, epoch=0, start=0):
        index, every = self.share
        for number in range(start * every + index, self.count, every):
            yield rows_of(ROWS * number, ROWS, self.schema)

    def __iter__(self):
        return self.batches()

    def shard(self, index, count):
        return replace(self, share=share_of(self.share, index, count))


def items_of(*batches, history=False, positive=True):
    """The items of positive samples, and of their histories, or of all samples, counted one by one."""
    counts = {}
    for batch in batches:
        for row in np.flatnonzero(batch.labels[:, 0] > 0) if positive else range(len(batch)):
            found = [(ids(batch, "item", row)[0], ids(batch, "shop", row)[0])]
            if history:
                found += list(zip(ids(batch, "items", row)[-3:], ids(batch, "shops", row)[-3:], strict=True))
            for each in found:
                counts[each] = counts.get(each, 0) + 1
    return counts


def ids(batch, name, row):
    return batch.id_features[name].slice(row, row + 1).values.tolist()


def drawn_of(batch):
    return list(zip(*(batch.id_features[f"negative_{name}"].values.tolist() for name in ITEM), strict=True))


def dense_of(schema, batch, name):
    return batch.dense[:, schema.dense_slices[name]]


def same(a, b):
    columns = [(a.id_features[n], b.id_features[n]) for n in a.id_features]
    equal = all(np.array_equal(x.values, y.values) and np.array_equal(x.offsets, y.offsets) for x, y in columns)
    return equal and np.array_equal(a.labels, b.labels) and np.array_equal(a.dense, b.dense)


CATALOG = data.item_catalog(Clicks(), ITEM, history=HISTORY)
DRAWS = [
    {"by": "uniform", "catalog": CATALOG},
    {"by": "popularity", "catalog": CATALOG, "history": HISTORY},
    {"by": "uniform", "window": 3},
    {"by": "popularity", "window": 3, "history": HISTORY},
    {"by": "in_batch", "window": 3, "count": None},
]


def made(**options):
    return data.shared_negatives(Clicks(), ITEM, **({"count": 6, "seed": 5} | options))


@pytest.mark.parametrize("options", DRAWS)
def test_a_batch_keeps_its_samples_and_gets_what_the_schema_says(options):
    reader = made(**options)
    drawn = options["by"] != "in_batch"
    assert [f.name for f in reader.schema.id_features][4:] == (["negative_item", "negative_shop"] if drawn else [])
    added = {
        "uniform": (),
        "popularity": ("log_q", "history_log_q", "negative_log_q"),
        "in_batch": ("log_q",),
    }[options["by"]]
    assert reader.schema.dense_names == ("x", *added)
    for before, after in zip(Clicks(), reader, strict=True):
        after.validate(reader.schema)
        kept = replace(after, id_features={n: after.id_features[n] for n in before.id_features}, dense=before.dense)
        assert same(before, kept)
        assert np.array_equal(after.dense[:, :1], before.dense)
        if drawn:
            assert len(drawn_of(after)) == 6
            assert np.diff(after.id_features["negative_item"].offsets).max() == 1
            assert all(item % 3 == shop for item, shop in drawn_of(after))  # The parts of an item stay together.


def test_few_samples_have_few_negatives_which_are_divided_evenly():
    reader = made(count=11, per_sample=2, by="popularity", catalog=CATALOG)
    for rows, lengths in ((8, [1, 1, 2, 1, 1, 2, 1, 2]), (6, [1, 2, 2, 2, 2, 2]), (3, [2, 2, 2]), (1, [2])):
        batch = reader.added(rows_of(0, rows), reader.generator(0, 0), 0)
        column = batch.id_features["negative_item"]
        assert np.diff(column.offsets).tolist() == lengths
        log_q = dense_of(reader.schema, batch, "negative_log_q")
        assert log_q.shape == (rows, 2)
        assert np.array_equal(log_q != 0, np.arange(2) < np.diff(column.offsets)[:, None])
    one = made(count=8, by="uniform", catalog=CATALOG)
    assert next(iter(one)).id_features["negative_item"].offsets is None
    with pytest.raises(DataError, match=r"The first batch has 8 samples.*set per_sample to 13"):
        next(iter(made(count=100, catalog=CATALOG)))


def test_mapped_features_of_drawn_items_follow():
    """Prefixes of codes and other mapped ids: `NextItem` reads them beside the item."""
    of_item = [
        IdFeature("bucket", dim=2, of="item", mapping=HashTo(5)),
        IdFeature("buckets", table="bucket", pooling=None, max_length=3, keep="last", of="items", mapping=HashTo(5)),
        IdFeature("pair", dim=2, cross=("item", "shop")),
    ]
    schema = Schema([*SCHEMA.id_features, *of_item], dense_features=["x"])
    reader = data.shared_negatives(Clicks(schema), ITEM, 11, per_sample=2, catalog=CATALOG)
    names = ["negative_item", "negative_shop", "negative_bucket"]
    assert [f.name for f in reader.schema.id_features] == [*(f.name for f in schema.id_features), *names]
    mapped = reader.schema.feature("negative_bucket")
    assert (mapped.table_name, mapped.of, mapped.max_length) == ("bucket", "negative_item", 2)
    assert reader.inner_schema(reader.schema).id_features == schema.id_features
    for batch in reader:
        batch.validate(reader.schema)
        drawn, buckets = batch.id_features["negative_item"], batch.id_features["negative_bucket"]
        assert np.array_equal(drawn.offsets, buckets.offsets)
        assert np.array_equal(buckets.values, mapped_ids(HashTo(5), drawn.values))
    pairs = [("items", "item"), ("buckets", "bucket")]
    persia.nn.models.NextItem(reader.schema, history=pairs, negatives=["negative_item", "negative_bucket"])
    with pytest.raises(ConfigError, match=r"'bucket' is computed from item; .* and mapped features follow"):
        data.shared_negatives(Clicks(schema), ["item", "bucket"], 4)
    with pytest.raises(ConfigError, match="'pair' is computed from item, shop; name"):
        data.shared_negatives(Clicks(schema), ["pair"], 4)


@pytest.mark.parametrize("history", [None, HISTORY])
def test_the_catalog_counts_what_was_chosen(history):
    catalog = data.item_catalog(Clicks(), ITEM, history=history)
    found = zip(*(catalog.ids[name].tolist() for name in ITEM), catalog.counts.tolist(), strict=True)
    assert {(item, shop): count for item, shop, count in found} == items_of(*Clicks(), history=history is not None)


SKEWED = data.ItemCatalog(
    {"item": np.array([7, 3, 5, 3, 9], np.uint64), "shop": np.array([1, 0, 2, 1, 0], np.uint64)},
    np.array([1, 4, 16, 64, 0]),
)


@pytest.mark.parametrize(
    ("by", "power"), [("uniform", 1.0), ("popularity", 1.0), ("popularity", 0.5), ("popularity", 0.0)]
)
def test_drawn_items_stand_for_all_of_them_once_corrected(by, power):
    """The mean of exp(score - log q) over drawn items is the sum of exp(score) over all: what the correction is for."""
    reader = made(by=by, catalog=SKEWED, power=power, count=8_000, per_sample=1_000)
    items = list(zip(*(SKEWED.ids[name].tolist() for name in ITEM), strict=True))
    weights = SKEWED.counts**power if by == "popularity" else np.ones(5)
    q = weights / weights.sum()
    batch = next(iter(reader))
    drawn = [items.index(each) for each in drawn_of(batch)]
    share = np.bincount(drawn, minlength=5) / len(drawn)
    np.testing.assert_allclose(share, q, atol=5 * np.sqrt(0.25 / 8_000))
    scores = np.array([0.3, -1.0, 0.5, 0.1, 1.0])
    if by == "uniform":
        assert "negative_log_q" not in reader.schema.dense_names
        log_q = np.full(8_000, np.log(1 / 5))
    else:
        log_q = dense_of(reader.schema, batch, "negative_log_q").reshape(-1)
        np.testing.assert_allclose(log_q, np.log(np.maximum(q, 1e-9))[drawn], rtol=1e-6)
    corrected = np.exp(scores[drawn] - log_q)
    expected = np.exp(scores)[q > 0].sum()
    assert abs(corrected.mean() - expected) < 5 * corrected.std() / np.sqrt(len(drawn))


def test_items_that_cannot_be_drawn_are_as_rare_as_the_rarest():
    reader = made(by="popularity", catalog=SKEWED, power=1.0, history=HISTORY)
    batch = rows_of(0, 4)
    pairs = {"item": [3, 3, 9, 3], "shop": [1, 0, 0, 2]}  # Known twice, not drawn, and a pair of known parts.
    events = {"items": [[7, 5, 3, 3], [], [4], [9, 7]], "shops": [[1, 2, 0, 1], [], [4], [0, 1]]}
    columns = {name: IdColumn(np.array(values, np.uint64)) for name, values in pairs.items()}
    for name, lists in events.items():
        offsets = np.cumsum([0, *map(len, lists)])
        columns[name] = IdColumn(np.array([e for of in lists for e in of], np.uint64), offsets)
    after = reader.added(replace(batch, id_features=columns), reader.generator(0), 0)
    q = np.exp(dense_of(reader.schema, after, "log_q")[:, 0])
    np.testing.assert_allclose(q, np.array([64, 4, 1, 1]) / 85, rtol=1e-5)
    found = np.exp(dense_of(reader.schema, after, "history_log_q"))  # The last three count; the rest is padding.
    expected = np.array([[16, 4, 64], [85, 85, 85], [1, 85, 85], [1, 1, 85]]) / 85
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@given(
    st.integers(1, 2), st.sampled_from([1, 3, 1 << 40]), st.integers(0, 1 << 60), st.integers(0, 1 << 31), st.booleans()
)
def test_log_q_is_that_of_a_dictionary_whatever_the_ids(features, stride, first, seed, popular):
    rng = np.random.default_rng(seed)
    names, shape = ITEM[:features], int(rng.integers(1, 40))
    columns = {
        name: rng.integers(0, 12, shape).astype(np.uint64) * stride + first for name in names
    }  # Some occur twice.
    counts = rng.integers(0, 5, shape)
    counts[0] += 1
    catalog = data.ItemCatalog({name: ids.astype(np.uint64) for name, ids in columns.items()}, counts)
    draws = ItemDraws(catalog, names, "popularity" if popular else "uniform", 0.75)
    weights = (counts / counts.max()) ** 0.75 if popular else np.ones(shape)
    share = {}
    for item, weight in zip(zip(*catalog.ids.values(), strict=True), weights, strict=True):
        share[item] = share.get(item, 0.0) + weight / weights.sum()
    least = min(each for each in share.values() if each > 0)
    far = [np.uint64(0), np.uint64(first - 1 if first else 2**64 - 1), np.uint64(2**64 - 1)]
    asked = [np.concatenate([ids, rng.permutation(ids), ids + np.uint64(1), far]) for ids in catalog.ids.values()]
    found = draws.log_q(asked)
    assert found.dtype == np.float32
    expected = [np.log(max(share.get(item, 0.0), least)) for item in zip(*asked, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert np.array_equal(draws.log_q_of_drawn(np.arange(shape)), found[:shape])


def test_the_first_events_count_where_the_schema_keeps_them():
    first = [replace_keep(f) for f in SCHEMA.id_features]
    schema = Schema(first, dense_features=["x"])
    reader = data.shared_negatives(Clicks(schema), ITEM, 6, by="popularity", catalog=CATALOG, history=HISTORY)
    counts = items_of(*Clicks(), history=True)
    least = min(counts.values()) ** 0.75
    batch = next(iter(reader))
    total = sum(count**0.75 for count in counts.values())
    for row in range(ROWS):
        events = list(zip(ids(batch, "items", row)[:3], ids(batch, "shops", row)[:3], strict=True))
        expected = [np.log(max(counts.get(e, 0) ** 0.75, least) / total) for e in events]
        found = dense_of(reader.schema, batch, "history_log_q")[row]
        np.testing.assert_allclose(found, [*expected, *[0.0] * (3 - len(events))], rtol=1e-5)


def replace_keep(feature):
    if feature.pooling is not None:
        return feature
    return IdFeature(feature.name, table=feature.table, pooling=None, max_length=3, keep="first")


@pytest.mark.parametrize("options", DRAWS)
def test_batches_can_be_read_again_from_the_middle_and_in_shards(options):
    reader = made(**options)
    whole = list(reader)
    for start in (1, 3, 4, 5, 6, 19):
        assert all(same(a, b) for a, b in zip(whole[start:], reader.batches(start=start), strict=True))
    for index in range(3):
        part = pickle.loads(pickle.dumps(reader.shard(index, 3)))
        assert all(same(a, b) for a, b in zip(whole[index::3], part, strict=True))
        assert all(same(a, b) for a, b in zip(whole[index + 6 :: 3], part.batches(start=2), strict=True))
    differs = options["by"] != "in_batch"
    for other in (reader.batches(epoch=1), made(**options | {"seed": 6})):
        assert all(same(a, b) for a, b in zip(whole, other, strict=True)) != differs


@pytest.mark.parametrize("by", ["uniform", "popularity"])
@pytest.mark.parametrize("history", [None, HISTORY])
def test_without_a_catalog_items_are_those_of_the_window_before(by, history):
    batches = list(Clicks())
    reader = made(by=by, window=4, history=history, power=1.0, count=60, per_sample=8)
    for number, after in enumerate(reader):
        window = number // 4
        known = batches[4 * (window - 1) : 4 * window] if window else [batches[number]]
        counts = items_of(*known, history=history is not None)
        drawn = drawn_of(after)
        assert set(drawn) <= set(counts)
        assert len(set(drawn)) >= 3
        if by == "uniform":
            continue
        total, least = sum(counts.values()), min(counts.values())
        of_drawn = dense_of(reader.schema, after, "negative_log_q")
        np.testing.assert_allclose(of_drawn[of_drawn != 0], [np.log(counts[e] / total) for e in drawn], rtol=1e-5)
        own = [(ids(after, "item", row)[0], ids(after, "shop", row)[0]) for row in range(ROWS)]
        expected = [np.log(counts.get(each, least) / total) for each in own]
        np.testing.assert_allclose(dense_of(reader.schema, after, "log_q")[:, 0], expected, rtol=1e-5)


def test_log_q_of_the_items_of_a_batch_is_their_share_of_the_samples():
    batches = list(Clicks())
    reader = made(by="in_batch", count=None, window=5, history=HISTORY)
    for number, after in enumerate(reader):
        window = number // 5
        known = batches[5 * (window - 1) : 5 * window] if window else [batches[number]]
        counts = items_of(*known, positive=False)  # Those that were not chosen are negatives of the batch, too.
        total, least = sum(counts.values()), min(counts.values())
        own = [(ids(after, "item", row)[0], ids(after, "shop", row)[0]) for row in range(ROWS)]
        found = dense_of(reader.schema, after, "log_q")[:, 0]
        np.testing.assert_allclose(found, [np.log(counts.get(e, least) / total) for e in own], rtol=1e-5)


class Nothing(Clicks):
    """No sample is positive."""

    def batches(self, epoch=0, start=0):
        for batch in Clicks.batches(self, epoch, start):
            yield replace(batch, labels=np.zeros_like(batch.labels))


@pytest.mark.parametrize("by", ["uniform", "popularity"])
def test_without_positive_samples_there_are_no_negatives(by):
    reader = data.shared_negatives(Nothing(), ITEM, 6, by=by, window=3)
    for batch in reader:
        batch.validate(reader.schema)
        assert not drawn_of(batch)
        assert not batch.dense[:, 1:].any()


def test_a_window_is_read_again_only_where_a_pass_begins_in_the_middle():
    class Counting(Clicks):
        reads = 0

        def batches(self, epoch=0, start=0):
            for batch in Clicks.batches(self, epoch, start):
                Counting.reads += 1
                yield batch

    reader = data.shared_negatives(Counting(), ITEM, 6, window=4)
    list(reader)
    assert Counting.reads == 20
    Counting.reads = 0
    list(reader.batches(start=10))  # Windows 1 and 2, of which the pass has read a part, then batches 10 to 19.
    assert Counting.reads == 4 + 4 + 10


def test_rules_can_be_fitted_to_the_samples():
    pa = pytest.importorskip("pyarrow")
    schema = Schema([IdFeature("item", dim=2)], dense_features=[DenseFeature("x", scale="standard")])
    table = pa.table({"item": range(20), "x": np.arange(20.0), "label": [1] * 20})
    reader = data.shared_negatives(data.arrow(table, schema, 10), ["item"], 5, by="popularity", window=1)
    fitted = persia.fit_features(reader.schema, reader)
    assert not fitted.needs_fit
    again = reader.with_schema(fitted)
    assert again.schema == fitted
    batches = list(again)
    assert abs(np.concatenate([b.dense[:, 0] for b in batches]).mean()) < 1e-6
    assert [len(b.id_features["negative_item"].values) for b in batches] == [5, 5]
    assert data.SharedNegatives is type(again)
    assert again.fingerprint().parts == data.arrow(table, schema, 10).fingerprint().parts


def test_requests_may_leave_negatives_empty():
    reader = made(by="popularity", catalog=CATALOG, history=HISTORY, per_sample=2)
    columns = {"item": [3], "shop": [0], "items": [[1, 2]], "shops": [[1, 2]], "x": [0.5]}
    nothing = {"negative_item": [[]], "negative_shop": [[]], "log_q": [None], "history_log_q": [None]}
    batch = Batch.from_columns(reader.schema, columns | nothing | {"negative_log_q": [None]}, require_labels=False)
    assert not drawn_of(batch)
    assert batch.dense.tolist() == [[0.5, 0, 0, 0, 0, 0, 0]]


# --- streams ------------------------------------------------------------------------------------------------------


class Log(LoggedStream):
    """A topic of one partition in memory, in batches of 8."""

    schema = SCHEMA
    input_rules = None

    def __init__(self, length=160, deleted=0):
        super().__init__(("clicks",))
        self.length, self.deleted = length, deleted

    def __reduce__(self):
        return Log, (self.length, self.deleted)

    def share(self, log, loader, loaders, stopping):
        return LogShare(self, log)

    def commit(self, offsets):
        pass

    def observe(self):
        return []


class LogShare:
    def __init__(self, stream, log):
        self.stream, self.log = stream, log
        self.partition = Partition("clicks", 0)
        (self.bounds,) = log.assign([PartitionBounds(self.partition, 0, stream.length)])

    def read(self, offsets):
        if offsets.begin < self.stream.deleted:
            raise DataError("Messages have been deleted.")
        return rows_of(offsets.begin, offsets.end - offsets.begin)

    def past(self, offsets):
        for begin in range(offsets.begin, offsets.end, 4):
            yield begin, self.read(offsets._replace(begin=begin, end=min(begin + 4, offsets.end)))

    def poll(self):
        begin = self.bounds.begin
        if begin >= self.stream.length:
            self.log.exhaust([self.partition])
            return None
        offsets = OffsetRange(self.partition, begin, begin + ROWS)
        self.bounds = self.bounds._replace(begin=offsets.end)
        return NewBatch(self.log.record(offsets), offsets, self.read(offsets))

    def close(self):
        pass


@pytest.mark.parametrize("options", [*DRAWS[:2], {"by": "popularity", "window": 30}, {"by": "uniform", "window": 30}])
def test_a_stream_has_the_same_negatives_wherever_it_is_continued(options):
    stream = data.shared_negatives(Log(), ITEM, 6, seed=3, **options)
    stream.begin(0, {}, lambda: False)
    whole = list(stream.batches())
    assert len(whole) == 20
    for batch in whole:
        batch.validate(stream.schema)
    assert all(same(a, b) for a, b in zip(whole[7:], stream.batches(0, 7), strict=True))
    other = pickle.loads(pickle.dumps(stream))
    other.begin(11, stream.offsets(7), lambda: False)
    assert all(same(a, b) for a, b in zip(whole[7:], other.batches(0, 11), strict=True))


def test_a_stream_draws_from_the_messages_before():
    stream = data.shared_negatives(Log(), ITEM, 8, by="popularity", power=1.0, window=30, seed=3)
    for number, batch in enumerate(stream):
        window = 8 * number // 30
        counts = items_of(rows_of(30 * (window - 1), 30)) if window else items_of(rows_of(8 * number, 8))
        assert set(drawn_of(batch)) <= set(counts)
        expected = [np.log(counts[e] / sum(counts.values())) for e in drawn_of(batch)]
        np.testing.assert_allclose(dense_of(stream.schema, batch, "negative_log_q")[:, 0], expected, rtol=1e-5)


def test_messages_that_were_deleted_are_not_drawn(caplog):
    stream = data.shared_negatives(Log(deleted=50), ITEM, 8, by="uniform", window=40)
    stream.begin(0, {"clicks": {0: 56}}, lambda: False)
    batches = list(stream.batches())
    assert "Negatives are drawn from their own batch" in caplog.text
    assert set(drawn_of(batches[0])) <= set(items_of(rows_of(56, 8)))
    assert set(drawn_of(batches[8])) <= set(items_of(rows_of(80, 40)))  # Of offset 120.


@pytest.mark.parametrize("reader", [Clicks(), Log()])
def test_negatives_of_single_samples_go_inside(reader):
    shared = data.shared_negatives(reader, ITEM, 4)
    with pytest.raises(ConfigError, match=r"the other way round, shared_negatives\(negatives\(\.\.\.\)\)"):
        data.negatives(shared, ITEM, 1)
    batch = next(iter(data.shared_negatives(data.negatives(reader, ITEM, 1), ITEM, 4)))
    assert len(batch) > ROWS
    assert len(drawn_of(batch)) == 4


def test_a_stream_without_shares_is_refused(tmp_path):
    growing = data.growing(tmp_path, SCHEMA, until="now")
    with pytest.raises(ConfigError, match="lose the position of DirectoryReader"):
        data.shared_negatives(growing, ITEM, 4)


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"features": ["nope"]}, "no ID-type feature 'nope'"),
        ({"features": []}, "list of the item's features"),
        ({"features": "item"}, "list of the item's features"),
        ({"count": 0}, "count"),
        ({"count": None}, "count"),
        ({"count": 1.5}, "count"),
        ({"by": "in_batch"}, "takes no count"),
        ({"by": "other"}, "by = 'other'"),
        ({"per_sample": 0}, "per_sample"),
        ({"window": 0}, "window"),
        ({"power": -1.0}, "power"),
        ({"seed": -1}, "seed"),
        ({"catalog": data.ItemCatalog({"item": np.arange(2, dtype=np.uint64)}, np.ones(2, np.int64))}, "lacks .*shop"),
        (
            {"by": "popularity", "catalog": replace(SKEWED, counts=np.zeros(5, np.int64))},
            "All counts of the catalog are 0",
        ),
        ({"history": ["items"]}, "one un-pooled feature for each"),
        ({"history": "items"}, "one un-pooled feature for each"),
        ({"history": ["items", "nope"]}, "no ID-type feature 'nope'"),
        ({"history": ["items", "shop"]}, "'shop' is pooled"),
    ],
)
def test_bad_arguments_are_refused(options, match):
    with pytest.raises(ConfigError, match=match):
        data.shared_negatives(Clicks(), **{"features": ITEM, "count": 4} | options)


def test_batches_of_similar_lengths_may_begin_with_the_rest_of_a_block():
    """Its few samples say nothing about the other batches, whose least number of samples is known."""
    pa = pytest.importorskip("pyarrow")
    rng = np.random.default_rng(0)
    histories = [rng.integers(0, 9, length).tolist() for length in rng.integers(0, 7, 61)]
    table = pa.table({"item": rng.integers(0, 9, 61), "history": histories, "label": np.ones(61)})
    schema = Schema([IdFeature("item", dim=2), IdFeature("history", table="item", pooling=None, max_length=6)])
    options = {"tokens_per_batch": 24, "shuffle_rows": 20, "similar_lengths": True}
    reader = data.arrow(table, schema, 10, **options)
    shared = data.shared_negatives(reader, ["item"], 12, per_sample=3, window=1)
    first = [len(next(shared.batches(epoch))) for epoch in range(30)]
    assert min(first) * 3 < 12 <= max(first) * 3
    with pytest.raises(ConfigError, match=r"have 4 samples \(tokens_per_batch = 24\).* set per_sample to 4, or"):
        data.shared_negatives(reader, ["item"], 13, per_sample=3)
    with pytest.raises(ConfigError, match=r"have 3 samples"):
        data.shared_negatives(data.arrow(table, schema, 3, **options), ["item"], 10, per_sample=3)


def test_names_that_are_taken_and_other_labels_are_refused():
    taken = Clicks(Schema(SCHEMA.id_features, dense_features=["x", "log_q"]))
    with pytest.raises(ConfigError, match="'log_q' occurs twice"):
        data.shared_negatives(taken, ITEM, 4, by="popularity")
    data.shared_negatives(taken, ITEM, 4)
    regression = Clicks(Schema(SCHEMA.id_features, labels=[Label("watch", kind="regression")]))
    with pytest.raises(ConfigError, match="is of kind 'regression'"):
        data.shared_negatives(regression, ITEM, 4)
    lengths = [*SCHEMA.id_features[:3], IdFeature("shops", table="shop", pooling=None, max_length=4)]
    with pytest.raises(ConfigError, match="differ in max_length or keep"):
        data.shared_negatives(Clicks(Schema(lengths, dense_features=["x"])), ITEM, 4, history=HISTORY)


def test_histories_of_different_lengths_and_data_without_labels_are_refused():
    batch = rows_of(0, 8)
    short = batch.id_features | {"shops": IdColumn(np.zeros(8, np.uint64))}
    reader = made(by="popularity", catalog=CATALOG, history=HISTORY)
    with pytest.raises(DataError, match=r"'items' and 'shops' .*different numbers of ids at row 0 of batch 4"):
        reader.added(replace(batch, id_features=short), reader.generator(0), 4)
    with pytest.raises(DataError, match="Batch 3 has no labels"):
        made().added(replace(batch, labels=np.zeros((8, 0), np.float32)), reader.generator(0), 3)
