"""Splits a source in time order into days, each a reader, to train on one day and test on the next."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from persia.batching.batch import Batch
from persia.data.reader import Reader, cut
from persia.errors import DataError
from persia.schema import InputRules, Schema, input_rules_of
from persia.services import fingerprint_of
from persia.types import SourceFingerprint

__all__ = ["Span", "days"]


@dataclass(frozen=True)
class Span:
    """A reader of consecutive rows of another reader.

    Attributes:
        source: the other reader.
        batch_size: samples per batch of both readers. The last batch of the span may be smaller.
        first: first row of the span in the source.
        rows: number of rows.
    """

    source: Reader
    batch_size: int
    first: int
    rows: int

    @property
    def schema(self) -> Schema:
        """The schema of the source."""
        return self.source.schema

    @property
    def input_rules(self) -> InputRules | None:
        """The rules of the source for missing values and lists."""
        return input_rules_of(self.source)

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """See `Reader.batches`. Opens the source at the batch with the first row of the span."""
        return cut(self._pieces(epoch, self.first + start * self.batch_size), self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """Iterates over the first pass."""
        return self.batches()

    def fingerprint(self) -> SourceFingerprint | None:
        """Returns the row range and the first part of the source only, which may grow after these rows."""
        whole = fingerprint_of(self.source)
        if whole is None:
            return None
        first = whole.parts[0]
        part = msgspec.structs.replace(first, name=f"{first.name}, rows {self.first} to {self.first + self.rows}")
        return msgspec.structs.replace(whole, parts=(part,)).ordered(batch_size=self.batch_size)

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
    """Finds the days of data that are sorted by day. Reads to the end of the day after `last`.

    Args:
        reader: reader whose batches, except the last, have `batch_size` samples. It must not shuffle.
        batch_size: samples per batch of the reader.
        first: first day to find.
        last: last day to find.
        row: row of the source at which to start.

    Returns:
        The days from `first` to `last` that have rows, and the next day after them, in ascending order.

    Raises:
        DataError: samples have no day, the data are not sorted by day, or a batch that is not the last has not
            `batch_size` samples.
    """
    runs: dict[int, tuple[int, int]] = {}
    number = row // batch_size
    current: int | None = None
    short = False
    for batch in reader.batches(0, number):
        at, number = number * batch_size, number + 1
        if short:
            raise DataError(
                f"The batch before row {at} has not {batch_size} samples, so the place of a row is not known; read "
                "days without tokens_per_batch and group_rows.",
                row=at,
            )
        short = len(batch) != batch_size
        if batch.day is None:
            raise DataError(f"Row {at} has no day; name the column of days in the reader's option `day`.", row=at)
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
            if day > last and any(known > last for known in runs) and day not in runs:
                return _spans(reader, batch_size, runs)
            current = day
            if day >= first:
                start, rows = runs.get(day, (at + begin, 0))
                runs[day] = start, rows + end - begin
    return _spans(reader, batch_size, runs)


def _spans(reader: Reader, batch_size: int, runs: dict[int, tuple[int, int]]) -> dict[int, Span]:
    return {day: Span(reader, batch_size, first, rows) for day, (first, rows) in runs.items()}
