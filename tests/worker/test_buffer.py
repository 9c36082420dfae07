"""What an embedding worker buffers: its bound, expiry, and who asks for what is not there."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from persia.errors import ConfigError, DeadlineError, MovedError, StaleBatchError
from persia.types import BatchId
from persia.worker import Worker, WorkerOptions
from persia.worker.buffer import BatchBuffer

DEADLINE = 20.0


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def buffer(clock, **options):
    return BatchBuffer(2, 5, WorkerOptions(**options), clock)


def test_ids_name_worker_incarnation_and_counter(clock):
    found = [BatchId.unpack(buffer(clock).put("x")), BatchId.unpack(BatchBuffer(0, 1, WorkerOptions(), clock).put("x"))]
    assert found == [BatchId(2, 5, 0), BatchId(0, 1, 0)]


def test_what_nobody_calls_for_expires(clock):
    kept = buffer(clock, expiry=600.0)
    old, called, used = kept.put("old"), kept.put("called"), kept.put("used")
    with kept.use(used) as entry:
        clock.now = 500
        with kept.use(called):
            pass
        clock.now = 601
        assert kept.statistics()["expired"] == 1
        with pytest.raises(StaleBatchError, match="it was not used within 600 s"), kept.use(old):
            pass
        clock.now = 5000  # A call that lasts.
        assert len(kept) == 2
        assert kept.statistics()["buffered"] == 1
        assert entry == "used"
    with kept.use(used) as entry:
        assert entry == "used"
    kept.forget(used, "pushed")
    assert kept.statistics() == {
        "buffered": 0, "registered": 3, "pushed": 1, "released": 0, "expired": 2, "stale": 1
    }  # fmt: skip


def test_a_batch_of_another_incarnation_is_stale_and_counted(clock):
    kept = buffer(clock)
    kept.put("mine")
    other = BatchId(2, 4, 0).pack()
    with pytest.raises(StaleBatchError, match="incarnation 4, and this is 2, incarnation 5") as caught, kept.use(other):
        pass
    assert caught.value.fields == {"batch_id": other}
    kept.forget(other, "released")
    assert kept.statistics()["stale"] == 1
    assert kept.statistics()["released"] == 0


def test_a_full_buffer_holds_registrations_back(clock):
    kept = buffer(clock, capacity=2, timeout=DEADLINE, expiry=600.0)
    first, _ = kept.put("a"), kept.put("b")
    with ThreadPoolExecutor(1) as threads:
        started = threading.Event()
        waiting = threads.submit(lambda: (started.set(), kept.put("c"))[1])
        assert started.wait(DEADLINE)
        assert not waiting.done()
        kept.forget(first, "pushed")
        assert BatchId.unpack(waiting.result(DEADLINE)).counter == 2
        again = threads.submit(kept.put, "d")
        clock.now = 601.0  # Room by expiry.
        kept.statistics()
        again.result(DEADLINE)
    assert kept.statistics()["expired"] == 2


def test_a_buffer_that_stays_full_is_named(clock):
    kept = buffer(clock, capacity=1, timeout=0.01)
    kept.put("a")
    with pytest.raises(DeadlineError, match=r"Embedding worker 2 \(incarnation 5\) has buffered 1 batches") as caught:
        kept.put("b")
    assert caught.value.fields == {"rank": 2, "buffered": 1, "seconds": 0.01}


def test_who_leaves_takes_nothing_new_and_keeps_what_it_has(clock):
    kept = buffer(clock, capacity=1, timeout=DEADLINE)
    batch_id = kept.put("a")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(kept.put, "b")
        kept.retire()
        with pytest.raises(MovedError, match="Embedding worker 2"):
            waiting.result(DEADLINE)
    with pytest.raises(MovedError):
        kept.put("c")
    with kept.use(batch_id) as entry:
        assert entry == "a"


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "gzip"}, {"capacity": 0}, {"capacity": 1.5}, {"capacity": "3"}, {"timeout": 0.0},
        {"expiry": float("nan")},
    ],
)  # fmt: skip
def test_options_are_checked(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        WorkerOptions(**options)


@pytest.mark.parametrize(("rank", "incarnation"), [(256, 1), (0, 0), (0, 65536)])
def test_ranks_that_no_batch_id_can_name_are_refused(rank, incarnation):
    with pytest.raises(ConfigError, match="batch id"):
        Worker(None, [], 1, rank, incarnation)
