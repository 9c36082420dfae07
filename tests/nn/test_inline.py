"""Lookups and pushes in the training thread: the bits of lookups ahead in Sync, and changes from one to the other."""

import os
import signal
import threading
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import persia
from persia.cluster import Embedded
from persia.modes import Hybrid, Observation, Sync
from persia.nn import CollectionOptions, EmbeddingCollection, gate
from persia.nn.gate import WINDOW, StalenessGate, Window
from persia.nn.inline_pass import InlinePass
from persia.nn.pass_threads import PassThreads
from persia.optim import SGD, Adagrad, Adam, Ftrl, RowwiseAdagrad
from support.pass_samples import Elsewhere, batches, schema


def train(cluster, declared, data, mode=None, optimizer=None, each=lambda embeddings: None, **options):
    """Trains a small network in a loop. Returns the collection and the losses."""
    torch.manual_seed(0)
    embeddings = EmbeddingCollection(
        declared,
        optimizer=optimizer or Adagrad(lr=0.1),
        mode=mode or Sync(),
        cluster=cluster,
        options=CollectionOptions(**options),
    )
    network = torch.nn.Linear(4 + 4 + 6 + 1, 1)
    dense = torch.optim.Adam(network.parameters(), 0.01)
    losses = []
    for batch in embeddings.prefetch(data):
        found = embeddings(batch)
        inputs = [found["item"], found["seen"], found["tag"].values.flatten(1), batch.dense]
        logits = network(torch.cat(inputs, 1))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        loss.backward()
        dense.step()
        dense.zero_grad()
        losses.append(loss.item())
        each(embeddings)
    return embeddings, losses


def rows(embeddings):
    return {table: embeddings.rows(table, np.arange(40, dtype=np.uint64), state=True) for table in ("item", "tag")}


def same(a, b):
    for table, found in a.items():
        other = b[table]
        np.testing.assert_array_equal(found.found, other.found)
        np.testing.assert_array_equal(found.values, other.values)


OPTIMIZERS = [SGD(lr=0.1), Adagrad(lr=0.1), RowwiseAdagrad(lr=0.1), Adam(lr=0.01), Ftrl(lr=0.1)]


@given(
    st.sampled_from(OPTIMIZERS),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.sampled_from([None, 12]),
    st.sampled_from([persia.AdmitAll(), persia.AdmitMinFrequency(2)]),
    st.integers(1, 3),
    st.integers(0, 9),
    st.integers(0, 3),
)
def test_the_bits_are_those_of_lookups_ahead(optimizer, dtype, capacity, admission, accumulation, count, seed):
    declared = schema(dtype=dtype, capacity=capacity, admission=admission)
    data = batches(count, declared, seed)
    options = {"optimizer": optimizer, "accumulation_steps": accumulation}
    near, losses = train(Embedded(threads=1), declared, data, **options)
    far, others = train(Elsewhere(threads=1), declared, data, **options)
    assert losses == others
    same(rows(near), rows(far))
    assert near.statistics() == far.statistics()
    assert near.pushed == far.pushed
    assert (near.global_step, near.pushes, near.staleness) == (far.global_step, far.pushes, far.staleness)


@pytest.fixture
def background():
    """Returns the names of the threads of persia that have begun since the test did."""
    before = set(threading.enumerate())  # An earlier test may have left one that waits for ever.

    def found():
        new = [thread.name for thread in threading.enumerate() if thread not in before]
        return sorted(name for name in new if name.startswith("persia-"))

    return found


@pytest.mark.parametrize("mode", [Sync(), Hybrid("auto"), Hybrid(4, warmup=100)])
def test_one_thread_reads_and_none_looks_up_or_pushes(mode, background):
    declared, seen = schema(), []
    train(Embedded(), declared, batches(5, declared), mode, each=lambda embeddings: seen.append(background()))
    assert all(names in ([], ["persia-read"]) for names in seen)
    assert background() == []


def test_remote_or_disk_rows_or_a_depth_mean_lookups_ahead(tmp_path):
    spilling = schema(capacity=1000, spill=str(tmp_path), memory_rows=100)
    for cluster, declared, mode in [
        (Elsewhere(), schema(), Sync()),
        (Embedded(), spilling, Sync()),
        (Embedded(), schema(), Hybrid(1, warmup=0)),
    ]:
        ahead = []
        train(
            cluster, declared, batches(3, declared), mode, each=lambda embeddings, to=ahead: to.append(embeddings.ahead)
        )
        assert ahead == [True] * 3


def test_after_a_warm_up_lookups_run_ahead():
    declared, ahead = schema(), []

    def each(embeddings):
        ahead.append(embeddings.ahead)

    embeddings, losses = train(Embedded(), declared, batches(12, declared), Hybrid(2, warmup=8), each=each)
    # A depth of 1 from global step 4 on. The fifth draw is of the batch of step 4.
    assert ahead == [False] * 4 + [True] * 8
    assert embeddings.global_step == len(losses) == 12
    assert embeddings.staleness.max <= 2
    assert embeddings.pushed.released == 0


@given(st.lists(st.sampled_from([0, 1, 3]), min_size=1, max_size=12), st.integers(1, 2))
def test_any_change_of_depth_trains_each_batch_once_in_order(depths, accumulation):
    declared, before = schema(), set(threading.enumerate())
    data = batches(len(depths), declared)
    prices, changes = [], iter(depths)
    embeddings = EmbeddingCollection(
        declared,
        optimizer=SGD(lr=0.1),
        mode=Hybrid("auto", warmup=0),
        cluster=Embedded(threads=1),
        options=CollectionOptions(accumulation_steps=accumulation),
    )
    parts = set()
    for batch in embeddings.prefetch(data):
        parts.add(type(embeddings._pass.runner))
        prices.append(batch.dense)
        embeddings(batch)["item"].sum().backward()
        embeddings.gate.depth = next(changes)  # As a window would.
    assert parts <= {InlinePass, PassThreads}
    assert torch.equal(torch.cat(prices), torch.cat([torch.from_numpy(batch.dense) for batch in data]))
    assert embeddings.global_step == -(-len(data) // accumulation)
    assert embeddings.staleness.max <= 3
    assert embeddings.connection.worker.buffered == 0
    assert not [thread for thread in threading.enumerate() if thread not in before]


def test_back_from_lookups_ahead_no_batch_is_left_out_or_stale():
    declared = schema()
    embeddings = EmbeddingCollection(declared, optimizer=SGD(lr=0.1), mode=Hybrid("auto", warmup=0))
    embeddings.gate.depth = 3
    ahead = []
    for number, batch in enumerate(embeddings.prefetch(batches(20, declared))):
        embeddings(batch)["item"].sum().backward()
        ahead.append(embeddings.ahead)
        if number == 5:
            embeddings.gate.depth = 0
    assert ahead[:6] == [True] * 6
    assert not any(ahead[-8:])
    assert len(ahead) == 20


class Late:
    """A loader that ends, or fails, after some batches."""

    def __init__(self, data, error=None):
        self.data, self.error = data, error

    def __iter__(self):
        yield from self.data
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("error", [None, OSError("disk on fire")])
@pytest.mark.parametrize("depth", [0, 1])
def test_end_and_errors_of_the_loader_follow_its_last_batch(depth, error, background):
    declared = schema()
    embeddings = EmbeddingCollection(declared, optimizer=SGD(lr=0.1), mode=Hybrid("auto", warmup=0))
    embeddings.gate.depth, trained = depth, 0

    def loop():
        nonlocal trained
        for batch in embeddings.prefetch(Late(batches(4, declared), error)):
            embeddings(batch)["item"].sum().backward()
            trained += 1
            embeddings.gate.depth = 1 - embeddings.gate.depth

    if error is None:
        loop()
    else:
        with pytest.raises(OSError, match="disk on fire"):
            loop()
    assert (trained, embeddings.global_step) == (4, 4)
    assert background() == []


def test_leaving_a_loop_pushes_the_gradient_of_its_last_batch():
    declared = schema()
    embeddings = EmbeddingCollection(declared, optimizer=SGD(lr=0.1), mode=Sync())
    data = batches(3, declared)
    for batch in embeddings.prefetch(data):
        item = int(data[0].id_features["item"].values[0])
        before = embeddings.rows("item", [item]).values
        embeddings(batch)["item"].sum().backward()
        break
    assert (embeddings.rows("item", [item]).values != before).all()
    assert embeddings.global_step == 1


def test_rows_have_the_updates_so_far_once_pushes_are_awaited():
    declared = schema()
    embeddings = EmbeddingCollection(declared, optimizer=SGD(lr=0.1), mode=Sync())
    data = batches(2, declared)
    item = int(data[0].id_features["item"].values[0])
    for batch in embeddings.prefetch(data):
        before = embeddings.rows("item", [item]).values
        embeddings(batch)["item"].sum().backward()
        assert embeddings.connection.worker.statistics()["pushed"] == 0
        embeddings.await_pushes()
        assert embeddings.connection.worker.statistics()["pushed"] == 1
        assert (embeddings.rows("item", [item]).values != before).all()
        break


def test_whoever_reads_in_the_loop_finds_the_updates_so_far():
    declared = schema()
    data = batches(3, declared)
    embeddings = EmbeddingCollection(declared, optimizer=SGD(lr=0.1), mode=Sync())
    item = int(data[0].id_features["item"].values[0])
    for batch in embeddings.prefetch(data):
        before = embeddings(batch)["item"][0].detach().clone()
        embeddings(batch)["item"].sum().backward()
        after = torch.from_numpy(embeddings.rows("item", [item]).values[0])
        assert (after != before).all()
        embeddings.eval()
        (read,) = embeddings.prefetch(data[:1])
        assert torch.equal(embeddings(read)["item"][0], after)
        assert torch.equal(embeddings(data[0])["item"][0], after)
        embeddings.train()
        break


@pytest.mark.parametrize("cores", [2, 8])
@pytest.mark.parametrize("cluster", [Embedded, Elsewhere])
def test_evaluation_looks_up_ahead_where_cores_are_spare(cluster, cores, monkeypatch, background):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    declared = schema()
    embeddings = EmbeddingCollection(declared, optimizer=SGD(lr=0.1), cluster=cluster(threads=1)).eval()
    names = set()
    for batch in embeddings.prefetch(batches(50, declared)):
        embeddings(batch)
        names |= set(background())
    assert ("persia-lookup" in names) == (cluster is Elsewhere or cores > 2)
    assert background() == []


@pytest.mark.parametrize("endless", [False, True])
def test_an_error_of_the_loader_is_not_mistaken_for_ours(endless):
    declared, error = schema(), TimeoutError("the socket")
    embeddings = EmbeddingCollection(declared, optimizer=SGD(lr=0.1), mode=Sync())
    with pytest.raises(TimeoutError) as caught:
        for batch in embeddings.prefetch(Late(batches(2, declared), error), endless=endless):
            embeddings(batch)["item"].sum().backward()
    assert caught.value is error


def test_a_stream_may_be_idle_for_longer_than_the_timeout():
    declared, idle = schema(), threading.Event()

    def stream():
        first, second = batches(2, declared)
        yield first
        idle.wait(30)
        yield second

    options = CollectionOptions(timeout=0.01)
    embeddings = EmbeddingCollection(declared, optimizer=SGD(lr=0.1), mode=Sync(), options=options)
    timer = threading.Timer(0.2, idle.set)
    timer.start()
    passed = embeddings.prefetch(stream(), endless=True)
    for batch in passed:
        embeddings(batch)["item"].sum().backward()
    timer.join()
    assert embeddings.global_step == 2


@pytest.mark.parametrize("last", [False, True])
def test_an_interrupt_comes_after_the_push(last, monkeypatch):
    declared = schema()
    embeddings = EmbeddingCollection(declared, optimizer=SGD(lr=0.1), mode=Sync())
    worker, pushed = embeddings.connection.worker, []
    push, handler = worker.push, signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        pushed.append(push(*arguments))
        return pushed[-1]

    monkeypatch.setattr(worker, "push", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            for batch in embeddings.prefetch(batches(1 if last else 5, declared)):
                embeddings(batch)["item"].sum().backward()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)
    assert len(pushed) == 1
    assert embeddings.pushed.applied == pushed[0]["item"].applied
    embeddings.flush()  # It is not raised again.
    monkeypatch.undo()
    for batch in embeddings.prefetch(batches(2, declared)):
        embeddings(batch)["item"].sum().backward()
    assert embeddings.global_step == 3


def test_what_fails_to_begin_leaves_no_thread(monkeypatch, background):
    declared = schema()
    embeddings = EmbeddingCollection(declared, optimizer=SGD(lr=0.1), mode=Hybrid(1, warmup=0))
    monkeypatch.setattr(
        "persia.nn.training_pass.PassThreads", mock.Mock(side_effect=RuntimeError("can't start new thread"))
    )
    with pytest.raises(RuntimeError, match="new thread"):
        next(embeddings.prefetch(batches(2, declared)))
    assert background() == []


# --- when to go ahead ---------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """Seconds, and processor seconds of the process on four cores."""

    class Clock:
        now = computed = 0.0

        def spend(self, seconds, cores):
            self.now += seconds
            self.computed += seconds * cores

    found = Clock()
    monkeypatch.setattr(gate.time, "monotonic", lambda: found.now)
    monkeypatch.setattr(gate.time, "process_time", lambda: found.computed)
    monkeypatch.setattr(gate.os, "sched_getaffinity", lambda _: set(range(4)))
    return found


@pytest.mark.parametrize(
    ("work", "cores", "waited"),
    [(0.4, 1.0, 0.4), (0.4, 4.0, 0.0), (0.4, 3.0, 0.25), (0.1, 3.0, 0.1), (0.4, 5.0, 0.0)],
)
def test_training_thread_work_counts_as_far_as_cores_are_idle(clock, work, cores, waited):
    window = Window(accumulation=1)
    for _ in range(10):
        clock.spend(1.0, cores)
        window.add(1.0, -work, work, inline=True)
    seen = window.observation()
    assert seen.waited == pytest.approx(10 * waited)
    assert (seen.elapsed, seen.steps) == (10.0, 10)


def windows(clock, mode, inline, ahead, count):
    """Depths after windows of batches of these seconds, half of them lookups and pushes, on one core."""
    found = StalenessGate(mode, 1, near=True)
    found.open()
    depths = []
    for _ in range(count):
        for _ in range(WINDOW + (not depths)):  # The first draw begins the first interval.
            found.pass_lookup()
            here = not found.depth
            clock.spend(inline if here else ahead, 1.0)
            found.drawn(-inline / 2 if here else 0.1 * ahead, inline=here)
            found.done(1)
        depths.append(found.depth)
    return depths


def test_auto_goes_ahead_where_that_is_faster_and_stays(clock):
    assert windows(clock, Hybrid("auto", warmup=0), 1.0, 0.6, 20) == [1] * 20


def test_auto_returns_if_it_is_slower_and_retries_much_later(clock):
    depths = windows(clock, Hybrid("auto", warmup=0), 1.0, 0.95, 70)
    assert depths[:3] == [1, 0, 0]
    assert sum(depths) == 2
    assert depths[64:67] == [0, 1, 0]


def test_in_a_warm_up_nothing_is_measured(clock):
    assert windows(clock, Hybrid("auto", warmup=3 * WINDOW), 1.0, 0.6, 6) == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("depth", "seconds", "before", "change", "count", "expected"),
    [
        (1, 0.93, 1.0, 1, 1, 0),  # Not faster by half of 15 %.
        (1, 0.92, 1.0, 1, 1, 1),
        (1, 0.99, 1.0, 1, 2, 1),  # Proved before.
        (0, 1.0, 0.95, -1, 5, 0),  # The step in flight had not helped.
        (0, 1.0, 0.95, -1, 64, 1),
        (0, 1.1, 0.95, -1, 5, 1),  # The load has changed.
    ],
)
def test_the_first_step_in_flight_is_judged_by_its_speed(depth, seconds, before, change, count, expected):
    seen = Observation(
        waited=0.0 if depth else 30.0 * seconds,
        elapsed=100.0 * seconds,
        steps=100,
        would_wait=30.0 * seconds,
        change=change,
        windows=count,
        seconds_before=before,
    )
    assert Hybrid("auto", warmup=0).next_depth(depth, seen) == expected


def test_another_mode_does_not_inherit_what_was_measured():
    """A raise of the depth before a switch would count as one that did not help after it."""
    found = StalenessGate(Hybrid("auto", warmup=0), 1, near=True)
    found._window.changed(1)
    found.adopt(Hybrid("auto", warmup=0))
    seen = found._window
    seen.add(1.0, -0.5, 0.5)
    assert seen.observation().change == 0
    raised = Observation(waited=50.0, elapsed=100.0, steps=100, change=1, windows=1, before=0.5)
    assert Hybrid("auto", warmup=0).next_depth(0, raised) == 1


def test_the_depth_is_restored_except_in_the_training_thread():
    for near, mode, depth in [(False, Hybrid("auto"), 3), (True, Hybrid("auto"), 0), (False, Hybrid(2), 2)]:
        found = StalenessGate(mode, 1, near)
        found.restore(3)
        assert found.depth == depth


def test_auto_starts_in_the_training_thread_with_rows_in_memory():
    assert StalenessGate(Hybrid("auto"), 1, near=True).depth == 0
    assert StalenessGate(Hybrid("auto"), 1).depth == 1
    assert StalenessGate(Hybrid(4), 1, near=True).depth == 4
