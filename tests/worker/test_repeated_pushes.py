"""Pushes whose number has come before: repetitions, and NN workers that count from 1 again."""

import numpy as np
import pytest

from persia.batching.id_column import IdColumn
from persia.errors import StalePushError
from persia.modes import Hybrid, Sync
from persia.nn import CollectionOptions, EmbeddingCollection
from persia.optim import SGD
from persia.ps import EmbeddingServer
from persia.testing import Threads
from persia.types import Contribution, Packed, PushHeader
from persia.worker import Worker
from persia.worker.embedding_worker import OUTCOMES
from support.switching_samples import DEADLINE, SCHEMA, batches, trainer


class Pushing:
    """An embedding worker with one PS, and the one NN worker."""

    def __init__(self):
        self.server = EmbeddingServer(SCHEMA.resolved_tables(), SGD(lr=1.0), Sync(), seed=3, threads=1)
        self.worker = Worker(SCHEMA, [self.server])

    def register(self):
        batch_id = self.worker.register({name: IdColumn(np.uint64([7])) for name in ("user", "item")})
        self.worker.lookup(batch_id)
        return batch_id

    def push(self, sequence, *batch_ids):
        gradients = Packed.of({name: np.ones((1, 4), np.float32) for name in ("user", "item")}, np.float32)
        header = PushHeader(1, 0, sequence, sequence - 1, 1)
        return self.worker.push(header, [Contribution(batch_id, gradients) for batch_id in batch_ids])

    def applied(self):
        return self.server.lookup({"user": np.uint64([7])}, train=False)["user"].copy()


def test_a_push_with_other_batches_is_no_repetition():
    pushing = Pushing()
    first, second = pushing.register(), pushing.register()
    counts = pushing.push(1, first)
    before = pushing.applied()
    assert pushing.push(1, first) == pushing.push(1) == counts  # Also without the batch, if it was lost meanwhile.
    with pytest.raises(StalePushError, match=r"made push 1 of generation 1 before.* one EmbeddingCollection"):
        pushing.push(1, second)
    np.testing.assert_array_equal(pushing.applied(), before)
    pushing.push(2, second)
    assert (pushing.applied() != before).all()
    assert pushing.worker.buffered == 0


def test_a_push_from_before_the_kept_ones_is_refused():
    pushing = Pushing()
    for sequence in range(1, OUTCOMES + 2):
        pushing.push(sequence, pushing.register())
    with pytest.raises(StalePushError, match=f"push {OUTCOMES + 1} is its newest"):
        pushing.push(1, pushing.register())
    pushing.push(1)  # One that is filled for a dead NN worker has no batches, and loses none.


def collection(member, mode):
    options = CollectionOptions(timeout=DEADLINE)
    return EmbeddingCollection(SCHEMA, optimizer=SGD(lr=0.1), mode=mode, cluster=member, options=options)


def train(embeddings, count):
    for batch in embeddings.prefetch(batches(count, seed=embeddings.connection.rank)):
        sum(values.sum() for values in embeddings(batch).values()).backward()
    return embeddings


def applied_and_buffered(embeddings):
    connection = embeddings.connection
    applied = sum(table["applied"] for server in connection.servers for table in server.statistics().values())
    return applied, connection.worker.statistics()["buffered"]


@pytest.mark.parametrize("mode", [Sync(), Hybrid(2, warmup=0)], ids=str)
@pytest.mark.parametrize("nn_workers", [1, 2])
def test_each_run_trains_with_collections_of_its_own(nn_workers, mode):
    cluster = Threads(nn_workers, ps=2, timeout=DEADLINE)
    found = []
    for _ in range(2):
        embeddings = cluster.run(lambda member: train(collection(member, mode), 5))
        found.append((*applied_and_buffered(embeddings[0]), sum(e.pushed.applied for e in embeddings)))
    (once, _, mine), (twice, _, theirs) = found
    assert (twice, theirs) == (2 * once, mine)
    assert once == mine > 0
    assert [buffered for _, buffered, _ in found] == [0, 0]


def test_each_run_trains_with_trainers_of_its_own():
    cluster = Threads(nn_workers=2, timeout=DEADLINE)
    changed = []
    for _ in range(2):
        first, _ = cluster.run(lambda member: [(t := trainer(Hybrid(2, warmup=0), member)), t.fit(batches(12))][0])
        changed.append(applied_and_buffered(first.embeddings))
    assert changed[1] == (2 * changed[0][0], 0)


@pytest.mark.parametrize("count", [2, 20])
@pytest.mark.parametrize("nn_workers", [1, 2])
def test_a_second_collection_in_one_run_is_refused(nn_workers, count):
    """It counts from step 0 again, as push 1."""
    cluster = Threads(nn_workers, timeout=DEADLINE)

    def work(member):
        train(collection(member, Hybrid(2, warmup=0)), count)
        train(collection(member, Hybrid(2, warmup=0)), count)

    for outcome in cluster.outcomes(work):
        with pytest.raises(StalePushError, match="one EmbeddingCollection or Trainer in each run"):
            raise outcome
