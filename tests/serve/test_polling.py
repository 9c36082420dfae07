"""The thread that follows the log of changes."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from persia.errors import DeadlineError
from persia.serve import polling
from persia.serve.polling import LogPoller


def test_a_call_that_does_not_return_is_named(monkeypatch):
    monkeypatch.setattr(polling, "END_SECONDS", 0.1)
    called, go = threading.Event(), threading.Event()

    def refresh():
        called.set()
        go.wait()

    poller = LogPoller(refresh, 1.0, threading.Event(), "s3://me:secret@changes")
    poller.start(at_once=True)
    assert called.wait(10)
    with pytest.raises(DeadlineError, match=r"Reading s3://.*changes did not stop within 0.1 s") as late:
        poller.end()
    assert "secret" not in str(late.value)
    go.set()
    poller.end()


HANGS = """
import threading
from persia.serve import polling
polling.EXIT_SECONDS = 0.1
called = threading.Event()
poller = polling.LogPoller(lambda: (called.set(), threading.Event().wait()), 1.0, threading.Event(), "log")
poller.start(at_once=True)
assert called.wait(10)
"""


@pytest.mark.processes
def test_a_call_that_does_not_return_does_not_keep_a_program():
    subprocess.run([sys.executable, "-c", HANGS], check=True, timeout=60)
