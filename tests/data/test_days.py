import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia import Batch, IdFeature, Schema
from persia.batching.id_column import IdColumn
from persia.data import Order, StreamReader, days
from persia.errors import DataError

SCHEMA = Schema([IdFeature("item", dim=2)], labels=["click"])


@dataclasses.dataclass(frozen=True)
class Numbered:
    """A source whose row i has the item i."""

    day: tuple[int, ...] | None

    def chunks(self, skip):
        n = 10 if self.day is None else len(self.day)
        ids = np.arange(skip, n, dtype=np.uint64)
        labels = np.zeros((len(ids), 1), np.float32)
        day = None if self.day is None else np.array(self.day[skip:], np.int32)
        yield Batch({"item": IdColumn(ids)}, np.zeros((len(ids), 0), np.float32), labels, day)


def reader(day, batch_size):
    return StreamReader(SCHEMA, Numbered(None if day is None else tuple(day)), Order(batch_size))


def items(batches):
    return [batch.id_features["item"].values.tolist() for batch in batches]


@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=6),
    batch_size=st.integers(1, 6),
    bounds=st.tuples(st.integers(0, 5), st.integers(0, 5)).map(sorted),
    start=st.integers(0, 3),
)
def test_a_day_has_its_rows_in_full_batches(lengths, batch_size, bounds, start):
    day = [d for d, length in enumerate(lengths) for _ in range(length)]
    first, last = bounds
    found = days(reader(day, batch_size), batch_size, first, last)
    wanted = [d for d in sorted(set(day)) if first <= d <= last]
    later = [d for d in sorted(set(day)) if d > last]
    assert list(found) == wanted + later[:1]
    for d, span in found.items():
        rows = [i for i, of in enumerate(day) if of == d]
        assert (span.first, span.rows) == (rows[0], len(rows))
        cut = [rows[at : at + batch_size] for at in range(0, len(rows), batch_size)]
        assert items(span) == cut
        assert items(span.batches(start=start)) == cut[start:]
        # From anywhere before it the same is found.
        again = days(reader(day, batch_size), batch_size, d, last, row=max(0, rows[0] - start))
        assert again.get(d, span) == span


def test_batches_of_other_sizes_are_errors():
    """A day would begin at another row."""
    with pytest.raises(DataError, match="before row 3 has not 3 samples"):
        days(reader([0, 0, 0, 0, 1, 1], 2), 3, 0, 1)


def test_days_out_of_order_or_missing_are_errors():
    with pytest.raises(DataError, match="Row 3 is of day 0 and comes after day 1"):
        days(reader([0, 1, 1, 0], 2), 2, 0, 1)
    with pytest.raises(DataError, match="has no day"):
        days(reader(None, 2), 2, 0, 1)


def test_no_more_is_read_than_is_needed():
    drawn = []

    class Endless:
        schema = SCHEMA

        def batches(self, epoch=0, start=0):
            for number in itertools.count(start):
                drawn.append(number)
                yield next(reader([number] * 2, 2).batches())

    found = days(Endless(), 2, 3, 4)
    assert {day: (span.first, span.rows) for day, span in found.items()} == {3: (6, 2), 4: (8, 2), 5: (10, 2)}
    assert drawn[-1] == 6  # The one that shows that day 5 is over.
