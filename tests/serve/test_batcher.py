"""Requests are joined, split, refused and given up as the limits say."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError
from contextlib import contextmanager

import numpy as np
import pytest

import persia
from persia.errors import ClosedError, DataError, OverloadedError
from persia.serve.http.batcher import Batcher, PredictionJob
from persia.serve.http.compute_times import ComputeTimes
from persia.serve.http.limits import ServeLimits
from support.served import SCHEMA, FakePredictor, expected

FAR = float("inf")


def batch(*users):
    columns = {
        "user": list(users),
        "tags": [[1, 2]] * len(users),
        "code": [3] * len(users),
        "price": [0.5] * len(users),
        "age": [1.0] * len(users),
    }
    return persia.Batch.from_columns(SCHEMA, columns, require_labels=False)


def job(*users, deadline=FAR):
    return PredictionJob(len(users), batch(*users), deadline)


@contextmanager
def batcher(predictor, **limits):
    made = Batcher(predictor.predict, ServeLimits(**{"max_wait_ms": 0, **limits}))
    try:
        yield made
    finally:
        predictor.go.set()
        made.close()


def blocked(predictor, made):
    """Lets the batcher compute a first request until `predictor.go` is set."""
    predictor.go.clear()
    first = job(0)
    made.submit(first)
    assert predictor.computing.wait(30)
    return first


def test_what_waits_is_joined_up_to_max_batch_and_split_again():
    predictor = FakePredictor()
    with batcher(predictor, max_batch=5) as made:
        blocked(predictor, made)
        jobs = [job(1, 2), job(3), job(4, 5), job(6, 7, 8, 9, 10, 11), job(12)]
        for each in jobs:
            made.submit(each)
        assert made.counts()[-2:] == (5, 12)
        predictor.go.set()
        for each, users in zip(jobs, [(1, 2), (3,), (4, 5), (6, 7, 8, 9, 10, 11), (12,)], strict=True):
            found = each.future.result(30)
            np.testing.assert_array_equal(found.values, expected(users, [0.5] * len(users)))
            assert (found.step, found.epoch) == (12, 3)
    assert predictor.sizes == [1, 5, 6, 1]
    counts = made.counts()
    assert (counts.rows, counts.batches, counts.queue, counts.queue_rows) == (13, 4, 0, 0)


def test_a_batch_waits_for_more_samples_until_it_is_full():
    predictor = FakePredictor()
    with batcher(predictor, max_batch=3, max_wait_ms=60_000) as made:
        jobs = [job(1), job(2), job(3)]
        for each in jobs:
            made.submit(each)
        for each in jobs:
            each.future.result(30)
        alone = job(4)
        made.submit(alone)
        assert not alone.future.done()
    assert alone.future.result(0).step == 12  # Closing does not wait for more.
    assert predictor.sizes == [3, 1]


def test_expired_and_cancelled_requests_are_not_computed():
    predictor = FakePredictor()
    with batcher(predictor) as made:
        blocked(predictor, made)
        late, dropped, good = job(1), job(2), job(3)
        for each in (late, dropped, good):
            made.submit(each)
        assert dropped.future.cancel()
        late.deadline = time.monotonic()  # Not before: it would be refused.
        while time.monotonic() <= late.deadline:
            pass
        predictor.go.set()
        good.future.result(30)
        with pytest.raises(OverloadedError, match="deadline of the request passed while it waited") as error:
            late.future.result(30)
        assert error.value.fields["retry_after"] >= 1
        with pytest.raises(CancelledError):
            dropped.future.result(0)
    assert predictor.sizes == [1, 1]
    assert made.counts().expired == 1


@pytest.mark.parametrize("limits", [{"max_queue": 2}, {"max_queue_rows": 2}])
def test_a_full_queue_refuses_at_once_and_recovers(limits):
    predictor = FakePredictor()
    with batcher(predictor, **limits) as made:
        blocked(predictor, made)
        waiting = [job(1), job(2)]
        for each in waiting:
            made.submit(each)
        with pytest.raises(OverloadedError, match="overloaded: 2 requests with 2 samples wait"):
            made.submit(job(3))
        with pytest.raises(OverloadedError):
            made.check()
        assert made.counts().overloaded == 2
        predictor.go.set()
        for each in waiting:
            each.future.result(30)
        after = job(4)
        made.submit(after)
        assert after.future.result(30).step == 12


def test_a_request_that_would_wait_past_its_deadline_is_refused():
    predictor = FakePredictor()
    with batcher(predictor, max_batch=1) as made:
        made._times.add(1, 100.0)
        blocked(predictor, made)
        with pytest.raises(OverloadedError, match="too near to the deadline"):
            made.submit(job(1, deadline=time.monotonic() + 300))  # 100 s for the one before, 100 s, twice.
        made.submit(job(1, deadline=time.monotonic() + 1000))


def test_a_bad_estimate_refuses_nothing_while_the_server_is_idle():
    predictor = FakePredictor()
    with batcher(predictor) as made:
        made._times.add(1, 1e6)
        first = job(1, deadline=time.monotonic() + 60)
        made.submit(first)
        first.future.result(30)


def test_one_bad_request_of_a_batch_fails_alone():
    predictor = FakePredictor()

    def predict(joined):
        if 666 in joined.id_features["user"].values:
            raise DataError("bad")
        return FakePredictor.predict(predictor, joined)

    made = Batcher(predict, ServeLimits(max_wait_ms=0))
    blocked(predictor, made)
    good, bad = job(1), job(666)
    made.submit(good)
    made.submit(bad)
    predictor.go.set()
    assert good.future.result(30).step == 12
    with pytest.raises(DataError, match="bad"):
        bad.future.result(30)
    made.close()


def test_a_failing_predictor_fails_its_requests_and_no_others():
    def predict(_):
        raise ZeroDivisionError

    made = Batcher(predict, ServeLimits(max_wait_ms=0))
    for _ in range(2):
        failed = job(1)
        made.submit(failed)
        with pytest.raises(ZeroDivisionError):
            failed.future.result(30)
    call = PredictionJob(5, lambda: "other work", FAR)
    made.submit(call)
    assert call.future.result(30) == "other work"
    made.close()
    with pytest.raises(ClosedError):
        made.submit(job(1))


def test_many_threads_get_their_own_answers():
    predictor = FakePredictor()
    failures = []

    def ask(start):
        for user in range(start, start + 50):
            mine = job(user)
            made.submit(mine)
            found = mine.future.result(30).values
            if not np.array_equal(found, expected([user], [0.5])):
                failures.append(user)

    with batcher(predictor, max_batch=7) as made:
        threads = [threading.Thread(target=ask, args=(1000 * i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    assert sum(predictor.sizes) == 400


def test_times_of_sizes_that_were_not_seen():
    times = ComputeTimes()
    assert times.seconds(100) == 0
    times.add(1, 0.001)
    times.add(64, 0.010)
    assert times.seconds(1) == times.seconds(31) == 0.001
    assert times.seconds(33) == 0.001
    assert times.seconds(5000) == 0.010
    assert times.queue(130, 64) == pytest.approx(0.021)
