"""A server ends while its predictor starts, and at once if it is told to twice."""

from __future__ import annotations

import queue
import threading

import pytest

from persia.errors import ClosedError
from persia.serve import Predictor
from persia.serve.http.options import HttpOptions
from persia.serve.http.run import run_server
from support.served import FakePredictor
from support.written_log import Steps

pytestmark = pytest.mark.processes


class Starting(FakePredictor):
    """A predictor whose start blocks until `end` is set, or `stopped` if it obeys."""

    def __init__(self, obeys):
        super().__init__()
        self.started = threading.Event()
        self.end = self.stopped if obeys else threading.Event()

    def start(self, timeout):
        self.started.set()
        assert self.end.wait(60)
        raise ClosedError("The predictor was closed while it started.")


def running(predictor):
    """Runs a server in a thread; returns it, and what stops the server, once the predictor starts."""
    opened = queue.SimpleQueue()
    thread = threading.Thread(target=run_server, args=(predictor, HttpOptions(port=0), opened.put), daemon=True)
    thread.start()
    assert predictor.started.wait(60)
    return thread, opened.get(timeout=60).stop


def test_the_end_does_not_wait_for_the_start():
    predictor = Starting(obeys=True)
    thread, stop = running(predictor)
    stop()
    thread.join(30)
    assert not thread.is_alive()
    assert predictor.closed


@pytest.mark.parametrize("late", [False, True])
def test_told_twice_it_waits_for_nothing(late):
    predictor = Starting(obeys=False)
    thread, stop = running(predictor)
    stop()
    if late:  # It waits for the start already.
        assert predictor.stopped.wait(60)
    stop()
    thread.join(30)
    assert not thread.is_alive()
    assert not predictor.closed
    predictor.end.set()


def test_a_stopped_predictor_aborts_its_start_but_still_answers(log, tmp_path):
    waiting = Predictor(str(tmp_path / "nothing"), Steps)
    waiting.stop()
    with pytest.raises(ClosedError, match="while it started"):
        waiting.start()
    with Predictor(log.url, Steps) as predictor:
        predictor.stop()
        assert predictor.table_rows("item", [1]).step == 3
