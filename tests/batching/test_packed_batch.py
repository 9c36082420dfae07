"""All tables of a batch in one call: the same as table by table."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from persia import batching
from persia.batching.id_column import IdColumn
from persia.errors import DataError
from persia.types import BucketMap, Packed
from support.bucket_maps import bucket_maps

POOLS = {threads: batching.ThreadPool(threads) for threads in (1, 3)}
SCRATCH = batching.Scratch()
features = st.lists(st.integers(0, 30) | st.integers(0, 2**64 - 1), max_size=40).map(
    lambda ids: np.array(ids, np.uint64)
)
groups = st.lists(st.lists(features, max_size=3), max_size=4)


def named(groups):
    return [(f"table {t}", [f"{t}.{f}" for f in range(len(group))]) for t, group in enumerate(groups)]


def check(groups, buckets, pool):
    """Against `unique` and `group_by_owner`."""
    tables = named(groups)
    names = [name for name, _ in tables]
    columns = {
        name: IdColumn(ids)
        for (_, names), group in zip(tables, groups, strict=True)
        for name, ids in zip(names, group, strict=True)
    }
    routed = batching.route_batch(tables, columns, buckets, pool, SCRATCH)
    expected = batching.unique(groups, pool)
    bounds = batching.group_by_owner(names, expected, buckets, pool)
    assert list(routed.ids) == names
    assert routed.buckets is buckets
    inverse = routed.inverse
    assert len(inverse) == sum(map(len, groups))
    for t, ((name, mine), (ids, inverses)) in enumerate(zip(tables, expected, strict=True)):
        np.testing.assert_array_equal(routed.ids[name], ids)
        np.testing.assert_array_equal(routed.bounds[t], bounds[t])
        for feature, theirs in zip(mine, inverses, strict=True):
            assert inverse[feature].dtype == theirs.dtype
            np.testing.assert_array_equal(inverse[feature], theirs)
    return routed


@pytest.mark.parametrize("threads", POOLS)
@settings(deadline=None)
@given(groups=groups, buckets=bucket_maps())
def test_a_routed_batch_is_that_of_each_table(threads, groups, buckets):
    check(groups, buckets, POOLS[threads])


def test_tables_with_many_ids_have_wide_inverses():
    rng = np.random.default_rng(0)
    many = [rng.integers(0, 2**40, 100_000).astype(np.uint64), rng.integers(0, 2**40, 10).astype(np.uint64)]
    routed = check([[many[1]], many, [], [many[1]]], BucketMap.even(3), POOLS[3])
    assert list(routed.wide) == ["1.0", "1.1"]
    assert list(routed.narrow) == ["0.0", "3.0"]


@pytest.mark.parametrize("bad", [np.zeros(3), np.zeros((3, 1), np.uint64), np.arange(6, dtype=np.uint64)[::2]])
def test_other_arrays_are_refused(bad):
    with pytest.raises(DataError, match="group 0"):
        batching.route_batch([("a", ["f"])], {"f": IdColumn(bad)}, BucketMap.even(1), POOLS[1], SCRATCH)


@settings(deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 4), min_size=3, max_size=3), st.integers(1, 5)), max_size=4))
def test_the_parts_of_all_servers_are_slices_of_the_whole(tables):
    bounds = np.array([np.cumsum([0, *counts]) for counts, _ in tables], np.int64).reshape(-1, 4)
    rng = np.random.default_rng(0)
    rows = {f"t{n}": rng.random((sum(counts), width), np.float32) for n, (counts, width) in enumerate(tables)}
    whole = Packed.of(rows, np.float32) if rows else Packed([], [], np.empty(0, np.float32), [])
    again = Packed(whole.names, whole.counts, np.zeros_like(whole.buffer), whole.widths)
    for server in range(3):
        part = batching.take_part(whole, bounds, server)
        for name, ends in zip(rows, bounds, strict=True):
            np.testing.assert_array_equal(part[name], rows[name][ends[server] : ends[server + 1]])
        batching.put_part(again, bounds, server, part.buffer)
    np.testing.assert_array_equal(again.buffer, whole.buffer)


def test_of_one_server_nothing_is_copied():
    whole = Packed(["a"], [3], np.arange(3, dtype=np.uint64))
    assert batching.take_part(whole, np.array([[0, 3]]), 0) is whole


def test_parts_that_do_not_fit_are_refused():
    whole = Packed(["a"], [3], np.zeros(6, np.float32), [2])
    for bounds in ([[0, 1, 2]], [[0, 2, 4]], [[0, 3, 3], [0, 0, 0]], [[0, 4, 3]], [[1, 2, 3]], [[0, -1, 3]]):
        with pytest.raises((DataError, ValueError)):
            batching.take_part(whole, np.array(bounds, np.int64), 0)
    with pytest.raises(DataError, match="smaller"):
        batching.put_part(whole, np.array([[0, 1, 3]]), 1, np.zeros(3, np.float32))
    with pytest.raises(DataError, match="one dtype"):
        batching.put_part(whole, np.array([[0, 1, 3]]), 1, np.zeros(4, np.float64))


floats = st.floats(width=32)
tables = st.lists(hnp.arrays(np.float32, st.tuples(st.integers(0, 4), st.integers(1, 3)), elements=floats), max_size=5)


@settings(deadline=None)
@given(tables)
def test_the_codec_of_all_tables_is_that_of_each(tables):
    rows = {f"t{number}": values for number, values in enumerate(tables)}
    halves, scales = batching.encode_packed(Packed.of(rows, np.float32))
    decoded = batching.decode_packed(halves, scales, SCRATCH)
    assert list(halves) == list(scales) == list(decoded) == list(rows)
    for name, values in rows.items():
        expected, factors = batching.encode_rows(values)
        np.testing.assert_array_equal(halves[name], expected)
        np.testing.assert_array_equal(scales[name], factors)
        np.testing.assert_array_equal(decoded[name], batching.decode_rows(expected, factors))
