"""Texts as ids and as numbers: native, and the slow twin."""

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from persia.batching import TextBuffers, text_ids, text_numbers
from persia.errors import DataError
from support.twins import batching as reference

LETTERS = st.text("0123456789.-+eE \tNAnaulTrefs,x\\/<>#", max_size=8)
CASES = [
    r"NA",
    r"true",
    r"5.0",
    r"-5.00",
    r"18446744073709551615",
    r"18446744073709551616",
    r"1e-320",
    r"1e-999",
    r"1e308",
    r"1e400",
    r"-0",
    r".",
    r"+.",
    r"+-1",
    r"1.e5",
]
TEXTS = st.lists(LETTERS | st.sampled_from(CASES) | st.text(max_size=3), max_size=6)
KINDS = ["auto", "number", "text"]


def buffers(texts, *, start=0, nulls=()):
    """With `start` texts before, and nulls at some positions."""
    plain = TextBuffers.of([b"before"] * start + [text.encode() for text in texts])
    bits = np.array([i - start not in nulls for i in range(len(plain))] or [True])
    return TextBuffers(plain.data, plain.offsets[start:], np.packbits(bits, bitorder="little"), start)


def attempt(function, *arguments):
    """The result and -1, or None and the position that is refused."""
    try:
        return function(*arguments), -1
    except ValueError as error:
        return None, error.args[0]


@pytest.mark.parametrize("kind", KINDS)
@given(texts=TEXTS, start=st.integers(0, 9), nulls=st.sets(st.integers(0, 5)))
def test_ids(kind, texts, start, nulls):
    given_ = buffers(texts, start=start, nulls=nulls)
    found = text_ids(given_, kind)
    expected, bad = attempt(reference.text_ids, given_, kind)
    assert found.bad == bad
    if bad < 0:
        assert [int(x) if there else None for x, there in zip(found.ids, found.present, strict=True)] == expected
        assert not found.ids[~found.present].any()


@given(texts=TEXTS, start=st.integers(0, 9), nulls=st.sets(st.integers(0, 5)))
def test_numbers(texts, start, nulls):
    given_ = buffers(texts, start=start, nulls=nulls)
    found = text_numbers(given_)
    expected, bad = attempt(reference.text_numbers, given_)
    assert found.bad == bad
    if bad < 0:
        assert [float(x) if there else None for x, there in zip(found.numbers, found.present, strict=True)] == expected
        assert np.isnan(found.numbers[~found.present]).all()


@given(st.lists(st.integers(0, 2**64 - 1) | st.booleans()))
def test_a_number_is_its_own_id(values):
    found = text_ids(TextBuffers.of([str(value).encode() for value in values]))
    assert found.ids.tolist() == [int(value) for value in values]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False)))
def test_a_float_is_read_as_it_was_printed(values):
    assert text_numbers(TextBuffers.of([repr(value).encode() for value in values])).numbers.tolist() == values


@given(st.lists(st.binary(min_size=1, max_size=100)), st.sampled_from([np.int32, np.int64]))
def test_the_kind_text_hashes_bytes(texts, dtype):
    given_ = TextBuffers.of(texts)
    found = text_ids(TextBuffers(given_.data, given_.offsets.astype(dtype)), "text")
    assert found.ids.tolist() == [xxhash.xxh64_intdigest(text) for text in texts]


@given(st.lists(st.binary(max_size=9).map(lambda x: x.replace(b"\0", b"")), min_size=1))
def test_buffers_of_fixed_width_texts(texts):
    fixed, plain = TextBuffers.of_fixed(np.array(texts, "S9")), TextBuffers.of(texts)
    assert fixed.offsets.tolist() == plain.offsets.tolist()
    assert fixed.data.tobytes() == plain.data.tobytes()


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
    ],
)
def test_hostile_buffers_are_refused(arguments):
    texts = TextBuffers(**{"data": np.full(4, ord("1"), np.uint8), "offsets": np.array([0, 4]), **arguments})
    with pytest.raises(DataError):
        text_ids(texts)
    with pytest.raises(DataError):
        text_numbers(texts)
