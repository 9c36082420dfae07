"""Retrieval over the log of changes, in process and over HTTP."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import persia
from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.errors import ClosedError, DataError
from persia.nn.item_catalogue import TowerFeatures
from persia.nn.models import TwoTower
from persia.publish import PublishOptions
from persia.schema import IdFeature, Schema
from persia.serve import Predictor, ServeOptions
from persia.serve.http.app import create_app
from persia.serve.http.limits import ServeLimits
from persia.serve.item_files import read_items
from persia.serve.item_index import ItemIndex
from persia.serve.retriever import Retriever, _Changes
from persia.serve.schema_parts import columns_of

ITEMS, USERS = 60, 30
SCHEMA = Schema(
    [IdFeature("user", dim=8), IdFeature("seen", dim=8, table="item", pooling="mean"), IdFeature("item", dim=8)],
    dense_features=["age", "price"],
    labels=["click"],
)


def batch(seed=0, n=600):
    rng = np.random.default_rng(seed)
    users, items = rng.integers(0, USERS, n).astype(np.uint64), rng.integers(0, ITEMS, n).astype(np.uint64)
    seen = IdColumn(rng.integers(0, ITEMS, 2 * n).astype(np.uint64), np.arange(0, 2 * n + 1, 2))
    dense = np.stack([users / USERS, items / ITEMS], 1).astype(np.float32)
    clicks = (users % 5 == items % 5).astype(np.float32)[:, None]
    return Batch({"user": IdColumn(users), "seen": seen, "item": IdColumn(items)}, dense, clicks)


def network():
    return TwoTower(SCHEMA, item=["item", "price"], hidden=(8,), dim=8)


def catalogue():
    ids = np.arange(ITEMS, dtype=np.uint64)
    dense = np.stack([np.zeros(ITEMS), ids / ITEMS], 1).astype(np.float32)
    return Batch({"item": IdColumn(ids)}, dense, np.empty((ITEMS, 0), np.float32))


@pytest.fixture
def run(tmp_path):
    torch.manual_seed(0)
    return persia.Trainer(
        network(),
        SCHEMA,
        optimizer=lambda params: torch.optim.Adam(params, 1e-2),
        embedding_optimizer=persia.optim.Adagrad(lr=0.1),
        options=persia.TrainerOptions(progress=False, publish=PublishOptions(str(tmp_path), seconds=0.05)),
    )


def nearest(run, users, k):
    """Returns what `predict` orders items by, for each user."""
    items, best = catalogue(), []
    for row in range(len(users)):
        one = users.take(np.full(ITEMS, row))
        dense = np.stack([one.dense[:, 0], items.dense[:, 1]], 1)
        (scores,) = run.predict([Batch({**one.id_features, "item": items.id_features["item"]}, dense, items.labels)])
        best.append(np.argsort(-scores[:, 0], kind="stable")[:k])
    return np.array(best)


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_it_follows_a_run(run, tmp_path):
    run.fit([batch(seed) for seed in range(5)])
    users = batch(99, 12)
    with Predictor(str(tmp_path), network(), ServeOptions(poll_seconds=0.05)) as predictor:
        late = Retriever(predictor, catalogue())
        with pytest.raises(ClosedError, match="The retriever has not started"):
            late.search(users, 1)
        with Retriever(predictor, catalogue(), seconds=0.05) as retriever:
            found = retriever.search(users, 5)
            assert found.step == 5
            assert np.mean(found.ids == nearest(run, users, 5)) > 0.9
            run.fit([batch(seed) for seed in range(5, 9)])
            until(lambda: retriever.index.step == 9)
            assert np.mean(retriever.search(users, 5).ids == nearest(run, users, 5)) > 0.9
            # An increment that removes a row, as the log has it.
            for tables in predictor.current().rows._tables:
                tables["item"].remove(np.array([7], np.uint64))
            predictor._updater._notify([persia.publish.Change("item", *_removed(7))])
            assert 7 not in retriever.search(users, ITEMS).ids


def _removed(item):
    none = np.empty(0, np.uint64)
    return none, np.empty((0, 8), np.float32), np.array([item], np.uint64), 9


def test_over_http_with_items_of_a_file(run, tmp_path):
    """As `persia serve URL --items FILE` does."""
    ids = np.arange(ITEMS)
    pq.write_table(
        pa.table({"price": ids / ITEMS, "item": ids, "name": list(map(str, ids))}), tmp_path / "items.parquet"
    )
    run.fit([batch(seed) for seed in range(3)])
    predictor = Predictor(str(tmp_path), network())
    retriever = Retriever(predictor, tmp_path / "items.parquet")
    users = {"features": {"user": [3, 4], "seen": [[1, 2], []]}, "dense": {"age": [0.1, 0.2]}}

    async def main():
        app = create_app(predictor, retriever=retriever, limits=ServeLimits(deadline_ms=60_000))
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            deadline = time.monotonic() + 60
            while "step" not in (await client.get("/health")).json().get("index", {}):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            assert (await client.get("/health")).json()["index"] == {
                "step": 3, "items": len(retriever.index), "waiting": 0, "problem": ""
            }  # fmt: skip
            answer = await client.post("/retrieve", json={"users": users, "k": 4})
            assert answer.status_code == 200, answer.text
            expected = retriever.search(_users(), 4)
            assert answer.json() == {"ids": expected.ids.tolist(), "scores": expected.scores.tolist(), "step": 3}
            with Retriever(predictor, catalogue()) as other:
                np.testing.assert_array_equal(other.search(_users(), 4).ids, expected.ids)
        with pytest.raises(ClosedError):
            retriever.search(_users(), 4)

    asyncio.run(main())


def test_users_may_be_raw_columns(run, tmp_path):
    run.fit([batch(seed) for seed in range(3)])
    columns = {"user": [3, 4], "seen": [[1, 2], []], "age": [0.1, 0.2]}
    with Predictor(str(tmp_path), network()) as predictor, Retriever(predictor, catalogue()) as retriever:
        expected = retriever.search(_users(), 4)
        found = retriever.search(columns, 4)
        np.testing.assert_array_equal(found.ids, expected.ids)
        np.testing.assert_array_equal(found.scores, expected.scores)
        for users, message in (
            ({"user": [3], "seen": [[1]]}, "Feature 'age' of the user is missing"),
            ({**columns, "item": [1, 2]}, "'item' is not a feature of the user; leave it out, and give 'age', 'seen'"),
            ({**columns, "age": ["x", "y"]}, "age"),
            ([3, 4], "users are of type list; give a Batch, or to `Retriever.search` columns"),
        ):
            with pytest.raises(DataError, match=message):
                retriever.search(users, 4)


def test_a_closed_retriever_is_not_told_of_changes(run, tmp_path, monkeypatch):
    run.fit([batch()])
    with Predictor(str(tmp_path), network()) as predictor:
        told = predictor._updater.listeners
        retriever = Retriever(predictor, catalogue())
        for _ in range(2):  # It may be started again.
            with retriever:
                assert told == [retriever.index]
            assert not told
        retriever.close()

        def failing(index):
            raise ClosedError("The retriever is closed.")

        monkeypatch.setattr(ItemIndex, "refresh", failing)
        with pytest.raises(ClosedError):
            retriever.start()
        assert not told


def test_rows_that_change_while_the_index_is_built_are_in_it(run, tmp_path, monkeypatch):
    """Only these are computed once more, and not all."""
    run.fit([batch()])
    computed = []

    class Built(ItemIndex):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            for tables in predictor.current().rows._tables:
                tables["item"].remove(np.array([7], np.uint64))
            predictor._updater._notify([persia.publish.Change("item", *_removed(7))])
            assert 7 in self.search(_users(), ITEMS).ids

        def refresh(self):
            computed.append(super().refresh())
            return computed[-1]

    monkeypatch.setattr("persia.serve.retriever.ItemIndex", Built)
    with Predictor(str(tmp_path), network()) as predictor, Retriever(predictor, catalogue(), seconds=60) as retriever:
        assert computed[0] == 1
        assert 7 not in retriever.search(_users(), ITEMS).ids
        assert predictor._updater.listeners == [retriever.index]


def test_a_notice_that_is_under_way_as_the_index_takes_over_is_not_lost():
    """The predictor tells the listeners that it had when the notice began."""
    told, changes = [], _Changes()
    ids, none = np.array([7], np.uint64), np.empty(0, np.uint64)
    changes.note_changes("item", ids, none)
    index = SimpleNamespace(note_changes=lambda *arguments: told.append(arguments))
    assert not told
    changes.pass_on(index)
    changes.note_changes("item", none, ids)
    assert told == [("item", ids, none), ("item", none, ids)]


def _users():
    schema = Schema(SCHEMA.id_features[:2], dense_features=SCHEMA.dense_features, tables=[persia.Table("item", 8)])
    columns = {"user": [3, 4], "seen": [[1, 2], []], "age": [0.1, 0.2], "price": [0.0, 0.0]}
    return Batch.from_columns(schema, columns, require_labels=False)


def test_files_of_items_that_do_not_fit(run, tmp_path):
    run.fit([batch()])
    pq.write_table(pa.table({"item": [1, 2]}), tmp_path / "items.parquet")
    with Predictor(str(tmp_path), network()) as predictor:
        with pytest.raises(DataError, match="price"):
            Retriever(predictor, str(tmp_path / "items.parquet")).start()
        with pytest.raises(DataError, match="none"):
            Retriever(predictor, str(tmp_path / "none.parquet")).start()
        stopped = Retriever(predictor, catalogue())
        stopped.stop()
        with pytest.raises(ClosedError, match="The retriever is closed"):
            stopped.start()


def test_columns_of_items_that_are_computed(tmp_path):
    schema = Schema(
        [
            IdFeature("user", dim=4),
            IdFeature("item", dim=4),
            IdFeature("shop", dim=4),
            IdFeature("item_shop", dim=4, cross=("item", "shop")),
            IdFeature("item_b", dim=4, of="item", mapping=persia.Remainder(10)),
        ],
        dense_features=["age", "price"],
        labels=["click"],
    )
    columns = {"item": [7, 8], "shop": [1, 2], "price": [0.5, 1.5], "more": [0, 0]}
    pq.write_table(pa.table(columns), tmp_path / "items.parquet")
    assert columns_of(schema, ["item_shop", "item_b"]) == {"item", "shop"}
    found = TowerFeatures(("item_shop", "item_b"), ("price",))
    (items,) = read_items(tmp_path / "items.parquet", schema, found)
    whole = {**columns, "user": [1, 1], "age": [0, 0]}
    del whole["more"]
    expected = Batch.from_columns(schema, whole, require_labels=False)
    for name in found.ids:
        np.testing.assert_array_equal(items.id_features[name].values, expected.id_features[name].values)
    np.testing.assert_array_equal(items.dense, expected.dense)
