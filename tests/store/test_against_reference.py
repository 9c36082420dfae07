"""Native store and reference agree to the last bit, whatever is done to them."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from persia.ps.row_chunks import set_rows
from persia.store import NativeStore, Spill, TableConfig
from persia.types import BUCKETS
from persia.types.half_floats import DTYPES
from support.examples import examples
from support.stores import contents, lookup, read, update
from support.twins.store import ReferenceStore

OPTIMIZERS = [
    ("sgd", {}),
    ("sgd", {"momentum": 0.9, "weight_decay": 0.01}),
    ("adagrad", {"initial_accumulator": 0.1, "weight_decay": 0.01}),
    ("adagrad", {}),
    ("rowwise_adagrad", {"weight_decay": 0.01}),
    ("adam", {}),
    ("adam", {"weight_decay": 0.1, "beta2": 0.99}),
    ("ftrl", {"l1": 0.01, "l2": 0.1}),
    ("sgd", {"momentum": 0.9, "clip_row_norm": 0.7, "decoupled_weight_decay": 0.3}),
    ("adagrad", {"clip_row_norm": 3.0, "weight_decay": 0.01}),
    ("rowwise_adagrad", {"decoupled_weight_decay": 0.1}),
    ("adam", {"clip_row_norm": 1.0, "decoupled_weight_decay": 0.1}),
    ("ftrl", {"clip_row_norm": 0.5}),
]
ADMISSIONS = [("all", 0.0), ("probability", 0.5), ("min_frequency", 3.0)]
INITIALIZERS = [("uniform", -0.5, 0.25), ("rsqrt_dim", 0, 0), ("zeros", 0, 0), ("normal", 0.5, 0.1)]
VALUES = st.sampled_from([0.0, -0.0, 1.0, -0.3, 1e-30, -1e-42, 1e19, -3e38, np.nan, np.inf, 0.1])


@st.composite
def configs(draw):
    optimizer, params = draw(st.sampled_from(OPTIMIZERS))
    initializer, a, b = draw(st.sampled_from(INITIALIZERS))
    admission, value = draw(st.sampled_from(ADMISSIONS))
    shards = draw(st.sampled_from([1, 2, 4]))
    return TableConfig(
        name="t",
        dim=draw(st.integers(1, 40) | st.sampled_from([63, 64, 65, 129, 256, 257])),
        capacity=draw(st.integers(shards, 40) | st.just(10_000)),
        shards=shards,
        seed=draw(st.integers(0, 2**64 - 1)),
        optimizer=optimizer,
        optimizer_params=params,
        initializer=initializer,
        initializer_a=a,
        initializer_b=b,
        admission=admission,
        admission_value=value,
        value_bound=draw(st.sampled_from([0.0, 0.0, 0.4])),
        ttl=draw(st.sampled_from([0, 1, 3, 40])),
        dtype=draw(st.sampled_from(DTYPES)),
    )


def restored(store, config, other):
    """Copies the content to another store, in small parts."""
    other.create_table(config)
    for _, rows in store.iterate_rows(0, max_rows=7):
        other.import_rows(0, rows)
    for shard in range(config.resolved_shards):
        other.import_state(0, shard, store.export_state(0, shard))
    return other


def assert_same_rows(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def compare(store, reference):
    assert store.size(0) == reference.size(0)
    assert store.statistics(0) == reference.statistics(0)
    for shard in range(store.config(0).resolved_shards):
        mine, theirs = (s.export_state(0, shard) for s in (store, reference))
        for name in ("clocks", "counters", "sketch", "ages"):
            assert mine[name].dtype == theirs[name].dtype
            np.testing.assert_array_equal(mine[name], theirs[name])
    mine, theirs = contents(store), contents(reference)
    assert mine.keys() == theirs.keys()
    for shard, rows in mine.items():
        assert_same_rows(rows, theirs[shard])
        assert np.isfinite(rows.embeddings).all()  # Whatever an update would have made of it.
        assert np.isfinite(rows.state).all()


ACTIONS = [
    "train",
    "train",
    "update",
    "update",
    "evaluate",
    "read",
    "set",
    "restore",
    "keep",
    "age",
    "remove",
    "remove_rows",
]


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_any_history(data):
    config = data.draw(configs())
    threads = data.draw(st.sampled_from([1, 3]))
    store, reference = both = NativeStore(threads), ReferenceStore()
    for s in both:
        s.create_table(config)
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    universe = random.integers(0, 2**64, data.draw(st.integers(1, 120)), dtype=np.uint64)
    for step in range(data.draw(st.integers(1, 12))):
        action = data.draw(st.sampled_from(ACTIONS))
        ids = random.choice(universe, random.integers(0, 100))
        if action in ("train", "evaluate"):
            mine, theirs = (lookup(s, ids, action == "train") for s in both)
            np.testing.assert_array_equal(mine, theirs)
        elif action == "update":
            gradients = random.normal(size=(len(ids), config.dim)).astype(np.float32)
            if len(ids):
                gradients[0, random.integers(config.dim)] = data.draw(VALUES)
            push = data.draw(st.tuples(st.integers(0, 2), st.integers(0, 5)))
            mine, theirs = (update(s, ids, gradients, 0.1, step, *push) for s in both)
            assert mine == theirs
        elif action == "read":
            np.testing.assert_array_equal(store.last_steps(0, ids), reference.last_steps(0, ids))
            np.testing.assert_array_equal(store.contains(0, ids), reference.contains(0, ids))
            assert_same_rows(read(store, ids), read(reference, ids))
            (mine, rows), (theirs, expected) = store.peek(0, ids), reference.peek(0, ids)
            np.testing.assert_array_equal(mine, theirs)
            assert_same_rows(rows, expected)
        elif action == "set":
            keys = np.unique(ids)
            values = random.normal(size=(len(keys), config.dim)).astype(np.float32)
            assert set_rows(store, 0, keys, values, None) == set_rows(reference, 0, keys, values, None)
        elif action == "keep":
            for s in both:
                s.keep_last_steps(0)
        elif action == "remove_rows":
            assert store.remove_rows(0, ids) == reference.remove_rows(0, ids)
        elif action == "remove":
            buckets = random.random(BUCKETS) < data.draw(st.sampled_from([0.0, 0.2, 0.8, 1.0]))
            for shard in range(config.resolved_shards):
                mine, theirs = (s.remove_buckets(0, shard, buckets) for s in both)
                assert mine == theirs
        elif action == "age":
            by = data.draw(st.integers(0, 30))
            for s in both:
                s.advance_clock(0, by)
        else:
            store, reference = both = (
                restored(store, config, NativeStore(threads)),
                restored(reference, config, ReferenceStore()),
            )
        compare(store, reference)


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_any_history_while_the_index_grows(data):
    """An index with `begins` rows begins to grow, and a twelfth as many new rows later it has grown."""
    begins = data.draw(st.sampled_from([51, 102, 204, 409, 819]))
    first = begins + data.draw(st.integers(0, begins // 12))
    config = TableConfig(
        "t",
        3,
        capacity=first + data.draw(st.integers(0, 10)),
        shards=1,
        seed=begins,
        optimizer=data.draw(st.sampled_from(["adagrad", "adam"])),
        dtype=data.draw(st.sampled_from(DTYPES)),
    )
    store, reference = both = NativeStore(), ReferenceStore()
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    universe = random.integers(0, 2**64, first + 40, dtype=np.uint64)
    for s in both:
        s.create_table(config)
        lookup(s, universe[:first])
    for step in range(1, data.draw(st.integers(1, 8))):
        action = data.draw(st.sampled_from(["train", "evaluate", "update", "set", "snapshot"]))
        ids = random.choice(universe, random.integers(1, 6))
        if action in ("train", "evaluate"):
            np.testing.assert_array_equal(*(lookup(s, ids, action == "train") for s in both))
        elif action == "update":
            gradients = random.normal(size=(len(ids), 3)).astype(np.float32)
            assert update(store, ids, gradients, 0.1, step) == update(reference, ids, gradients, 0.1, step)
        elif action == "set":
            keys = np.unique(ids)
            values = random.normal(size=(len(keys), 3)).astype(np.float32)
            assert set_rows(store, 0, keys, values, None) == set_rows(reference, 0, keys, values, None)
        else:
            snapshots = []
            for s in both:
                epoch = s.begin_snapshot(0, 0, Spill("/tmp"))
                lookup(s, ids)
                rows, _ = s.export_snapshot(0, 0, epoch, 10**6)
                s.end_snapshot(0)
                snapshots.append(rows)
            assert_same_rows(*snapshots)
        compare(store, reference)


def test_adam_beyond_cached_corrections():
    """Long-lived rows leave the table of bias corrections; the value must not jump."""
    config = TableConfig("t", 4, optimizer="adam", shards=1)
    ids = np.zeros(500, np.uint64)
    gradients = np.random.default_rng(0).normal(size=(500, 4)).astype(np.float32)
    found = []
    for store in (NativeStore(), ReferenceStore()):
        store.create_table(config)
        lookup(store, ids[:1])
        rows = contents(store)[0]
        store.import_rows(0, rows._replace(update_count=np.array([2**15 - 100], np.uint32)))
        update(store, ids, gradients, 0.01)
        found.append(contents(store)[0].embeddings)
    np.testing.assert_array_equal(*found)


def test_values_do_not_depend_on_shards_or_order():
    ids = np.arange(5000, dtype=np.uint64)
    values = []
    for shards, order in ((1, ids), (8, ids[::-1].copy())):
        store = NativeStore(2)
        store.create_table(TableConfig("t", 16, shards=shards, seed=3))
        store.lookup([0], [order], True)
        values.append(store.lookup([0], [ids], False)[0])
    np.testing.assert_array_equal(*values)


def test_large_eviction_is_least_recently_used():
    """Beyond one scan of the queue: batches in order, so exactly the latest `capacity` ids survive."""
    store = NativeStore()
    store.create_table(TableConfig("t", 2, capacity=50_000, shards=1))
    for start in range(0, 400_000, 1000):
        store.lookup([0], [np.arange(start, start + 1000, dtype=np.uint64)], True)
        store.lookup([0], [np.arange(100, dtype=np.uint64)], True)
    survivors = store.contains(0, np.arange(400_000, dtype=np.uint64))
    assert survivors[:100].all()
    assert survivors.sum() == 50_000
    # 49,900 ids left for what came last, whole batches but for the oldest one.
    assert survivors[400_000 - 49_900 :].all()


class SearchedRows:
    """Ids and stamps of a shard that searches all its rows for each victim; the reference store takes too long here."""

    def __init__(self, capacity: int) -> None:
        self.ids, self.stamps = np.zeros(capacity, np.uint64), np.zeros(capacity, np.uint32)
        self.rows: dict[int, int] = {}
        self.clock = 0

    def lookup(self, ids):
        self.clock += 1
        for id_ in ids.tolist():
            if id_ not in self.rows:
                row = len(self.rows)
                if row == len(self.ids):
                    row = int(self.stamps.argmin())
                    del self.rows[int(self.ids[row])]
                self.rows[id_], self.ids[row] = row, id_
            self.stamps[self.rows[id_]] = self.clock


@settings(max_examples=examples(6), deadline=None)
@given(
    capacity=st.sampled_from([12_000, 30_000]), share_new=st.sampled_from([1.0, 0.5, 0.1]), seed=st.integers(0, 2**32)
)
def test_victims_while_the_next_ones_are_collected(capacity, share_new, seed):
    """Tables whose scans take many requests, and sort their rows in several runs."""
    random = np.random.default_rng(seed)
    store, searched = NativeStore(), SearchedRows(capacity)
    store.create_table(TableConfig("t", 1, capacity=capacity, shards=1))
    first_new, size = 0, capacity // 40
    for request in range(120):
        new = size if len(searched.rows) < capacity else int(size * share_new)
        fresh = np.arange(first_new, first_new + new, dtype=np.uint64)
        first_new += new
        asked = random.permutation(np.append(fresh, random.choice(searched.ids, size - new)))
        lookup(store, asked)
        searched.lookup(asked)
        if request % 4 == 0:
            pushed = searched.ids[random.choice(len(searched.rows), size // 4)]
            assert update(store, pushed, np.zeros((len(pushed), 1))).absent == 0
            searched.lookup(pushed)
    (rows,) = contents(store).values()
    np.testing.assert_array_equal(rows.ids, searched.ids)
    np.testing.assert_array_equal(rows.stamp, searched.stamps)
    assert store.statistics(0)["evicted"] > capacity // 8


def test_clock_overflow_keeps_order():
    config = TableConfig("t", 2, capacity=8, shards=1)
    store, reference = both = NativeStore(), ReferenceStore()
    for s in both:
        s.create_table(config)
        for id_ in (5, 3, 1, 4, 2, 0, 6, 7):
            lookup(s, np.array([id_], np.uint64))
    state = store.export_state(0, 0)
    state["clocks"] = np.array([2**32 - 3, 1, 0], np.uint64)
    store.import_state(0, 0, state)
    for step in range(20):
        ids = np.array([step % 5, 100 + step], np.uint64)
        for s in both:
            lookup(s, ids)
    np.testing.assert_array_equal(contents(store)[0].ids, contents(reference)[0].ids)
