"""The data loader: which batch is whose, reading ahead, seeking, and embedding workers that come and go."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia import rpc, services
from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.data import Loader
from persia.errors import ClosedError, DataError, DeadlineError, MovedError
from persia.membership import Directory
from persia.metrics import count_ids
from persia.schema import IdFeature, Schema
from persia.types import BatchId, Feed, Member, Membership
from support.examples import examples
from support.waiting import wait_until

DEADLINE = 20.0
SCHEMA = Schema([IdFeature("id", dim=2)], dense_features=["number"], labels=["y"])


def batch_of(number, epoch=0):
    ids = np.array([number, 1000 + number], np.uint64)
    return Batch(
        {"id": IdColumn(ids)}, np.full((2, 1), number + 1000 * epoch, np.float32), np.zeros((2, 1), np.float32)
    )


class Source:
    """Batches 0, 1, ... of an epoch. Seekable; remembers which it has made."""

    def __init__(self, batches, gate=None):
        self.count, self.gate = batches, gate
        self.made = []
        self.opened = []

    def batches(self, epoch=0, start=0):
        self.opened.append((epoch, start))
        for number in range(start, self.count):
            if self.gate is not None:
                assert self.gate.wait(DEADLINE)
            self.made.append(number)
            yield batch_of(number, epoch)


class ShardedSource(Source):
    def shard(self, index, count):
        return _Share(self, index, count)


class _Share:
    def __init__(self, whole, index, count):
        self.whole, self.index, self.count = whole, index, count

    def batches(self, epoch=0, start=0):
        for number in range(start * self.count + self.index, self.whole.count, self.count):
            self.whole.made.append(number)
            yield batch_of(number, epoch)


class Buffering:
    """Stands for an embedding worker."""

    def __init__(self, rank=0, incarnation=1):
        self.rank, self.incarnation = rank, incarnation
        self.numbers = {}
        self.released = []
        self.refuse = None
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.lock = threading.Lock()
        self.next = 0

    def register(self, id_features):
        self.entered.set()
        assert self.gate.wait(DEADLINE)
        if self.refuse is not None:
            raise self.refuse
        with self.lock:
            batch_id = BatchId(self.rank, self.incarnation, self.next).pack()
            self.next += 1
            self.numbers[batch_id] = int(id_features["id"].values[0])
            return batch_id

    def release(self, batch_id):
        with self.lock:
            self.released.append(self.numbers.pop(batch_id))


class Workers(Directory):
    """Embedding workers whose membership a test replaces."""

    def __init__(self, *workers):
        super().__init__("embedding_worker", lambda member: self.known[member.rank, member.incarnation])
        self.replace(*workers)

    def replace(self, *workers, leaving=()):
        self.known = {(worker.rank, worker.incarnation): worker for worker in workers}
        members = [
            Member("embedding_worker", *key, "", "leaving" if worker in leaving else "alive")
            for key, worker in self.known.items()
        ]
        self.update(Membership(self.roster().version + 1, 1, members))


@pytest.fixture
def make():
    made = []

    def make(source, *workers, timeout=DEADLINE, **options):
        if not (workers and isinstance(workers[0], Workers)):
            workers = (Workers(*(workers or [Buffering()])),)
        loader = Loader(source, SCHEMA, *workers, timeout=timeout, **options)
        made.append(loader)
        return loader

    yield make
    for loader in made:
        loader.end()


@pytest.fixture
def quick_retries(monkeypatch):
    """A call that no embedding worker has taken is made again soon, without news of them."""
    monkeypatch.setattr("persia.membership.directory.NEWS_SECONDS", 0.02)


def feed(epoch=0, start=0, nn_workers=1, loader=0, loaders=1, ahead=2):
    return Feed(epoch, start, nn_workers, loader, loaders, ahead)


def number_in(delivery):
    return None if delivery.batch is None else int(delivery.batch.dense[0, 0])


def test_ids_of_sampled_batches_are_counted(make):
    loader = make(Source(19), Buffering())
    loader.begin(feed())
    with rpc.serve(loader, protocol=services.DataLoader) as server:
        stub = rpc.connect(server.address, services.DataLoader, timeout=DEADLINE)
        for number in range(19):
            counts = stub.take(0, 0, number).batch.id_counts
            assert (counts is None) == (number not in (0, 17))
            if counts is not None:
                columns = batch_of(number).id_features.values()
                assert np.array_equal(counts, count_ids([(c.values, c.offsets) for c in columns]))
        rpc.close(stub)


@pytest.mark.parametrize("how", ["here", "rpc"])
def test_every_nn_worker_gets_its_batches_in_order_then_the_end(make, how):
    worker = Buffering()
    loader = make(Source(7), worker)
    loader.begin(feed(start=1, nn_workers=2))

    def check(service):
        for rank, numbers in ((0, [1, 3, 5]), (1, [2, 4, 6])):
            for number in numbers:
                found = service.take(rank, 0, number)
                assert (found.number, number_in(found)) == (number, number)
                assert worker.numbers[found.batch.batch_id] == number
                assert found.batch.labels.shape == (2, 1)
                assert found.batch.day is None
            assert service.take(rank, 0, numbers[-1] + 2).batch is None
        counts = service.statistics()
        assert counts == {
            "ready": 0, "read": 6, "taken": 6, "registered": 6, "registered_again": 0, "rows": 12, "bytes": 6 * 32
        }  # fmt: skip

    if how == "here":
        check(loader)
        return
    with rpc.serve(loader, protocol=services.DataLoader) as server:
        stub = rpc.connect(server.address, services.DataLoader, timeout=DEADLINE)
        stub.begin(feed(start=1, nn_workers=2))  # A repetition.
        check(stub)
        rpc.close(stub)


@settings(deadline=None, max_examples=examples(60))
@given(
    batches=st.integers(0, 30),
    start=st.integers(0, 8),
    nn_workers=st.integers(1, 4),
    loaders=st.integers(1, 3),
    ahead=st.integers(1, 3),
    workers=st.integers(1, 3),
    kind=st.sampled_from([Source, ShardedSource]),
    order=st.randoms(use_true_random=False),
)
def test_whatever_the_topology_each_batch_is_taken_once(
    batches, start, nn_workers, loaders, ahead, workers, kind, order
):
    """NN workers ask in any order among each other; each its numbers in order."""
    embedding_workers = [Buffering(rank) for rank in range(workers)]
    parts = [Loader(kind(batches), SCHEMA, Workers(*embedding_workers), 2, DEADLINE) for _ in range(loaders)]
    try:
        for index, loader in enumerate(parts):
            loader.begin(feed(3, start, nn_workers, index, loaders, ahead))
        position = {rank: start + rank for rank in range(nn_workers)}
        seen = []
        while position:
            rank = order.choice(sorted(position))
            number = position[rank]
            found = parts[number % loaders].take(rank, 3, number)
            if found.batch is None:
                assert number >= batches
                del position[rank]
                continue
            assert number_in(found) == number + 3000
            seen.append(number)
            # Groups of two consecutive batches of an NN worker lie together.
            turn = (number - start) // nn_workers
            expected = (turn // 2 * nn_workers + rank) % workers
            assert BatchId.unpack(found.batch.batch_id).rank == expected
            position[rank] += nn_workers
        assert sorted(seen) == list(range(start, batches))
    finally:
        for loader in parts:
            loader.end()


def test_it_reads_ahead_as_far_as_allowed_and_no_further(make):
    source, worker = Source(100), Buffering()
    loader = make(source, worker)
    loader.begin(feed(nn_workers=2, ahead=3))
    wait_until(lambda: loader.statistics()["ready"] == 6)
    loader.take(0, 0, 0)
    wait_until(lambda: loader.statistics()["ready"] == 6)  # One taken, one more read.
    assert source.made == list(range(7))
    # It waits for NN worker 1, whose next batch is 7; NN worker 0 gets all that it has not.
    for number in (2, 4, 6):
        assert number_in(loader.take(0, 0, number)) == number
    assert source.made == list(range(7))


def test_it_is_idle_while_enough_batches_are_ready(make):
    loader = make(Source(100), Buffering())
    loader.begin(feed(ahead=2))
    wait_until(lambda: loader.statistics()["ready"] == 2)
    before = loader.idle.seconds
    wait_until(lambda: loader.idle.seconds > before)
    assert loader.statistics()["read"] == 2


def test_a_repeated_take_gets_the_same_batch_until_the_next(make):
    worker = Buffering()
    loader = make(Source(9), worker)
    loader.begin(feed())
    first = loader.take(0, 0, 0)
    assert loader.take(0, 0, 0).batch.batch_id == first.batch.batch_id
    loader.take(0, 0, 1)
    again = loader.take(0, 0, 0)  # A new NN worker, or one that has lost the answer.
    assert number_in(again) == 0
    assert again.batch.batch_id != first.batch.batch_id


@pytest.mark.parametrize("make_source", [lambda n: [batch_of(i) for i in range(n)], Source], ids=["list", "seekable"])
def test_nothing_is_passed_over_for_a_fast_nn_worker(make, make_source):
    """The slow one's batches are kept although it has no room: the source is read once, from front to back."""
    source = make_source(12)
    loader = make(source)
    loader.begin(feed(nn_workers=2, ahead=1))
    for number in (0, 2, 4, 6, 8):
        assert number_in(loader.take(0, 0, number)) == number
    for number in (1, 3, 5, 7, 9):
        assert number_in(loader.take(1, 0, number)) == number
    if isinstance(source, Source):
        assert source.opened == [(0, 0)]


def test_a_new_loader_seeks_to_what_it_is_asked_for(make):
    source = Source(5000)
    loader = make(source)
    loader.begin(feed(nn_workers=2, loader=1, loaders=2, ahead=2))
    assert number_in(loader.take(1, 0, 4001)) == 4001
    wait_until(lambda: loader.statistics()["ready"] == 2)
    assert len(source.made) < 100
    assert number_in(loader.take(1, 0, 3)) == 3
    assert number_in(loader.take(1, 0, 4003)) == 4003


def test_batches_that_are_passed_untaken_are_released(make):
    worker = Buffering()
    loader = make(Source(100), worker)
    loader.begin(feed(ahead=4))
    wait_until(lambda: loader.statistics()["ready"] == 4)
    loader.take(0, 0, 2)
    wait_until(lambda: worker.released == [0, 1])
    loader.take(0, 0, 3)
    loader.end()
    assert 2 not in worker.released  # It is the NN worker's.
    assert 3 not in worker.released
    assert set(worker.numbers.values()) == {2, 3}


def test_the_loaders_of_a_pass_are_resized(make):
    """Two loaders from batch 10 on, where there was one; nothing is repeated or left out."""
    worker = Buffering()
    one, two = make(ShardedSource(40), worker), make(ShardedSource(40), worker)
    one.begin(feed(nn_workers=2, ahead=3))
    seen = [number_in(one.take(n % 2, 0, n)) for n in range(10)]
    wait_until(lambda: 11 in worker.numbers.values())
    for index, loader in enumerate((one, two)):
        loader.begin(feed(nn_workers=2, ahead=3, loader=index, loaders=2))
    with pytest.raises(MovedError, match="data loader 1 of 2"):
        one.take(1, 0, 11)
    seen += [number_in((one, two)[n % 2].take(n % 2, 0, n)) for n in range(10, 40)]
    assert seen == list(range(40))
    assert two.take(1, 0, 41).batch is None
    assert set(worker.released) >= {11}
    two.end()
    with pytest.raises(MovedError, match="has ended"):
        two.take(1, 0, 13)


def test_a_take_waits_for_its_pass_and_ends_with_the_loader(make):
    loader = make(Source(3))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(loader.take, 0, 2, 1)
        loader.begin(feed(epoch=1))
        loader.begin(feed(epoch=2))
        assert number_in(waiting.result(DEADLINE)) == 2001
        gated = make(Source(3, threading.Event()))
        gated.begin(feed())
        waiting = threads.submit(gated.take, 0, 0, 1)
        wait_until(lambda: gated._waiting)
        gated._changed.acquire()
        gated._changed.release()
        ending = threading.Thread(target=gated.end)
        ending.start()
        with pytest.raises(MovedError, match="has ended"):
            waiting.result(DEADLINE)
        gated._cursor._source.gate.set()
        ending.join(DEADLINE)


@pytest.mark.parametrize(("rank", "epoch", "number"), [(1, 1, 4), (0, 0, 4), (0, 1, 2)])
def test_batches_that_are_not_the_askers_are_refused(make, rank, epoch, number):
    loader = make(Source(9))
    loader.begin(feed(epoch=1, start=4, nn_workers=2))
    with pytest.raises(DataError, match=f"Batch {number} of pass {epoch} is not NN worker {rank}'s"):
        loader.take(rank, epoch, number)


def test_batches_are_checked_and_the_error_names_the_batch(make):
    class Bad(Source):
        healed = False

        def batches(self, epoch=0, start=0):
            for number, batch in enumerate(super().batches(epoch, start), start):
                if number == 2 and not self.healed:
                    batch.labels[1] = 7.0
                yield batch

    source = Bad(5)
    loader = make(source)
    loader.begin(feed())
    assert [number_in(loader.take(0, 0, n)) for n in (0, 1)] == [0, 1]
    for _ in range(2):
        with pytest.raises(DataError, match=r"Batch 2 of pass 0: Label 'y' is 7.0 at row 1") as caught:
            loader.take(0, 0, 2)
        assert caught.value.fields == {"column": "y", "row": 1, "number": 2, "epoch": 0}
    source.healed = True  # Every call may be repeated.
    assert number_in(loader.take(0, 0, 2)) == 2


def test_what_a_source_raises_becomes_a_data_error(make):
    def broken():
        yield batch_of(0)
        raise OSError("the disk is on fire")

    loader = make(broken())
    loader.begin(feed())
    assert number_in(loader.take(0, 0, 0)) == 0
    for _ in range(2):  # And not the end.
        with pytest.raises(DataError, match=r"Batch 1 of pass 0 cannot be read: .* OSError: the disk is on fire"):
            loader.take(0, 0, 1)
    loader = make([batch_of(0), "?"])
    loader.begin(feed())
    with pytest.raises(DataError, match="The data yielded a str"):
        loader.take(0, 0, 1)


def test_another_generation_begins_anew(make):
    """The NN workers of before may have used what they took, so nobody gets their batch ids."""
    worker = Buffering()
    loader = make(Source(9), worker)
    loader.begin(feed())
    before = [loader.take(0, 0, n).batch.batch_id for n in range(2)]
    loader.begin(feed())  # A repetition of the call.
    assert loader.take(0, 0, 1).batch.batch_id == before[1]
    loader.begin(feed()._replace(generation=2))
    again = [loader.take(0, 0, n) for n in range(2)]
    assert [number_in(d) for d in again] == [0, 1]
    assert not {d.batch.batch_id for d in again} & set(before)


def test_another_generation_reads_an_iterable_from_its_beginning(make):
    loader = make([batch_of(n) for n in range(3)])
    for generation in (1, 2, 3):
        loader.begin(feed()._replace(generation=generation))
        assert [number_in(loader.take(0, 0, n)) for n in range(4)] == [0, 1, 2, None]


def test_another_part_of_a_pass_restarts_an_iterable(make):
    """It was read ahead, in the order of the part before."""
    loader = make([batch_of(n) for n in range(20)])
    loader.begin(feed(nn_workers=2, ahead=4))
    wait_until(lambda: loader.statistics()["ready"] == 8)
    assert number_in(loader.take(1, 0, 1)) == 1
    loader.begin(feed(ahead=4)._replace(on_demand=True))
    assert [number_in(loader.take(0, 0, n)) for n in range(3)] == [0, 1, 2]
    loader.begin(feed(start=1, nn_workers=2, ahead=4))
    assert [number_in(loader.take(n % 2 == 0, 0, n)) for n in range(1, 5)] == [1, 2, 3, 4]


def test_a_failed_iterable_is_read_again_in_the_next_pass(make):
    class Failing(list):
        def __iter__(self):
            yield batch_of(0)
            if not self:
                self.append("failed")
                raise OSError("the disk is on fire")
            yield from (batch_of(n) for n in (1, 2))

    loader = make(Failing())
    loader.begin(feed())
    with pytest.raises(DataError, match="on fire"):
        loader.take(0, 0, 1)
    loader.begin(feed(epoch=1))
    assert [number_in(loader.take(0, 1, n)) for n in range(4)] == [0, 1, 2, None]


def test_one_loader_reads_any_iterable(make):
    loader = make([batch_of(n) for n in range(6)])
    for epoch in (0, 1):
        loader.begin(feed(epoch=epoch, start=2))
        assert [number_in(loader.take(0, epoch, n)) for n in (2, 3, 5, 6)] == [2, 3, 5, None]
    with pytest.raises(DataError, match="one-shot iterator at batch"):
        loader.take(0, 1, 3)
    with pytest.raises(DataError, match="2 data loaders cannot share"):
        loader.begin(feed(loaders=2))


# --- embedding workers that come and go ----------------------------------------------------------------------------


def test_untaken_batches_of_a_dead_worker_are_registered_again(make):
    first, second = Buffering(0), Buffering(1)
    workers = Workers(first, second)
    loader = make(Source(50), workers)
    loader.begin(feed(ahead=4))
    taken = loader.take(0, 0, 0)
    assert BatchId.unpack(taken.batch.batch_id).rank == 0
    wait_until(lambda: loader.statistics()["ready"] == 4)
    again = Buffering(0, incarnation=2)
    workers.replace(again, second)
    loader.check_workers()
    wait_until(lambda: sorted(again.numbers.values()) == [2, 4])  # Before anyone takes them.
    assert number_in(loader.take(0, 0, 0)) == 0  # It had lost the answer: the same samples, registered anew.
    found = [loader.take(0, 0, n) for n in range(1, 5)]
    assert [number_in(d) for d in found] == [1, 2, 3, 4]
    assert {BatchId.unpack(d.batch.batch_id)[:2] for d in found} == {(0, 2), (1, 1)}
    assert loader.statistics()["registered_again"] == 3


def test_long_ready_batches_are_registered_again_before_delivery(make):
    """An embedding worker forgets what nobody calls for."""
    worker = Buffering()
    loader = make(Source(50), worker, fresh=0.1)
    loader.begin(feed(ahead=3))
    taken = loader.take(0, 0, 0)
    wait_until(lambda: loader.statistics()["ready"] == 3)
    old = set(worker.numbers)
    time.sleep(0.2)
    assert loader.take(0, 0, 0).batch.batch_id == taken.batch.batch_id  # A repetition: it is in use.
    found = loader.take(0, 0, 1)
    assert number_in(found) == 1
    assert found.batch.batch_id not in old
    assert loader.statistics()["registered_again"] >= 1
    wait_until(lambda: 1 in worker.released)


def test_one_that_leaves_keeps_what_it_has_and_gets_nothing_new(make):
    first, second = Buffering(0), Buffering(1)
    workers = Workers(first, second)
    loader = make(Source(50), workers)
    loader.begin(feed(ahead=4))
    wait_until(lambda: loader.statistics()["ready"] == 4)
    first.refuse = MovedError("leaving")  # It knows before the data loader does.
    ranks = [BatchId.unpack(loader.take(0, 0, n).batch.batch_id).rank for n in range(6)]
    assert ranks == [0, 1, 0, 1, 1, 1]
    workers.replace(first, second, leaving=[first])
    loader.check_workers()
    assert loader.statistics()["registered_again"] == 0


@pytest.mark.parametrize("error", [MovedError("leaving"), ClosedError("gone"), DeadlineError("late")])
@pytest.mark.usefixtures("quick_retries")
def test_a_worker_that_fails_is_passed_over_and_tried_again(make, error):
    first, second = Buffering(0), Buffering(1)
    first.refuse = second.refuse = error
    loader = make(Source(5), first, second)
    loader.begin(feed())
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(loader.take, 0, 0, 0)
        assert first.entered.wait(DEADLINE)
        assert second.entered.wait(DEADLINE)
        second.refuse = None
        assert BatchId.unpack(waiting.result(DEADLINE).batch.batch_id).rank == 1


def test_an_unexpected_exception_is_named_and_reading_continues(make, monkeypatch, caplog):
    loader = make(Source(5))
    with monkeypatch.context() as patched:
        patched.setattr("persia.data.loader.sampled_ids", lambda *_: 1 / 0)
        loader.begin(feed())
        with pytest.raises(DataError, match=r"ZeroDivisionError while reading batch 0: division by zero.*\(Source\)"):
            loader.take(0, 0, 0)
    assert "Traceback" in caplog.text
    assert [number_in(loader.take(0, 0, n)) for n in range(5)] == list(range(5))


def test_a_batch_registered_after_its_pass_is_released(make):
    worker = Buffering()
    worker.gate.clear()
    loader = make(Source(5), worker)
    loader.begin(feed())
    assert worker.entered.wait(DEADLINE)
    loader.begin(feed(epoch=1, start=3))
    worker.gate.set()
    assert number_in(loader.take(0, 1, 3)) == 1003
    wait_until(lambda: worker.released == [0])


@pytest.mark.usefixtures("quick_retries")
def test_deadlines_name_the_source_or_the_embedding_workers(make):
    gate = threading.Event()
    slow = make(Source(5, gate))
    slow.begin(feed())
    wait_until(lambda: slow._doing == "reading batch 0")
    with impatient(slow), pytest.raises(DeadlineError, match=r"source Source\): batch 0 .* it is reading batch 0"):
        slow.take(0, 0, 0)
    gate.set()
    worker = Buffering(3, 2)
    worker.gate.clear()
    held = make(Source(5), worker)
    held.begin(feed())
    assert worker.entered.wait(DEADLINE)
    named = r"registering batch 0: embedding worker 3 \(incarnation 2\)"
    with impatient(held), pytest.raises(DeadlineError, match=named):
        held.take(0, 0, 0)
    worker.gate.set()
    nobody = make(Source(5), Workers())
    nobody.begin(feed())
    wait_until(lambda: nobody._registrar.doing and "registering" in nobody._doing)
    with impatient(nobody), pytest.raises(DeadlineError, match="no embedding worker is alive"):
        nobody.take(0, 0, 0)
    with pytest.raises(DeadlineError, match="the beginning of pass 4"):
        Loader(Source(5), SCHEMA, Workers(), timeout=0.05).take(0, 4, 0)


@contextlib.contextmanager
def impatient(loader):
    """Gives the calls of a block a short deadline."""
    before, loader._timeout = loader._timeout, 0.05
    try:
        yield
    finally:
        loader._timeout = before
