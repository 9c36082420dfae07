"""Retrieval: the nearest items of brute force, and an index that follows rows, deletions and networks."""

import itertools
import sys
import threading
import time

import numpy as np
import pytest
import torch

from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.errors import ConfigError, DataError, MissingExtraError
from persia.nn.models import FFNN, TwoTower
from persia.schema import IdFeature, Schema
from persia.serve.item_index import IndexOptions, ItemIndex

SCHEMA = Schema(
    [
        IdFeature("user", dim=8),
        IdFeature("history", dim=8, table="item", pooling="mean", max_length=5),
        IdFeature("item", dim=8),
        IdFeature("tags", dim=4, pooling="sum", max_length=3),
    ],
    dense_features=["age", "price"],
    labels=["click"],
)
ITEMS = 400


class Tables:
    """Rows in dictionaries."""

    def __init__(self, seed=0):
        rng = np.random.default_rng(seed)
        dims = {name: table.dim for name, table in SCHEMA.resolved_tables().items()}
        counts = {"user": 50, "item": ITEMS, "tags": 20}
        self.rows = {
            name: {i: rng.standard_normal(dims[name]).astype(np.float32) for i in range(counts[name])} for name in dims
        }
        self.dims = dims

    def found(self, table, ids):
        return np.array([int(i) in self.rows[table] for i in ids], np.bool_)

    def read(self, batch, features=tuple(feature.name for feature in SCHEMA.id_features)):
        embeddings = {}
        for feature in map(SCHEMA.feature, features):
            column, rows = batch.id_features[feature.name], self.rows[feature.table_name]
            zero = np.zeros(self.dims[feature.table_name], np.float32)
            offsets = np.arange(len(column) + 1) if column.offsets is None else column.offsets
            pooled = []
            for first, last in itertools.pairwise(offsets):
                values = [rows.get(int(i), zero) for i in column.values[first:last]]
                total = np.sum(values, 0) if values else zero
                pooled.append(total / len(values) if values and feature.pooling == "mean" else total)
            embeddings[feature.name] = torch.from_numpy(np.stack(pooled))
        return torch.from_numpy(batch.dense), embeddings


def catalogue(ids):
    ids = np.asarray(ids, np.uint64)
    n = len(ids)
    tags = IdColumn(np.stack([ids % 20, ids % 7], 1).reshape(-1).astype(np.uint64), np.arange(0, 2 * n + 1, 2))
    dense = np.stack([np.zeros(n), ids % 5], 1).astype(np.float32)
    return Batch({"item": IdColumn(ids), "tags": tags}, dense, np.empty((n, 0), np.float32))


def users(n=20, seed=1):
    rng = np.random.default_rng(seed)
    history = IdColumn(rng.integers(0, ITEMS, 3 * n).astype(np.uint64), np.arange(0, 3 * n + 1, 3))
    user = IdColumn(rng.integers(0, 50, n).astype(np.uint64))
    return Batch({"user": user, "history": history}, rng.random((n, 2)).astype(np.float32), np.empty((n, 0), "f4"))


def model(seed=0):
    torch.manual_seed(seed)
    return TwoTower(SCHEMA, item=["item", "tags", "price"], hidden=(16,), dim=8).eval()


def index_of(tables, network, **options):
    return ItemIndex(network, SCHEMA, catalogue(range(ITEMS)), tables, key="item", **options)


def brute_force(tables, network, batch, k, ids=range(ITEMS)):
    """Returns ids and scores of the nearest items that have rows."""
    ids = np.array([i for i in ids if i in tables.rows["item"]], np.uint64)
    n, nothing = len(batch), lambda rows: IdColumn(np.empty(0, np.uint64), np.zeros(rows + 1, np.int64))
    items = catalogue(ids)
    whole = Batch({**items.id_features, **{f: nothing(len(ids)) for f in ("user", "history")}}, items.dense, None)
    asked = Batch({**batch.id_features, **{f: nothing(n) for f in ("item", "tags")}}, batch.dense, None)
    with torch.no_grad():
        scores = (network.users(*tables.read(asked)) @ network.items(*tables.read(whole)).T).numpy()
    order = np.argsort(-scores, 1)[:, :k]
    return ids[order], np.take_along_axis(scores, order, 1)


def check(index, tables, network, recall=0.95, k=10):
    batch = users()
    found = index.search(batch, k)
    ids, _ = brute_force(tables, network, batch, k)
    assert found.ids.shape == ids.shape
    hits = np.mean([len(np.intersect1d(a, b)) / len(b) for a, b in zip(found.ids, ids, strict=True)])
    assert hits >= recall
    by_id, best = brute_force(tables, network, batch, ITEMS)
    for row in range(len(batch)):  # Scores are those of the ids, and fall.
        known = dict(zip(by_id[row].tolist(), best[row].tolist(), strict=True))
        np.testing.assert_allclose(found.scores[row], [known[i] for i in found.ids[row].tolist()], atol=1e-5)
        assert (np.diff(found.scores[row]) <= 0).all()
    assert len(index) == len(tables.rows["item"])


def change(index, tables, table, ids, removed=(), seed=3):
    rng = np.random.default_rng(seed)
    for i in removed:
        tables.rows[table].pop(i, None)
    for i in ids:
        tables.rows[table][i] = rng.standard_normal(tables.dims[table]).astype(np.float32)
    index.note_changes(table, np.array(ids, np.uint64), np.array(removed, np.uint64))


def test_finds_the_nearest_items_and_follows_changes():
    tables, network = Tables(), model()
    index = index_of(tables, network)
    check(index, tables, network)
    assert index.refresh() == 0

    change(index, tables, "item", range(0, 100, 2), removed=range(1, 100, 2))
    assert index.waiting == 100
    assert not np.isin(index.search(users(), 50).ids, np.arange(1, 100, 2)).any()  # At once.
    assert index.refresh() == 100
    assert index.waiting == 0
    check(index, tables, network)

    change(index, tables, "tags", [3])  # Of all items with the tag, the removed ones among them.
    with_tag = [i for i in range(ITEMS) if i % 20 == 3 or i % 7 == 3]
    assert index.refresh() == len(with_tag)
    check(index, tables, network)

    change(index, tables, "item", [1, 3])  # They come back.
    change(index, tables, "item", [5], removed=[5])
    change(index, tables, "user", [4])
    assert index.refresh() == 3
    check(index, tables, network)
    assert not index.crowded

    second = model(1)
    change(index, tables, "item", [7])
    index.load(second, 12)
    assert index.search(users(), 1).step == index.step == 12
    check(index, tables, second)
    assert index.refresh() == 0
    tables.rows["tags"][2][:] = 5
    index.note_all()
    assert index.refresh() == ITEMS
    check(index, tables, second)
    index.rebuild()
    assert len(index._state.fresh) == 0
    check(index, tables, second)


def test_changes_while_an_index_is_built_are_in_it():
    tables, network = Tables(), model()
    index = index_of(tables, network)
    second, calls = model(1), []
    items = second.items

    def changing(dense, embeddings):
        vectors = items(dense, embeddings)
        if not calls:  # After the rows were read.
            change(index, tables, "item", [10, 11], removed=[12])
        calls.append(len(dense))
        return vectors

    second.items = changing
    index.load(second, 3)
    assert calls == [ITEMS, 2]
    check(index, tables, second)
    assert index.refresh() == 0


def test_a_graph_without_current_vectors_is_not_searched():
    """Else a search would ask it for more and more items, up to all, after a snapshot replaced the rows."""
    tables, network = Tables(), model()
    index = index_of(tables, network)
    asked = []

    class Graph(type(index._state.graph)):
        def search(self, queries, count, **options):
            asked.append(count)
            return super().search(queries, count, **options)

    index._state.graph.__class__ = Graph
    check(index, tables, network)
    assert asked
    index.note_all()
    index.refresh()
    asked.clear()
    check(index, tables, network)
    assert not asked
    index.rebuild()
    change(index, tables, "item", range(ITEMS - 3))
    index.refresh()
    assert index._state.visible == 3
    check(index, tables, network)


def test_few_items_and_none():
    tables, network = Tables(), model()
    index = index_of(tables, network)
    change(index, tables, "item", [], removed=range(2, ITEMS))
    assert index.search(users(), 10).ids.shape == (20, 2)
    index.refresh()
    check(index, tables, network)
    change(index, tables, "item", [], removed=[0, 1])
    index.refresh()
    index.rebuild()
    assert index.search(users(), 10).ids.shape == (20, 0)
    change(index, tables, "item", [9])
    index.refresh()
    assert index.search(users(), 10).ids.tolist() == [[9]] * 20


def test_searches_go_on_while_items_change():
    tables, network = Tables(), model()
    index = index_of(tables, network)
    ended, failures, searches = threading.Event(), [], [0] * 3
    removed = np.zeros(ITEMS, np.bool_)

    def search(number):
        while not ended.is_set():
            gone = np.flatnonzero(removed)
            found = index.search(users(4, seed=number), 20)
            searches[number] += 1
            if np.isin(found.ids, gone).any() or not np.isfinite(found.scores).all() or found.ids.shape != (4, 20):
                failures.append(found)

    threads = [threading.Thread(target=search, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(10):
        ids = list(range(20 * turn, 20 * turn + 20))
        change(index, tables, "item", [], removed=ids)
        removed[ids] = True
        index.refresh()
        if turn % 4 == 3:
            index.load(model(turn), turn)
    deadline = time.monotonic() + 60
    while min(searches) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    ended.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert min(searches) >= 5


def test_a_search_in_the_earlier_state_leaves_out_removed_items(monkeypatch):
    """The exchange must not take from the search's state what it knows of the removal."""
    tables = Tables()
    network = model()
    index = index_of(tables, network)
    removed = index.search(users(1), 1).ids[0, 0]
    change(index, tables, "item", [], [removed])
    read = Tables.read

    def read_while_the_vectors_are_exchanged(self, batch, features):
        monkeypatch.undo()
        index.refresh()
        return read(self, batch, features)

    monkeypatch.setattr(Tables, "read", read_while_the_vectors_are_exchanged)
    assert removed not in index.search(users(1), ITEMS).ids
    assert not index.waiting
    check(index, tables, network)


def test_an_item_with_a_bad_vector_is_left_out():
    tables, network = Tables(), model()
    tables.rows["item"][8][:] = np.nan
    index = index_of(tables, network)
    assert len(index) == ITEMS - 1
    assert 8 not in index.search(users(), ITEMS).ids
    tables.rows["user"][int(users().id_features["user"].values[0])][:] = np.nan
    with pytest.raises(DataError, match="The vector of a user is not finite"):
        index.search(users(), 3)


def test_errors(monkeypatch):
    tables, network = Tables(), model()
    with pytest.raises(ConfigError, match="say which one identifies it, such as key='item'"):
        ItemIndex(network, SCHEMA, catalogue([1]), tables)
    with pytest.raises(ConfigError, match="key = 'user' is no ID-type feature of the item"):
        ItemIndex(network, SCHEMA, catalogue([1]), tables, key="user")
    with pytest.raises(DataError, match="Two items have the id 2 of 'item'"):
        ItemIndex(network, SCHEMA, [catalogue([1, 2]), catalogue([2])], tables, key="item")
    with pytest.raises(DataError, match="The batch is empty"):
        ItemIndex(network, SCHEMA, catalogue([]), tables, key="item")
    with pytest.raises(DataError, match="Item 1 has not one id of 'item'"):
        two = Batch(
            {
                "item": IdColumn(np.array([1], np.uint64), np.array([0, 1, 1])),
                "tags": catalogue([1, 2]).id_features["tags"],
            },
            np.zeros((2, 2), np.float32),
            np.zeros((2, 0), np.float32),
        )
        ItemIndex(network, SCHEMA, two, tables, key="item")
    with pytest.raises(DataError, match="The batch lacks the features item, tags"):
        ItemIndex(network, SCHEMA, users(), tables, key="item")
    with pytest.raises(ConfigError, match="FFNN has no towers"):
        ItemIndex(FFNN(SCHEMA).eval(), SCHEMA, catalogue([1]), tables, key="item")
    with pytest.raises(ConfigError, match="The model is in training mode"):
        ItemIndex(model().train(), SCHEMA, catalogue([1]), tables, key="item")
    for dtype in ("f8", "i8"):
        with pytest.raises(ConfigError, match="dtype"):
            IndexOptions(dtype=dtype)
    index = index_of(tables, network, options=IndexOptions(dtype="f16"))
    with pytest.raises(ConfigError, match="k"):
        index.search(users(), 0)
    with pytest.raises(DataError, match="The batch lacks the features user, history"):
        index.search(catalogue([1]), 1)
    other = TwoTower(SCHEMA, item=["item"], hidden=(4,), dim=8).eval()
    with pytest.raises(ConfigError, match="other features"):
        index.load(other, 1)
    monkeypatch.setitem(sys.modules, "usearch.index", None)
    with pytest.raises(MissingExtraError, match=r"pip install \"persia-recsys\[usearch\]\""):
        index_of(tables, network)
