"""Loops of one's own on several NN workers: with equal steps they end; with plain DDP, unequal data are an error."""

import time

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import persia
from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.dense import AllReduce
from persia.errors import DeadlineError, UnequalStepsError
from persia.modes import Hybrid, Sync
from persia.nn import CollectionOptions, batch_counts
from persia.nn import collection as nn_collection
from persia.nn.replicas import SingleReplica
from persia.optim import SGD
from support.nn_processes import Model, Remote, Services, parameters
from support.processes import Processes

pytestmark = pytest.mark.processes

IDS = 20
SCHEMA = persia.Schema([persia.IdFeature("item", dim=4)], dense_features=["price"], labels=["click"])
MODES = [Sync(), Hybrid(2, warmup=0)]
NAMES = ["sync", "hybrid"]
SECONDS = 20.0
"""Far below the 60 s after which a collective of these processes gives up."""


def batches_of(rank, count):
    rng = np.random.default_rng(rank)
    for _ in range(count):
        size = 3 + int(rng.integers(0, 4))
        ids = IdColumn(rng.integers(0, IDS, size).astype(np.uint64))
        labels = (rng.random((size, 1)) < 0.5).astype(np.float32)
        yield Batch({"item": ids}, rng.random((size, 1), np.float32), labels)


def collection(rank, count, addresses, mode):
    torch.manual_seed(rank)  # The first one's parameters count.
    embeddings = persia.nn.EmbeddingCollection(
        SCHEMA,
        optimizer=SGD(lr=0.1),
        mode=mode,
        cluster=Remote(rank, count, addresses),
        options=CollectionOptions(timeout=60.0),
    )
    return embeddings, Model(SCHEMA)


def step(embeddings, net, optimizer, batch):
    logits = net(batch.dense, embeddings(batch))
    torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
    optimizer.step()
    optimizer.zero_grad()


def plain(rank, addresses, mode, counts, body=step, source=batches_of, passes=1):
    """A loop with DistributedDataParallel: steps made, network, what it was ended by, and after how long."""
    batch_counts.GRACE_SECONDS = SECONDS / 2  # The error lacks who is slower than this.
    embeddings, model = collection(rank, len(counts), addresses, mode)
    net = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    steps, began, error = 0, time.monotonic(), None
    try:
        for _ in range(passes):
            for batch in embeddings.prefetch(source(rank, counts[rank])):
                body(embeddings, net, optimizer, batch)
                steps += 1
    except UnequalStepsError as raised:
        error = raised
    return steps, parameters(model), error and (error.message, error.fields), time.monotonic() - began


def equal(rank, addresses, mode, counts):
    """The documented loop."""
    embeddings, net = collection(rank, len(counts), addresses, mode)
    replicas = AllReduce(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    steps = 0
    for batch in embeddings.prefetch(batches_of(rank, counts[rank]), equal_steps=replicas):
        with replicas.batch(batch.dummy):
            logits = replicas.model(batch.dense, embeddings(batch))
            torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return steps, parameters(net)


@pytest.fixture(scope="module")
def two():
    with Processes(2) as processes:
        yield processes


@pytest.fixture(scope="module")
def four():
    with Processes(4) as processes:
        yield processes


def run(processes, function, mode, counts, *args):
    with Services(SCHEMA, [], len(counts), mode) as services:
        return processes.run(function, services.addresses, mode, counts, *args)


@pytest.mark.parametrize("mode", MODES, ids=NAMES)
def test_the_documented_loop_makes_equal_steps_and_networks(four, mode):
    results = run(four, equal, mode, [25, 24, 24, 0])
    assert [steps for steps, _ in results] == [25] * 4
    for _, mine in results[1:]:
        for name, value in results[0][1].items():
            np.testing.assert_array_equal(mine[name], value)


@pytest.mark.parametrize("mode", MODES, ids=NAMES)
def test_plain_ddp_names_who_has_run_out(four, mode):
    results = run(four, plain, mode, [25, 24, 24, 24])
    assert [steps for steps, *_ in results] == [24] * 4  # The 25th never began.
    assert [error is None for _, _, error, _ in results] == [False, True, True, True]
    message, fields = results[0][2]
    assert fields == {"batch": 24, "ended": [1, 2, 3], "left": [], "having": [0]}
    assert "NN workers 1, 2, 3 ran out of batches after 24. NN worker 0 still had batches" in message
    assert "equal_steps=persia.dense.AllReduce(net)" in message
    assert max(seconds for *_, seconds in results) < SECONDS


def test_all_that_still_have_batches_are_told(four):
    results = run(four, plain, Hybrid(2, warmup=0), [30, 12, 40, 31])
    assert [error and error[1]["having"] for _, _, error, _ in results] == [[0, 2, 3], None, [0, 2, 3], [0, 2, 3]]
    assert {error[1]["batch"] for _, _, error, _ in results if error} == {12}


def slow_reader(rank, count):
    for number, batch in enumerate(batches_of(rank, count)):
        if rank == 1 and number in (0, 7):
            time.sleep(1.5)
        yield batch


def slow_step(embeddings, net, optimizer, batch):
    if torch.distributed.get_rank() == 1 and batch.labels[0] > 0:
        time.sleep(0.3)
    step(embeddings, net, optimizer, batch)


@pytest.mark.parametrize(("body", "source"), [(step, slow_reader), (slow_step, batches_of)], ids=["data", "step"])
def test_a_slow_nn_worker_is_no_error(two, body, source):
    results = run(two, plain, Hybrid(2, warmup=0), [12, 12], body, source)
    assert [(steps, error) for steps, _, error, _ in results] == [(12, None)] * 2
    for name, value in results[0][1].items():
        np.testing.assert_array_equal(results[1][1][name], value)


def test_more_batches_than_counters_are_kept_in_several_passes(two):
    results = run(two, plain, Hybrid(4, warmup=0), [300, 300], step, batches_of, 2)
    assert [(steps, error) for steps, _, error, _ in results] == [(600, None)] * 2


def left_early(rank, addresses, mode, counts):
    """All leave after nine steps, one of them with its last batch; then an evaluation, which none waits for."""
    embeddings, model = collection(rank, len(counts), addresses, mode)
    net = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number, batch in enumerate(embeddings.prefetch(batches_of(rank, counts[rank]))):
        if number == 9:
            break  # Drawn by one of them only, and not used.
        step(embeddings, net, optimizer, batch)
        if number == 4 and rank == 0:
            embeddings.eval()
            with torch.no_grad():
                for other in embeddings.prefetch(batches_of(rank, 3)):
                    model(other.dense, embeddings(other))
            embeddings.train()
    return embeddings.global_step


def test_loops_that_all_leave_early_are_no_error(two):
    assert run(two, left_early, Hybrid(2, warmup=0), [20, 9]) == [9, 9]


def alone(rank, addresses, mode, counts):
    embeddings, model = collection(rank, len(counts), addresses, mode)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in embeddings.prefetch(batches_of(rank, counts[rank]), equal_steps=SingleReplica(model)):
        step(embeddings, model, optimizer, batch)
    return embeddings.global_step


def test_networks_that_are_not_averaged_may_make_unequal_steps(two):
    assert run(two, alone, Hybrid(2, combine=False, warmup=0), [20, 9]) == [20, 9]


def broken_reader(rank, count):
    yield from batches_of(rank, 5)
    if rank == 1:
        raise ValueError("the disk is gone")
    yield from batches_of(rank, count)


def broken(rank, addresses, mode, counts):
    try:
        return plain(rank, addresses, mode, counts, source=broken_reader)[2]
    except ValueError as error:
        return str(error)


def test_a_source_that_fails_is_told_to_the_others(two):
    (message, fields), theirs = run(two, broken, Hybrid(2, warmup=0), [12, 12])
    assert theirs == "the disk is gone"
    assert (fields["batch"], fields["ended"], fields["left"]) == (5, [], [1])
    assert "NN worker 1 could not read it (ValueError: the disk is gone)" in message


def late(rank, addresses, mode, counts):
    """The second one begins no pass."""
    embeddings, _ = collection(rank, len(counts), addresses, mode)
    if rank == 1:
        return None
    made = nn_collection.batch_counts
    nn_collection.batch_counts = lambda connection, _: made(connection, 0.5)  # Else nothing has to be in time.
    with pytest.raises(DeadlineError) as caught:
        for batch in embeddings.prefetch(batches_of(rank, counts[rank])):
            embeddings(batch)
    return caught.value.fields


def test_who_is_late_to_read_is_named():
    with Processes(2) as processes:
        assert run(processes, late, Hybrid(2, warmup=0), [3, 3])[0] == {"batch": 0, "late": [1], "timeout": 0.5}
