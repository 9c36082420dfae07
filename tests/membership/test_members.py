"""Several embedding workers and data loaders as one: the same numbers, whoever serves; and what happens to the lost."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import persia
from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.errors import ClosedError, DeadlineError, MovedError, StaleBatchError
from persia.membership.data_loaders import DataLoaders
from persia.membership.directory import Directory
from persia.membership.embedding_workers import EmbeddingWorkers
from persia.modes import Hybrid, Sync
from persia.nn.transfer import decode, encode
from persia.optim import SGD, Adagrad
from persia.ps import EmbeddingServer
from persia.services import Connection
from persia.types import Contribution, Delivery, Feed, Member, Membership, PushHeader, RegisteredBatch
from persia.worker import Worker
from support.several_ps import several_servers

TIMEOUT = 20.0
SCHEMA = persia.Schema(
    id_features=[persia.IdFeature("item", dim=4), persia.IdFeature("user", dim=3)],
    dense_features=["price"],
    labels=["click"],
)


def make_batches(count, size=8, seed=0):
    rng = np.random.default_rng(seed)
    return [
        Batch(
            {name: IdColumn(rng.integers(0, 30, size).astype(np.uint64)) for name in ("item", "user")},
            rng.random((size, 1), np.float32),
            (rng.random((size, 1)) < 0.5).astype(np.float32),
        )
        for _ in range(count)
    ]


class Loader:
    """A data loader in this process, for one pass at a time."""

    def __init__(self, batches, workers):
        self.batches, self.workers, self.feed, self.taken = batches, workers, None, []

    def begin(self, feed):
        self.feed = feed

    def take(self, rank, epoch, number):
        if number % self.feed.loaders != self.feed.loader:
            raise MovedError("Not mine.")
        if number >= len(self.batches):
            return Delivery(number, None)
        self.taken.append(number)
        batch = self.batches[number]
        batch_id = self.workers[number % len(self.workers)].register(batch.id_features)
        return Delivery(number, RegisteredBatch(batch_id, batch.dense, batch.labels, batch.day))


class Several:
    """A cluster in this process."""

    def __init__(self, batches, servers=1, workers=1, loaders=1):
        self.batches, self.counts = batches, (servers, workers, loaders)

    def connect(self, schema, optimizer, mode, seed):
        servers, workers, loaders = self.counts
        self.servers = several_servers(servers, schema.resolved_tables(), optimizer, mode, seed)
        self.workers = [Worker(schema, self.servers, rank=rank) for rank in range(workers)]
        self.loaders = [Loader(self.batches, self.workers) for _ in range(loaders)]
        return Connection(
            EmbeddingWorkers(Directory.fixed("embedding_worker", self.workers), TIMEOUT),
            self.servers,
            DataLoaders(Directory.fixed("data_loader", self.loaders), TIMEOUT),
        )


def losses(cluster, data, **options):
    torch.manual_seed(0)
    trainer = persia.Trainer(
        persia.nn.models.FFNN(SCHEMA, hidden=(16,)),
        SCHEMA,
        optimizer=lambda p: torch.optim.Adam(p, 1e-2),
        embedding_optimizer=Adagrad(lr=0.1),
        mode=Sync(),
        cluster=cluster,
        options=persia.TrainerOptions(progress=False, **options),
    )
    seen = []
    forward_backward = trainer.step.forward_backward

    def recorded(batch, embeddings, *, all_reduce):
        logits, loss = forward_backward(batch, embeddings, all_reduce=all_reduce)
        seen.append(loss.item())
        return logits, loss

    trainer.step.forward_backward = recorded
    result = trainer.fit(data, epochs=2)
    return seen, result.progressive.log_loss


@pytest.mark.parametrize(("servers", "workers", "loaders"), [(1, 1, 1), (2, 1, 2), (1, 3, 1), (2, 3, 2)])
def test_losses_are_those_of_one_process_to_the_bit(servers, workers, loaders):
    batches = make_batches(12)
    expected = losses(None, batches)
    cluster = Several(batches, servers, workers, loaders)
    assert losses(cluster, None) == expected
    assert all(worker.buffered == 0 for worker in cluster.workers)
    assert all(worker.statistics()["pushed"] for worker in cluster.workers)


def member(rank, incarnation=1, state="alive", role="embedding_worker"):
    return Member(role, rank, incarnation, "", state)


class Broken:
    """A stub of something that has died."""

    def __init__(self, error=ClosedError):
        self.error = error
        self.asked = threading.Event()

    def __getattr__(self, name):
        def call(*_, **__):
            self.asked.set()
            raise self.error("Nobody is there.")

        return call


def facade(batches=(), workers=2, timeout=TIMEOUT):
    server = EmbeddingServer(SCHEMA.resolved_tables(), SGD(lr=1.0), Sync(), 3, 1)
    services = {(rank, 1): Worker(SCHEMA, [server], rank=rank) for rank in range(workers)}
    closed = []
    directory = Directory(
        "embedding_worker", lambda m: services.setdefault((m.rank, m.incarnation), Broken()), closed.append
    )
    directory.update(Membership(1, 1, [member(rank) for rank in range(workers)]))
    return EmbeddingWorkers(directory, timeout), directory, services, closed, server


def contribution(found, batch_id):
    return Contribution(batch_id, {name: np.ones_like(rows) for name, rows in found.rows.items()})


def test_a_step_on_two_embedding_workers_is_pushed_in_parts():
    several, _, services, _, _ = facade()
    one, other = make_batches(2, size=5)
    ids = [services[rank, 1].register(b.id_features) for rank, b in enumerate((one, other))]
    found = [several.lookup(batch_id) for batch_id in ids]
    headers = []
    for worker in services.values():
        push = worker.push
        worker.push = lambda h, c, push=push: (headers.append(h), push(h, c))[1]
    contributions = [contribution(f, b) for f, b in zip(found, ids, strict=True)]
    counts = several.push(PushHeader(1, 0, 1, 0, 10), contributions)
    assert sorted((h.part, h.parts, h.rows) for h in headers) == [(0, 2, 5), (1, 2, 5)]
    distinct = len(set(one.id_features["item"].values) | set(other.id_features["item"].values))
    assert counts["item"].applied == distinct
    assert several.statistics()["lost_gradients"] == 0


def test_batches_of_a_dead_embedding_worker_are_lost_and_counted():
    several, directory, services, closed, _ = facade()
    first, second, third = make_batches(3)
    kept, lost, never = (services[r, 1].register(b.id_features) for r, b in ((0, first), (1, second), (1, third)))
    found = {batch_id: several.lookup(batch_id) for batch_id in (kept, lost)}
    directory.update(Membership(2, 1, [member(0), member(1, 2)]))
    assert closed == [services[1, 1]]
    with pytest.raises(StaleBatchError, match="embedding worker 1, incarnation 1, is gone"):
        several.lookup(never)
    counts = several.push(PushHeader(1, 0, 1, 0, 16), [contribution(f, b) for b, f in found.items()])
    assert counts["item"].applied == len(set(first.id_features["item"].values))
    assert several.statistics()["lost_gradients"] == 1
    several.release(never)


def test_a_call_waits_until_the_membership_reports_its_peer_gone():
    several, directory, services, _, _ = facade()
    batch_id = services[1, 1].register(make_batches(1)[0].id_features)
    broken = Broken()
    services[1, 1].lookup = broken.lookup
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(several.lookup, batch_id)
        assert broken.asked.wait(TIMEOUT)
        assert not call.done()
        directory.update(Membership(2, 1, [member(0), member(1, state="dead")]))
        with pytest.raises(StaleBatchError):
            call.result(TIMEOUT)


def test_a_batch_of_a_peer_that_is_about_to_join_is_not_lost():
    """The data loader may hear of a new embedding worker, and register with it, before the NN worker does."""
    several, directory, services, _, server = facade()
    services[1, 2] = Worker(SCHEMA, [server], rank=1, incarnation=2)
    batch_id = services[1, 2].register(make_batches(1)[0].id_features)
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(several.lookup, batch_id)
        directory.update(Membership(2, 1, [member(0), member(1, 2)]))
        assert call.result(TIMEOUT).rows["item"].shape[1] == 4


def test_a_peer_that_is_there_and_does_not_answer_ends_the_call():
    several, _, services, _, _ = facade(timeout=0.05)
    batch_id = services[1, 1].register(make_batches(1)[0].id_features)
    services[1, 1].lookup = Broken(DeadlineError).lookup
    with pytest.raises(DeadlineError, match="Nobody is there"):
        several.lookup(batch_id)


@pytest.mark.parametrize(("recent", "workers", "share"), [(0, 3, 0), (5, 1, 5), (6, 3, 2), (7, 3, 3)])
def test_each_embedding_worker_has_its_share_of_the_recent_batches(recent, workers, share):
    several, directory, services, _, _ = facade(workers=workers)
    batch_id = services[0, 1].register(make_batches(1)[0].id_features)
    look_up, asked = services[0, 1].lookup_ahead, []
    services[0, 1].lookup_ahead = lambda batch_id, pool, recent: (asked.append(recent), look_up(batch_id, pool))[1]
    several.lookup_ahead(batch_id, recent=recent)
    assert asked == [share]
    # One that is leaving gets no batches; if all are, each may have had all.
    directory.update(Membership(2, 1, [member(rank, state="leaving") for rank in range(workers)]))
    several.lookup_ahead(batch_id, recent=recent)
    assert asked == [share, recent]


def test_a_leaving_embedding_worker_gets_nothing_new():
    several, directory, services, _, _ = facade()
    batch = make_batches(1)[0]
    assert several.register(batch.id_features) >> 56 == 0
    batch_id = several.register(batch.id_features)
    directory.update(Membership(2, 1, [member(0, state="leaving"), member(1)]))
    assert several.register(batch.id_features) >> 56 == 1
    several.lookup(batch_id)
    services[1, 1].register = Broken(MovedError).register
    with pytest.raises(MovedError):
        EmbeddingWorkers(directory, 0.01).register(batch.id_features)
    with pytest.raises(DeadlineError, match="no embedding worker"):
        EmbeddingWorkers(Directory("embedding_worker", lambda m: None), 0.01).register(batch.id_features)


def test_a_call_for_any_member_goes_to_the_next_one_immediately(monkeypatch):
    monkeypatch.setattr("persia.membership.directory.NEWS_SECONDS", 1000.0)  # It does not wait for news.
    several, directory, services, _, _ = facade(workers=3)
    services[0, 1].register = Broken().register
    services[1, 1].register = Broken(MovedError).register
    assert several.register(make_batches(1)[0].id_features) >> 56 == 2
    asked = []
    directory.call_any(lambda member: asked.append(member.rank), 4, TIMEOUT, "ask")
    assert asked == [1]
    with pytest.raises(KeyError):  # Of the call itself: no other member is asked.
        directory.call_any(lambda member: {}[asked.append(member.rank)], 2, TIMEOUT, "ask")
    assert asked == [1, 2]


def test_every_member_is_tried_even_if_the_first_uses_all_time():
    _, directory, _, _, _ = facade(workers=3)
    asked = []

    def ask(member):
        asked.append(member.rank)
        if len(asked) < 3:
            raise DeadlineError("It does not answer.")
        return member.rank

    assert directory.call_any(ask, 1, 0.0, "ask") == 0
    assert asked == [1, 2, 0]
    asked.clear()
    with pytest.raises(DeadlineError, match="does not answer"):  # All would wait for the same.
        directory.call_any(ask, 1, 0.0, "ask", past_deadline=False)
    assert asked == [1]


def test_a_cancelled_call_is_not_repeated():
    nobody = Directory("embedding_worker", lambda m: None)
    with pytest.raises(DeadlineError, match="ask: there has been no embedding worker"):
        nobody.call_any(lambda member: None, 0, 1000.0, "ask", cancelled=lambda: True)
    _, directory, _, _, _ = facade(workers=3)
    asked = []

    def ask(member):
        asked.append(member.rank)
        raise ClosedError("Nobody is there.")

    with pytest.raises(ClosedError):
        directory.call_any(ask, 1, 1000.0, "ask", cancelled=lambda: len(asked) == 2)
    assert asked == [1, 2]


def test_data_loaders_are_asked_by_number_also_after_a_resize():
    worker = Worker(SCHEMA, [EmbeddingServer(SCHEMA.resolved_tables(), SGD(lr=1.0), Sync(), 3, 1)])
    loaders = [Loader(make_batches(9), [worker]) for _ in range(3)]
    directory = Directory("data_loader", lambda m: loaders[m.rank])
    directory.update(Membership(1, 1, [member(rank, role="data_loader") for rank in range(2)]))
    several = DataLoaders(directory, TIMEOUT, ahead=7)
    several.begin(Feed(0, 0, 1, 0, 1, 1))
    assert [(x.feed.loader, x.feed.loaders, x.feed.ahead) for x in loaders[:2]] == [(0, 2, 7), (1, 2, 7)]
    assert [several.take(0, 0, number).number for number in range(4)] == [0, 1, 2, 3]
    # The loaders learn of the resize first: numbers move, and the facade asks again when it has learnt of it.
    for number, loader in enumerate(loaders):
        loader.begin(Feed(0, 0, 1, number, 3, 7))
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(several.take, 0, 0, 5)
        directory.update(Membership(2, 1, [member(rank, role="data_loader") for rank in range(3)]))
        assert call.result(TIMEOUT).number == 5
    assert [several.take(0, 0, number).batch is None for number in (6, 7, 8, 9)] == [False, False, False, True]
    assert [loader.taken for loader in loaders] == [[0, 2, 6], [1, 3, 7], [5, 8]]


class Delayed:
    """Passes calls on after a random delay, and notes how many pushes had returned at each lookup."""

    def __init__(self, service, seed, names=("lookup", "push"), most=0.004):
        self.service, self.random, self.names, self.most = service, random.Random(seed), names, most
        self.lock = threading.Lock()
        self.pushed = 0
        self.at_lookup = []

    def __getattr__(self, name):
        method = getattr(self.service, name)
        if name not in self.names:
            return method

        def call(*args, **options):
            with self.lock:
                if name == "lookup":
                    self.at_lookup.append(self.pushed)
                seconds = self.random.uniform(0, self.most)
            time.sleep(seconds / 2)
            result = method(*args, **options)
            time.sleep(seconds / 2)
            with self.lock:
                self.pushed += name == "push"
            return result

        return call


@pytest.mark.parametrize("combine", [True, False])
@pytest.mark.parametrize("bound", [1, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_staleness_of_two_workers_never_exceeds_the_bound(bound, accumulation, combine):
    mode = Hybrid(bound, combine, warmup=0, refresh=False)
    hold = {"nn_workers": 2, "timeout": TIMEOUT}
    both = several_servers(2, SCHEMA.resolved_tables(), SGD(lr=0.1), mode, **hold)
    servers = [Delayed(server, seed) for seed, server in enumerate(both)]
    workers = [Worker(SCHEMA, servers, rank=rank) for rank in range(2)]

    class OfRank:
        def __init__(self, rank):
            self.rank = rank
            # The outermost: a lookup is noted before the delays of all roles, a push after them.
            self.worker = Delayed(EmbeddingWorkers(Directory.fixed("embedding_worker", workers), TIMEOUT, rank), rank)

        def connect(self, *_):
            return Connection(self.worker, servers, None, self.rank, 2)

    def train(rank):
        cluster = OfRank(rank)
        options = persia.nn.CollectionOptions(accumulation_steps=accumulation)
        embeddings = persia.nn.EmbeddingCollection(
            SCHEMA, optimizer=SGD(lr=0.1), mode=mode, cluster=cluster, options=options
        )
        for batch in embeddings.prefetch(make_batches(40, seed=rank)):
            sum(e.sum() for e in embeddings(batch).values()).backward()
        return embeddings, cluster.worker

    with ThreadPoolExecutor(2) as threads:
        trained = [call.result(TIMEOUT) for call in [threads.submit(train, r) for r in (0, 1)]]
        for embeddings, worker in trained:
            behind = [n // accumulation - pushed for n, pushed in enumerate(worker.at_lookup)]
            assert len(behind) == 40
            assert 0 < max(behind) <= bound
            assert max(behind) <= embeddings.staleness.max <= bound
        # The first NN worker counts the rows of a combined step.
        assert [embeddings.pushed.applied > 0 for embeddings, _ in trained] == [True, not combine]


def test_a_lost_batch_is_passed_over_in_a_bare_loop():
    batches = make_batches(6)
    cluster = Several(batches)
    embeddings = persia.nn.EmbeddingCollection(SCHEMA, optimizer=SGD(lr=0.1), mode=Sync(), cluster=cluster)
    lookup, seen = cluster.workers[0].lookup_ahead, []

    def losing(batch_id, pool, recent):
        seen.append(batch_id)
        if len(seen) == 3:
            cluster.workers[0].release(batch_id)
        return lookup(batch_id, pool, recent)

    cluster.workers[0].lookup_ahead = losing
    embeddings.connection.loader.begin(Feed(0, 0, 1, 0, 1, 1))
    trained = 0
    for batch in embeddings.prefetch(embeddings.registered()):
        sum(e.sum() for e in embeddings(batch).values()).backward()
        trained += 1
    assert trained == 5
    assert embeddings.global_step == 6
    assert (embeddings.pushed.lost_batches, embeddings.pushed.lost_rows) == (1, 8)
    assert embeddings.staleness.max == 0


class Compressing:
    """What an embedding worker with float16 rows answers."""

    def __init__(self, worker):
        self.worker = worker
        self.pushed = []

    def __getattr__(self, name):
        return getattr(self.worker, name)

    def lookup(self, batch_id, train=True, pool=False):
        found = self.worker.lookup(batch_id, train, pool)
        rows, scales = encode(found.rows)
        return found._replace(rows=rows, scales=scales)

    def lookup_ahead(self, batch_id, pool=False, recent=0):
        found = self.worker.lookup_ahead(batch_id, pool, recent)
        rows, scales = encode(found.rows)
        return found._replace(rows=rows, scales=scales)

    def refresh(self, batch_id, seen, left_out=None):
        fresh = self.worker.refresh(batch_id, seen, left_out)
        rows, scales = encode(fresh.rows)
        return fresh._replace(rows=rows, scales=scales)

    def push(self, header, contributions):
        self.pushed += contributions
        return self.worker.push(header, contributions)


def test_float16_rows_are_read_and_gradients_go_the_same_way():
    batches = make_batches(4)

    def train(wrap):
        cluster = Several(batches)
        connection = cluster.connect(SCHEMA, SGD(lr=0.1), Sync(), 0)
        worker = wrap(connection.worker)
        cluster.connect = lambda *_: connection._replace(worker=worker)
        embeddings = persia.nn.EmbeddingCollection(SCHEMA, optimizer=SGD(lr=0.1), mode=Sync(), cluster=cluster)
        for batch in embeddings.prefetch(batches):
            assert all(rows.dtype == torch.float32 for rows in batch.rows.values())
            sum(e.square().sum() for e in embeddings(batch).values()).backward()
        ids = np.arange(30, dtype=np.uint64)
        return worker, cluster.servers[0].lookup({"item": ids}, train=False)["item"]

    _, exact = train(lambda worker: worker)
    worker, rounded = train(Compressing)
    assert all(values.dtype == np.float16 for c in worker.pushed for values in c.gradients.values())
    np.testing.assert_allclose(rounded, exact, rtol=5e-3, atol=1e-4)


def test_codec():
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((50, 8)) * 10.0 ** rng.integers(-30, 30, (50, 1))).astype(np.float32)
    rows[3], rows[4, 2], rows[5, 1] = 0, np.nan, np.inf
    packed, scales = encode({"t": rows})
    assert packed["t"].dtype == np.float16
    assert scales["t"].dtype == np.float32
    with np.errstate(invalid="ignore"):
        back = decode(packed, scales)["t"]
    assert back.dtype == np.float32
    finite = np.isfinite(rows).all(axis=1)
    np.testing.assert_array_equal(np.isfinite(back).all(axis=1), finite)  # Such rows are dropped as a whole.
    largest = np.abs(rows[finite]).max(axis=1, keepdims=True)
    assert (np.abs(back[finite] - rows[finite]) <= largest * 2.0**-11).all()
    np.testing.assert_array_equal(decode({"t": rows}, None)["t"], rows)
    assert encode({"t": np.empty((0, 8), np.float32)})[0]["t"].shape == (0, 8)
