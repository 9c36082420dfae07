"""Lookups and pushes in the training thread next to a device: the order of a step, and the bits of `Sync` and `Hybrid`.

The device is made of tensors of the CPU. It computes a step when the test, or the thread that waits for it, lets it.
"""

from __future__ import annotations

import collections
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import persia
from persia.cluster import Embedded
from persia.errors import ConfigError
from persia.modes import Hybrid, Sync
from persia.nn import CollectionOptions, EmbeddingCollection
from persia.nn.overlapped_pass import OverlappedPass
from persia.optim import SGD, Adagrad, Adam, RowwiseAdagrad
from persia.testing import Threads
from persia.trainer.options import check_dense_servers
from support.examples import examples
from support.pass_samples import IDS, Elsewhere, batches, schema
from support.staging import BlockStaging, as_on_a_gpu
from support.waiting import wait_until


def collection(mode, declared=None, cluster=None, optimizer=None, on_host=True, **options):
    embeddings = EmbeddingCollection(
        declared or schema(),
        optimizer=optimizer or Adagrad(lr=0.1),
        mode=mode,
        cluster=cluster or Embedded(threads=1),
        options=CollectionOptions(**options),
    )
    if not on_host:
        as_on_a_gpu(embeddings)
    return embeddings


def train(embeddings, data, each=lambda: None):
    """Trains a small network in a loop. Returns the losses."""
    torch.manual_seed(0)
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
        each()
    return losses


def same_rows(a, b):
    for table in ("item", "tag"):
        ours, theirs = (each.rows(table, np.arange(IDS, dtype=np.uint64), state=True) for each in (a, b))
        np.testing.assert_array_equal(ours.found, theirs.found)
        np.testing.assert_array_equal(ours.values, theirs.values)


# --- the order of a step ------------------------------------------------------------------------------------------


class Device(BlockStaging):
    """Computes one step after another when it has to: when a thread waits for the event of its gradients."""

    def __init__(self, log):
        super().__init__()
        self.log, self.launched, self.computed = log, 0, 0

    def to_host(self, tensors):
        """The gradients of a step, whose kernels are launched now and computed later."""
        copied, step = super().to_host(tensors), self.launched
        self.launched += 1
        self.log.append(f"launch {step}")

        def wait():
            while self.computed <= step:
                self.log.append(f"compute {self.computed}")
                self.computed += 1
            return copied()

        return wait


class Watched:
    """A collection on a `Device`, with a log of what its training thread does."""

    def __init__(self, mode, **options):
        self.log = []
        self.embeddings = collection(mode, on_host=False, one_thread=True, **options)
        self.device = self.embeddings._staging = self.embeddings._transfer._staging = Device(self.log)
        self.worker, counts = self.embeddings.connection.worker, collections.Counter()
        for name, called in [("lookup", "look up"), ("lookup_ahead", "find"), ("refresh", "refresh"), ("push", "push")]:
            self._note(name, called, counts)

    def _note(self, name, called, counts):
        method = getattr(self.worker, name)

        def noted(*arguments):
            assert threading.current_thread() is threading.main_thread()
            key = "rows" if called in ("look up", "find") else called
            self.log.append(f"{called} {counts[key]}")
            counts[key] += 1
            return method(*arguments)

        setattr(self.worker, name, noted)

    def steps(self, count, **arguments):
        train(self.embeddings, batches(count, self.embeddings.schema), **arguments)
        return self.log


def test_with_staleness_a_step_is_launched_before_the_one_before_is_pushed():
    for staleness in (1, 4):
        watched = Watched(Hybrid(staleness, warmup=0))
        assert watched.steps(4) == [
            *("look up 0", "launch 0"),
            *("look up 1", "launch 1"),
            *("compute 0", "push 0", "look up 2", "launch 2"),
            *("compute 1", "push 1", "look up 3", "launch 3"),
            *("compute 2", "push 2", "compute 3", "push 3"),  # The loader has ended.
        ]
        assert watched.embeddings.staleness == (0.75, 1, 4)


def test_in_sync_rows_are_found_while_the_device_computes_and_read_after_the_push():
    watched = Watched(Sync())
    assert watched.steps(3) == [
        *("look up 0", "launch 0"),
        *("find 1", "compute 0", "push 0", "refresh 0", "launch 1"),
        *("find 2", "compute 1", "push 1", "refresh 1", "launch 2"),
        *("compute 2", "push 2"),
    ]
    assert watched.embeddings.staleness == (0.0, 0, 3)


def test_a_step_of_several_batches_is_in_flight_as_a_whole():
    watched = Watched(Hybrid(2, warmup=0), accumulation_steps=2)
    assert watched.steps(6) == [
        *("look up 0", "launch 0", "look up 1", "launch 1"),
        *("look up 2", "launch 2", "look up 3", "launch 3"),
        *("compute 0", "compute 1", "push 0", "look up 4", "launch 4", "look up 5", "launch 5"),
        *("compute 2", "compute 3", "push 1", "compute 4", "compute 5", "push 2"),
    ]
    assert watched.embeddings.staleness.max == 1


def test_while_a_stream_is_idle_nothing_is_left_in_flight():
    """Whoever reads rows need not wait for the next sample."""
    watched = Watched(Hybrid(1, warmup=0))
    data = batches(3, watched.embeddings.schema)

    def stream():
        yield from data[:2]
        wait_until(lambda: "push 1" in watched.log, "that the last step is pushed")
        yield data[2]

    for batch in watched.embeddings.prefetch(stream(), endless=True):
        watched.embeddings(batch)["item"].sum().backward()
    assert watched.log[-2:] == ["compute 2", "push 2"]
    assert watched.embeddings.global_step == 3


def test_whoever_reads_in_the_loop_finds_the_updates_so_far():
    watched = Watched(Hybrid(1, warmup=0))
    pushed = []

    def each():
        watched.embeddings.rows("item", [0])
        pushed.append(watched.worker.statistics()["pushed"])

    watched.steps(3, each=each)
    assert pushed == [1, 2, 3]
    assert watched.embeddings.staleness.max == 0


def test_in_a_warm_up_the_order_is_that_of_sync_until_the_depth_is_1():
    watched = Watched(Hybrid(2, warmup=4))
    assert watched.steps(4) == [
        *("look up 0", "launch 0"),
        *("find 1", "compute 0", "push 0", "refresh 0", "launch 1"),
        *("look up 2", "launch 2"),
        *("compute 1", "push 1", "look up 3", "launch 3"),
        *("compute 2", "push 2", "compute 3", "push 3"),
    ]


# --- the bits -----------------------------------------------------------------------------------------------------


OPTIMIZERS = [SGD(lr=0.1), Adagrad(lr=0.1), RowwiseAdagrad(lr=0.1), Adam(lr=0.01)]


@settings(max_examples=examples(30))
@given(
    st.sampled_from(OPTIMIZERS),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from([None, 12]),
    st.sampled_from([persia.AdmitAll(), persia.AdmitMinFrequency(2)]),
    st.integers(1, 3),
    st.integers(0, 9),
    st.booleans(),
    st.sampled_from([Embedded, Elsewhere]),
)
def test_the_bits_are_those_of_sync(optimizer, dtype, capacity, admission, accumulation, count, on_host, cluster):
    declared = schema(dtype=dtype, capacity=capacity, admission=admission)
    data = batches(count, declared)
    found = []
    for one_thread, where in [(None, Embedded), (True, cluster)]:
        embeddings = collection(
            Sync(),
            declared,
            where(threads=1),
            optimizer,
            on_host,
            accumulation_steps=accumulation,
            one_thread=one_thread,
        )
        found.append((embeddings, train(embeddings, data)))
    (plain, losses), (overlapped, others) = found
    assert losses == others
    same_rows(plain, overlapped)
    assert plain.statistics() == overlapped.statistics()
    assert (plain.pushed, plain.pushes, plain.staleness) == (
        overlapped.pushed,
        overlapped.pushes,
        overlapped.staleness,
    )


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_bits_are_those_of_threads_with_one_step_in_flight(accumulation, on_host):
    """In threads a lookup may also come after the push of the step before: here each push waits for it."""
    count = 9
    mode, data = Hybrid(1, warmup=0, refresh=False), batches(count, schema())
    options = {"accumulation_steps": accumulation, "on_host": on_host}
    overlapped = collection(mode, one_thread=True, **options)
    losses = train(overlapped, data)
    threads = collection(mode, one_thread=False, **options)
    worker, changed, looked_up = threads.connection.worker, threading.Condition(), 0
    lookup, push = worker.lookup, worker.push

    def counted_lookup(*arguments):
        nonlocal looked_up
        with changed:
            found = lookup(*arguments)
            looked_up += 1
            changed.notify_all()
        return found

    def late_push(header, contributions):
        with changed:
            due = min(count, (header.step + 2) * accumulation)
            assert changed.wait_for(lambda: looked_up >= due, 20)
            return push(header, contributions)

    worker.lookup, worker.push = counted_lookup, late_push
    assert train(threads, data) == losses
    same_rows(threads, overlapped)
    assert threads.staleness == overlapped.staleness


# --- when it is chosen, and how it ends ---------------------------------------------------------------------------


@pytest.mark.parametrize("one_thread", [None, False, True])
@pytest.mark.parametrize("mode", [Sync(), Hybrid(1, warmup=0), Hybrid("auto")])
def test_it_is_chosen_by_the_option_alone(mode, one_thread):
    names, kinds = set(), set()
    embeddings = collection(mode, one_thread=one_thread)
    before = set(threading.enumerate())

    def each():
        names.update(thread.name for thread in set(threading.enumerate()) - before)
        kinds.add(type(embeddings._pass.runner))

    train(embeddings, batches(5, embeddings.schema), each)
    assert (kinds == {OverlappedPass}) == (one_thread is True)
    ahead = not one_thread if one_thread is not None else mode == Hybrid(1, warmup=0)
    assert ("persia-push" in names) == ahead


def test_asynchronous_modes_refuse_it():
    options = persia.TrainerOptions(one_thread=True)
    with pytest.raises(ConfigError, match="one_thread = true does not go with the mode gba"):
        check_dense_servers(options, "gba")
    for wrong in ("yes", 1):
        with pytest.raises(ConfigError, match="one_thread"):
            CollectionOptions(one_thread=wrong)


@pytest.mark.parametrize("mode", [Sync(), Hybrid(1, warmup=0)])
def test_several_nn_workers_refuse_it(mode):
    def work(member):
        declared = schema()
        embeddings = EmbeddingCollection(
            declared,
            optimizer=SGD(lr=0.1),
            mode=mode,
            cluster=member,
            options=CollectionOptions(one_thread=True, timeout=20.0),
        )
        with pytest.raises(ConfigError, match="one_thread = true trains with one NN worker, and there are 2"):
            next(embeddings.prefetch(batches(2, declared)))

    Threads(2, timeout=20.0).run(work)


def test_a_trainer_passes_it_on():
    declared = schema()
    reader = batches(4, declared)
    options = persia.TrainerOptions(device="cpu", progress=False, one_thread=True)
    trainer = persia.Trainer(
        persia.nn.models.FFNN(declared, hidden=(4,)),
        declared,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        embedding_optimizer=SGD(lr=0.1),
        mode=Hybrid(1, warmup=0),
        options=options,
    )
    trainer.fit(reader)
    assert trainer.embeddings.options.one_thread
    assert trainer.embeddings.staleness == (0.75, 1, 4)


def failing_at(number, method):
    calls = iter(range(100))

    def fail(*arguments):
        if next(calls) == number:
            raise RuntimeError("no more")
        return method(*arguments)

    return fail


@pytest.mark.parametrize(("what", "note"), [("push", "Raised by a push"), ("refresh", "at the lookup of batch 3 of")])
def test_a_failure_is_raised_by_the_draw(what, note):
    embeddings = collection(Sync(), one_thread=True)
    worker = embeddings.connection.worker
    setattr(worker, what, failing_at(2, getattr(worker, what)))
    with pytest.raises(RuntimeError, match="no more") as raised:
        train(embeddings, batches(9, embeddings.schema))
    assert any(note in text for text in raised.value.__notes__)
    assert worker.buffered == 0


def test_leaving_a_loop_pushes_what_is_in_flight():
    embeddings = collection(Hybrid(1, warmup=0), one_thread=True)
    for number, batch in enumerate(embeddings.prefetch(batches(9, embeddings.schema))):
        embeddings(batch)["item"].sum().backward()
        if number == 3:
            break
    assert embeddings.global_step == embeddings.connection.worker.statistics()["pushed"] == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", [Sync(), Hybrid(1, warmup=0)])
def test_one_thread_on_a_gpu_trains_as_on_a_cpu(mode):
    losses = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        embeddings = collection(mode, optimizer=SGD(lr=0.1), device=device, one_thread=True)
        network = torch.nn.Linear(9, 1).to(device)
        of_device = []
        for batch in embeddings.prefetch(batches(12, embeddings.schema)):
            found = embeddings(batch)
            loss = network(torch.cat([found["item"], found["seen"], batch.dense], 1)).square().mean()
            loss.backward()
            of_device.append(loss.detach())
        losses.append([float(loss) for loss in of_device])
    np.testing.assert_allclose(*losses, rtol=1e-3)
