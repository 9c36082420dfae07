"""What threads beside the training thread pool and sum, and what a loop sees of it."""

import gc
import threading
import weakref

import numpy as np
import pytest
import torch

import persia
from persia import modes
from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.nn import CollectionOptions, EmbeddingCollection, pooling
from persia.optim import SGD
from support.waiting import wait_until

SCHEMA = persia.Schema(
    [persia.IdFeature("item", dim=4), persia.IdFeature("user", dim=2), persia.IdFeature("seen", dim=4, table="item")]
)
NBYTES = 8 * (4 + 2 + 4) * 4
"""Of the features of a batch."""


def make_batches(count):
    rng = np.random.default_rng(0)
    return [
        Batch(
            {name: IdColumn(rng.integers(0, 20, 8).astype(np.uint64)) for name in ("item", "user", "seen")},
            np.zeros((8, 0), np.float32),
            np.zeros((8, 1), np.float32),
        )
        for _ in range(count)
    ]


def collection(mode, on_host=True, scaler=None, **options):
    embeddings = EmbeddingCollection(
        SCHEMA,
        optimizer=SGD(lr=0.1),
        mode=mode,
        grad_scaler=scaler,
        options=CollectionOptions(device="cpu", **options),
    )
    if not on_host:  # The way of a GPU.
        embeddings._expander.on_host = False
        embeddings._transfer._on_host = False
    return embeddings


def rows_of(embeddings):
    ids = np.arange(20, dtype=np.uint64)
    return {name: embeddings.rows(name, ids).values for name in ("item", "user")}


def squares(embeddings, batch):
    return sum(values.square().sum() for values in embeddings(batch).values())


@pytest.fixture
def threads(monkeypatch):
    """The names of the threads that pool and sum, one for each batch."""
    where = {"pool_rows": [], "sum_rows": []}

    def noted(name, method):
        def call(*args):
            where[name].append(threading.current_thread().name)
            return method(*args)

        return call

    for name in where:
        monkeypatch.setattr(pooling.Expander, name, noted(name, getattr(pooling.Expander, name)))
    return where


@pytest.mark.parametrize(("accumulation_steps", "summing"), [(1, "persia-push"), (2, "MainThread")])
def test_threads_beside_the_network_pool_and_sum(threads, accumulation_steps, summing):
    """Sums of gradients are left to the push thread, but for those that wait for other batches of the step."""
    embeddings = collection(modes.Hybrid(2, warmup=0, refresh=False), accumulation_steps=accumulation_steps)
    for batch in embeddings.prefetch(make_batches(4)):
        squares(embeddings, batch).backward()
    assert threads == {"pool_rows": ["persia-lookup"] * 4, "sum_rows": [summing] * 4}


def test_features_are_pooled_ahead_at_depth_1_too(threads):
    """There a lookup lacks only the step that is being computed, so that hardly any row is refreshed."""
    embeddings = collection(modes.Hybrid(1, warmup=0))
    for batch in embeddings.prefetch(make_batches(8)):
        squares(embeddings, batch).backward()
    assert set(threads["pool_rows"]) <= {"persia-lookup", "persia-refresh"}
    assert threads["pool_rows"].count("persia-lookup") == 8


def test_few_pooled_features_wait_for_the_training_thread(threads, monkeypatch):
    monkeypatch.setattr(pooling, "MOST_AHEAD", 2 * NBYTES)
    embeddings = collection(modes.Hybrid(None, refresh=False))
    drawn = threading.Event()

    def loader():
        for number, batch in enumerate(make_batches(20)):
            assert number == 0 or drawn.wait(10)
            yield batch

    batches = embeddings.prefetch(loader())
    first = next(batches)
    drawn.set()
    wait_until(lambda: embeddings.ready == 19)
    assert threads["pool_rows"] == ["persia-lookup"] * 3
    squares(embeddings, first).backward()
    for batch in batches:
        squares(embeddings, batch).backward()
    assert len(threads["pool_rows"]) == 20


def test_few_gradients_wait_to_be_summed(threads, monkeypatch):
    monkeypatch.setattr(pooling, "MOST_AHEAD", 2 * NBYTES)
    embeddings = collection(modes.Hybrid(None, refresh=False))
    worker, may_push = embeddings.connection.worker, threading.Event()
    push = worker.push

    def late(header, contributions):
        assert may_push.wait(10)
        return push(header, contributions)

    monkeypatch.setattr(worker, "push", late)
    for number, batch in enumerate(embeddings.prefetch(make_batches(10))):
        squares(embeddings, batch).backward()
        if number == 8:
            assert threads["sum_rows"].count("MainThread") == 7
            may_push.set()
    assert len(threads["sum_rows"]) == 10


def test_the_bound_changes_no_result(monkeypatch):
    found = []
    for most in (pooling.MOST_AHEAD, NBYTES, 0):
        monkeypatch.setattr(pooling, "MOST_AHEAD", most)
        embeddings = collection(modes.Sync())
        for batch in embeddings.prefetch(make_batches(6)):
            squares(embeddings, batch).backward()
        found.append(rows_of(embeddings))
    for name in ("item", "user"):
        np.testing.assert_array_equal(found[1][name], found[0][name])
        np.testing.assert_array_equal(found[2][name], found[0][name])


@pytest.mark.parametrize("scale", [None, 64.0])
@pytest.mark.parametrize("use_features", [True, False])
def test_rows_are_differentiable_wherever_the_network_is(use_features, scale):
    found = []
    for on_host in (True, False):
        scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
        embeddings = collection(modes.Sync(), on_host, scaler)
        before = None
        for batch in embeddings.prefetch(make_batches(4)):
            assert isinstance(batch.pooled, pooling.PooledAhead) == on_host
            loss = 0.5 * batch.rows["item"].square().sum()
            if use_features:
                loss = loss + squares(embeddings, batch)
            before = before or rows_of(embeddings)
            (loss if scaler is None else scaler.scale(loss)).backward()
        found.append(rows_of(embeddings))
        assert (found[-1]["item"] != before["item"]).any()
    for name in ("item", "user"):
        np.testing.assert_allclose(found[0][name], found[1][name], rtol=1e-5, atol=1e-7)


def test_a_loss_that_is_kept_keeps_no_gradients():
    made = []

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            ctx.shape = values.shape
            return values.sum()

        @staticmethod
        def backward(ctx, gradient):
            array = np.ones(ctx.shape, np.float32)
            made.append(weakref.ref(array))
            return torch.from_numpy(array)

    embeddings = collection(modes.Sync())
    losses = []
    for batch in embeddings.prefetch(make_batches(3)):
        losses.append(sum(map(Sum.apply, embeddings(batch).values())))
        losses[-1].backward()
    del batch
    gc.collect()
    assert len(made) == 9
    assert [ref() for ref in made] == [None] * 9


def test_a_loss_without_gradients_of_features_is_pushed():
    class NoGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            return values.sum()

        @staticmethod
        def backward(ctx, gradient):
            return None

    embeddings = collection(modes.Sync())
    for batch in embeddings.prefetch(make_batches(2)):
        sum(map(NoGradient.apply, embeddings(batch).values())).backward()
    assert embeddings.pushed.applied == 0
    assert embeddings.global_step == 2


@pytest.mark.filterwarnings("ignore:Using backward")
def test_rows_may_get_gradients_that_have_a_graph():
    embeddings = collection(modes.Sync())
    for batch in embeddings.prefetch(make_batches(2)):
        batch.rows["item"].pow(3).sum().backward(create_graph=True)
    assert embeddings.pushed.applied > 0
