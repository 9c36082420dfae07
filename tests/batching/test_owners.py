import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia import batching
from persia.errors import DataError
from persia.types import BUCKETS, BucketMap
from support.bucket_maps import bucket_maps
from support.twins import batching as reference

POOLS = {threads: batching.ThreadPool(threads) for threads in (1, 3)}

some_ids = st.one_of(st.integers(0, 30), st.integers(0, 2**64 - 1))
features = st.lists(some_ids, max_size=40).map(lambda ids: np.array(ids, np.uint64))
groups = st.lists(st.lists(features, max_size=3), max_size=4)


@pytest.mark.parametrize("threads", POOLS)
@given(groups=groups, buckets=bucket_maps())
def test_grouping_equals_the_reference_and_keeps_inverses_valid(threads, groups, buckets):
    names = [f"table {number}" for number in range(len(groups))]
    found, expected = batching.unique(groups, POOLS[threads]), reference.unique(groups)
    bounds = batching.group_by_owner(names, found, buckets, POOLS[threads])
    for ours, theirs in zip(bounds, reference.group_by_owner(names, expected, buckets), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for name, group, (ids, inverses), (expected_ids, expected_inverses), ends in zip(
        names, groups, found, expected, bounds, strict=True
    ):
        np.testing.assert_array_equal(ids, expected_ids)
        for feature, inverse, expected_inverse in zip(group, inverses, expected_inverses, strict=True):
            np.testing.assert_array_equal(inverse, expected_inverse)
            np.testing.assert_array_equal(ids[inverse], feature)
        sorted_owners = np.repeat(np.arange(buckets.servers), np.diff(ends))
        np.testing.assert_array_equal(batching.owners(name, ids, buckets), sorted_owners)


def test_many_ids_with_wide_inverses():
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 2**40, 100_000).astype(np.uint64), rng.integers(0, 2**20, 1_000).astype(np.uint64)]
    found = batching.unique([ids], POOLS[3])
    assert found[0][1][0].dtype == np.uint32
    (bounds,) = batching.group_by_owner(["item"], found, BucketMap.even(4), POOLS[3])
    np.testing.assert_array_equal(found[0][0][found[0][1][0]], ids[0])
    sizes = np.diff(bounds)
    assert sizes.max() / sizes.mean() < 1.02


def test_owners_never_change():
    """They are part of the protocol: rows would be looked for where they are not."""
    ids = np.array([0, 1, 2, 3, 1000, 2**64 - 1], np.uint64)
    buckets = [2089, 3635, 2565, 3823, 171, 4076]
    assert batching.buckets_of("item", ids).tolist() == [reference.bucket("item", i) for i in ids.tolist()] == buckets
    assert batching.owners("item", ids, BucketMap.even(3)).tolist() == [1, 2, 1, 2, 0, 2]


def test_ids_in_another_order_of_bytes_or_with_gaps_have_the_same_buckets():
    ids = np.arange(100, dtype=np.uint64)
    expected = batching.buckets_of("item", ids)
    np.testing.assert_array_equal(batching.buckets_of("item", ids.astype(">u8")), expected)
    np.testing.assert_array_equal(batching.buckets_of("item", ids[::2]), expected[::2])


@pytest.mark.parametrize("stride", [1, 2**12, 2**20, 2**32, 2**52, 3**20])
def test_patterns_of_ids_are_spread_evenly(stride):
    """Multiples, as of ids that are made of several numbers; 64 ids for each bucket."""
    ids = np.arange(64 * BUCKETS, dtype=np.uint64) * np.uint64(stride)
    ids = np.unique(ids)  # Large strides wrap around.
    counts = np.bincount(batching.owners("item", ids, BucketMap.even(8)), minlength=8)
    assert counts.max() / counts.mean() < (1.06 if len(ids) > 10_000 else 1.2)


def test_what_unique_cannot_have_returned_is_refused():
    ids, pool = np.arange(3, dtype=np.uint64), POOLS[1]
    for inverse in (np.array([0, 3], np.uint16), np.array([0, 3], np.uint32), np.array([0, 1], np.int64)):
        with pytest.raises(DataError):
            batching.group_by_owner(["item"], [(ids, [inverse])], BucketMap.even(2), pool)
    frozen = ids.copy()
    frozen.flags.writeable = False
    with pytest.raises(DataError):
        batching.group_by_owner(["item"], [(frozen, [])], BucketMap.even(2), pool)
