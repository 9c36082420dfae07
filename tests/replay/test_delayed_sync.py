"""A step does not depend on how many NN workers share it, and Hybrid is Sync with older rows: by written-out rules."""

import functools
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import binary_cross_entropy_with_logits

import persia
from persia.modes import Bsp, Gba, HopBw, Hybrid, Sync
from persia.optim import SGD, Adagrad, Adam
from persia.ps import EmbeddingServer, ServerOptions
from persia.replay import Setting, Slowdown, Trace, load_timeline, simulate
from persia.schema import Table
from persia.testing import Threads
from persia.testing.logistic import LOCAL, Problem, delayed_sync, lock_step
from persia.types import Gradients, PushHeader
from support.examples import examples
from support.listed import Listed
from support.switching_samples import CrashingNet, Net, adam, batches, rows_of, trainer

GLOBAL = 32
STEPS = 16
OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl"]


def split(parts, optimizer):
    """Global batches of `GLOBAL` rows, each in `parts` batches."""
    return Problem(optimizer=optimizer, rows=GLOBAL, parts=parts)


@functools.cache
def by_one_nn_worker(optimizer):
    """Trained by the rule itself, with whole batches."""
    whole = delayed_sync(split(1, optimizer), range(STEPS), 1)
    assert whole.apart(split(1, optimizer)) > 0.1
    return whole


def in_lock_step(mode, parts, optimizer):
    return split(parts, optimizer).run(lock_step(mode, parts, STEPS * parts, local=GLOBAL // parts))


@pytest.mark.parametrize("parts", [1, 2, 4, 8, 32])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_does_not_depend_on_how_many_nn_workers_share_it(optimizer, parts):
    """Against one NN worker with the whole batch, by the rule itself."""
    whole = by_one_nn_worker(optimizer)
    for mode in (Sync(), Gba(GLOBAL), Bsp(parts), HopBw(0)):
        assert in_lock_step(mode, parts, optimizer).apart(whole) <= 1e-9
    if parts > 1:
        assert in_lock_step(Sync("per_id"), parts, optimizer).apart(whole) > 1e-3


@pytest.mark.parametrize("mode", [Sync(), Hybrid(2, warmup=0), Bsp(4), Gba(4 * LOCAL)], ids=str)
@pytest.mark.parametrize("optimizer", [SGD(0.5), Adagrad(0.5), Adam(0.5)], ids=lambda o: type(o).__name__)
def test_rows_do_not_depend_on_how_nn_workers_share_a_step(optimizer, mode):
    """Four pushes, of uneven batches, not all with the same ids or with any, and one with their mean over all rows."""
    rng = np.random.default_rng(3)
    table, weights = {"item": Table("item", dim=3)}, [5, 1, LOCAL, 3]
    many, one = (
        EmbeddingServer(table, optimizer, of, 0, 1, ServerOptions(workers, 20.0))
        for of, workers in ((mode, 4), (Sync(), 1))
    )
    every = np.arange(9, dtype=np.uint64)
    for server in (many, one):
        server.lookup({"item": every}, True)
    many.switch(mode, 1, 0)
    for step in range(6):
        sizes = (4, 9, step % 2, 6)  # The ids of a batch may all be at other PSs.
        parts = [(np.sort(rng.choice(every, size, replace=False)), rng.normal(size=(size, 3))) for size in sizes]
        total = np.zeros((9, 3))
        for weight, (ids, values) in zip(weights, parts, strict=True):
            total[ids.astype(int)] += weight * values
        tokens = mode.dense().value == "server"

        def push(rank, step=step, parts=parts, tokens=tokens):
            ids, values = parts[rank]
            place = {"slot": rank, "group": 4, "token": step} if tokens else {}
            header = PushHeader(1, rank, step + 1, step, weights[rank], **place)
            many.push(header, {"item": Gradients(ids, values.astype(np.float32))} if len(ids) else {})

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(push, rng.permutation(4)))
        seen = np.unique(np.concatenate([ids for ids, _ in parts]))
        mean = (total / sum(weights))[seen.astype(int)].astype(np.float32)
        one.push(PushHeader(1, 0, step + 1, step, sum(weights)), {"item": Gradients(seen, mean)})
    found, expected = (server.lookup({"item": every}, False)["item"] for server in (many, one))
    np.testing.assert_allclose(found, expected, atol=1e-5)


@settings(deadline=None, max_examples=examples(40))
@given(st.integers(2, 3), st.integers(2, 4), st.sampled_from([SGD(0.5), Adagrad(0.5), Adam(0.5)]), st.data())
def test_steps_are_applied_in_order_whichever_arrives_first(workers, steps, optimizer, data):
    """All pushes of several open steps, in any order, against the means of the steps, one after the other."""
    table, every = {"item": Table("item", dim=2)}, np.arange(4, dtype=np.uint64)
    mode = Hybrid(4, warmup=0)
    many, one = (EmbeddingServer(table, optimizer, mode, 0, 1, ServerOptions(n, 20.0)) for n in (workers, 1))
    for server in (many, one):
        server.lookup({"item": every}, True)
        server.switch(mode, 1, 0)
    rng = np.random.default_rng(data.draw(st.integers(0, 99), "seed of the gradients"))
    values = rng.normal(size=(steps, workers, 4, 2)).astype(np.float32)
    order = data.draw(st.permutations([(step, rank) for step in range(steps) for rank in range(workers)]), "order")

    def push(step, rank):
        return many.push(PushHeader(1, rank, step + 1, step, 8), {"item": Gradients(every, values[step, rank])})

    with ThreadPoolExecutor(len(order)) as pool:
        calls = []
        for place in order:
            calls.append(pool.submit(push, *place))
            time.sleep(0.001)  # Nearly always they arrive in this order.
        for call in calls:
            call.result(20.0)
    for step in range(steps):
        one.push(PushHeader(1, 0, step + 1, step, 8), {"item": Gradients(every, values[step].mean(0))})
    found, expected = (server.lookup({"item": every}, False)["item"] for server in (many, one))
    np.testing.assert_allclose(found, expected, atol=1e-5)


@st.composite
def clusters(draw):
    speeds = st.floats(0.5, 9.0)
    parts = [[Slowdown(0.0, draw(speeds)), Slowdown(2.0, draw(speeds))] for _ in range(draw(st.integers(1, 5)))]
    latency = st.sampled_from([0.0, 0.3, 1.7])
    return Setting(Trace(parts, 5.0), local_batch=LOCAL, lookup=draw(latency), push=draw(latency))


@settings(deadline=None, max_examples=examples(100))
@given(
    clusters(),
    st.one_of(
        st.builds(Hybrid, st.one_of(st.integers(1, 6), st.just("auto")), warmup=st.sampled_from([0, 7])),
        st.just(Hybrid(None)),
    ),
    st.sampled_from(OPTIMIZERS),
    st.integers(1, 60),
)
def test_hybrid_is_sync_with_the_rows_of_earlier_steps(setting, mode, optimizer, count):
    schedule = simulate(mode, setting, count)
    lookups = {event.batch: event.version for event in schedule.events if event.kind == "lookup"}
    versions = [lookups[batch] for batch in range(count)]
    workers = setting.nn_workers
    for batch, version in enumerate(versions):
        step = batch // workers
        limit = mode.staleness if isinstance(mode.staleness, int) else count
        assert step - (limit * step // mode.warmup if step < mode.warmup else limit) <= version <= step
    found = Problem(optimizer=optimizer).run(schedule)
    assert found.apart(delayed_sync(Problem(optimizer=optimizer), versions, workers)) <= 1e-9


def written_out(data, versions, workers, optimizer):
    """The rule of `delayed_sync` with a torch network, for SGD and Adagrad. Returns the network, and rows by key."""
    first = trainer(Sync(), embedding_optimizer=optimizer).embeddings.connection.servers[0]
    every = np.arange(40, dtype=np.uint64)
    tables = {name: torch.from_numpy(first.lookup({name: every}, True)[name].copy()) for name in ("user", "item")}
    sums = {name: torch.full_like(t, getattr(optimizer, "initial_accumulator", 0.0)) for name, t in tables.items()}
    history, seen = [tables], {name: set() for name in tables}
    net = Net(torch.float32)
    adam = torch.optim.Adam(net.parameters(), 1e-2)
    for start in range(0, len(data), workers):
        numbers = range(start, min(start + workers, len(data)))
        leaves = {i: {n: t.clone().requires_grad_() for n, t in history[versions[i]].items()} for i in numbers}
        adam.zero_grad()
        total = sum(len(data[i].labels) for i in numbers)
        for i, mine in leaves.items():
            ids = {name: data[i].id_features[name].values.astype(np.int64) for name in tables}
            for name, values in ids.items():
                seen[name].update(values.tolist())
            logits = net(torch.from_numpy(data[i].dense), {name: mine[name][ids[name]] for name in tables})
            loss = binary_cross_entropy_with_logits(logits, torch.from_numpy(data[i].labels), reduction="sum") / total
            loss.backward()
        adam.step()
        rows = {}
        for name, table in history[-1].items():
            gradient = sum(mine[name].grad for mine in leaves.values())
            sums[name] += gradient**2
            scale = sums[name].sqrt() + 1e-10 if isinstance(optimizer, Adagrad) else 1.0
            rows[name] = table - optimizer.lr * gradient / scale
        history.append(rows)
    keys = {(name, i) for name, ids in seen.items() for i in ids}
    return net, {(name, i): history[-1][name][i].numpy() for name, i in keys}


def uneven(count):
    """Batches of 16, 5, 11, 16, 5, ... rows."""
    return [batch.slice(0, (16, 5, 11)[number % 3]) for number, batch in enumerate(batches(count))]


def versions_in(directory):
    """The version in which each batch looked its rows up, as the PS has recorded it."""
    versions = {}
    for phase in directory.glob("phase-*.jsonl"):
        versions |= {event.batch: event.version for event in load_timeline(phase).events if event.kind == "lookup"}
    return versions


def assert_delayed_sync(t, data, workers, optimizer, versions):
    """Compares a trained `Trainer` with the rule."""
    net, rows = written_out(data, [versions[batch] for batch in range(len(data))], workers, optimizer)
    for mine, theirs in zip(t.model.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
    found = rows_of(t)
    assert found.keys() == rows.keys()
    for key, row in rows.items():
        np.testing.assert_allclose(found[key], row, rtol=0, atol=1e-5)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("mode", [Sync(), Hybrid(3, warmup=0), Hybrid("auto", warmup=0)], ids=str)
def test_a_run_is_delayed_sync(mode, workers, tmp_path):
    """Native store, barrier, push threads and all. Each mode and each number of NN workers has both optimizers."""
    data, optimizer = uneven(40), SGD(lr=0.5) if (workers + (mode != Sync())) % 2 else Adagrad(lr=0.05)

    def work(member):
        t = trainer(mode, member, embedding_optimizer=optimizer, record_dir=str(tmp_path))
        t.fit(data)
        return t

    t = Threads(workers, timeout=30.0).run(work)[0]
    assert_delayed_sync(t, data, workers, optimizer, versions_in(tmp_path))


@pytest.mark.parametrize("workers", [1, 3])
def test_a_run_with_rests_and_switches_is_delayed_sync(workers, tmp_path):
    """Calls of `fit` of a few steps each, and switches between and within them."""
    data, optimizer = uneven(40), Adagrad(lr=0.05)
    schedule = [(2, Hybrid(2, warmup=0)), (5, Sync()), (7, Hybrid(None)), (10, Hybrid(3, warmup=12))]

    def work(member):
        options = {"record_dir": str(tmp_path), "mode_schedule": schedule}
        t = trainer(Sync(), member, embedding_optimizer=optimizer, **options)
        for steps in (1, 2, 3, 3):
            t.fit(data, max_steps=steps)
        t.fit(data)
        return t

    t = Threads(workers, timeout=30.0).run(work)[0]
    assert len(list(tmp_path.glob("phase-*.jsonl"))) >= 8
    assert_delayed_sync(t, data, workers, optimizer, versions_in(tmp_path))


@settings(deadline=None, max_examples=examples(15))
@given(
    st.integers(1, 3),
    st.sampled_from([Sync(), Hybrid(2, warmup=0), Hybrid(3, warmup=12), Hybrid("auto", warmup=0)]),
    st.integers(3, 12),
    st.integers(0, 2),
    st.integers(0, 3),
)
def test_a_run_that_dies_is_delayed_sync(workers, mode, death, rank, increments):
    """One NN worker dies with several steps open; all go on from the last checkpoint, which may hold changes only."""
    data, optimizer = Listed(uneven(40)), Adagrad(lr=0.05)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("persia.nn.pass_threads.PUSH_GRACE", 0.1)  # Pushes that wait for the dead one never return.
        before, checkpoints, after = (Path(folder) / name for name in ("before", "checkpoints", "after"))
        options = {"checkpoint_dir": str(checkpoints), "checkpoint_increments": increments, "checkpoint_share": 1.0}

        def first(member):
            model = CrashingNet(death, RuntimeError) if member.rank == rank % workers else None
            recorded = {"model": model, "record_dir": str(before), "checkpoint_every_steps": 2, **options}
            trainer(mode, member, embedding_optimizer=optimizer, **recorded).fit(data)

        def second(member):
            goes_on = persia.TrainerOptions(progress=False, record_dir=str(after), **options)
            net = Net(torch.float32)
            t = persia.Trainer.resume(str(checkpoints), net, optimizer=adam, cluster=member, options=goes_on)
            resumed = t.global_step
            t.fit(data)
            return t, resumed

        outcomes = Threads(workers, timeout=30.0).outcomes(first)
        assert isinstance(outcomes[rank % workers], RuntimeError)
        t, resumed = Threads(workers, timeout=30.0).run(second)[0]
        versions = {i: v for i, v in versions_in(before).items() if i < resumed * workers} | versions_in(after)
    assert 2 <= resumed < death
    assert_delayed_sync(t, data, workers, optimizer, versions)
