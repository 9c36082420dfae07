import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from persia import batching
from persia.batching import reference
from persia.errors import DataError

POOLS = {threads: batching.ThreadPool(threads) for threads in (1, 3)}
threads = pytest.mark.parametrize("threads", POOLS)
seeds = st.integers(0, 2**64 - 1)


def arrow(strings, dtype=np.int64):
    ends = np.concatenate([[0], np.cumsum([len(s) for s in strings])]).astype(dtype)
    return np.frombuffer(b"".join(strings), np.uint8), ends


@given(data=st.binary(max_size=200), seed=seeds)
def test_reference_is_xxhash(data, seed):
    assert reference.xxh64(data, seed) == xxhash.xxh64_intdigest(data, seed)


@threads
@given(strings=st.lists(st.binary(max_size=100)), seed=seeds, dtype=st.sampled_from([np.int32, np.int64]))
def test_strings(threads, strings, seed, dtype):
    data, offsets = arrow(strings, dtype)
    found = batching.hash_strings(data, offsets, POOLS[threads], seed=seed)
    assert found.tolist() == [xxhash.xxh64_intdigest(s, seed) for s in strings]
    np.testing.assert_array_equal(found, reference.hash_strings(data, offsets, seed=seed))


@given(
    strings=st.lists(st.binary(max_size=9), max_size=30),
    start=st.integers(0, 12),
    null=seeds,
    bits=st.binary(max_size=6),
)
def test_nulls_and_slices(strings, start, null, bits):
    data, offsets = arrow(strings)
    validity = np.frombuffer(bits.ljust(8, b"\x55"), np.uint8)
    skip = len(strings) // 3  # a slice does not start at 0
    arguments = {"validity": validity, "validity_start": start, "null": null}
    found = batching.hash_strings(data, offsets[skip:], POOLS[3], **arguments)
    np.testing.assert_array_equal(found, reference.hash_strings(data, offsets[skip:], **arguments))


def test_many_strings_in_parallel():
    strings = [str(i * i).encode() for i in range(50_000)]
    found = batching.hash_strings(*arrow(strings), POOLS[3])
    assert found.tolist() == [xxhash.xxh64_intdigest(s) for s in strings]


@threads
@pytest.mark.parametrize("dtype", ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"])
@given(seed=seeds, contents=st.binary(min_size=0, max_size=160))
def test_values(threads, dtype, seed, contents):
    width = np.dtype(dtype).itemsize
    values = np.frombuffer(contents[: len(contents) // width * width], f"u{width}")
    values = values.astype("?") if dtype == "?" else values.view(dtype)
    found = batching.hash_values(values, POOLS[threads], seed=seed)
    np.testing.assert_array_equal(found, reference.hash_values(values, seed=seed))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_equal_categories_hash_alike(dtype):
    bits = np.dtype(f"u{np.dtype(dtype).itemsize}").type
    nan = np.array([np.nan], dtype)
    other = (nan.view(bits) | bits(1)).view(dtype)
    values = np.concatenate([np.array([0.0, -0.0, np.inf, -np.inf], dtype), nan, -nan, other, -other])
    found = batching.hash_values(values, POOLS[1]).tolist()
    assert found[0] == found[1]
    assert len(set(found[4:])) == 1
    assert len(set(found)) == 4


def test_width_is_part_of_a_category():
    five = [batching.hash_values(np.array([5], dtype), POOLS[1])[0] for dtype in (np.int32, np.int64)]
    assert five[0] != five[1]


@threads
@given(rows=st.lists(st.tuples(*[seeds] * 5), max_size=20), columns=st.integers(1, 5), seed=seeds)
def test_cross(threads, rows, columns, seed):
    table = [np.array([row[c] for row in rows], np.uint64) for c in range(columns)]
    found = batching.hash_cross(table, POOLS[threads], seed=seed)
    expected = [xxhash.xxh64_intdigest(np.array(row[:columns], "<u8").tobytes(), seed) for row in rows]
    assert found.tolist() == expected
    assert reference.hash_cross(table, seed=seed).tolist() == expected


def test_cross_depends_on_the_order():
    a, b = np.array([1], np.uint64), np.array([2], np.uint64)
    assert batching.hash_cross([a, b], POOLS[1])[0] != batching.hash_cross([b, a], POOLS[1])[0]


@pytest.mark.parametrize(
    "arguments",
    [
        {"offsets": np.array([0, 2, 1, 4])},
        {"offsets": np.array([-1, 2])},
        {"offsets": np.array([0, 2**62])},
        {"offsets": np.array([0, 5])},
        {"offsets": np.array([], np.int64)},
        {"offsets": np.array([0, 4], np.uint64)},
        {"offsets": np.array([0, 4], np.int16)},
        {"offsets": np.array([0.0, 4.0])},
        {"offsets": np.zeros((1, 2), np.int64)},
        {"data": np.zeros(4, np.int8)},
        {"data": np.zeros(8, np.uint8)[::2]},
        {"validity": np.zeros(0, np.uint8)},
        {"validity": np.zeros(1, np.uint8), "validity_start": 8},
        {"validity": np.zeros(1, np.uint8), "validity_start": 2**63},
        {"validity": np.zeros(1, np.int8)},
        {"validity": np.zeros(1, np.uint8), "validity_start": -1},
        {"seed": -1},
        {"seed": 2**64},
        {"null": -1},
    ],
)
def test_hostile_strings_are_refused(arguments):
    arguments = {"data": np.zeros(4, np.uint8), "offsets": np.array([0, 4]), **arguments}
    with pytest.raises(DataError):
        batching.hash_strings(pool=POOLS[1], **arguments)


@pytest.mark.parametrize(
    "values",
    [
        np.zeros(2, ">i4"),
        np.zeros(2, np.longdouble),
        np.zeros(2, np.complex64),
        np.zeros(2, "U3"),
        np.zeros(2, object),
        np.zeros((2, 2)),
        np.zeros(4)[::2],
        [1, 2],
    ],
)
def test_values_that_cannot_be_hashed_are_refused(values):
    with pytest.raises(DataError):
        batching.hash_values(values, POOLS[1])


@pytest.mark.parametrize(
    "columns",
    [[], [np.zeros(2, np.int64)], [np.zeros(2, np.uint64), np.zeros(3, np.uint64)], [np.zeros((2, 2), np.uint64)]],
)
def test_crosses_that_do_not_fit_are_refused(columns):
    with pytest.raises(DataError):
        batching.hash_cross(columns, POOLS[1])
