"""An index whose items are the rows of a table: it follows rows that come, change and go, and a served `NextItem`."""

import asyncio
import time

import httpx
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import persia
from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.errors import ConfigError
from persia.nn.item_catalogue import RowCatalogue
from persia.nn.models import NextItem, TwoTower
from persia.publish import PublishOptions
from persia.schema import DenseFeature, IdFeature, Schema
from persia.serve import Predictor, Retriever, ServeOptions, item_index
from persia.serve.http.app import create_app
from persia.serve.http.limits import ServeLimits
from persia.serve.item_index import ItemIndex
from persia.serve.network_builder import NetworkBuilder
from support import written_log
from support.written_log import Steps, WrittenLog

DIM, LENGTH, IDS = 4, 5, 30

SCHEMA = Schema(
    [IdFeature("item", dim=DIM), IdFeature("history", dim=DIM, table="item", pooling=None, max_length=LENGTH)],
    dense_features=[DenseFeature("ages", size=LENGTH)],
    labels=["chosen"],
)


class Rows:
    """Rows of items in a dictionary."""

    def __init__(self):
        self.rows = {}

    def found(self, table, ids):
        return np.array([int(i) in self.rows for i in ids], np.bool_)

    def ids(self, table):
        return np.array(list(self.rows), np.uint64)

    def read(self, batch, features):
        (name,) = features
        values = [self.rows.get(int(i), np.zeros(DIM, np.float32)) for i in batch.id_features[name].values]
        return torch.from_numpy(batch.dense), {name: torch.from_numpy(np.array(values, np.float32))}


class Dots:
    """Towers whose vectors are rows, times a factor: another one is another version of the network."""

    features = (("history",), ("item",))
    user_columns = item_columns = torch.empty(0, dtype=torch.int64)

    def __init__(self, factor=1):
        self.factor = factor

    def users(self, dense, embeddings):
        return embeddings["history"] * self.factor

    def items(self, dense, embeddings):
        return embeddings["item"] * self.factor


def user(item):
    dense, labels = np.zeros((1, LENGTH), np.float32), np.empty((1, 0), np.float32)
    return Batch({"history": IdColumn(np.array([item], np.uint64), np.array([0, 1]))}, dense, labels)


def agrees(index, rows, factor):
    """The search finds all rows, in the order of brute force."""
    ids = sorted(rows.rows)
    assert len(index) == len(ids)
    if not ids:
        return
    asked = ids[0]
    scores = np.array([rows.rows[i] @ rows.rows[asked] for i in ids]) * factor**2
    found = index.search(user(asked), IDS)
    assert sorted(found.ids[0].tolist()) == ids
    np.testing.assert_allclose(found.scores[0], np.sort(scores)[::-1], rtol=1e-5, atol=1e-5)
    by_id = dict(zip(ids, scores, strict=True))
    np.testing.assert_allclose(found.scores[0], [by_id[i] for i in found.ids[0].tolist()], rtol=1e-5, atol=1e-5)


IDS_OF_ONE = st.sets(st.integers(0, IDS - 1), max_size=6)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("change"), IDS_OF_ONE, IDS_OF_ONE),
        st.tuples(st.just("replace"), IDS_OF_ONE, st.none()),
        st.tuples(st.just("load"), st.none(), st.none()),
        st.tuples(st.just("refresh"), st.none(), st.none()),
    ),
    max_size=8,
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(IDS_OF_ONE, OPERATIONS, st.integers(0, 1000))
def test_rows_that_come_change_and_go_are_followed(first, operations, seed):
    rng = np.random.default_rng(seed)
    rows, factor = Rows(), 1

    def new(ids):
        return {i: rng.integers(-3, 4, DIM).astype(np.float32) for i in ids}

    rows.rows = new(first)
    index = ItemIndex(Dots(), SCHEMA, None, rows)
    agrees(index, rows, factor)
    for kind, some, others in operations:
        if kind == "change":  # Rows are removed, then set, as in the log.
            for i in others:
                rows.rows.pop(i, None)
            rows.rows |= new(some)
            index.note_changes("item", *(np.array(sorted(ids), np.uint64) for ids in (some, others)))
        elif kind == "replace":  # A snapshot.
            rows.rows = new(some)
            index.note_all()
        elif kind == "load":
            factor += 1
            index.load(Dots(factor), factor)
        else:
            index.refresh()
            agrees(index, rows, factor)
    index.refresh()
    assert not index.waiting
    agrees(index, rows, factor)
    index.rebuild()
    agrees(index, rows, factor)


def test_items_that_come_while_a_network_is_loaded_are_found(monkeypatch):
    """In the middle of the build, and refreshed before it ends."""
    rows = Rows()
    rows.rows = {i: np.full(DIM, i, np.float32) for i in range(1, 4)}
    index = ItemIndex(Dots(), SCHEMA, None, rows)
    read = Rows.read

    def read_while_an_item_comes(self, batch, features):
        monkeypatch.undo()
        rows.rows[9] = np.ones(DIM, np.float32)
        index.note_changes("item", np.array([9], np.uint64), np.empty(0, np.uint64))
        assert index.waiting == 1
        index.refresh()
        assert 9 in index.search(user(1), IDS).ids
        return read(self, batch, features)

    monkeypatch.setattr(Rows, "read", read_while_an_item_comes)
    index.load(Dots(2), 2)
    agrees(index, rows, 2)


def test_ids_without_rows_delay_no_rebuild_and_are_dropped_by_it(monkeypatch):
    monkeypatch.setattr(item_index, "MIN_FRESH", 2)
    rows, none = Rows(), np.empty(0, np.uint64)
    rows.rows = {i: np.full(DIM, i, np.float32) for i in range(100)}
    index = ItemIndex(Dots(), SCHEMA, None, rows)
    rows.rows = {i: np.full(DIM, i, np.float32) for i in (3, *range(92, 104))}
    removed = np.setdiff1d(np.arange(92, dtype=np.uint64), [3])
    index.note_changes("item", np.arange(100, 104, dtype=np.uint64), removed)
    index.refresh()
    assert index.crowded  # 4 of 13 items that can be found; there were 104 ids.
    index.rebuild()
    assert not index.crowded
    assert sorted(index._catalogue.keys) == sorted(rows.rows)
    agrees(index, rows, 1)
    rows.rows[50] = np.full(DIM, 50, np.float32)  # An id that was dropped is an item again.
    index.note_changes("item", np.array([50], np.uint64), none)
    index.refresh()
    agrees(index, rows, 1)


def test_a_row_that_is_set_while_ids_are_dropped_is_found(monkeypatch):
    """Before and after the rows were asked which ids they have."""
    rows, none = Rows(), np.empty(0, np.uint64)
    rows.rows = {i: np.full(DIM, i, np.float32) for i in range(1, 9)}
    index = ItemIndex(Dots(), SCHEMA, None, rows)
    rows.rows = {8: rows.rows[8]}
    index.note_changes("item", none, np.arange(1, 8, dtype=np.uint64))
    found, asked = Rows.found, []

    def found_while_rows_are_set(self, table, ids):
        of_dead = 8 not in ids
        answer = found(self, table, ids)
        if of_dead and len(asked) < 2:
            asked.append(ids)
            rows.rows[len(asked)] = np.full(DIM, len(asked), np.float32)
            index.note_changes("item", np.array([len(asked)], np.uint64), none)
        return answer

    monkeypatch.setattr(Rows, "found", found_while_rows_are_set)
    index.load(Dots(2), 2)
    assert len(asked) == 2
    agrees(index, rows, 2)
    assert sorted(index._catalogue.keys) == [1, 2, 8]


def test_changes_that_are_noted_while_ids_get_other_numbers_are_of_the_right_items(monkeypatch):
    rows, none = Rows(), np.empty(0, np.uint64)
    rows.rows = {i: np.full(DIM, i, np.float32) for i in range(1, 9)}
    index = ItemIndex(Dots(), SCHEMA, None, rows)
    rows.rows = {i: rows.rows[i] for i in (6, 7, 8)}
    index.note_changes("item", none, np.arange(1, 6, dtype=np.uint64))
    unknown = RowCatalogue.unknown

    def unknown_while_ids_are_dropped(catalogue, table, ids):
        monkeypatch.undo()
        index.rebuild()
        return unknown(catalogue, table, ids)

    monkeypatch.setattr(RowCatalogue, "unknown", unknown_while_ids_are_dropped)
    rows.rows |= {i: np.full(DIM, 10 * i, np.float32) for i in (2, 8)}
    index.note_changes("item", np.array([2, 8], np.uint64), none)
    index.refresh()
    agrees(index, rows, 1)


def test_new_ids_are_merged_into_sorted_ones(monkeypatch):
    rng = np.random.default_rng(0)
    ids = rng.permutation(40).astype(np.uint64)
    catalogue = RowCatalogue(SCHEMA, "item", ids[:20])
    monkeypatch.setattr(np, "argsort", None)  # It would take seconds for millions of ids.
    for part in (ids[20:21], np.sort(ids[21:40]), ids[:0]):
        catalogue = catalogue.with_ids(part)
    asked = np.array([*range(40), 99], np.uint64)
    np.testing.assert_array_equal(catalogue.keys[catalogue.using("item", asked)], np.arange(40))
    assert catalogue.unknown("item", asked).tolist() == [99]
    even = catalogue.subset(catalogue.keys % 2 == 0)
    np.testing.assert_array_equal(even.keys, catalogue.keys[catalogue.keys % 2 == 0])
    np.testing.assert_array_equal(even.keys[even.using("item", asked)], np.arange(0, 40, 2))
    assert even.unknown("item", asked).tolist() == [*range(1, 40, 2), 99]


def test_a_listing_that_fails_is_repeated(monkeypatch):
    rows = Rows()
    index = ItemIndex(Dots(), SCHEMA, None, rows)
    rows.rows = {1: np.ones(DIM, np.float32), 2: np.ones(DIM, np.float32)}
    index.note_changes("item", np.array([1], np.uint64), np.empty(0, np.uint64))
    index.note_all()
    with monkeypatch.context() as patch:
        patch.setattr(Rows, "ids", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            index.refresh()
    assert index.refresh() == 2
    agrees(index, rows, 1)


class Lookups(Steps):
    """Towers of a log that a test writes: vectors are rows."""

    features = (("user",), ("item",))
    user_columns = item_columns = torch.empty(0, dtype=torch.int64)

    def users(self, dense, embeddings):
        return embeddings["user"]

    def items(self, dense, embeddings):
        return embeddings["item"][:, :2]


def test_items_of_a_new_epoch_are_found(tmp_path, serve, monkeypatch):
    """Also if the index is refreshed while the network of the epoch is loaded, after its snapshots."""
    load = NetworkBuilder.load

    def load_late(builder, update):
        retriever.refresh()
        return load(builder, update)

    log = WrittenLog(tmp_path / "log", servers=2)
    log.begin(3)
    predictor = serve(log, Lookups)
    user = persia.Batch.from_columns(written_log.SCHEMA, {"user": [0], "item": [0]}, require_labels=False)
    with Retriever(predictor, seconds=3600.0) as retriever:
        assert sorted(retriever.search(user, 64).ids[0]) == [*range(64)]
        monkeypatch.setattr(written_log, "IDS", np.arange(50, 114, dtype=np.uint64))
        monkeypatch.setattr(NetworkBuilder, "load", load_late)
        log.begin(5)
        predictor.refresh()
        retriever.refresh()
        user = persia.Batch.from_columns(written_log.SCHEMA, {"user": [60], "item": [0]}, require_labels=False)
        assert sorted(retriever.search(user, 64).ids[0]) == [*range(50, 114)]
        monkeypatch.setattr(written_log, "IDS", np.arange(80, 144, dtype=np.uint64))
        log.rows(0, 6, whole=True)  # A snapshot of one PS.
        log.rows(1, 6, whole=True)
        predictor.refresh()
        retriever.refresh()
        assert sorted(retriever.search(user, 64).ids[0]) == [*range(80, 144)]


def test_models_that_read_more_of_an_item_need_items():
    schema = Schema([IdFeature("user", dim=4), IdFeature("item", dim=4)], dense_features=["price"])
    model = TwoTower(schema, item=["item", "price"]).eval()
    with pytest.raises(ConfigError, match="The item has the features item, price, but a row of table 'item' says"):
        ItemIndex(model, schema, None, Rows())


# --- a served NextItem --------------------------------------------------------------------------------------------


def chain(seed, first=0, rows=200):
    """In the items from `first` on, each is followed by the next."""
    rng = np.random.default_rng(seed)
    start, lengths = rng.integers(0, IDS, rows), rng.integers(1, LENGTH + 1, rows)
    events = [[first + int(s + i) % IDS for i in range(n + 1)] for s, n in zip(start, lengths, strict=True)]
    columns = {"item": [e[-1] for e in events], "history": [e[:-1] for e in events], "chosen": np.ones(rows)}
    return persia.Batch.from_columns(SCHEMA, columns | {"ages": rng.random((rows, LENGTH))})


def network(schema=SCHEMA):
    torch.manual_seed(0)
    return NextItem(schema, backbone="hstu", ages="ages", temperature=0.2)


def nearest(run, batch, ids, k):
    """Exact top k by all scores in NumPy, from the states of the trained network and all rows."""
    run.model.eval()
    run.embeddings.eval()
    with torch.no_grad():
        (prepared,) = run.embeddings.prefetch([batch])
        states = run.model.users(prepared.dense, run.embeddings(prepared)).numpy()
    run.model.train()
    run.embeddings.train()
    rows = run.embeddings.rows("item", np.array(ids, np.uint64)).values
    scores = states @ (rows / np.linalg.norm(rows, axis=1, keepdims=True)).T
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.array(ids)[order], np.take_along_axis(scores, order, 1)


def test_a_raw_history_finds_items_that_are_published_later(tmp_path):
    """As `persia serve URL --retrieve` does."""
    run = persia.Trainer(
        network(),
        SCHEMA,
        optimizer=lambda params: torch.optim.Adam(params, 1e-2),
        embedding_optimizer=persia.optim.Adagrad(lr=0.1),
        mode=persia.modes.Sync(),
        options=persia.TrainerOptions(progress=False, publish=PublishOptions(str(tmp_path), seconds=0.05)),
    )
    run.fit([chain(seed) for seed in range(5)])
    asked = chain(99, rows=8)
    histories = [asked.id_features["history"].slice(r, r + 1).values.tolist() for r in range(8)]
    raw = {"features": {"history": histories}, "dense": {"ages": asked.dense.tolist()}}
    predictor = Predictor(str(tmp_path), network(), ServeOptions(poll_seconds=0.02))
    retriever = Retriever(predictor, seconds=0.02)

    async def main():
        app = create_app(predictor, retriever=retriever, limits=ServeLimits(deadline_ms=60_000))
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):

            async def until(step, items):
                """Waits until the server has this step, and all vectors of it."""
                deadline = time.monotonic() + 60
                while True:
                    index = (await client.get("/health")).json().get("index", {})
                    if (index.get("step"), index.get("items"), index.get("waiting")) == (step, items, 0):
                        return
                    assert time.monotonic() < deadline, index
                    await asyncio.sleep(0.01)

            async def check(ids):
                answer = await client.post("/retrieve", json={"users": raw, "k": 4})
                assert answer.status_code == 200, answer.text
                best, scores = nearest(run, asked, ids, 4)
                assert answer.json()["ids"] == best.tolist()
                np.testing.assert_allclose(answer.json()["scores"], scores, atol=1e-5)

            await until(5, IDS)
            await check(range(IDS))
            await asyncio.to_thread(run.fit, [chain(seed, first=IDS) for seed in range(2)])
            await until(7, 2 * IDS)
            await check(range(2 * IDS))
            known = [[2 * IDS - 3, 2 * IDS - 2]]
            answer = await client.post(
                "/retrieve",
                json={"users": {"features": {"history": known}, "dense": {"ages": [[0.5] * LENGTH]}}, "k": 3},
            )
            assert min(answer.json()["ids"][0]) >= IDS  # Items that came later.

    asyncio.run(main())
