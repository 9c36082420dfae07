"""Calls of `fit` after one that has failed in the middle of a pass, while pushes were in flight."""

import logging
import threading
import time

import pytest
import torch

from persia.modes import Async, Hybrid
from persia.nn.step_pass import MOST_PUSHES
from persia.ps import EmbeddingServer
from persia.testing import Threads
from support.switching_samples import Net, batches, trainer

TIMEOUT = 20.0
GRACE = 0.1
"""For tests whose pushes do not return until the second call."""
STEPS = 10
FAILS_AT = 7  # The number of the batch, from 1 on, of each NN worker.
DATA = batches(2 * STEPS)


class FailingNet(Net):
    """Raises in its forward pass of one batch, once, after `first` was called; `error` None: never."""

    def __init__(self, error):
        super().__init__(torch.float32)
        self.error, self.left, self.first = error, FAILS_AT, lambda: None

    def forward(self, dense, embeddings):
        self.left -= 1
        if self.left == 0 and self.error is not None:
            self.first()
            raise self.error
        return super().forward(dense, embeddings)


@pytest.fixture
def applied(monkeypatch):
    """Records the steps that the PS applies; each waits for `open`, and for its turn."""

    class Applied(list):
        def __init__(self):
            super().__init__()
            self.open, self.turn = threading.Event(), lambda: True

    found, apply = Applied(), EmbeddingServer._apply_step
    found.open.set()

    def slow(self, barrier, arrived):
        assert found.open.wait(TIMEOUT)
        assert found.turn()
        found.append(arrived[0].header.step)
        return apply(self, barrier, arrived)

    monkeypatch.setattr(EmbeddingServer, "_apply_step", slow)
    monkeypatch.setattr("persia.nn.pass_threads.PUSH_GRACE", GRACE)
    return found


def fit_twice(cluster, mode, before_second=lambda: None, prepare=lambda member, t: None, then=None):
    """A call of `fit` that fails, and one in mode `then` that does not. Returns trainers, and seconds of both calls."""
    second = threading.Barrier(cluster.nn_workers, before_second)

    def work(member):
        t = trainer(mode, member, model=FailingNet(ZeroDivisionError("of the user")), timeout=TIMEOUT)
        prepare(member, t)
        times = [time.monotonic()]
        with pytest.raises(ZeroDivisionError, match="of the user"):
            t.fit(DATA)
        times.append(time.monotonic())
        second.wait(TIMEOUT)
        times.append(time.monotonic())
        if then is not None:
            t.state.change_mode(then)
        t.fit(DATA)
        times.append(time.monotonic())
        return t, times[1] - times[0], times[3] - times[2]

    return cluster.run(work)


def until(condition):
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_slow_pushes_are_finished(applied, monkeypatch):
    """All NN workers fail in the same batch, as they do when they share a network that has diverged.

    Each push takes three quarters of the time that both have for the next one to return, on a clock that the test sets.
    """
    made, now, turns = [], [0.0], threading.Semaphore(0)

    class Grace:
        def __init__(self, seconds):
            self.end = now[0] + seconds
            made.append(self)

        @property
        def passed(self):
            return now[0] >= self.end

    monkeypatch.setattr("persia.nn.pass_threads.Deadline", Grace)
    applied.turn = lambda: turns.acquire(timeout=TIMEOUT)

    def return_slowly():
        for returned in range(FAILS_AT - 1):
            until(lambda returned=returned: len(made) >= 2 * (returned + 1))  # Both wait, and know of those before.
            now[0] += 0.75 * GRACE
            turns.release()

    returning = threading.Thread(target=return_slowly)
    returning.start()
    cluster = Threads(nn_workers=2, timeout=TIMEOUT)
    for t, _, _ in fit_twice(cluster, Hybrid(8, warmup=0), lambda: setattr(applied, "turn", lambda: True)):
        assert t.global_step == STEPS
    returning.join()
    assert applied == list(range(STEPS))


def test_an_asynchronous_mode_continues(applied):
    applied.open.clear()
    for t, _, following in fit_twice(
        Threads(nn_workers=2, timeout=TIMEOUT), Hybrid(8, warmup=0), applied.open.set, then=Async()
    ):
        assert following < TIMEOUT / 2
        assert t.global_step >= STEPS


def test_pushes_that_do_not_return_are_abandoned_with_a_warning(applied, caplog):
    applied.open.clear()
    with caplog.at_level(logging.WARNING, "persia"):
        for t, failing, following in fit_twice(
            Threads(nn_workers=2, timeout=TIMEOUT), Hybrid(8, warmup=0), applied.open.set
        ):
            assert failing < TIMEOUT / 2
            assert following < TIMEOUT / 2
            assert t.global_step == STEPS
    assert f"before its pushes of steps 0 to {FAILS_AT - 2} had returned" in caplog.text
    following = range(FAILS_AT - 1, STEPS)
    assert applied[-len(following) :] == list(following)
    assert set(applied) - set(following) <= set(range(MOST_PUSHES))  # Some may have come before the second call.


def test_nn_workers_that_failed_around_a_push_agree_again(applied):
    def prepare(member, t):
        def await_earlier():
            """Only a push that waits for one that never comes is left behind, however slow the others are."""
            until(lambda: t.embeddings._pass.runner._returned == FAILS_AT - 1)

        t.model.first = await_earlier
        if member.rank == 1:  # Fails behind the push of the batch, as if it had learned of the other's error there.
            replicas, reduce_rest = t.step.replicas, t.step.replicas.reduce_rest
            t.model.error = None

            def reduce(parameters):
                if t.model.left == 0:
                    await_earlier()
                    raise ZeroDivisionError("of the user")
                reduce_rest(parameters)

            replicas.reduce_rest = reduce

    found = fit_twice(Threads(nn_workers=2, timeout=TIMEOUT), Hybrid(2, warmup=0), prepare=prepare)
    for t, failing, following in found:
        assert failing < TIMEOUT / 2
        assert following < TIMEOUT / 2
        assert t.global_step == STEPS + 1
    skipped = FAILS_AT - 1
    assert applied == [step for step in range(STEPS + 1) if step != skipped]
