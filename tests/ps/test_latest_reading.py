"""Readings that are given in time, whatever holds up new ones."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest

from persia.ps import latest_reading
from persia.ps.latest_reading import LatestReading

DEADLINE = 60.0


class Slow:
    """Counts its readings, and is held up while its gate is closed."""

    def __init__(self):
        self.gate, self.begun, self.count = threading.Event(), threading.Event(), 0
        self.gate.set()

    def read(self):
        self.begun.set()
        assert self.gate.wait(DEADLINE)
        self.count += 1
        return self.count


@pytest.fixture(autouse=True)
def wait(monkeypatch):
    """Sets the time for readings that are not held up, however slow the machine is."""

    def set_wait(seconds):
        monkeypatch.setattr(latest_reading, "WAIT_SECONDS", seconds)
        monkeypatch.setattr(latest_reading, "END_SECONDS", seconds)

    set_wait(DEADLINE)
    return set_wait


def test_the_last_value_is_given_while_a_new_one_is_held_up(wait):
    slow = Slow()
    latest = LatestReading(slow.read)
    slow.gate.clear()
    wait(0.1)
    assert latest.get()[0] == 1
    slow.gate.set()
    wait(DEADLINE)
    latest.close()
    assert [latest.get(), latest.get()] == [(3, 0.0), (4, 0.0)]
    slow.gate.clear()
    wait(0.1)
    value, late = latest.get()
    assert (value, 0.1 <= late < DEADLINE) == (4, True)
    assert latest.get()[1] > late  # It is still the same reading.
    began = time.monotonic()
    latest.close()
    assert time.monotonic() - began < DEADLINE / 2
    slow.gate.set()
    wait(DEADLINE)
    latest.close()
    assert latest.get() == (6, 0.0)


def test_a_reading_that_began_before_the_call_is_not_its_answer():
    """It may lack what the caller has just done."""
    slow = Slow()
    latest, found = LatestReading(slow.read), {}
    slow.begun.clear()
    slow.gate.clear()
    threads = [threading.Thread(target=lambda n=n: found.update({n: latest.get()})) for n in range(2)]
    threads[0].start()
    assert slow.begun.wait(DEADLINE)
    threads[1].start()
    time.sleep(0.05)
    slow.gate.set()
    for thread in threads:
        thread.join(DEADLINE)
    assert found[1] == (3, 0.0)
    assert found[0] in [(2, 0.0), (3, 0.0)]


def test_a_reading_that_fails_fails_and_the_next_one_does_not():
    errors = []

    def read():
        if errors:
            raise errors.pop()
        return 1

    latest = LatestReading(read)
    errors.append(RuntimeError("no table"))
    with pytest.raises(RuntimeError, match="no table"):
        latest.get()
    assert latest.get() == (1, 0.0)


def test_nothing_is_kept_alive():
    slow = Slow()
    latest = LatestReading(slow.read)
    latest.get()
    gone = weakref.ref(slow)
    del slow, latest
    deadline = time.monotonic() + DEADLINE
    while gone() is not None:  # The thread of the reading may be about to end.
        assert time.monotonic() < deadline
        gc.collect()
        time.sleep(0.001)


@pytest.mark.processes
def test_a_process_ends_although_a_reading_is_held_up():
    program = """if True:
        import threading
        from persia.ps.latest_reading import LatestReading

        held_up = threading.Event()
        latest = LatestReading(lambda: held_up.is_set() and threading.Event().wait())
        held_up.set()
        print(latest.get()[0], flush=True)
        """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE, check=True)
    assert (done.stdout, done.stderr) == ("False\n", "")
