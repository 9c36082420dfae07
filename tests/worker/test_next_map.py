"""An embedding worker continues with the next bucket map, and with the batches that it had registered before."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import persia
from persia.batching.id_column import IdColumn
from persia.errors import ConfigError, StaleMapError
from persia.types import BucketMap, Contribution, Packed, PushHeader
from persia.worker import Worker
from support.examples import examples
from support.moving_ps import PSs

SCHEMA = persia.Schema(
    id_features=[
        persia.IdFeature("one", dim=3, table="item"),
        persia.IdFeature("many", dim=3, table="item", pooling="sum"),
        persia.IdFeature("user", dim=2),
    ],
    dense_features=[],
    labels=["click"],
)
TABLES = SCHEMA.resolved_tables()


def some_ids(random, count):
    return random.integers(0, 50, count).astype(np.uint64)


def columns(random, samples):
    lengths = random.integers(0, 4, samples)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    weights = random.random(offsets[-1]).astype(np.float32)
    return {
        "one": IdColumn(some_ids(random, samples), None),
        "many": IdColumn(some_ids(random, offsets[-1]), offsets, weights),
        "user": IdColumn(some_ids(random, samples), None),
    }


def values(found):
    """The values of each feature, in the order of its ids, and what belongs to them."""
    inverse = {**found.narrow, **found.wide}
    table = {"one": "item", "many": "item", "user": "user"}
    rows = {name: found.rows[table[name]][places].tolist() for name, places in inverse.items()}
    return rows, found.offsets["many"].tolist(), found.weights["many"].tolist()


def gradients(found, ids):
    """Gradients of the ids, whatever their order."""
    return {table: np.stack([own % 7] * TABLES[table].dim, 1).astype(np.float32) for table, own in ids.items()}


def step(worker, batch_id, number):
    found = worker.lookup(batch_id)
    contribution = Contribution(batch_id, Packed.of(gradients(found, worker.distinct_ids(batch_id)), np.float32))
    worker.push(PushHeader(number, 0, 1, number - 1, 1), [contribution])
    return values(found)


def move(cluster, after):
    cluster.begin(after)
    cluster.end(after)


@settings(max_examples=examples(30), deadline=None)
@given(st.data())
def test_batches_that_were_registered_before_are_those_of_one_ps(data):
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    before = BucketMap.even(data.draw(st.integers(1, 3)))
    cluster, alone = PSs(4, before, TABLES), PSs(1, BucketMap.even(1), TABLES)
    worker, twin = Worker(SCHEMA, cluster.all[: before.servers]), Worker(SCHEMA, alone.all)
    number = 0
    registered = []
    for _ in range(data.draw(st.integers(1, 4))):
        for _ in range(data.draw(st.integers(0, 3))):
            batch = columns(random, int(random.integers(1, 9)))
            registered.append((worker.register(batch), twin.register(batch)))
        while registered and data.draw(st.booleans()):
            number += 1
            mine, theirs = registered.pop(0)
            assert step(worker, mine, number) == step(twin, theirs, number)
        after = cluster.buckets.moved(data.draw(st.integers(1, 4)))
        if after != cluster.buckets:
            move(cluster, after)
            worker.adopt(cluster.all[: after.servers])
    for mine, theirs in registered:
        number += 1
        assert step(worker, mine, number) == step(twin, theirs, number)
    assert cluster.rows() == alone.rows()


@pytest.fixture
def moved():
    """A worker with a batch that was looked up by the map before, and the PSs with the map after."""
    cluster = PSs(3, BucketMap.even(2), TABLES)
    worker = Worker(SCHEMA, cluster.all[:2])
    batch_id = worker.register(columns(np.random.default_rng(0), 20))
    found = worker.lookup(batch_id)
    ids = worker.distinct_ids(batch_id)
    move(cluster, cluster.buckets.moved(3))
    return cluster, worker, batch_id, Contribution(batch_id, Packed.of(gradients(found, ids), np.float32))


def test_gradients_in_the_order_of_the_map_before_are_refused(moved):
    cluster, worker, batch_id, contribution = moved
    before = cluster.rows()
    with pytest.raises(StaleMapError):
        worker.push(PushHeader(1, 0, 1, 0, 20), [contribution])
    worker.adopt(cluster.all)
    with pytest.raises(StaleMapError):
        worker.push(PushHeader(1, 0, 1, 0, 20), [contribution])
    assert cluster.rows() == before
    step(worker, batch_id, 1)
    assert cluster.rows() != before


def test_without_the_next_map_nothing_is_read(moved):
    cluster, worker, batch_id, _ = moved
    with pytest.raises(StaleMapError):
        worker.lookup(batch_id)
    with pytest.raises(StaleMapError):
        worker.evaluate(columns(np.random.default_rng(1), 5))
    with pytest.raises(ConfigError, match="has 2 embedding PSs, and their bucket map has 3"):
        worker.adopt(cluster.all[:2])
    worker.adopt(cluster.all)
    worker.lookup(batch_id)


def test_a_mask_in_the_order_of_the_map_before_is_refused(moved):
    cluster, worker, batch_id, _ = moved
    ids = worker.distinct_ids(batch_id)
    wanted = Packed(ids.names, ids.counts, np.ones(len(ids.buffer), np.bool_))
    worker.adopt(cluster.all)
    with pytest.raises(StaleMapError):
        worker.lookup_part(batch_id, wanted)


def test_a_refresh_of_rows_in_the_order_of_the_map_before_is_refused():
    cluster = PSs(2, BucketMap.even(2), TABLES)
    worker = Worker(SCHEMA, cluster.all)
    batch_id = worker.register(columns(np.random.default_rng(0), 20))
    found = worker.lookup_ahead(batch_id)
    move(cluster, cluster.buckets.reassigned(0, 1))
    worker.adopt(cluster.all)
    with pytest.raises(StaleMapError):
        worker.refresh(batch_id, found.seen)
    found = worker.lookup_ahead(batch_id)
    worker.refresh(batch_id, found.seen)
