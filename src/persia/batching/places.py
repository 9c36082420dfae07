"""Ids and rows at some places of a batch's tables, for all tables in one step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from persia.errors import DataError
from persia.types import BoolArray, Int64Array
from persia.types.packed import Packed

__all__ = [
    "check_places",
    "complement",
    "flag_places",
    "keep",
    "places_included",
    "places_of",
    "put_places",
    "take_places",
]

S = TypeVar("S", bound=np.generic)


def check_places(counts: Mapping[str, int], places: Packed[np.uint32]) -> None:
    """Checks that places are within their tables.

    Args:
        counts: number of rows by table, in the order of the places.
        places: places in each table, uint32.

    Raises:
        DataError: a place is beyond its table.
    """
    _in_buffer(list(counts.values()), places)


def flag_places(counts: Sequence[int], places: Packed[np.uint32]) -> Packed[np.bool_]:
    """Returns whether each row is at one of the places, by table.

    Args:
        counts: number of rows of each table.
        places: places in each table, uint32.
    """
    flags = np.zeros(sum(counts), np.bool_)
    flags[_in_buffer(counts, places)] = True
    return Packed(places.names, counts, flags)


def complement(flags: Packed[np.bool_]) -> Packed[np.bool_]:
    """Returns the opposite of each flag."""
    return Packed(flags.names, flags.counts, ~flags.buffer)


def places_of(flags: Packed[np.bool_]) -> Packed[np.uint32]:
    """Returns the places that have a flag, by table, ascending: the inverse of `flag_places`."""
    index = np.flatnonzero(flags.buffer)
    sizes = np.asarray(flags.counts, np.int64)
    ends = np.cumsum(sizes)
    counts = np.diff(np.searchsorted(index, ends), prepend=0)
    index -= np.repeat(ends - sizes, counts)
    return Packed(flags.names, counts.tolist(), index.astype(np.uint32))


def take_places(values: Packed[S], places: Packed[np.uint32]) -> Packed[S]:
    """Returns the values at places, by table.

    Args:
        values: `[n]` by table.
        places: places in each table, uint32, for the same tables.
    """
    return Packed(values.names, places.counts, values.buffer[_in_buffer(values.counts, places)])


def places_included(left_out: Packed[np.bool_], rows: Packed[S]) -> Packed[np.uint32]:
    """Returns the places of the rows of a lookup among all rows of the batch.

    Raises:
        DataError: there is another number of rows.
    """
    included = places_of(complement(left_out))
    if list(included.names) != list(rows.names) or list(included.counts) != list(rows.counts):
        raise DataError(f"A lookup has not left out the rows that it names: {rows!r} at {included!r}.")
    return included


def put_places(rows: Packed[np.float32], places: Packed[np.uint32], fresh: Packed[np.float32]) -> None:
    """Overwrites the rows at places.

    Args:
        rows: `[n, dim]` by table; its buffer is written.
        places: places in each table, uint32.
        fresh: the rows for them, `[places, dim]`.

    Raises:
        DataError: tables, places or rows do not match.
    """
    widths = rows.widths or []
    if not list(rows.names) == list(places.names) == list(fresh.names) or list(fresh.widths or []) != list(widths):
        raise DataError(f"Refreshed rows are of other tables: {fresh!r} at {places!r}, for {rows!r}.")
    if list(places.counts) != list(fresh.counts):
        raise DataError(f"There is not one place for each refreshed row: {fresh!r} at {places!r}.")
    index = _in_buffer(rows.counts, places)
    if len(set(widths)) == 1:
        row = np.dtype((np.void, widths[0] * rows.buffer.itemsize))  # As one item, it is copied three times as fast.
        np.put(rows.buffer.view(row), index, fresh.buffer.view(row))
        return
    for whole, at, part in zip(rows.arrays(), places.arrays(), fresh.arrays(), strict=True):
        whole[at] = part


def keep(values: Packed[S], kept: BoolArray) -> Packed[S]:
    """Returns some of the rows of each table.

    Args:
        values: `[n]` or `[n, width]` by table.
        kept: whether to keep each row, bool `[sum of n]`.
    """
    ends = list(itertools.accumulate(values.counts))
    flags = [kept[end - count : end] for end, count in zip(ends, values.counts, strict=True)]
    parts = [array[flag].reshape(-1) for array, flag in zip(values.arrays(), flags, strict=True)]
    buffer = np.concatenate(parts) if parts else values.buffer
    return Packed(values.names, [int(flag.sum()) for flag in flags], buffer, values.widths)


def _in_buffer(counts: Sequence[int], places: Packed[np.uint32]) -> Int64Array:
    """Returns the places in the buffer of all tables. Raises `DataError` if a table has no such place."""
    sizes = np.asarray(counts, np.int64)
    index = places.buffer.astype(np.int64)
    beyond = index >= np.repeat(sizes, places.counts)
    if beyond.any():
        first = int(beyond.argmax())
        count = np.repeat(sizes, places.counts)[first]
        raise DataError(f"Place {index[first]} is beyond the {count} rows of its table.")
    index += np.repeat(np.cumsum(sizes) - sizes, places.counts)
    return index
