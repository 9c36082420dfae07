"""Cuts rows into batches of whole groups, so that a position stays a batch number that any reader can seek to.

Batch k holds the groups that begin in rows [k * window, (k + 1) * window). Rows from k * window - 1 on are enough to
find it. With windows of batch_size - group_rows + 1 rows, no batch has more than batch_size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import numpy as np

from persia.batching.batch import Batch
from persia.errors import DataError
from persia.types import BoolArray, Int64Array

__all__ = ["Groups", "Sliceable", "cut_groups", "find_groups", "permuted"]


class Sliceable(Protocol):
    """Rows of which parts can be taken."""

    def slice(self, start: int, stop: int) -> Batch:
        """Returns rows `start` to `stop`."""
        ...


class Groups(NamedTuple):
    """Consecutive rows, and where groups begin.

    Attributes:
        position: number of the first row in the stream.
        rows: the rows.
        begins: bool `[rows]`: whether a row is the first of a group.
    """

    position: int
    rows: Sliceable
    begins: BoolArray


def find_groups(chunks: Iterable[Batch], position: int, longest: int) -> Iterator[Groups]:
    """Yields the chunks with the beginnings of their groups: runs of rows with the same value of `Batch.groups`.

    Args:
        chunks: rows of a stream.
        position: number of their first row, which begins a group if it is 0, and else is not said to.
        longest: maximum number of rows of a group.

    Raises:
        DataError: the rows have no groups, or a group is longer.
    """
    last: np.uint64 | None = None
    waiting = 0  # Rows of the last group in earlier chunks.
    for chunk in chunks:
        groups = chunk.groups
        if not len(chunk):
            continue
        if groups is None:
            raise DataError("group_rows keeps groups whole, but the rows have none; set Schema.group to their column.")
        begins = np.empty(len(groups), np.bool_)
        begins[1:] = groups[1:] != groups[:-1]
        begins[0] = position == 0 if last is None else groups[0] != last
        starts = np.flatnonzero(begins)
        lengths = np.diff(starts, prepend=-waiting, append=len(groups))
        if lengths.max() > longest:
            row = position + int(np.concatenate([[-waiting], starts])[lengths.argmax()])
            raise DataError(
                f"The group that begins at row {row} has more than group_rows = {longest} rows; raise group_rows (and "
                "batch_size), or divide long groups in the data.",
                row=row,
            )
        yield Groups(position, chunk, begins)
        waiting, last, position = int(lengths[-1]), groups[-1], position + len(groups)


def cut_groups(
    pieces: Iterable[Groups], window: int, *, first: int, every: int = 1, offset: int = 0
) -> Iterator[tuple[Batch, Groups]]:
    """Yields the batches i >= first with i % every == offset, each with its beginnings of groups.

    Args:
        pieces: from row `first * window - 1` of the stream on, or from an earlier row.
        window: number of rows in which the groups of a batch begin; at least the rows of the longest group.
        first: number of the first batch.
        every: see above.
        offset: see above.
    """
    number, position, parts, begins = -1, 0, list[Batch](), list[BoolArray]()
    for piece in pieces:
        starts = np.flatnonzero(piece.begins)
        numbers = (piece.position + starts) // window
        changes = np.flatnonzero(np.diff(numbers, prepend=number))
        bounds = [0, *starts[changes].tolist(), len(piece.begins)]
        for part, (start, stop) in enumerate(itertools.pairwise(bounds)):
            if part:
                if parts:
                    yield _joined(position, parts, begins)
                number, position = int(numbers[changes[part - 1]]), piece.position + start
                parts, begins = [], []
            if start < stop and number >= first and number % every == offset:
                parts.append(piece.rows.slice(start, stop))
                begins.append(piece.begins[start:stop])
    if parts:
        yield _joined(position, parts, begins)


def permuted(begins: BoolArray, random: np.random.Generator) -> tuple[Int64Array, BoolArray]:
    """Returns an order of rows in which whole groups are permuted, and where groups begin in it.

    Args:
        begins: whether a row is the first of a group; True for the first row.
        random: source of the permutation.
    """
    starts = np.flatnonzero(begins)
    lengths = np.diff(starts, append=len(begins))
    order = random.permutation(len(starts))
    starts, lengths = starts[order], lengths[order]
    new_starts = np.cumsum(lengths) - lengths
    rows = np.arange(len(begins)) + np.repeat(starts - new_starts, lengths)
    new_begins = np.zeros(len(begins), np.bool_)
    new_begins[new_starts] = True
    return rows, new_begins


def _joined(position: int, parts: list[Batch], begins: list[BoolArray]) -> tuple[Batch, Groups]:
    batch = Batch.concat(parts)
    return batch, Groups(position, batch, np.concatenate(begins))
