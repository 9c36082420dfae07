"""Waits of the network for batches, by whether these were read."""

import time

import pytest

from persia.nn.draw_waits import DrawWaits
from persia.telemetry.metrics import WaitClock


def test_the_part_in_which_no_batch_was_read(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    reading, waits = WaitClock(), DrawWaits()
    with waits.timed(reading):
        with reading.waiting():
            now += 3.0
        now += 2.0  # It is looked up.
    assert waits.loading_seconds == 3.0
    with reading.waiting():  # While the network computes.
        now += 4.0
        with pytest.raises(StopIteration), waits.timed(reading):
            now += 1.0
            raise StopIteration
    assert waits.loading_seconds == 4.0
    assert sum(waits.latency().counts) == 2
