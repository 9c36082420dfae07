"""Who of a group of NN workers is silent."""

from __future__ import annotations

import threading
import time

from persia.membership.silent_ranks import LOOK_SECONDS, FailureReports, named_ranks, silent_ranks


class Store:
    """A store that processes share, until it is gone."""

    def __init__(self):
        self.keys = set()
        self.gone = False

    def set(self, key, value):
        self._answer()
        self.keys.add(key)

    def check(self, keys):
        self._answer()
        return self.keys.issuperset(keys)

    def _answer(self):
        if self.gone:
            raise RuntimeError("connection reset")


def of(store, rank, size=4):
    return FailureReports(store, "failed", rank, size)


def test_ranks_that_report_no_failure_are_silent():
    store = Store()
    assert of(store, 0).silent(0.0) == [1, 2, 3]
    assert of(store, 2).silent(0.0) == [1, 3]
    assert of(store, 1).silent(0.0) == [3]
    assert of(store, 1).others_failed()
    assert not of(Store(), 1).others_failed()


def test_a_report_that_comes_in_time_counts():
    store = Store()
    late = threading.Timer(20 * LOOK_SECONDS, of(store, 1, 2).silent, [0.0])
    late.start()
    began = time.monotonic()
    assert of(store, 0, 2).silent(60.0) == []
    assert time.monotonic() - began < 30
    late.join()


def test_the_process_of_a_store_that_does_not_answer_is_silent():
    store = Store()
    store.gone = True
    assert of(store, 2).silent(0.0) == [0]
    assert of(store, 0).silent(0.0) == [1, 2, 3]
    assert of(store, 2).others_failed()


def test_a_store_that_ends_meanwhile_leaves_what_was_reported():
    class Ending(Store):
        def check(self, keys):
            found = super().check(keys)
            self.gone = "failed/3" in keys  # After the first look at all of them.
            return found

    store = Ending()
    of(store, 0).silent(0.0)
    store.gone = False
    assert of(store, 2).silent(2 * LOOK_SECONDS) == [1, 3]


def test_each_rank_is_looked_at_once_at_least():
    looks = []
    assert silent_ranks([3, 5], lambda rank: looks.append(rank) or rank == 5, 0.0) == [3]
    assert looks == [3, 5]
    assert silent_ranks([], lambda rank: False, 60.0) == []


def test_ranks_have_names():
    assert named_ranks([1]) == "NN worker 1"
    assert named_ranks([1, 3]) == "NN workers 1, 3"
