"""Cuts rows into batches by the number of their events, so that histories of any length need the same memory.

Where a batch begins depends on the lengths of all rows before it: readers seek by reading from the first row on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from persia.batching.batch import Batch
from persia.errors import ConfigError
from persia.schema import Schema
from persia.types import Int64Array

__all__ = [
    "Budget",
    "MeasuredRows",
    "TakenRows",
    "cut_events",
    "cut_similar",
    "event_counts",
    "sequence_lengths",
    "spans",
]


class TakenRows(Protocol):
    """Rows of which parts can be taken."""

    def slice(self, start: int, stop: int) -> Batch:
        """Returns rows `start` to `stop`."""
        ...

    def take(self, rows: Int64Array) -> Batch:
        """Returns these rows, in this order."""
        ...


class MeasuredRows(NamedTuple):
    """Consecutive rows, and the number of events of each, int64 `[rows]`."""

    rows: TakenRows
    events: Int64Array


class Budget(NamedTuple):
    """Largest size of a batch.

    Attributes:
        events: number of events of all samples together; no sample has more.
        rows: number of samples.
    """

    events: int
    rows: int


NOTHING = Budget(0, 0)


def sequence_lengths(schema: Schema, budget: int) -> dict[str, int]:
    """Returns the `max_length` of each un-pooled feature, whose ids are events.

    Raises:
        ConfigError: there is none, or a sample may have more events than the budget.
    """
    lengths = {each.name: each.max_length or 0 for each in schema.id_features if each.pooling is None}
    if not lengths:
        raise ConfigError(
            "tokens_per_batch counts the ids of un-pooled features, but the schema has none; declare the history with "
            "pooling=None, or leave tokens_per_batch out.",
            field="tokens_per_batch",
        )
    longest = max(lengths, key=lambda name: lengths[name])
    if budget < lengths[longest]:
        raise ConfigError(
            f"tokens_per_batch = {budget} is less than the max_length of {longest!r}; set it to {lengths[longest]} or "
            "more, or lower max_length.",
            field="tokens_per_batch",
        )
    return lengths


def event_counts(batch: Batch, lengths: Mapping[str, int]) -> Int64Array:
    """Returns the number of events of each sample: the ids of its longest un-pooled feature, int64 `[batch]`.

    Args:
        batch: the samples.
        lengths: `max_length` of the un-pooled features; later ids do not count.
    """
    counts = np.zeros(len(batch), np.int64)
    for name, longest in lengths.items():
        offsets = batch.id_features[name].offsets
        np.maximum(counts, 1 if offsets is None else np.minimum(np.diff(offsets), longest), out=counts)
    return counts


def spans(events: Int64Array, budget: Budget, before: Budget = NOTHING) -> Iterator[tuple[int, int]]:
    """Yields the rows of each batch as (start, stop); a batch ends where the next row exceeds the budget.

    Args:
        events: of each row, int64 `[rows]`.
        budget: of a batch.
        before: size of the unfinished batch before the rows, which the first span continues; it may be empty.
    """
    ends = np.cumsum(events)
    start, passed = 0, -before.events
    most = budget.rows - before.rows
    while True:
        stop = min(int(np.searchsorted(ends, passed + budget.events, "right")), start + most)
        yield start, stop
        if stop >= len(events):
            return
        start, passed, most = stop, int(ends[stop - 1]) if stop else 0, budget.rows


def cut_events(
    pieces: Iterable[MeasuredRows], budget: Budget, *, first: int = 0, every: int = 1, offset: int = 0
) -> Iterator[Batch]:
    """Yields the batches i >= first with i % every == offset, of rows in their order.

    Args:
        pieces: all rows, in chunks of any size, on which the batches do not depend.
        budget: of a batch.
        first: see above.
        every: see above.
        offset: see above.
    """
    number, parts, size = 0, list[Batch](), NOTHING
    for rows, events in pieces:
        for place, (start, stop) in enumerate(spans(events, budget, size)):
            if place:
                if parts:
                    yield Batch.concat(parts)
                number, parts, size = number + 1, [], NOTHING
            if start < stop and number >= first and number % every == offset:
                parts.append(rows.slice(start, stop))
            size = Budget(size.events + int(events[start:stop].sum()), size.rows + stop - start)
    if parts:
        yield Batch.concat(parts)


def cut_similar(
    blocks: Iterable[MeasuredRows],
    budget: Budget,
    seed: tuple[int, ...],
    *,
    first: int = 0,
    every: int = 1,
    offset: int = 0,
) -> Iterator[Batch]:
    """Yields the batches i >= first with i % every == offset, each of rows with about equally many events.

    The rows of a block are sorted by their number of events and cut; then its batches are permuted, so that their order
    does not depend on lengths. Rows of equal length keep their order in the block, which should be random.

    Args:
        blocks: all rows.
        budget: of a batch.
        seed: of the permutations.
        first: see above.
        every: see above.
        offset: see above.
    """
    number = 0
    for block, (rows, events) in enumerate(blocks):
        order = np.argsort(events, kind="stable")
        found = list(spans(events[order], budget))
        if number + len(found) > first:
            for place in np.random.default_rng((*seed, block, _BATCHES)).permutation(len(found)).tolist():
                if number >= first and number % every == offset:
                    yield rows.take(order[slice(*found[place])])
                number += 1
        else:
            number += len(found)


_BATCHES = 1
"""Seeds the random numbers of batches apart from those of rows."""
