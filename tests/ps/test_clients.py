"""Several clients of one table of a PS: each gets what it would get alone, and nothing is lost or counted twice."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia.modes import Hybrid
from persia.optim import SGD, Adagrad, Adam
from persia.ps import EmbeddingServer, ServerOptions
from persia.schema import Table, Zeros
from persia.store import NativeStore
from persia.types import Gradients, PushHeader
from support.examples import examples
from support.twins.store import ReferenceStore

CLIENTS = 8
DEADLINE = 60.0
DIM = 3
IDS = 80
"""Rows of each client."""


def new_ps(optimizer, threads=1, store=NativeStore, **table):
    """A PS that applies the push of each client on arrival."""
    options = ServerOptions(CLIENTS, DEADLINE, store=store)
    tables = {"t": Table("t", DIM, capacity=1 << 20, **table)}  # Large enough for several shards.
    return EmbeddingServer(tables, optimizer, Hybrid(combine=False), 3, threads, options)


def own_ids(client):
    """Rows that no other client has."""
    return np.random.default_rng(client).integers(0, 2**64, IDS, np.uint64) // CLIENTS * CLIENTS + np.uint64(client)


def push(ps, client, sequence, ids, gradients):
    header = PushHeader(1, client, sequence, sequence - 1, len(ids))
    (counts,) = ps.push(header, {"t": Gradients(ids, gradients)}).values()
    return counts


def train(ps, client, seed, rounds):
    """Looks up and pushes some of its rows in each round; returns the rows that it has read."""
    random = np.random.default_rng([seed, client])
    read = []
    for sequence in range(1, rounds + 1):
        ids = random.permutation(own_ids(client))[: random.integers(1, IDS + 1)]
        read.append(ps.lookup({"t": ids}, True)["t"].copy())
        gradients = random.normal(size=(len(ids), DIM)).astype(np.float32)
        assert push(ps, client, sequence, ids, gradients).applied == len(ids)
        if sequence % 2:
            assert push(ps, client, sequence, ids, gradients).duplicate == len(ids)
    return read


def counted(ps):
    (counters,) = ps.statistics().values()
    return {name: count for name, count in counters.items() if name != "bytes"}


@settings(max_examples=examples(10), deadline=None)
@given(
    optimizer=st.sampled_from([SGD(0.1, momentum=0.9), Adagrad(0.1), Adam(0.1)]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
)
def test_clients_get_what_they_would_get_alone(optimizer, dtype, threads, seed):
    ps, twin = new_ps(optimizer, threads, dtype=dtype), new_ps(optimizer, store=ReferenceStore, dtype=dtype)
    with ThreadPoolExecutor(CLIENTS) as pool:
        read = list(pool.map(lambda client: train(ps, client, seed, 3), range(CLIENTS), timeout=DEADLINE))
    for client in range(CLIENTS):
        for mine, alone in zip(read[client], train(twin, client, seed, 3), strict=True):
            np.testing.assert_array_equal(mine.view(np.uint32), alone.view(np.uint32))
        mine, alone = (each.read_rows("t", own_ids(client), True) for each in (ps, twin))
        assert mine.found.tolist() == alone.found.tolist()
        np.testing.assert_array_equal(mine.values, alone.values)
        np.testing.assert_array_equal(mine.state.values, alone.state.values)
        np.testing.assert_array_equal(mine.state.update_count, alone.state.update_count)
    assert counted(ps) == counted(twin)


@pytest.mark.parametrize("threads", [1, 2])
def test_no_update_of_a_shared_row_is_lost(threads):
    rounds = 20
    ps = new_ps(SGD(0.5), threads, initializer=Zeros())
    every = np.arange(2000, dtype=np.uint64)

    def work(client):
        random = np.random.default_rng(client)
        times = np.zeros(len(every), np.int64)
        for sequence in range(1, rounds + 1):
            ids = random.permutation(every)[: random.choice([300, 1800])]
            ps.lookup({"t": ids}, True)
            assert push(ps, client, sequence, ids, np.ones((len(ids), DIM), np.float32)).applied == len(ids)
            times[ids.astype(np.int64)] += 1
        return times

    with ThreadPoolExecutor(CLIENTS) as pool:
        times = sum(pool.map(work, range(CLIENTS), timeout=DEADLINE))
    rows = ps.read_rows("t", every, True)
    assert rows.found.all()
    assert rows.state.update_count.tolist() == times.tolist()
    np.testing.assert_array_equal(rows.values, np.repeat(-0.5 * times[:, None].astype(np.float32), DIM, 1))
    counters = counted(ps)
    assert counters["rows"] == counters["misses"] == counters["admitted"] == len(every)
    assert counters["applied"] == counters["lookups"] == times.sum()
    assert counters["absent"] == counters["duplicates"] == counters["nonfinite"] == 0
