"""Which updates the rows of a batch have, and what happens if a refresh or a push fails, hangs, or is late."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
import torch

import persia
from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.errors import DeadlineError
from persia.membership.directory import Directory
from persia.membership.embedding_workers import EmbeddingWorkers
from persia.modes import Hybrid, Sync
from persia.nn import CollectionOptions, EmbeddingCollection, pooling
from persia.nn.prepared import PreparedBatch
from persia.nn.row_refresher import RowRefresher
from persia.optim import SGD
from persia.ps import EmbeddingServer
from persia.schema import Table, Zeros
from persia.services import Connection
from persia.types import Moment
from persia.worker import Worker
from support.waiting import wait_until

HOT = 7
MODES = [Sync(), Hybrid(4, warmup=0)]


def schema():
    return persia.Schema([persia.IdFeature("item", table="item")], tables=[Table("item", 2, initializer=Zeros())])


def make_batches(count):
    """Each has the hot id, and one of its own."""
    return [
        Batch(
            {"item": IdColumn(np.array([HOT, 100 + number], np.uint64))},
            np.zeros((2, 0), np.float32),
            np.zeros((2, 1), np.float32),
        )
        for number in range(count)
    ]


class Controlled:
    """An embedding worker whose pushes and refreshes a test holds, or lets fail; it may look up all rows ahead."""

    def __init__(self, worker):
        self._worker = worker
        self.leaves_out = False
        self.left_out, self.recent, self.asked = [], [], []
        self.may_push, self.may_refresh = threading.Semaphore(0), threading.Event()
        self.holds_pushes = False
        self.may_refresh.set()
        self.pushes = self.refreshes = self.begun = 0
        self.on_push = self.on_refresh = lambda number: None
        self.refreshed_rows = []

    def push(self, header, contributions):
        if self.holds_pushes:
            assert self.may_push.acquire(timeout=20)
        self.pushes += 1
        self.on_push(self.pushes)
        return self._worker.push(header, contributions)

    def lookup_ahead(self, batch_id, pool, recent):
        self.recent.append(recent)
        found = self._worker.lookup_ahead(batch_id, pool, recent if self.leaves_out else 0)
        self.left_out.append(0 if found.left_out is None else int(found.left_out.buffer.sum()))
        return found

    def refresh(self, batch_id, seen, left_out):
        self.begun += 1
        self.asked.append(left_out is not None)
        assert self.may_refresh.wait(20)
        self.refreshes += 1
        self.on_refresh(self.refreshes)
        fresh = self._worker.refresh(batch_id, seen, left_out)
        self.refreshed_rows.append(sum(fresh.places.counts))
        return fresh

    def __getattr__(self, name):
        return getattr(self._worker, name)


class Cluster:
    """All roles in this process, with calls to an embedding worker as if it were elsewhere, unless it is near."""

    def __init__(self, near=False):
        self.near = near

    def connect(self, schema, optimizer, mode, seed):
        self.server = EmbeddingServer(schema.resolved_tables(), optimizer, mode, seed, 1)
        self.worker = Worker(schema, [self.server])
        self.controlled = Controlled(self.worker)
        workers = EmbeddingWorkers(Directory.fixed("embedding_worker", [self.controlled]), 20.0)
        return Connection(workers, [self.server], near=self.near)


def collection(mode, timeout=20.0, accumulation=1, near=False):
    cluster = Cluster(near)
    options = CollectionOptions(timeout=timeout, accumulation_steps=accumulation)
    embeddings = EmbeddingCollection(schema(), optimizer=SGD(lr=1.0), mode=mode, cluster=cluster, options=options)
    return embeddings, cluster.controlled


def hot_value(batch):
    """Counts the updates of the hot row: the gradient is -1 in each step, and the rate 1."""
    values = batch.packed_rows()["item"]
    place = batch.inverse["item"][0]
    assert values[place, 0] == values[place, 1]
    return values[place, 0]


def train(embeddings, batch):
    (-embeddings(batch)["item"].sum()).backward()


def threads(before):
    started = set(threading.enumerate()) - before
    return [thread.name for thread in started if thread.name.startswith("persia-")]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    before = set(threading.enumerate())
    yield
    wait_until(lambda: not threads(before), "that all threads of the pass end")


def current_to(embeddings):
    """Steps that the rows of the next batch have, as far as the refreshing thread is known to have brought them."""
    waiting = embeddings._pass._refresher._waiting
    return waiting[0].current_to if waiting else None


def noticed(embeddings):
    """Whether the refreshing thread knows which batch is next: it refreshes it with the pushes from then on."""
    refresher = embeddings._pass._refresher
    return not refresher._waiting or refresher._waiting[0].number == refresher._next


APPLIED = [0, 0, 0, 0, 0, 1, 4, 4, 8, 8, 8, 11, 11, 11]
"""Pushes that have returned by the draw of each batch. At most 4 steps are in flight at a lookup."""


@pytest.mark.parametrize("refresh", [True, False])
def test_a_row_misses_only_pushes_in_flight(refresh):
    embeddings, worker = collection(Hybrid(4, warmup=0, refresh=refresh))
    worker.holds_pushes = True
    looked_up, used = [], []
    count = len(APPLIED)
    batches = embeddings.prefetch(make_batches(count))
    released = 0
    for number, applied in enumerate(APPLIED):
        while True:
            # As many lookups as may run ahead, so that it is known what they have found.
            ahead = min(count, released + 5)
            wait_until(lambda ahead=ahead, number=number: embeddings.ready >= ahead - number or not number)
            looked_up += [released] * (ahead - len(looked_up))
            if released == applied:
                break
            worker.may_push.release()
            released += 1
            wait_until(lambda released=released: embeddings.gate.applied == released, "that a push returns")
        if refresh and number and applied > APPLIED[number - 1]:  # Else the draw waits for it.
            wait_until(lambda applied=applied: current_to(embeddings) == applied, "that the next batch is refreshed")
        batch = next(batches)
        if refresh:
            wait_until(lambda: noticed(embeddings))
        used.append(hot_value(batch))
        train(embeddings, batch)
    worker.holds_pushes = False
    worker.may_push.release(count)
    assert next(batches, None) is None
    if refresh:
        assert used == APPLIED
    else:
        assert used == looked_up
        assert used != APPLIED
        assert worker.refreshes == 0
    lags = [number - value for number, value in enumerate(used)]
    assert embeddings.staleness == (sum(lags) / count, max(lags), count)
    assert embeddings.rows("item", [HOT]).values.tolist() == [[count, count]]


def test_a_batch_waits_for_updates_that_were_applied_when_the_batch_before_was_used():
    embeddings, worker = collection(Hybrid(4, warmup=0))
    worker.holds_pushes = True
    batches = embeddings.prefetch(make_batches(6))
    first = next(batches)
    train(embeddings, first)
    train(embeddings, next(batches))
    wait_until(lambda: embeddings.ready == 3)
    worker.may_refresh.clear()
    for _ in range(2):
        worker.may_push.release()
    wait_until(lambda: embeddings.gate.applied == 2)
    second = next(batches)  # Needs no update: none was applied when the batch before was used.
    assert hot_value(second) == 0
    train(embeddings, second)
    drawn = []

    def draw():
        drawn.append(hot_value(next(batches)))

    drawing = threading.Thread(target=draw)
    drawing.start()
    drawing.join(0.1)
    assert drawing.is_alive()
    worker.may_refresh.set()
    drawing.join(20)
    assert drawn == [2]
    worker.holds_pushes = False
    worker.may_push.release(6)
    batches.close()


@pytest.mark.parametrize("leaves_out", [False, True])
def test_sync_has_all_updates_and_refreshes_each_row_once(leaves_out):
    embeddings, worker = collection(Sync())
    worker.leaves_out = leaves_out
    embeddings.gate.versions = []
    batches, used = embeddings.prefetch(make_batches(20)), []
    for number, batch in enumerate(batches):
        wait_until(lambda number=number: embeddings.ready >= min(4, 19 - number), "that lookups run ahead")
        used.append(hot_value(batch))
        train(embeddings, batch)
    assert used == list(range(20))
    assert embeddings.gate.versions == used
    assert embeddings.staleness == (0, 0, 20)
    assert worker.refreshes == 19
    assert worker.refreshed_rows == [1] * 19  # The hot row, not that of a batch's own id.
    assert worker.left_out == [0] + [int(leaves_out)] * 19


def test_a_batch_that_is_current_is_not_refreshed():
    """There is nothing to do where no push has returned since its lookup."""
    embeddings, worker = collection(Hybrid(4, warmup=0))
    worker.holds_pushes = True
    batches = embeddings.prefetch(make_batches(5))
    for _ in range(5):
        train(embeddings, next(batches))
    assert worker.refreshes == 0
    worker.may_push.release(5)
    assert next(batches, None) is None


def test_a_batch_without_some_rows_is_refreshed_before_its_use():
    """Also if no push has returned since its lookup; it is not refreshed before it is drawn, as a push may return."""
    embeddings, worker = collection(Hybrid(4, warmup=0))
    worker.leaves_out = worker.holds_pushes = True
    batches, used = embeddings.prefetch(make_batches(6)), []
    for number in range(5):
        wait_until(lambda number=number: not number or embeddings.ready == 5 - number, "that lookups run ahead")
        assert worker.refreshes == max(0, number - 2)
        batch = next(batches)
        used.append(batch.packed_rows()["item"].tolist())
        train(embeddings, batch)
    assert worker.left_out == [0, 0, 1, 1, 1]  # One missing step is tolerated, so the second batch has its rows.
    assert worker.refreshed_rows == [1, 1, 1]
    assert used == [[[0, 0], [0, 0]]] * 5
    worker.may_push.release(1)
    wait_until(lambda: embeddings.gate.applied == 1)
    batch = next(batches)
    assert hot_value(batch) == 1
    train(embeddings, batch)
    assert worker.refreshed_rows == [1, 1, 1, 1]
    worker.may_push.release(5)
    assert next(batches, None) is None


@pytest.mark.parametrize(("mode", "tolerated"), [(Sync(), 0), (Hybrid(4, warmup=0), 1)], ids=["sync", "hybrid"])
def test_rows_of_all_batches_in_flight_are_left_out(mode, tolerated):
    """Unless so few are in flight that there will hardly be a refresh."""
    embeddings, worker = collection(mode, accumulation=3)
    worker.leaves_out = worker.holds_pushes = True
    batches = embeddings.prefetch(make_batches(15))
    first = next(batches)
    wait_until(lambda: embeddings.ready == 14, "that lookups run ahead")
    in_flight = [step if step > tolerated else 0 for step in range(5)]
    assert worker.recent == [3 * steps for steps in in_flight for _ in range(3)]
    worker.holds_pushes = False
    train(embeddings, first)
    for batch in batches:
        train(embeddings, batch)
    assert embeddings.rows("item", [HOT]).values[0, 0] == 15


def test_rows_in_memory_of_the_process_are_not_left_out():
    embeddings, worker = collection(Hybrid(4, warmup=0), near=True)
    worker.leaves_out = worker.holds_pushes = True
    batches = embeddings.prefetch(make_batches(5))
    first = next(batches)
    wait_until(lambda: embeddings.ready == 4, "that lookups run ahead")
    assert worker.recent == [0] * 5
    worker.holds_pushes = False
    worker.may_push.release(5)
    train(embeddings, first)
    for batch in batches:
        train(embeddings, batch)
    assert embeddings.rows("item", [HOT]).values[0, 0] == 5


def test_a_push_brings_rows_that_were_left_out():
    """They come with the refresh that the push causes, next to the network, once."""
    embeddings, worker = collection(Hybrid(4, warmup=0))
    worker.leaves_out = worker.holds_pushes = True
    batches = embeddings.prefetch(make_batches(4))
    train(embeddings, next(batches))
    train(embeddings, next(batches))
    wait_until(lambda: embeddings.ready == 2 and noticed(embeddings), "that lookups run ahead")
    assert worker.refreshes == 0
    worker.may_push.release()
    wait_until(lambda: current_to(embeddings) == 1)
    assert worker.refreshed_rows == [1]
    worker.may_push.release()
    wait_until(lambda: current_to(embeddings) == 2)
    assert worker.refreshed_rows == [1, 1]
    assert worker.asked == [True, False]  # Now it is refreshed as any other row.
    assert hot_value(next(batches)) == 2
    worker.holds_pushes = False
    worker.may_push.release(4)
    batches.close()


@pytest.mark.parametrize("most", [pooling.MOST_AHEAD, 0], ids=["pooled ahead", "pooled late"])
def test_features_are_pooled_with_refreshed_rows(most, monkeypatch):
    """The refreshing thread pools them, if they may wait, and again after another refresh."""
    monkeypatch.setattr(pooling, "MOST_AHEAD", most)
    where, pool_rows = [], pooling.Expander.pool_rows

    def noted(*arguments):
        where.append(threading.current_thread().name)
        return pool_rows(*arguments)

    monkeypatch.setattr(pooling.Expander, "pool_rows", noted)
    embeddings, worker = collection(Hybrid(4, warmup=0))
    worker.holds_pushes = True
    batches = embeddings.prefetch(make_batches(4))
    train(embeddings, next(batches))
    train(embeddings, next(batches))
    wait_until(lambda: embeddings.ready == 2, "that lookups run ahead")
    for applied in (1, 2):
        worker.may_push.release()
        wait_until(lambda applied=applied: current_to(embeddings) == applied)
    assert where.count("persia-refresh") == (2 if most else 0)
    batch = next(batches)
    features = embeddings(batch)["item"]
    assert features.tolist() == [[2, 2], [0, 0]]
    (-features.sum()).backward()
    worker.holds_pushes = False
    worker.may_push.release(4)
    batches.close()
    assert embeddings.rows("item", [HOT]).values.tolist() == [[3, 3]]


def failing_at(number, error):
    def fail(call):
        if call == number:
            raise error

    return fail


@pytest.mark.parametrize("mode", MODES, ids=["sync", "hybrid"])
def test_a_push_that_fails_ends_the_loop(mode):
    embeddings, worker = collection(mode)
    worker.on_push = failing_at(3, RuntimeError("no more"))
    with pytest.raises(RuntimeError, match="no more") as raised:
        for batch in embeddings.prefetch(make_batches(40)):
            train(embeddings, batch)
    assert "Raised by a push of prefetch." in raised.value.__notes__
    assert embeddings.rows("item", [HOT]).values.tolist() == [[2, 2]]


@pytest.mark.parametrize("mode", MODES, ids=["sync", "hybrid"])
def test_a_refresh_that_fails_ends_the_loop(mode):
    embeddings, worker = collection(mode)
    worker.on_refresh = failing_at(2, RuntimeError("no more"))
    with pytest.raises(RuntimeError, match="no more") as raised:
        for number, batch in enumerate(embeddings.prefetch(make_batches(200))):
            if not number:
                wait_until(lambda: embeddings.ready >= 4, "that lookups run ahead")
            wait_until(lambda number=number: worker.refreshes >= min(number, 2))
            train(embeddings, batch)
    assert raised.value.__notes__ == ["Raised in the refreshing thread of prefetch."]
    worker.on_refresh = lambda number: None
    used = [train(embeddings, batch) for batch in embeddings.prefetch(make_batches(3))]  # Another pass.
    assert len(used) == 3
    assert worker.pushes == embeddings.rows("item", [HOT]).values[0, 0]


def test_a_refresh_that_hangs_is_named():
    embeddings, worker = collection(Sync())
    late = r"not brought up to date within 0.2 s.*2 steps, and 2 are applied"
    try:
        with pytest.raises(DeadlineError, match=late) as raised:
            for number, batch in enumerate(embeddings.prefetch(make_batches(10))):
                if not number:
                    wait_until(lambda: embeddings.ready >= 4, "that lookups run ahead")
                if number == 1:
                    worker.may_refresh.clear()
                train(embeddings, batch)
                wait_until(lambda number=number: embeddings._pass._gate.applied == number + 1)
                embeddings._pass._refresher._timeout = 0.2 if number else 20.0  # Only of the one that hangs.
        assert raised.value.fields["stage"] == "embedding worker: refresh"
    finally:
        worker.may_refresh.set()


def test_a_push_that_hangs_is_named(monkeypatch):
    embeddings, worker = collection(Sync())

    def be_brief(training):
        """Waits 0.2 s for the push, and as long as it takes for other threads."""
        runner, join = training.runner, training.runner._join

        def joined(thread, what):
            runner._timeout = 0.2 if thread.name == "persia-push" else 20.0
            join(thread, what)

        monkeypatch.setattr(runner, "_join", joined)
        training._refresher._timeout = 0.2

    try:
        with pytest.raises(DeadlineError, match=r"did not end within 0.2 s. Late: embedding worker: push") as raised:
            for batch in embeddings.prefetch(make_batches(10)):
                worker.holds_pushes = True
                train(embeddings, batch)
                be_brief(embeddings._pass)
        assert "it needs the updates of 1 steps, and 0 are applied" in str(raised.value.__context__)
    finally:
        worker.may_push.release(10)


@pytest.mark.parametrize("mode", MODES, ids=["sync", "hybrid"])
@pytest.mark.parametrize("how", ["break", "close", "error"])
def test_a_loop_that_is_left_leaves_no_thread(mode, how):
    before = set(threading.enumerate())
    embeddings, _ = collection(mode)
    for _ in range(2):
        with contextlib.suppress(ZeroDivisionError):
            batches = embeddings.prefetch(make_batches(50))
            for number, batch in enumerate(batches):
                train(embeddings, batch)
                if number == 5:
                    wait_until(lambda: embeddings.ready >= 1)
                    assert "persia-refresh" in threads(before)
                    if how == "break":
                        break
                    if how == "error":
                        1 / 0  # noqa: B018
                    batches.close()
        batches.close()
        assert not threads(before)
    assert embeddings.rows("item", [HOT]).values[0, 0] == 12


def test_a_loop_that_is_left_while_a_refresh_runs():
    """It ends with it, and the rows of its batch are not used."""
    embeddings, worker = collection(Hybrid(4, warmup=0))
    batches = embeddings.prefetch(make_batches(9))
    first = next(batches)
    wait_until(lambda: embeddings.ready >= 4, "that lookups run ahead")
    worker.may_refresh.clear()
    train(embeddings, first)
    wait_until(lambda: worker.begun == 1)
    leaving = threading.Thread(target=batches.close)
    leaving.start()
    leaving.join(0.1)
    assert leaving.is_alive()
    worker.may_refresh.set()
    leaving.join(20)
    assert not leaving.is_alive()
    assert embeddings.rows("item", [HOT]).values[0, 0] == 1


def batches_ahead(embeddings):
    """Twelve batches, the first of which is used once others are looked up ahead."""
    for number, batch in enumerate(embeddings.prefetch(make_batches(12))):
        if not number:
            wait_until(lambda: embeddings.ready >= 4, "that lookups run ahead")
        yield batch


@pytest.mark.parametrize("mode", MODES, ids=["sync", "hybrid"])
def test_a_batch_that_is_lost_before_its_refresh(mode):
    """Its rows stay as they were looked up; its gradient is lost with the embedding worker, and counted."""
    embeddings, worker = collection(mode)
    refresh, lost = worker._worker.refresh, []

    def losing(batch_id, seen, left_out):
        if worker.refreshes == 3:
            worker._worker.release(batch_id)
            lost.append(batch_id)
        return refresh(batch_id, seen, left_out)

    worker._worker.refresh = losing
    used = []
    for number, batch in enumerate(batches_ahead(embeddings)):
        wait_until(lambda number=number: worker.refreshes >= min(number, 2))
        used.append(batch.batch_id)
        train(embeddings, batch)
    assert len(used) == 12
    assert len(lost) == 1
    assert embeddings.pushed.lost_gradients == 1
    assert embeddings.rows("item", [HOT]).values[0, 0] == 11


@pytest.mark.parametrize("mode", MODES, ids=["sync", "hybrid"])
def test_a_batch_that_is_lost_with_rows_that_were_left_out(mode):
    """Its rows are not known, so it is not trained: as a batch that is lost before its lookup."""
    embeddings, worker = collection(mode)
    worker.leaves_out = True
    refresh, lost = worker._worker.refresh, []

    def losing(batch_id, seen, left_out):
        if left_out is not None and not lost:
            worker._worker.release(batch_id)
            lost.append(batch_id)
        return refresh(batch_id, seen, left_out)

    worker._worker.refresh = losing
    used = []
    for batch in batches_ahead(embeddings):
        used.append(batch.batch_id)
        train(embeddings, batch)
    assert len(used) == 11
    assert lost[0] not in used
    pushed = embeddings.pushed
    assert (pushed.lost_batches, pushed.lost_rows, pushed.lost_gradients) == (1, 2, 0)
    assert embeddings.rows("item", [HOT]).values[0, 0] == 11
    assert embeddings.global_step == 12


class Held:
    """A batch that waits, and the refresher that has it; refreshes wait for the test."""

    def __init__(self, applied, current_to):
        self.applied, self.may_refresh = applied, threading.Event()
        self.batch = PreparedBatch(torch.zeros(1, 0), torch.zeros(1, 1), None, {}, {}, {})
        self.batch.batch_id, self.batch.seen = 1, [Moment(0, 0)]
        self.batch.step, self.batch.current_to = 3, current_to
        self.refresher = RowRefresher(self.refresh, lambda: self.applied, 20.0, lambda: None, lambda: None, eager=False)
        self.refresher.offer(self.batch)

    def refresh(self, batch):
        assert self.may_refresh.wait(20)
        return lambda: None

    def close(self):
        self.refresher.close()
        self.refresher.join()


def test_only_waiting_for_pushes_counts_as_such(monkeypatch):
    """What makes "auto" raise its depth, or keep it: a batch that is current, or is being refreshed, does not."""
    current = Held(applied=3, current_to=3)
    assert current.refresher.take(current.batch, 3) == 0.0
    refreshed = Held(applied=3, current_to=1)
    threading.Timer(0.05, refreshed.may_refresh.set).start()
    assert refreshed.refresher.take(refreshed.batch, 3) == 0.0
    pushed = Held(applied=2, current_to=2)
    pushed.may_refresh.set()
    wait = pushed.refresher._changed.wait

    def push_meanwhile(seconds=None):
        if threading.current_thread() is threading.main_thread() and pushed.applied == 2:
            pushed.applied = 3
            pushed.refresher.pushed()
        return wait(seconds)

    monkeypatch.setattr(pushed.refresher._changed, "wait", push_meanwhile)
    assert pushed.refresher.take(pushed.batch, 3) > 0.0
    for held in (current, refreshed, pushed):
        held.close()
