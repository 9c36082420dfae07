"""How gradients leave an NN worker: the pushes of a training pass, their order, and what becomes of the rest."""

import itertools
import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest

from persia.cluster import Embedded
from persia.coordinator.scheduler_state import SchedulerState
from persia.errors import ConfigError, PersiaError, StaleBatchError
from persia.modes import Async, Gba, HopBs, HopBw, Hybrid, Sync
from persia.nn import CollectionOptions, EmbeddingCollection
from persia.nn.pass_threads import PUSH_GRACE
from persia.nn.step_pass import MOST_PUSHES
from persia.optim import SGD
from support.switching_samples import DEADLINE, ROWS, SCHEMA, batches, trainer


class RecordedWorker:
    """The embedding worker; keeps the headers of pushes, and the batch ids in them.

    Args:
        worker: the embedding worker.
        apply: whether its PSs get the pushes.
        seconds: duration of a push.
        lost: number of the lookup whose batch is lost.
    """

    def __init__(self, worker, apply=True, seconds=0.0, lost=None):
        self.worker, self.apply, self.seconds, self.lost = worker, apply, seconds, lost
        self.headers, self.pushed, self.released = [], [], []
        self.lock = threading.Lock()
        self.in_flight = self.most_in_flight = 0
        self.held = threading.Event()  # Pushes wait for it.
        self.held.set()
        self.opens_at = 0  # Number of pushes in flight that sets `held`; 0: the test sets it.
        self.lookups_first = lambda number: 0  # Number of lookups that the push of this number waits for.
        self.returned = 0
        self.returned_at_lookup = []
        self.returned_at_refresh = []

    def __getattr__(self, name):
        return getattr(self.worker, name)

    def lookup(self, batch_id, train=True, pool=False):
        self.note_lookup(batch_id)
        return self.worker.lookup(batch_id, train, pool)

    def lookup_ahead(self, batch_id, pool=False, recent=0):
        self.note_lookup(batch_id)
        return self.worker.lookup_ahead(batch_id, pool, recent)

    def refresh(self, batch_id, seen, left_out=None):
        self.returned_at_refresh.append(self.returned)
        return self.worker.refresh(batch_id, seen, left_out)

    def note_lookup(self, batch_id):
        self.returned_at_lookup.append(self.returned)
        if len(self.returned_at_lookup) - 1 == self.lost:
            raise StaleBatchError("Gone.", batch_id=batch_id)

    def push(self, header, contributions):
        with self.lock:
            self.headers.append(header)
            self.pushed.append([c.batch_id for c in contributions])
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        time.sleep(self.seconds)
        until(lambda: len(self.returned_at_lookup) >= self.lookups_first(header.sequence - 1))
        if 0 < self.opens_at <= self.most_in_flight:
            self.held.set()
        assert self.held.wait(DEADLINE)
        counts = self.worker.push(header, contributions) if self.apply else {}
        with self.lock:
            self.in_flight -= 1
            self.returned += 1
        return counts

    def release(self, batch_id):
        self.released.append(batch_id)
        self.worker.release(batch_id)


class Recorded:
    """This process, with a recorded embedding worker; also as one NN worker of several, whose pushes go nowhere.

    As if rows were elsewhere, so that other threads push.
    """

    def __init__(self, nn_workers=1, **options):
        self.nn_workers, self.options = nn_workers, options

    def connect(self, *arguments):
        connection = Embedded().connect(*arguments)
        self.worker = RecordedWorker(connection.worker, self.nn_workers == 1, **self.options)
        return connection._replace(worker=self.worker, nn_workers=self.nn_workers, near=False)


class OthersHaveData:
    """Lets this NN worker make as many steps as another one that has `steps` batches."""

    dummy_rows = 1

    def __init__(self, steps):
        self.steps = steps

    def start(self, rows, has_data):
        self.steps -= 1

    def over(self):
        return self.steps < 0


def collection(cluster, mode=None, **options):
    options = CollectionOptions(timeout=DEADLINE, **options)
    return EmbeddingCollection(SCHEMA, optimizer=SGD(lr=0.1), mode=mode or Sync(), cluster=cluster, options=options)


def backward(embeddings, batch):
    sum(values.sum() for values in embeddings(batch).values()).backward()


def pushes(cluster):
    """Of each push: sequence number, global step, number of batches, rows; by number, as threads overtake."""
    worker = cluster.worker
    found = sorted(zip(worker.headers, worker.pushed, strict=True), key=lambda push: push[0].sequence)
    return [(header.sequence, header.step, len(ids), header.rows) for header, ids in found]


def test_a_warm_up_counts_global_steps_from_pass_to_pass():
    cluster = Recorded()
    embeddings = collection(cluster, Hybrid(2, warmup=8, refresh=False))
    for bound in (0, 1, 2):  # Of each step of a pass; its pushes wait until lookups have gone to the bound.
        end = 4 * (bound + 1)
        cluster.worker.lookups_first = lambda number, ahead=1 + bound, end=end: min(number + ahead, end)
        for batch in embeddings.prefetch(batches(4)):
            backward(embeddings, batch)
        assert embeddings.staleness.max == bound
    assert embeddings.global_step == 12


@pytest.mark.parametrize(
    ("mode", "most"),
    [
        (Sync(), 1),
        (Hybrid(1, warmup=0), 2),
        (Hybrid(2, warmup=0), 3),
        (Hybrid(8, warmup=0), MOST_PUSHES),
        (Hybrid(None), MOST_PUSHES),
        (Hybrid(8, combine=False, warmup=0), 1),
    ],
    ids=str,
)
def test_as_many_pushes_are_in_flight_as_steps_are_open(mode, most):
    cluster = Recorded(nn_workers=2, seconds=0.02)
    embeddings = collection(cluster, mode)
    cluster.worker.held.clear()
    cluster.worker.opens_at = most  # And each push lasts for longer, so that there is time for one too many.
    for batch in embeddings.prefetch(batches(20), OthersHaveData(20)):
        backward(embeddings, batch)
    assert cluster.worker.most_in_flight == most
    assert sorted(pushes(cluster)) == [(step + 1, step, 1, ROWS) for step in range(20)]
    late = [step - place for place, (_, step, _, _) in enumerate(pushes(cluster))]
    assert max(late) < most  # They start in order, as far as threads do.
    assert embeddings.pushed.applied == embeddings.pushed.released == 0
    assert embeddings.staleness.max <= (mode.staleness or 20 if isinstance(mode, Hybrid) else 0)


def test_one_nn_worker_has_one_push_in_flight():
    cluster = Recorded(seconds=0.02)
    embeddings = collection(cluster, Hybrid(8, warmup=0))
    for batch in embeddings.prefetch(batches(10)):
        backward(embeddings, batch)
    assert cluster.worker.most_in_flight == 1


@pytest.fixture
def short_grace(monkeypatch):
    monkeypatch.setattr("persia.nn.pass_threads.PUSH_GRACE", 0.2)


def fail(embeddings, steps):
    """A pass of so many steps, which the error of another NN worker ends. Pushes that are held are in flight then."""
    worker = embeddings.connection.worker
    passed = embeddings.prefetch(batches(steps), OthersHaveData(steps))
    for batch in itertools.islice(passed, steps):
        backward(embeddings, batch)
    if not worker.held.is_set():
        until(lambda: worker.in_flight == min(steps, MOST_PUSHES))
    with pytest.raises(KeyError, match="of another NN worker"):
        passed.throw(KeyError("of another NN worker"))


@pytest.mark.usefixtures("short_grace")
def test_pushes_of_a_pass_that_has_failed_are_left_behind():
    """They may wait for an NN worker that has failed. Those that end later do not open the gate of the next pass."""
    cluster = Recorded(nn_workers=2)
    embeddings = collection(cluster, Hybrid(2, warmup=0))
    worker = cluster.worker
    worker.held.clear()
    began = time.monotonic()
    fail(embeddings, 2)
    assert time.monotonic() - began < DEADLINE / 2
    assert worker.in_flight == 2
    embeddings.forget_failed_pass()
    following = embeddings.prefetch(batches(6), OthersHaveData(6))
    next(following)
    worker.held.set()
    until(lambda: worker.in_flight == 0)
    assert embeddings.gate._done == 0
    following.close()
    assert embeddings.pushed.released == 1


class Grace:
    """A deadline on a clock that the test sets."""

    now = 0.0
    made = 0

    def __init__(self, seconds):
        self.end = Grace.now + seconds
        Grace.made += 1

    @property
    def passed(self):
        return Grace.now >= self.end


def test_slow_pushes_of_a_pass_that_has_failed_are_finished(monkeypatch):
    """Each one takes three quarters of the time that the end of the pass has for the next to return."""
    monkeypatch.setattr("persia.nn.pass_threads.Deadline", Grace)
    monkeypatch.setattr(Grace, "now", 0.0)
    monkeypatch.setattr(Grace, "made", 0)
    cluster = Recorded(nn_workers=2)
    embeddings = collection(cluster, Hybrid(20, warmup=0))
    worker, turns = cluster.worker, threading.Semaphore(0)
    worker.held = SimpleNamespace(wait=lambda seconds: turns.acquire(timeout=seconds), is_set=lambda: False)

    def return_slowly():
        for returned in range(3 * MOST_PUSHES):
            until(lambda returned=returned: Grace.made > returned)  # The end waits, and knows of those before.
            Grace.now += 0.75 * PUSH_GRACE
            turns.release()

    returning = threading.Thread(target=return_slowly)
    returning.start()
    fail(embeddings, 3 * MOST_PUSHES)
    returning.join()
    assert worker.returned == 3 * MOST_PUSHES
    embeddings.flush()


@pytest.mark.usefixtures("short_grace")
def test_a_pass_is_refused_while_pss_wait_for_a_failed_step():
    cluster = Recorded(nn_workers=2)
    embeddings = collection(cluster, Hybrid(8, warmup=0))
    cluster.worker.held.clear()
    fail(embeddings, 3)
    for _ in range(2):
        with pytest.raises(PersiaError, match="before its pushes of steps 0 to 2 had returned"):
            next(embeddings.prefetch(batches(1), OthersHaveData(1)))
    for use in (embeddings.flush, lambda: backward(embeddings, batches(1)[0])):
        with pytest.raises(PersiaError, match="before its pushes of steps 0 to 2 had returned"):
            use()
    cluster.worker.held.set()  # All were in flight, and return.
    until(lambda: not embeddings._steps.not_applied)
    for batch in embeddings.prefetch(batches(2), OthersHaveData(2)):
        backward(embeddings, batch)
    assert pushes(cluster)[3:] == [(4, 3, 1, ROWS), (5, 4, 1, ROWS)]


@pytest.mark.usefixtures("short_grace")
def test_a_dropped_push_releases_its_batches_unless_in_flight():
    cluster = Recorded(nn_workers=2)
    embeddings = collection(cluster, Hybrid(8, warmup=0))
    worker = cluster.worker
    worker.held.clear()
    fail(embeddings, MOST_PUSHES + 2)
    assert worker.in_flight == MOST_PUSHES
    assert len(worker.released) == 2
    assert not set(worker.released) & set(itertools.chain(*worker.pushed))
    worker.held.set()
    until(lambda: embeddings._steps.not_applied[0] == MOST_PUSHES)
    assert len(worker.headers) == MOST_PUSHES
    with pytest.raises(PersiaError, match=f"its pushes of steps {MOST_PUSHES} to {MOST_PUSHES + 1} had returned"):
        embeddings.flush()


def test_a_push_does_not_begin_once_its_batches_are_released():
    log = collection(Recorded()).push_log
    log.registered.add(7)
    group = [(SimpleNamespace(batch_id=7), None)]
    with pytest.raises(KeyError), log.pushing(group):
        assert not log.registered
        raise KeyError
    log.release_all()
    with pytest.raises(StaleBatchError, match="dropped"), log.pushing(group):
        pytest.fail("It began.")


@pytest.mark.usefixtures("short_grace")
def test_the_exit_handler_stays_while_threads_run(monkeypatch):
    """A thread that returns from native code while the interpreter ends crashes the process."""
    handlers = []
    monkeypatch.setattr("atexit.register", handlers.append)
    monkeypatch.setattr("atexit.unregister", handlers.remove)
    monkeypatch.setattr("persia.nn.reading_thread.LOADER_GRACE", DEADLINE)
    cluster = Recorded(nn_workers=2)
    embeddings = collection(cluster, Hybrid(8, warmup=0))
    cluster.worker.held.clear()
    fail(embeddings, 2)
    assert len(handlers) == 1
    cluster.worker.held.set()
    handlers.pop()()
    assert cluster.worker.in_flight == 0
    monkeypatch.setattr("persia.nn.pass_threads.PUSH_GRACE", DEADLINE)
    fail(embeddings, 2)
    assert handlers == []


def test_the_failure_of_a_push_is_told_with_that_of_the_loop():
    cluster = Recorded()
    embeddings = collection(cluster)
    cluster.worker.push = mock.Mock(side_effect=KeyError("of the push"))
    passed = embeddings.prefetch(batches(3))
    backward(embeddings, next(passed))
    until(lambda: embeddings._pass.runner.push_failure)
    with pytest.raises(ZeroDivisionError) as failure:
        passed.throw(ZeroDivisionError("of the loop"))
    assert failure.value.__notes__ == ["A push has failed, too (KeyError: 'of the push')."]
    embeddings.flush()


def test_a_failed_push_ends_one_pass_and_not_the_next():
    cluster = Recorded()
    embeddings = collection(cluster)
    cluster.worker.push = mock.Mock(side_effect=KeyError("of the push"))
    with pytest.raises(KeyError, match="of the push"):
        for batch in embeddings.prefetch(batches(100)):
            backward(embeddings, batch)
    del cluster.worker.push
    for batch in embeddings.prefetch(batches(2)):
        backward(embeddings, batch)
    assert len(cluster.worker.headers) == 2
    assert embeddings.connection.worker.buffered == 0


def until(condition):
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.001)


@pytest.mark.parametrize("left_early", [False, True])
def test_an_incomplete_step_is_pushed_at_the_end(left_early):
    cluster = Recorded()
    embeddings = collection(cluster, accumulation_steps=3)
    for number, batch in enumerate(embeddings.prefetch(batches(9 if left_early else 5))):
        backward(embeddings, batch)
        if number == 4:
            break
    assert pushes(cluster) == [(1, 0, 3, 3 * ROWS), (2, 1, 2, 2 * ROWS)]
    assert embeddings.connection.worker.buffered == 0


def test_an_incomplete_step_is_pushed_once_no_nn_worker_has_data():
    for left_early in (False, True):
        cluster = Recorded(nn_workers=2)
        embeddings = collection(cluster, accumulation_steps=2)
        for number, batch in enumerate(embeddings.prefetch(batches(3), OthersHaveData(3))):
            backward(embeddings, batch)
            if left_early and number == 2:
                break
        assert pushes(cluster) == [(1, 0, 2, 2 * ROWS), (2, 1, 1, ROWS)][: 1 if left_early else 2]
        assert len(cluster.worker.released) == left_early


def test_leaving_the_loop_at_a_dummy_batch_completes_its_step():
    cluster = Recorded(nn_workers=2)
    embeddings = collection(cluster)
    for batch in embeddings.prefetch(batches(1), OthersHaveData(3)):
        if batch.dummy:
            break
        backward(embeddings, batch)
    assert pushes(cluster) == [(1, 0, 1, ROWS), (2, 1, 0, 0)]
    for _ in embeddings.prefetch(batches(2), OthersHaveData(2)):
        break
    assert len(cluster.worker.headers) == embeddings.global_step == 2
    assert embeddings.pushed.released == 1
    assert embeddings.connection.worker.buffered == 1  # That of the first push, which went nowhere.


def test_sequence_numbers_go_on_over_passes_and_kinds_of_phases():
    cluster = Recorded()
    t = trainer(Sync(), cluster, mode_schedule=[(4, Gba(ROWS)), (7, Hybrid(2, warmup=0)), (9, Gba(2 * ROWS))])
    t.fit(batches(13), epochs=2)
    assert [header.sequence for header in cluster.worker.headers] == list(range(1, 27))
    assert t.embeddings.pushes == 26


def test_without_prefetch_a_push_is_made_at_once():
    cluster = Recorded()
    embeddings = collection(cluster)
    for number, batch in enumerate(batches(3)):
        backward(embeddings, batch)
        assert pushes(cluster)[number:] == [(number + 1, number, 1, ROWS)]
    embeddings(batches(1)[0])
    embeddings.flush()
    assert embeddings.pushed.released == 1
    assert pushes(cluster)[3:] == []


@pytest.mark.parametrize("mode", [Async(), Gba(2 * ROWS), HopBs(2), HopBs(1), HopBw(0)], ids=str)
def test_a_token_is_drawn_at_most_one_gradient_ahead(mode):
    """And where the gate lets no second batch pass, when the gradient before has arrived: its push is under way."""
    cluster = Recorded(seconds=0.02)
    t = trainer(mode, cluster)
    t.fit(batches(8))
    in_flight = [number - returned for number, returned in enumerate(cluster.worker.returned_at_refresh)]
    assert len(in_flight) == 8
    alone = isinstance(mode, HopBw)  # It waits for each step.
    ahead = mode.gate(1, mode.initial_depth(), 1)
    assert max(in_flight) <= (0 if alone else 2 if ahead else 1)


def test_token_modes_take_a_batch_after_the_previous_lookup(monkeypatch):
    """Batches that a slow NN worker has read ahead are lost to the others."""
    cluster = Recorded(seconds=0.005)
    t = trainer(Gba(2 * ROWS), cluster)
    lookups_before = []
    take = SchedulerState.take  # By a call of its own, or with the token of the batch before.

    def counted(self, *arguments):
        lookups_before.append(len(cluster.worker.returned_at_lookup))
        return take(self, *arguments)

    monkeypatch.setattr(SchedulerState, "take", counted)
    t.fit(batches(20))
    assert all(lookups >= taken - 1 for taken, lookups in enumerate(lookups_before))
    assert len(lookups_before) >= 20


@pytest.mark.parametrize("mode", [Sync(), Gba(2 * ROWS)], ids=lambda mode: type(mode).__name__)
def test_a_lost_batch_is_pushed_empty_in_token_modes_only(mode):
    cluster = Recorded(lost=2)
    t = trainer(mode, cluster)
    result = t.fit(batches(6))
    kept = [ROWS] * 2 if mode == Sync() else [ROWS, ROWS, 0]
    assert [header.rows for header in cluster.worker.headers] == [*kept, ROWS, ROWS, ROWS]
    assert (t.embeddings.pushed.lost_batches, t.embeddings.pushed.lost_rows) == (1, ROWS)
    assert result.global_step == (6 if mode == Sync() else 3)


def test_a_flushed_step_of_a_loop_waits_for_those_before_it():
    cluster = Recorded()
    embeddings = collection(cluster, Hybrid(8, warmup=0), accumulation_steps=2)
    cluster.worker.held.clear()
    loop = embeddings.prefetch(batches(7))
    for _ in range(5):
        backward(embeddings, next(loop))
    embeddings.flush()
    until(lambda: cluster.worker.in_flight == 1)
    cluster.worker.held.set()
    for batch in loop:
        backward(embeddings, batch)
    assert [(header.sequence, header.step) for header in cluster.worker.headers] == [(1, 0), (2, 1), (3, 2), (4, 3)]


def test_an_asynchronous_pass_of_equal_steps_is_refused():
    embeddings = collection(Recorded(), Async())
    with pytest.raises(ConfigError, match="Both `tokens` and `equal_steps`"):
        embeddings.prefetch(batches(1), OthersHaveData(1), tokens=object())


def test_counts_may_be_read_while_a_pass_ends():
    embeddings = collection(Recorded(), Hybrid(2, warmup=0))
    loop = embeddings.prefetch(batches(2))
    next(loop)
    current = embeddings._pass
    loop.close()
    embeddings._pass = current  # As another thread may see it for a moment.
    assert (embeddings.ready, embeddings.ahead) == (0, False)
    embeddings._pass = None
