"""An embedding worker looks rows up ahead and refreshes them: of 1, 2 and 3 PSs, and compressed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import persia
from persia import batching
from persia.batching.id_column import IdColumn
from persia.batching.places import _in_buffer
from persia.errors import StaleBatchError, StaleMapError, StoreError
from persia.modes import Sync
from persia.nn.transfer import decode
from persia.optim import SGD
from persia.schema import Table
from persia.types import Contribution, Moment, Packed, PushHeader
from persia.worker import Worker, WorkerOptions
from support.examples import examples
from support.several_ps import several_servers

SCHEMA = persia.Schema(
    id_features=[
        persia.IdFeature("item", dim=4),
        persia.IdFeature("history", dim=4, table="item", pooling="sum"),
        persia.IdFeature("user", dim=3),
        persia.IdFeature("shop", dim=1),
    ]
)
SHORT = persia.Schema(
    id_features=[persia.IdFeature("item", table="item"), persia.IdFeature("user", dim=3)],
    tables=[Table("item", 5, dtype="bfloat16")],
)


def a_worker(servers=1, schema=SCHEMA, compression="none"):
    parts = several_servers(servers, schema.resolved_tables(), SGD(lr=1.0), Sync())
    return Worker(schema, parts, options=WorkerOptions(compression))


def columns(ids_of, schema=SCHEMA):
    """Features with one id for each sample, but for `history`."""
    named = {
        feature.name: IdColumn(np.array(ids_of.get(feature.name, []), np.uint64)) for feature in schema.id_features
    }
    if "history" in named:
        ends = np.array([0, len(named["history"].values)], np.int64)
        named["history"] = IdColumn(named["history"].values, ends)
    return named


def push(worker, step, batch_id, ids, value=-1.0):
    """Pushes one gradient for all rows of a batch."""
    gradients = {name: np.full((len(own), DIMS[name]), value, np.float32) for name, own in ids.items()}
    return worker.push(PushHeader(1, 0, step + 1, step, 1), [Contribution(batch_id, gradients)])


DIMS = {"item": 4, "user": 3, "shop": 1}
some_ids = st.lists(st.integers(0, 30), max_size=20)
features = st.fixed_dictionaries(dict.fromkeys(["item", "history", "user", "shop"], some_ids))


@settings(max_examples=examples(25))
@given(features, st.lists(features, max_size=3), st.sampled_from([1, 2, 3]))
def test_refreshed_rows_are_those_of_a_whole_lookup(ahead, pushed, servers):
    worker = a_worker(servers)
    batch_id = worker.register(columns(ahead))
    looked_up = worker.lookup_ahead(batch_id)
    assert len(looked_up.seen) == servers
    rows, seen, ids = looked_up.rows, looked_up.seen, worker.distinct_ids(batch_id)
    for step, batch in enumerate(pushed):
        other = worker.register(columns(batch))
        worker.lookup(other)
        changed = worker.distinct_ids(other)
        push(worker, step, other, changed)
        places, fresh, seen, scales, _ = worker.refresh(batch_id, seen)
        assert scales is None
        assert len(seen) == servers
        for name, own in ids.items():
            assert (np.diff(places[name].astype(np.int64)) > 0).all()
            assert own[places[name]].tolist() == [id_ for id_ in own.tolist() if id_ in changed[name]]
        batching.put_places(rows, places, fresh)
        np.testing.assert_array_equal(rows.buffer, worker.lookup_ahead(batch_id).rows.buffer)
    assert worker.refresh(batch_id, seen).places.buffer.size == 0


@settings(max_examples=examples(25))
@given(
    st.lists(features, min_size=1, max_size=4),
    features,
    st.integers(0, 4),
    st.integers(0, 3),
    st.sampled_from([1, 2, 3]),
)
def test_rows_that_were_left_out_come_with_the_refresh(before, ids_of, recent, pushed, servers):
    """Those of ids of the last batches that were looked up ahead, whether or not these have been pushed."""
    worker = a_worker(servers)
    earlier = [worker.register(columns(batch)) for batch in before]
    for other in earlier:
        worker.lookup_ahead(other)
    batch_id = worker.register(columns(ids_of))
    ids = worker.distinct_ids(batch_id)
    found = worker.lookup_ahead(batch_id, recent=recent)
    in_last = {name: set() for name in ids}
    for other in earlier[max(0, len(earlier) - recent) :]:
        for name, own in worker.distinct_ids(other).items():
            in_last[name].update(own.tolist())
    flags = [id_ in in_last[name] for name, own in ids.items() for id_ in own.tolist()]
    assert (found.left_out is None) == (not any(flags))
    if found.left_out is not None:
        assert found.left_out.buffer.tolist() == flags  # No id shares its slot here.
    included = batching.places_of(Packed(ids.names, ids.counts, ~np.array(flags, np.bool_)))
    assert list(found.rows.counts) == list(included.counts)
    changed = earlier[pushed % len(earlier)]
    push(worker, 0, changed, worker.distinct_ids(changed))
    fresh = worker.refresh(batch_id, found.seen, found.left_out)
    widths = [DIMS[name] for name in ids]
    size = sum(count * width for count, width in zip(ids.counts, widths, strict=True))
    rows = Packed(ids.names, ids.counts, np.full(size, np.nan, np.float32), widths)
    batching.put_places(rows, included, found.rows)
    batching.put_places(rows, fresh.places, fresh.rows)
    np.testing.assert_array_equal(rows.buffer, worker.lookup(batch_id).rows.buffer)
    assert len(fresh.places.buffer) == len(np.unique(_in_buffer(ids.counts, fresh.places)))  # No row twice.
    assert worker.refresh(batch_id, fresh.seen).places.buffer.size == 0


def test_a_repeated_lookup_ahead_leaves_out_the_same_rows():
    worker = a_worker()
    worker.lookup_ahead(worker.register(columns({"item": [1]})))
    batch_id = worker.register(columns({"item": [1, 2], "user": [3]}))
    ids = worker.distinct_ids(batch_id)
    found = [worker.lookup_ahead(batch_id, recent=4) for _ in range(3)]
    for each in found:
        assert {name: ids[name][flags].tolist() for name, flags in each.left_out.items()} == {
            "item": [1],
            "user": [],
            "shop": [],
        }
        np.testing.assert_array_equal(each.rows.buffer, found[0].rows.buffer)
    assert worker.lookup_ahead(batch_id).left_out is None  # No repetition: it asks for all rows.


def test_new_rows_that_were_left_out_are_made_at_the_refresh():
    """An id may be left out that has no row, as another id shares its slot."""
    worker = a_worker(2)
    batch_id = worker.register(columns({"item": [1, 2], "user": [3]}))
    seen, ids = worker.lookup_ahead(worker.register(columns({}))).seen, worker.distinct_ids(batch_id)
    left_out = Packed(ids.names, ids.counts, np.ones(3, np.bool_))
    fresh = worker.refresh(batch_id, seen, left_out)
    assert sorted(fresh.places["item"].tolist()) == [0, 1]
    assert fresh.places["user"].tolist() == [0]
    assert (fresh.rows["item"] != 0).any(axis=1).all()
    assert push(worker, 0, batch_id, ids)["item"].applied == 2


def test_rows_left_out_have_to_be_those_of_the_batch():
    worker = a_worker()
    batch_id = worker.register(columns({"item": [1, 2]}))
    seen = worker.lookup_ahead(batch_id).seen
    names = worker.distinct_ids(batch_id).names
    with pytest.raises(StoreError, match="one flag for each of the distinct ids"):
        worker.refresh(batch_id, seen, Packed(names, [1, 0, 0], np.ones(1, np.bool_)))


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_only_what_a_ps_has_changed_comes_from_it(servers):
    """Places are among the ids of the whole batch, which are sorted by PS."""
    worker = a_worker(servers)
    batch_id = worker.register(columns({"item": range(40), "user": range(40), "shop": [1]}))
    looked_up, ids = worker.lookup_ahead(batch_id), worker.distinct_ids(batch_id)
    for step, id_ in enumerate((7, 33)):
        other = worker.register(columns({"item": [id_]}))
        worker.lookup(other)
        push(worker, step, other, worker.distinct_ids(other))
    fresh = worker.refresh(batch_id, looked_up.seen)
    assert sorted(ids["item"][fresh.places["item"]].tolist()) == [7, 33]
    np.testing.assert_array_equal(fresh.rows["item"], looked_up.rows["item"][fresh.places["item"]] + 1)
    assert fresh.places.counts[1:] == [0, 0]
    # A PS whose moment is unknown sends all its rows, the others what has changed.
    with worker._buffer.use(batch_id) as (entry, _):
        own = worker._router.ids_of(entry, 0)["item"].tolist()
    seen = [Moment(1, 0), *fresh.seen[1:]]
    again = worker.refresh(batch_id, seen)
    assert set(ids["item"][again.places["item"]].tolist()) == set(own)
    np.testing.assert_array_equal(again.rows["item"], worker.lookup_ahead(batch_id).rows["item"][again.places["item"]])


@pytest.mark.parametrize("moments", [0, 1, 3])
def test_other_numbers_of_moments_are_refused(moments):
    worker = a_worker(2)
    batch_id = worker.register(columns({"item": [1]}))
    seen = worker.lookup_ahead(batch_id).seen
    with pytest.raises(StaleMapError, match=f"sorted for {moments} embedding PSs.*there are 2 now"):
        worker.refresh(batch_id, (seen * 2)[:moments])
    assert worker.refresh(batch_id, seen).places.buffer.size == 0


def test_batches_that_are_gone_are_stale():
    worker = a_worker()
    batch_id = worker.register(columns({"item": [1]}))
    seen = worker.lookup_ahead(batch_id).seen
    for unknown in (batch_id + 1, 12345):
        with pytest.raises(StaleBatchError):
            worker.lookup_ahead(unknown)
        with pytest.raises(StaleBatchError):
            worker.refresh(unknown, seen)
    push(worker, 0, batch_id, worker.distinct_ids(batch_id))
    with pytest.raises(StaleBatchError):
        worker.refresh(batch_id, seen)
    released = worker.register(columns({"item": [1]}))
    worker.release(released)
    with pytest.raises(StaleBatchError):
        worker.refresh(released, seen)


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("schema", [SCHEMA, SHORT], ids=["float32", "bfloat16"])
def test_compressed_rows_are_those_of_a_compressed_lookup(schema, servers):
    """Tables with 16 bits are sent as stored; the others as float16 and a scale for each row."""
    worker, tables = a_worker(servers, schema, "fp16"), schema.resolved_tables()
    ids_of = {"item": range(20), "user": range(10)}
    batch_id = worker.register(columns(ids_of, schema))
    looked_up = worker.lookup_ahead(batch_id)
    other = worker.register(columns({"item": range(5), "user": [3]}, schema))
    worker.lookup(other)
    gradients = {
        name: np.full((len(own), tables[name].dim), -0.5, np.float32)
        for name, own in worker.distinct_ids(other).items()
        if len(own)
    }
    worker.push(PushHeader(1, 0, 1, 0, 1), [Contribution(other, gradients)])
    places, rows, _, scales, _ = worker.refresh(batch_id, looked_up.seen)
    assert scales is not None
    assert sorted(places.counts, reverse=True)[:2] == [5, 1]
    mine = decode(looked_up.rows, looked_up.scales, tables=tables)
    batching.check_rows(rows, scales, tables)
    batching.put_places(mine, places, decode(rows, scales, tables=tables))
    whole = worker.lookup_ahead(batch_id)
    np.testing.assert_array_equal(mine.buffer, decode(whole.rows, whole.scales, tables=tables).buffer)


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_the_bytes_of_refreshed_rows_are_counted(compression):
    worker = a_worker(compression=compression)
    batch_id = worker.register(columns({"item": range(8)}))
    seen = worker.lookup_ahead(batch_id).seen
    push(worker, 0, worker.register(columns({"item": range(3)})), {"item": np.arange(3, dtype=np.uint64)})
    assert worker.refresh(batch_id, seen).places.counts[0] == 3
    codec, each = {"none": ("none", 16), "fp16": ("fp16", 8 + 4)}[compression]
    (measured,) = [metric for metric in worker.observe()[0] if metric.name == "worker_refreshed_bytes"]
    assert measured.value == 3 * each
    assert measured.labels == {"codec": codec}


@pytest.mark.parametrize("servers", [1, 2])
def test_a_batch_without_ids_is_refreshed(servers):
    schema = persia.Schema([], dense_features=["x"])
    worker = a_worker(servers, schema)
    batch = worker.register({})
    ahead = worker.lookup_ahead(batch)
    fresh = worker.refresh(batch, ahead.seen)
    assert (list(fresh.places.counts), list(fresh.rows.counts)) == ([], [])
    assert len(fresh.seen) == servers
