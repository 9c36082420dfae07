"""Retries with a deadline and a backoff."""

import pytest

from persia.errors import DataError, StoreFullError
from persia.retry import Backoff, Deadline, retry


def failing(times, error):
    """A call that fails so many times, then returns how often it was called."""
    calls = []

    def call():
        calls.append(1)
        if len(calls) <= times:
            raise error
        return len(calls)

    return call


def full(error):
    return isinstance(error, StoreFullError)


def test_transient_failures_are_retried_with_growing_pauses():
    pauses, noticed, error = [], [], StoreFullError("Full.")
    result = retry(
        failing(5, error), transient=full, deadline=Deadline(60.0), backoff=Backoff(1.0, 5.0),
        on_wait=noticed.append, wait=pauses.append,
    )  # fmt: skip
    assert result == 6
    assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert noticed == [error]


def test_other_failures_are_raised_at_once():
    with pytest.raises(DataError):
        retry(failing(1, DataError("Bad.")), transient=full, deadline=Deadline(60.0), wait=pytest.fail)


def test_the_failure_is_raised_once_the_deadline_has_passed():
    with pytest.raises(StoreFullError):
        retry(failing(1, StoreFullError("Full.")), transient=full, deadline=Deadline(0.0), wait=pytest.fail)


def test_no_pause_exceeds_the_deadline_and_one_last_call_follows(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("persia.retry.time.monotonic", lambda: now[0])
    pauses = []

    def wait(seconds):
        pauses.append(seconds)
        now[0] += seconds

    call = failing(3, StoreFullError("Full."))
    with pytest.raises(StoreFullError):
        retry(call, transient=full, deadline=Deadline(1.5), backoff=Backoff(1.0, 2.0), wait=wait)
    assert pauses == [1.0, 0.5]
    assert call() == 4  # Three attempts have been made.


def test_a_deadline_counts_down(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("persia.retry.time.monotonic", lambda: now[0])
    deadline = Deadline(2.0)
    assert (deadline.left, deadline.passed) == (2.0, False)
    now[0] = 103.0
    assert (deadline.left, deadline.passed) == (0.0, True)
