"""Rows by id: `EmbeddingCollection.rows` and `set_rows`."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import persia
from persia import Batch, HashTo, IdFeature, Quotient, Remainder, Schema, Table
from persia.errors import ClosedError, ConfigError, DataError, PersiaError, StaleMapError, StoreError
from persia.modes import Sync
from persia.nn import EmbeddingCollection, RowsSet, RowState
from persia.optim import SGD, Adagrad, Adam
from persia.testing.threads import Threads
from support.examples import examples
from support.several_ps import Several

SCHEMA = Schema(
    [IdFeature("shop", dim=4), IdFeature("visited", dim=4, table="shop", pooling="mean"), IdFeature("user", dim=3)],
    tables=[Table("user", dim=3, optimizer=Adam(0.1), value_bound=2.0)],
)


def collection(ps=1, schema=SCHEMA, optimizer=None):
    return EmbeddingCollection(schema, optimizer=optimizer or Adagrad(0.1), mode=Sync(), cluster=Several(ps))


def batch_of(shops, users=None):
    rows = len(shops)
    users = list(range(rows)) if users is None else users
    columns = {"shop": shops, "visited": [[]] * rows, "user": users, "label": np.zeros(rows)}
    return Batch.from_columns(SCHEMA, columns)


def train(embeddings, batches):
    for batch in embeddings.prefetch(batches):
        found = embeddings(batch)
        (found["shop"].sum() + found["user"].sum()).backward()


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_what_is_set_is_read(data):
    """Whatever was there before, for any ids in any order, on any number of PSs."""
    embeddings = collection(data.draw(st.integers(1, 3)))
    keys = st.lists(st.integers(0, 2**64 - 1), max_size=30, unique=True)
    train(embeddings, [batch_of(np.array([*data.draw(keys), 1], np.uint64))])
    ids = np.array(data.draw(keys), np.uint64)
    finite = st.floats(-(2.0**100), 2.0**100, width=32)
    values = data.draw(arrays.arrays(np.float32, (len(ids), 4), elements=finite))
    before = embeddings.rows("shop", ids, state=True)
    state = None
    if data.draw(st.booleans()):
        accumulators = data.draw(arrays.arrays(np.float32, (len(ids), 4), elements=st.floats(0, 1, width=32)))
        counts = data.draw(arrays.arrays(np.uint32, len(ids)))
        state = RowState(accumulators, counts, counts[::-1].copy())
    done = embeddings.set_rows("shop", ids, values, state=state)
    assert done == RowsSet(int((~before.found).sum()), int(before.found.sum()), 0)
    order = np.array(data.draw(st.permutations(range(len(ids)))), np.int64)
    after = embeddings.rows("shop", ids[order], state=True)
    assert after.found.all()
    np.testing.assert_array_equal(after.ids, ids[order])
    np.testing.assert_array_equal(after.values, values[order])
    if state is None:  # That of existing rows stays; new ones begin with the first one.
        first = np.where(before.found[:, None], before.state.values, np.float32(Adagrad(0.1).initial_accumulator))
        state = RowState(first, before.state.update_count, before.state.last_step)
    state = state._replace(last_step=np.zeros(len(ids), np.uint32))  # Hybrid does not ask for it.
    for mine, theirs in zip(after.state, state, strict=True):
        np.testing.assert_array_equal(mine, theirs[order])


@pytest.mark.parametrize("ps", [1, 3])
def test_ids_are_those_of_readers(ps):
    embeddings = collection(ps)
    train(embeddings, [batch_of(["shop-1", "shop-2", "shop-1"], [5, 6, 7])])
    assert embeddings.rows("shop", ["shop-2", "nowhere", "shop-1"]).found.tolist() == [True, False, True]
    assert embeddings.rows("user", [7, 8, 5]).found.tolist() == [True, False, True]
    by_value = embeddings.rows("shop", ["shop-1"])
    by_id = embeddings.rows("shop", batch_of(["shop-1"]).id_features["shop"].values)
    np.testing.assert_array_equal(by_value.ids, by_id.ids)
    np.testing.assert_array_equal(by_value.values, by_id.values)
    embeddings.set_rows("shop", ["shop-9"], np.full((1, 4), 7.0))
    embeddings.eval()
    with torch.no_grad():
        assert embeddings(batch_of(["shop-9"]))["shop"].tolist() == [[7.0] * 4]


@pytest.mark.parametrize("values", [["5", "x5"], [5, 6], np.array([5, 6])])
def test_values_mean_what_the_kind_of_the_feature_says(values):
    schema = Schema([IdFeature("auto", dim=2), IdFeature("text", dim=2, kind="text")], labels=[])
    embeddings = collection(2, schema)
    batch = Batch.from_columns(schema, {"auto": values, "text": values})
    for name, column in batch.id_features.items():
        np.testing.assert_array_equal(embeddings.rows(name, values).ids, column.values)
        np.testing.assert_array_equal(embeddings.rows(name, column.values).ids, column.values)


def test_values_of_a_table_with_two_mappings_are_refused():
    schema = Schema([IdFeature("shop", dim=2), IdFeature("name", dim=2, table="shop", kind="text")])
    embeddings = collection(schema=schema)
    with pytest.raises(DataError, match=r"ambiguous.*shop: auto, name: text.*array of uint64"):
        embeddings.rows("shop", ["a"])
    assert embeddings.rows("shop", np.array([1], np.uint64)).found.tolist() == [False]


MAPPED = Schema(
    [
        IdFeature("city", dim=2, kind="text"),
        IdFeature("shop", dim=2),
        IdFeature("both", dim=2, cross=("city", "shop")),
        IdFeature("city_a", dim=2, of="city", mapping=HashTo(50, seed=1)),
        IdFeature("shop_q", dim=2, of="shop", mapping=Quotient(3)),
        IdFeature("shop_r", dim=2, of="shop", table="parts", mapping=Remainder(3)),
        IdFeature("both_a", dim=2, of="both", mapping=HashTo(50)),
    ],
    labels=[],
)


def test_a_value_that_would_be_hashed_is_not_divided():
    embeddings = collection(schema=MAPPED)
    with pytest.raises(DataError, match=r"has '15\.5' at row 1"):
        embeddings.rows("shop_q", [7, 15.5])


def test_values_are_mapped_as_those_of_the_feature():
    embeddings = collection(schema=MAPPED)
    columns = {"city": ["5", "Oslo"], "shop": [7, 2**64 - 1]}
    found = Batch.from_columns(MAPPED, columns).id_features
    for feature, table in (("city_a", "city_a"), ("shop_q", "shop_q"), ("shop_r", "parts")):
        values = columns[MAPPED.feature(feature).of]
        assert embeddings.row_ids(table, values).tolist() == found[feature].values.tolist()
        ids = np.array([5, 100], np.uint64)
        assert embeddings.row_ids(table, ids).tolist() == [5, 100]
    crosses = found["both"].values.tolist()
    assert embeddings.row_ids("both_a", crosses).tolist() == found["both_a"].values.tolist()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (IdFeature("shop_q", dim=2, of="shop", table="shop", mapping=Quotient(3)), r"shop_q: Quotient\(by=3\)"),
        (IdFeature("both", dim=2, table="shop_r", cross=("city", "shop")), r"both: auto"),
        (IdFeature("shop_q", dim=2, of="shop", table="shop_r", mapping=Quotient(3)), r"shop_r: Remainder\(by=3\)"),
    ],
)
def test_values_of_a_table_with_mapped_and_other_ids_are_refused(other, said):
    part = IdFeature("shop_r", dim=2, of="shop", mapping=Remainder(3))
    embeddings = collection(schema=Schema([*MAPPED.id_features[:2], part, other], labels=[]))
    with pytest.raises(DataError, match=rf"ambiguous.*{said}.*array of uint64"):
        embeddings.rows(other.table_name, [1])
    assert embeddings.row_ids(other.table_name, np.array([1], np.uint64)).tolist() == [1]


def test_times_are_no_ids_of_ages():
    schema = Schema([IdFeature("times", dim=2, age_since="now"), IdFeature("item", dim=2)], labels=[])
    embeddings = collection(schema=schema)
    with pytest.raises(DataError, match=r"magnitudes of ages \(age_since of 'times'\).*array of uint64"):
        embeddings.rows("times", [1_700_000_000])
    assert embeddings.row_ids("times", np.array([9], np.uint64)).tolist() == [9]


def test_training_goes_on_from_what_was_set():
    embeddings = collection(2, optimizer=SGD(lr=0.5))
    embeddings.set_rows("shop", [1, 2], torch.nn.Parameter(torch.ones(2, 4)))
    train(embeddings, [batch_of([1, 1, 3])])
    found = embeddings.rows("shop", [1, 2], state=True)
    np.testing.assert_allclose(found.values, [[0.0] * 4, [1.0] * 4])  # Two samples, gradient 1 each.
    assert found.state.update_count.tolist() == [1, 0]
    assert found.state.values.shape == (2, 0)


def test_reading_changes_nothing():
    embeddings = collection(2)
    train(embeddings, [batch_of([1, 2])])
    before = embeddings.statistics()
    embeddings.rows("shop", [1, 99], state=True)
    assert embeddings.statistics() == before


def test_capacity_is_kept():
    schema = Schema([IdFeature("shop", dim=2)], tables=[Table("shop", dim=2, capacity=10)])
    embeddings = collection(schema=schema)
    assert embeddings.set_rows("shop", np.arange(10), np.ones((10, 2))) == RowsSet(10, 0, 0)
    assert embeddings.set_rows("shop", np.arange(8, 12), np.ones((4, 2))) == RowsSet(2, 2, 2)
    assert embeddings.statistics()["shop"]["rows"] == 10
    assert embeddings.rows("shop", np.arange(8, 12)).found.all()


def test_large_sets_travel_in_pieces(monkeypatch):
    monkeypatch.setattr("persia.nn.row_access.CHUNK_BYTES", 1000)
    embeddings = collection(2)
    ids, values = np.arange(500), np.random.default_rng(0).random((500, 4), np.float32)
    calls = []
    for server in embeddings.connection.servers:
        original = server.set_rows
        server.set_rows = lambda *a, call=original: calls.append(len(a[2])) or call(*a)
    assert embeddings.set_rows("shop", ids, values).inserted == 500
    assert len(calls) > 20
    assert max(calls) * 4 * 4 < 1000
    np.testing.assert_array_equal(embeddings.rows("shop", ids[::-1]).values, values[::-1])


ONE = np.ones((1, 4), np.float32)
COUNT = np.ones(1, np.uint32)


@pytest.mark.parametrize(
    ("error", "message", "arguments", "state"),
    [
        (ConfigError, "no table 'nope'; the schema has shop, user", ("nope", [1], ONE), None),
        (DataError, "Duplicate id 7 .*at position 2", ("shop", [7, 8, 7], np.ones((3, 4))), None),
        (DataError, r"shape \[1, 3\]; give float32 \[1, 4\]", ("shop", [1], np.ones((1, 3))), None),
        (DataError, r"shape \[4\]", ("shop", [1], np.ones(4)), None),
        (DataError, r"not finite at \[0, 2\]", ("shop", [1], [[0, 0, np.nan, 0]]), None),
        (DataError, "not finite", ("shop", [1], [[0, 0, 1e300, 0]]), None),
        (DataError, "not numbers", ("shop", [1], [["a", "b", "c", "d"]]), None),
        (DataError, "value_bound = 2 at row 1", ("user", [1, 2], [[0, 0, 0], [0, -3, 0]]), None),
        (DataError, "one id each", ("shop", [[1, 2]], ONE), None),
        (DataError, "one id each", ("shop", ["a", None], ONE), None),
        (DataError, "is a tuple; give a RowState", ("shop", [1], ONE), (ONE, COUNT, COUNT)),
        (DataError, "shapes", ("shop", [1], ONE), RowState(ONE, COUNT, np.ones(2, np.uint32))),
        (DataError, "shapes", ("shop", [1], ONE), RowState(np.ones((2, 4)), COUNT, COUNT)),
        (DataError, "shapes", ("shop", [1], ONE), RowState(np.ones(1), COUNT, COUNT)),
        (DataError, "not finite", ("shop", [1], ONE), RowState(ONE * np.inf, COUNT, COUNT)),
        (DataError, "update_count .* not uint32", ("shop", [1], ONE), RowState(ONE, np.array([-1]), COUNT)),
        (DataError, "last_step .* not uint32", ("shop", [1], ONE), RowState(ONE, COUNT, np.array([0.5]))),
        (StoreError, "states must have 4 columns", ("shop", [1], ONE), RowState(np.ones((1, 5)), COUNT, COUNT)),
    ],
)
def test_what_is_wrong_is_refused_and_changes_nothing(error, message, arguments, state):
    embeddings = collection(2)
    with pytest.raises(error, match=message):
        embeddings.set_rows(*arguments, state=state)
    assert all(counters["rows"] == 0 for counters in embeddings.statistics().values())


def test_no_rows_at_all():
    embeddings = collection(2)
    found = embeddings.rows("user", [], state=True)
    assert found.values.shape == (0, 3)
    assert found.state.values.shape == (0, 6)
    assert embeddings.set_rows("user", [], np.empty((0, 3))) == RowsSet(0, 0, 0)


def test_not_during_a_training_pass():
    embeddings = collection()
    for batch in embeddings.prefetch([batch_of([1, 2]), batch_of([3])]):
        with pytest.raises(PersiaError, match="during a training pass"):
            embeddings.set_rows("shop", [1], ONE)
        assert embeddings.rows("shop", [1]).found[0]  # Reading may.
        embeddings(batch)["shop"].sum().backward()
    embeddings.set_rows("shop", [1], ONE)


def test_a_trainer_saves_what_was_set(tmp_path):
    """Also in an incremental checkpoint, whose base is of before."""
    data = persia.data.synthetic(640, id_features=2, ids_per_feature=50, batch_size=64, dim=4, seed=1)

    def model():
        return persia.nn.models.FFNN(data.schema, hidden=(8,))

    def adam(parameters):
        return torch.optim.Adam(parameters, 1e-2)

    options = persia.TrainerOptions(progress=False, checkpoint_dir=str(tmp_path), checkpoint_increments=9)
    trainer = persia.Trainer(
        model(), data.schema, optimizer=adam, embedding_optimizer=Adagrad(0.1), mode=Sync(), options=options
    )
    trainer.fit(data, max_steps=2)
    trainer.fit(data, max_steps=2)
    trainer.embeddings.set_rows("id_0", [10**9, 3], np.full((2, 4), 5.0))
    trainer.fit(data, max_steps=1)
    resumed = persia.Trainer.resume(str(tmp_path), model(), optimizer=adam)
    np.testing.assert_array_equal(resumed.embeddings.rows("id_0", [10**9]).values, np.full((1, 4), 5.0))
    ids = np.arange(50)
    for table in ("id_0", "id_1"):
        mine, theirs = (t.embeddings.rows(table, ids, state=True) for t in (trainer, resumed))
        np.testing.assert_array_equal(mine.values, theirs.values)
        np.testing.assert_array_equal(mine.state.values, theirs.state.values)


def test_all_nn_workers_see_it():
    cluster = Threads(nn_workers=2, ps=2, timeout=30.0)

    def work(member):
        return EmbeddingCollection(SCHEMA, optimizer=Adagrad(0.1), mode=Sync(), cluster=member)

    first, second = cluster.run(work)
    first.set_rows("shop", ["a", "b"], np.arange(8).reshape(2, 4))
    second.set_rows("shop", ["b"], np.full((1, 4), 9.0))
    for embeddings in (first, second):
        assert embeddings.rows("shop", ["a", "b"]).values.tolist() == [[0, 1, 2, 3], [9] * 4]


@pytest.mark.parametrize("refusal", [StaleMapError("Stale.", routed=0, current=1), ClosedError("It has left.")])
def test_an_attempt_uses_one_map_and_the_next_one_a_newer(refusal, monkeypatch):
    embeddings = collection(2)
    train(embeddings, [batch_of(np.arange(20, dtype=np.uint64))])
    ids = np.arange(20, dtype=np.uint64)
    expected = embeddings.rows("shop", ids)
    servers = embeddings.connection.servers
    asked, read = [], servers[0].read_rows

    def refused(*arguments):
        if not asked:
            asked.append(arguments)
            raise refusal
        return read(*arguments)

    monkeypatch.setattr(servers[0], "read_rows", refused)
    maps = []
    buckets = servers[0].buckets
    monkeypatch.setattr(servers[0], "buckets", lambda: maps.append(1) or buckets())
    np.testing.assert_array_equal(embeddings.rows("shop", ids).values, expected.values)
    assert len(asked) == 1
    assert maps


def test_closed_connections_are_not_asked_again(monkeypatch):
    embeddings = collection(2)

    def closed(*_):
        raise ClosedError("The connection is closed.")

    for server in embeddings.connection.servers:
        monkeypatch.setattr(server, "read_rows", closed)
        monkeypatch.setattr(server, "buckets", closed)
    with pytest.raises(ClosedError, match="The connection is closed"):
        embeddings.rows("shop", np.arange(20, dtype=np.uint64))
