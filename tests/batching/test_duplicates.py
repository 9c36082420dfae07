import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia import batching
from persia.errors import DataError
from support.twins import batching as reference

POOLS = {threads: batching.ThreadPool(threads) for threads in (1, 3)}
threads = pytest.mark.parametrize("threads", POOLS)

some_ids = st.one_of(st.integers(0, 3), st.integers(0, 2**64 - 1), st.sampled_from([0, 2**63, 2**64 - 1]))
features = st.lists(some_ids, max_size=40).map(lambda ids: np.array(ids, np.uint64))
groups = st.lists(st.lists(features, max_size=3), max_size=4)


def assert_same(found, expected):
    assert len(found) == len(expected)
    for (ids, inverses), (expected_ids, expected_inverses) in zip(found, expected, strict=True):
        assert ids.dtype == np.uint64
        np.testing.assert_array_equal(ids, expected_ids)
        assert len(inverses) == len(expected_inverses)
        for inverse, expected_inverse in zip(inverses, expected_inverses, strict=True):
            assert inverse.dtype == expected_inverse.dtype
            np.testing.assert_array_equal(inverse, expected_inverse)


@threads
@given(groups=groups)
def test_unique_is_the_reference(threads, groups):
    assert_same(batching.unique(groups, POOLS[threads]), reference.unique(groups))


@threads
def test_unique_many_groups_with_shared_scratch(threads):
    rng = np.random.default_rng(0)
    scratch = batching.Scratch()
    for _ in range(3):
        groups = [[(1e6 * rng.random(n) ** 3).astype(np.uint64) for n in rng.integers(0, 3000, 3)] for _ in range(26)]
        assert_same(batching.unique(groups, POOLS[threads], scratch), reference.unique(groups))


@pytest.mark.parametrize("count", [65_534, 65_535, 65_536, 65_537])
@pytest.mark.parametrize("repeats", [0, 5000])
def test_unique_at_the_edge_of_uint16(count, repeats):
    rng = np.random.default_rng(count)
    distinct = rng.permutation(np.arange(count, dtype=np.uint64) * 1_000_003)
    ids = np.concatenate([distinct, rng.choice(distinct, repeats)])
    groups = [[ids[:1000], ids[1000:]], [ids[:10]]]
    found = batching.unique(groups, POOLS[3])
    assert_same(found, reference.unique(groups))
    assert found[0][1][0].dtype == (np.uint16 if count <= 65_536 else np.uint32)
    assert found[1][1][0].dtype == np.uint16


def test_unique_of_one_id_and_of_a_large_group():
    same = np.full(200_000, 2**64 - 1, np.uint64)
    large = (1e9 * np.random.default_rng(1).random(200_000) ** 3).astype(np.uint64)
    assert_same(batching.unique([[same], [large]], POOLS[3]), reference.unique([[same], [large]]))


def test_unique_of_nothing():
    assert batching.unique([], POOLS[1]) == []
    ((ids, inverses),) = batching.unique([[]], POOLS[1])
    assert ids.shape == (0,)
    assert inverses == []


@pytest.mark.parametrize(
    "bad",
    [
        np.zeros(4, np.int64),
        np.zeros(4, ">u8"),
        np.zeros((2, 2), np.uint64),
        np.zeros(8, np.uint64)[::2],
        np.frombuffer(bytes(17), np.uint8)[1:].view(np.uint64),
        [1, 2],
        None,
    ],
)
def test_unique_refuses(bad):
    with pytest.raises(DataError, match="group 1"):
        batching.unique([[np.zeros(3, np.uint64)], [bad]], POOLS[1])


def test_unique_reads_read_only_arrays():
    ids = np.array([5, 5, 1], np.uint64)
    ids.flags.writeable = False
    ((found, (inverse,)),) = batching.unique([[ids]], POOLS[1])
    assert found.tolist() == [5, 1]
    assert inverse.tolist() == [0, 0, 1]


@threads
@given(parts=st.lists(features, min_size=1, max_size=4), dim=st.sampled_from([1, 3, 4, 8, 16]), seed=st.integers(0, 9))
def test_merge_gradients_is_the_reference(threads, parts, dim, seed):
    rng = np.random.default_rng(seed)
    pairs = [(ids, rng.standard_normal((len(ids), dim), np.float32)) for ids in parts]
    ids, gradients = batching.merge_gradients(pairs, POOLS[threads])
    expected_ids, expected = reference.merge_gradients(pairs)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_array_equal(gradients, expected)


def test_merge_gradients_on_the_callers_thread():
    ids = np.array([3, 4], np.uint64)
    merged, gradients = batching.merge_gradients([(ids, np.ones((2, 2), np.float32)), (ids[:1], np.ones((1, 2), "f4"))])
    assert merged.tolist() == [3, 4]
    assert gradients.tolist() == [[2, 2], [1, 1]]


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [(np.zeros(2, np.uint64), np.zeros((3, 4), np.float32))],
        [(np.zeros(2, np.uint64), np.zeros((2, 4), np.float64))],
        [(np.zeros(2, np.uint64), np.zeros(2, np.float32))],
        [(np.zeros(2, np.uint64), np.zeros((2, 4), "f4")), (np.zeros(2, np.uint64), np.zeros((2, 5), "f4"))],
        [(np.zeros(2, np.int64), np.zeros((2, 4), np.float32))],
    ],
)
def test_merge_gradients_refuses(parts):
    with pytest.raises(DataError):
        batching.merge_gradients(parts)
