"""Which ids an embedding worker takes for those of the last batches that it has looked up ahead."""

import numpy as np
import pytest

from persia.types import Packed
from persia.worker import recent_lookups
from persia.worker.recent_lookups import RecentLookups


def packed(item, user=()):
    return Packed.of({"item": np.array(item, np.uint64), "user": np.array(user, np.uint64)}, np.uint64)


def added(lookups, recent, item, user=()):
    """Adds a batch; returns its ids, by table, that were in the last batches."""
    ids, flags = packed(item, user), lookups.add(packed(item, user), recent)
    return None if flags is None else {name: own[flags[name]].tolist() for name, own in ids.items()}


def test_ids_of_the_last_batches():
    lookups = RecentLookups()
    assert added(lookups, 5, [1, 2], [3]) is None
    assert added(lookups, 0, [2, 9]) is None
    assert added(lookups, 1, [1, 2, 9, 3]) == {"item": [2, 9], "user": []}
    assert added(lookups, 2, [7], [3, 1]) is None
    assert added(lookups, 4, [7], [3, 8]) == {"item": [7], "user": [3]}
    assert added(lookups, 1, [1]) is None  # It was in an earlier one.
    assert added(lookups, 5, [1]) == {"item": [1], "user": []}


@pytest.mark.parametrize(("others", "left_out"), [(400_000, True), (1_200_000, False)])
def test_no_id_is_named_if_recent_batches_fill_a_twentieth_of_the_slots(others, left_out):
    """Of 2**24 slots. Each other id would be named as often."""
    lookups = RecentLookups()
    added(lookups, 0, [1])
    added(lookups, 0, np.arange(100, 100 + others))
    expected = {"item": [1], "user": []} if left_out else None
    assert added(lookups, 2, [1]) == expected
    assert added(lookups, 1, [1]) == {"item": [1], "user": []}  # The large batch is none of these.


def test_batches_are_counted_from_the_start_when_numbers_run_out(monkeypatch):
    monkeypatch.setattr(recent_lookups, "LAST_VERSION", 3)
    lookups = RecentLookups()
    expected = {"item": [1], "user": []}
    assert [added(lookups, 2, [1]) for _ in range(7)] == [None, expected, expected] * 2 + [None]
