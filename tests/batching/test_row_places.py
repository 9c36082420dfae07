"""Rows at places of tables, against their twins; and places that there are not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia.batching import complement, flag_places, keep, places_of, put_places, take_places
from persia.errors import DataError
from persia.types import Packed
from support.twins import batching as reference


@st.composite
def tables(draw):
    """The number of rows, the width and some places of each table."""
    counts = draw(st.lists(st.integers(0, 7), max_size=4))
    widths, one = st.integers(1, 5), draw(st.booleans())
    wide = [draw(widths)] * len(counts) if one else [draw(widths) for _ in counts]
    places = [sorted(draw(st.sets(st.integers(0, count - 1)))) if count else [] for count in counts]
    return counts, wide, places


def named(arrays, dtype, widths=None):
    names = [f"t{number}" for number in range(len(arrays))]
    flat = [np.asarray(array, dtype).reshape(-1) for array in arrays]
    buffer = np.concatenate(flat) if flat else np.empty(0, dtype)
    return Packed(names, [len(array) for array in arrays], buffer, widths)


def rows_of(counts, widths, start=0):
    arrays, at = [], start
    for count, width in zip(counts, widths, strict=True):
        arrays.append(np.arange(at, at + count * width, dtype=np.float32).reshape(count, width))
        at += count * width
    return named(arrays, np.float32, list(widths) if widths else None)


def same(mine, theirs):
    assert list(mine.names) == list(theirs.names)
    assert list(mine.counts) == list(theirs.counts)
    assert list(mine.widths or []) == list(theirs.widths or [])
    assert mine.buffer.dtype == theirs.buffer.dtype
    np.testing.assert_array_equal(mine.buffer, theirs.buffer)


@given(tables())
def test_values_at_places_are_those_of_the_twin(given_tables):
    counts, _, at = given_tables
    ids = named([np.arange(count, dtype=np.uint64) * 10 + n for n, count in enumerate(counts)], np.uint64)
    places = named(at, np.uint32)
    same(take_places(ids, places), reference.take_places(ids, places))


@given(tables())
def test_rows_are_put_as_by_the_twin(given_tables):
    counts, widths, at = given_tables
    mine, theirs = rows_of(counts, widths), rows_of(counts, widths)
    places, fresh = named(at, np.uint32), rows_of([len(own) for own in at], widths, 1000)
    put_places(mine, places, fresh)
    reference.put_places(theirs, places, fresh)
    same(mine, theirs)
    assert (mine.buffer >= 1000).sum() == fresh.buffer.size


@given(tables(), st.booleans(), st.data())
def test_what_is_kept_is_what_the_twin_keeps(given_tables, flat, data):
    counts, widths, _ = given_tables
    kept = np.array(data.draw(st.lists(st.booleans(), min_size=sum(counts), max_size=sum(counts))), np.bool_)
    values = named([np.arange(count) for count in counts], np.uint32) if flat else rows_of(counts, widths)
    same(keep(values, kept), reference.keep(values, kept))


def test_packed_values_are_copied():
    rows = rows_of([3], [2])
    kept = keep(rows, np.ones(3, np.bool_))
    taken = take_places(named([[4, 5]], np.uint64), named([[0, 1]], np.uint32))
    rows.buffer[:] = -1
    assert kept.buffer.tolist() == [0, 1, 2, 3, 4, 5]
    assert taken.buffer.tolist() == [4, 5]


@pytest.mark.parametrize("widths", [(2, 2), (2, 3)], ids=["one width", "mixed widths"])
@pytest.mark.parametrize(
    ("at", "message"),
    [
        (([3], []), "Place 3 is beyond the 3 rows"),
        (([], [1]), "Place 1 is beyond the 1 rows"),
        (([2], [2]), "Place 2 is beyond the 1 rows"),
        (([0, 1, 4_000_000_000], [0]), "Place 4000000000 is beyond the 3 rows"),
    ],
)
def test_places_beyond_a_table_are_refused_and_nothing_changes(widths, at, message):
    """Also those that are inside the buffer, where another table is."""
    places, rows = named(at, np.uint32), rows_of([3, 1], widths)
    fresh = rows_of([len(own) for own in at], widths, 1000)
    with pytest.raises(DataError, match=message):
        take_places(named([[1, 2, 3], [4]], np.uint64), places)
    with pytest.raises(DataError, match=message):
        put_places(rows, places, fresh)
    same(rows, rows_of([3, 1], widths))


@pytest.mark.parametrize("widths", [(2, 2), (2, 3)], ids=["one width", "mixed widths"])
def test_rows_that_do_not_match_are_refused_and_nothing_changes(widths):
    rows, places, fresh = rows_of([3, 1], widths), named([[1], [0]], np.uint32), rows_of([1, 1], widths, 1000)
    others = {
        "other tables": [
            (Packed(["t1", "t0"], places.counts, places.buffer), fresh),
            (places, Packed(["t0", "t2"], fresh.counts, fresh.buffer, fresh.widths)),
            (named([[1]], np.uint32), rows_of([1], widths[:1])),
            (places, rows_of([1, 1], (2, 4))),
            (places, named([[1], [2]], np.float32)),
        ],
        "one place for each": [
            (named([[1, 2], []], np.uint32), fresh),
            (named([[1], []], np.uint32), fresh),
        ],
    }
    for message, pairs in others.items():
        for wrong in pairs:
            with pytest.raises(DataError, match=message):
                put_places(rows, *wrong)
    same(rows, rows_of([3, 1], widths))


@given(tables())
def test_flags_of_places_and_places_of_flags(case):
    counts, _, places = case
    packed = named(places, np.uint32)
    flags = flag_places(counts, packed)
    assert [array.tolist() for array in flags.arrays()] == [
        [place in own for place in range(count)] for count, own in zip(counts, places, strict=True)
    ]
    same(places_of(flags), packed)
    others = [sorted(set(range(count)) - set(own)) for count, own in zip(counts, places, strict=True)]
    same(places_of(complement(flags)), named(others, np.uint32))
