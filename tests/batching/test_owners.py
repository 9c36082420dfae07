import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia import batching
from persia.errors import DataError
from support.twins import batching as reference

POOLS = {threads: batching.ThreadPool(threads) for threads in (1, 3)}

some_ids = st.one_of(st.integers(0, 30), st.integers(0, 2**64 - 1))
features = st.lists(some_ids, max_size=40).map(lambda ids: np.array(ids, np.uint64))
groups = st.lists(st.lists(features, max_size=3), max_size=4)


@pytest.mark.parametrize("threads", POOLS)
@given(groups=groups, servers=st.integers(1, 5))
def test_grouping_equals_the_reference_and_keeps_inverses_valid(threads, groups, servers):
    names = [f"table {number}" for number in range(len(groups))]
    found, expected = batching.unique(groups, POOLS[threads]), reference.unique(groups)
    bounds = batching.group_by_owner(names, found, servers, POOLS[threads])
    for ours, theirs in zip(bounds, reference.group_by_owner(names, expected, servers), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for name, group, (ids, inverses), (expected_ids, expected_inverses), ends in zip(
        names, groups, found, expected, bounds, strict=True
    ):
        np.testing.assert_array_equal(ids, expected_ids)
        for feature, inverse, expected_inverse in zip(group, inverses, expected_inverses, strict=True):
            np.testing.assert_array_equal(inverse, expected_inverse)
            np.testing.assert_array_equal(ids[inverse], feature)
        np.testing.assert_array_equal(batching.owners(name, ids, servers), np.repeat(np.arange(servers), np.diff(ends)))


def test_many_ids_with_wide_inverses():
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 2**40, 100_000).astype(np.uint64), rng.integers(0, 2**20, 1_000).astype(np.uint64)]
    found = batching.unique([ids], POOLS[3])
    assert found[0][1][0].dtype == np.uint32
    (bounds,) = batching.group_by_owner(["item"], found, 4, POOLS[3])
    np.testing.assert_array_equal(found[0][0][found[0][1][0]], ids[0])
    sizes = np.diff(bounds)
    assert sizes.max() / sizes.mean() < 1.02


def test_owners_never_change():
    """They are part of the protocol: rows would be looked for where they are not."""
    ids = np.array([0, 1, 2, 3, 1000, 2**64 - 1], np.uint64)
    assert (
        batching.owners("item", ids, 3).tolist()
        == [reference.owner("item", i, 3) for i in ids.tolist()]
        == [1, 2, 1, 2, 0, 2]
    )


def test_what_unique_cannot_have_returned_is_refused():
    ids, pool = np.arange(3, dtype=np.uint64), POOLS[1]
    for inverse in (np.array([0, 3], np.uint16), np.array([0, 3], np.uint32), np.array([0, 1], np.int64)):
        with pytest.raises(DataError):
            batching.group_by_owner(["item"], [(ids, [inverse])], 2, pool)
    frozen = ids.copy()
    frozen.flags.writeable = False
    with pytest.raises(DataError):
        batching.group_by_owner(["item"], [(frozen, [])], 2, pool)
