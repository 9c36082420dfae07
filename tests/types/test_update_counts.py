"""Sums of update counts."""

from persia.types import UpdateCounts, sum_counts


def test_counts_add_up_one_by_one():
    assert UpdateCounts(1, 2, 3, 4) + UpdateCounts(10, 20, 30, 40) == UpdateCounts(11, 22, 33, 44)
    assert isinstance(UpdateCounts() + UpdateCounts(), UpdateCounts)


def test_answers_are_summed_by_table():
    first, second = {"item": UpdateCounts(1), "user": UpdateCounts(0, 2)}, {"item": UpdateCounts(3, 0, 5)}
    assert sum_counts([first, {}, second]) == {"item": UpdateCounts(4, 0, 5), "user": UpdateCounts(0, 2)}
    assert sum_counts([]) == {}
    assert first == {"item": UpdateCounts(1), "user": UpdateCounts(0, 2)}
