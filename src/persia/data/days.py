"""The days of a source in time order, each a reader of its own: to train one, and test on the next."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from persia.batching.batch import Batch
from persia.data.reader import Reader, cut
from persia.errors import DataError
from persia.schema import Schema

__all__ = ["Span", "days"]


@dataclass(frozen=True)
class Span:
    """Rows of a reader that follow one another, as a reader.

    Attributes:
        source: the whole.
        batch_size: samples of a batch, there and here. The last batch here may be smaller.
        first: row of the source that it begins with.
        rows: how many.
    """

    source: Reader
    batch_size: int
    first: int
    rows: int

    @property
    def schema(self) -> Schema:
        """Of the source."""
        return self.source.schema

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """See `Reader.batches`; the source is opened at the batch with the first row that is wanted."""
        return cut(self._pieces(epoch, self.first + start * self.batch_size), self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """The first pass, from its beginning."""
        return self.batches()

    def _pieces(self, epoch: int, begin: int) -> Iterator[Batch]:
        number, skip = divmod(begin, self.batch_size)
        left = self.first + self.rows - begin
        if left <= 0:
            return
        for batch in self.source.batches(epoch, number):
            piece = batch.slice(skip, min(len(batch), skip + left))
            left, skip = left - len(piece), 0
            yield piece
            if left <= 0:
                return


def days(reader: Reader, batch_size: int, first: int, last: int, *, row: int = 0) -> dict[int, Span]:
    """Finds days in data that lie in the order of their days. Reads until the one after `last` is over.

    Args:
        reader: all of its batches but the last have `batch_size` samples; it does not shuffle.
        batch_size: of the reader.
        first: the first day wanted.
        last: the last day wanted.
        row: a row of the source, before which nothing is wanted.

    Returns:
        By day, ascending, the days from `first` to `last` that have rows, and the next one after them.

    Raises:
        DataError: samples have no day, or a day comes after a later one.
    """
    found: dict[int, tuple[int, int]] = {}
    number = row // batch_size
    current: int | None = None
    for batch in reader.batches(0, number):
        at, number = number * batch_size, number + 1
        if batch.day is None:
            raise DataError(
                f"Row {at} has no day; name the column that has it: `day`, an option of the reader.", row=at
            )
        edges = [0, *(np.flatnonzero(np.diff(batch.day)) + 1).tolist(), len(batch)]
        for begin, end in itertools.pairwise(edges):
            day = int(batch.day[begin])
            if current is not None and day < current:
                raise DataError(
                    f"Row {at + begin} is of day {day} and comes after day {current}. Sort the data by day, and do not "
                    "shuffle them.",
                    row=at + begin,
                    day=day,
                )
            if day > last and any(known > last for known in found) and day not in found:
                return _spans(reader, batch_size, found)
            current = day
            if day >= first:
                start, rows = found.get(day, (at + begin, 0))
                found[day] = start, rows + end - begin
    return _spans(reader, batch_size, found)


def _spans(reader: Reader, batch_size: int, found: dict[int, tuple[int, int]]) -> dict[int, Span]:
    return {day: Span(reader, batch_size, first, rows) for day, (first, rows) in found.items()}
