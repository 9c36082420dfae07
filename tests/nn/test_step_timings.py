"""`StepTimings`, which several push threads call."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from persia.nn.step_timings import StepTimings

DEADLINE = 30.0


class Reports:
    """A token scheduler that keeps what is reported, and lets each report wait for `open`."""

    def __init__(self):
        self.timings, self.open, self.begun = [], threading.Event(), threading.Event()
        self.open.set()

    def report_timings(self, rank, timings):
        self.begun.set()
        assert self.open.wait(DEADLINE)
        self.timings += timings
        return True


class Yielding(float):
    """A time at whose subtraction another thread runs."""

    def __rsub__(self, other):
        time.sleep(1e-4)
        return other - float(self)


def test_each_batch_is_reported_once():
    reports, threads, each = Reports(), 4, 100
    timings = StepTimings(reports, 0, 0.0, pytest.fail)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: [timings.add(Yielding()) for _ in range(each)], range(threads)))
    assert len(reports.timings) == threads * each


def test_a_slow_report_delays_no_other_thread():
    reports = Reports()
    timings = StepTimings(reports, 0, DEADLINE, pytest.fail)
    timings._sent -= DEADLINE
    reports.open.clear()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(timings.add, 0.0)
        assert reports.begun.wait(DEADLINE)
        pool.submit(timings.add, 0.0).result(DEADLINE / 2)
        reports.open.set()
        first.result(DEADLINE)
    assert len(reports.timings) == 1
