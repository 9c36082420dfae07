"""Runs of several NN workers against their replay in virtual time: same parameters, drops and staleness."""

import contextlib
import itertools
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import persia
from persia.errors import ConfigError, DataError
from persia.modes import Async, Bsp, Gba, HopBs, HopBw, Hybrid, Sync
from persia.nn.token_client import TokenClient
from persia.optim import Adagrad
from persia.ps import EmbeddingServer
from persia.pushes.step_barrier import StepBarrier
from persia.replay import Records, load_timeline, recorded
from persia.replay.virtual import VirtualTraining
from persia.testing import Threads, threads
from persia.types import BucketMap, JournalRecord, PushHeader, ReadRecord
from persia.types.half_floats import from_halves
from support.examples import examples
from support.switching_samples import DEADLINE, ROWS, SCHEMA, Net, batches, leave_batches_to, rows_of, trainer

WORKERS = 3
MODES = [
    Sync(),
    Sync("per_id"),
    Hybrid(3, warmup=0),
    Hybrid(3, combine=False, warmup=0),
    Hybrid(2, reduction="per_id", warmup=0),
    Async(),
    Bsp(4),
    HopBs(2),
    HopBw(1),
    Gba(3 * ROWS),
    Gba(4 * ROWS, tolerance=0),
    Gba(2 * ROWS, reduction="per_id"),
]


def adam(parameters):
    """Adam that does not magnify the last bit of a gradient that nearly cancels out, as sums differ in it."""
    return torch.optim.Adam(parameters, 1e-2, eps=1e-3)


def at_random(*seed):
    """Seconds that batches take."""
    random = np.random.default_rng(seed)
    while True:
        yield random.exponential(0.002) * random.choice([1, 1, 6])


class Uneven(Net):
    """Takes as long as it likes, and dies when it is told to."""

    def __init__(self, pauses, dies_at=None):
        super().__init__(torch.float32)
        self.pauses = pauses
        self.left = dies_at

    def forward(self, dense, embeddings):
        if self.training:
            time.sleep(next(self.pauses))
            if self.left is not None:
                self.left -= 1
                if self.left == 0:
                    raise KeyboardInterrupt("killed")
        return super().forward(dense, embeddings)


@contextlib.contextmanager
def in_order_of_arrival():
    """Pushes reach all PSs in the order in which the token scheduler places them, so its report has their steps."""
    push, one = TokenClient.push, threading.Lock()

    def alone(client, *arguments):
        with one:
            return push(client, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenClient, "push", alone)
        yield


def run(mode, data, directory, pauses, servers=(1, 1), dies_at=None, **options):
    """Trains; returns what each NN worker returned or raised, and a trainer that lives.

    Args:
        mode: how.
        data: batches.
        directory: for the records.
        pauses: of each NN worker, in seconds.
        servers: embedding PSs, dense PSs.
        dies_at: the batch that an NN worker dies with, by rank.
        options: of the trainer.
    """
    cluster = Threads(len(pauses), ps=servers[0], dense_ps=servers[1], timeout=DEADLINE)
    dies_at = dies_at or {}
    trainers = {}

    def work(member):
        model = Uneven(pauses[member.rank], dies_at.get(member.rank))
        trainers[member.rank] = t = persia.Trainer(
            model,
            SCHEMA,
            optimizer=adam,
            embedding_optimizer=Adagrad(lr=0.05),
            mode=mode,
            cluster=member,
            options=persia.TrainerOptions(progress=False, timeout=DEADLINE, record_dir=str(directory), **options),
        )
        return t.fit(data)

    outcomes = cluster.outcomes(work)
    survivors = [rank for rank, outcome in enumerate(outcomes) if not isinstance(outcome, BaseException)]
    assert survivors, outcomes
    return outcomes, trainers[survivors[0]]


def of_seed(seed):
    return [at_random(seed, rank) for rank in range(WORKERS)]


def assert_replayed(directory, data, t, atol=1e-5):
    """The replay of all segments arrives at the same parameters and rows. Returns their schedules.

    Several NN workers add up shares of a mean and the replay divides their sum, so last bits differ.
    """
    files = sorted(directory.iterdir(), key=lambda path: int(path.stem.split("-")[1]))
    schedules = [load_timeline(path) for path in files]
    virtual = VirtualTraining(Net(torch.float32), SCHEMA, data.__getitem__, adam, Adagrad(lr=0.05))
    for schedule in schedules:
        virtual.run(schedule)
    virtual.evaluate(data[:1])
    for mine, theirs in zip(virtual.model.parameters(), t.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=atol)
    rows, found = rows_of(t), {}
    for store in virtual.stores:
        for chunk in store.export_rows():
            ids, values = chunk.arrays["ids"], from_halves(chunk.arrays["embeddings"])
            found.update({(chunk.table, int(i)): v for i, v in zip(ids, values, strict=True)})
    assert found.keys() == rows.keys()
    for key, row in rows.items():
        np.testing.assert_allclose(found[key], row, rtol=0, atol=atol)
    return schedules


def assert_same_report(schedules, result):
    report = result.asynchronous
    summaries = [schedule.summary() for schedule in schedules]
    assert sum(s.dropped + s.decayed for s in summaries) == report.dropped_batches
    assert sum(s.applied_rows for s in summaries) == report.rows
    if "dense-1" not in schedules[0].servers:  # Of several, the report has the oldest parameters.
        assert max(s.staleness_max for s in summaries) == report.staleness_max
        ages = sum(s.staleness_mean * report.batches for s in summaries)
        assert ages == pytest.approx(report.staleness_sum)
    if isinstance(schedules[0].mode, Gba):
        assert report.token_staleness_max <= schedules[0].mode.tolerance


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_run_is_its_replay(mode, seed, tmp_path):
    data = batches(28, seed=seed)
    with in_order_of_arrival():
        outcomes, t = run(mode, data, tmp_path, of_seed(seed))
    schedules = assert_replayed(tmp_path, data, t)
    assert len(schedules) == 1
    if schedules[0].mode.dense().value == "server":
        assert_same_report(schedules, outcomes[0])


@pytest.mark.parametrize(
    "mode",
    [Hybrid(2, warmup=0), Hybrid(2, combine=False, warmup=0), Async(), HopBw(1), Gba(4 * ROWS, tolerance=1)],
    ids=str,
)
def test_with_several_ps_of_both_kinds(mode, tmp_path):
    data = batches(31)
    _, t = run(mode, data, tmp_path, of_seed(5), servers=(2, 2))
    assert_replayed(tmp_path, data, t)


@pytest.mark.parametrize(("mode", "nn_workers"), [(Async(), 3), (Hybrid(3, combine=False, warmup=0), 2)], ids=str)
def test_a_run_with_rows_of_16_bits_is_its_replay(mode, nn_workers, tmp_path, monkeypatch):
    """A replay that makes the same updates rounds alike: numbers depend on the update and the bits of the row before.

    To the last bit: a row that is rounded the other way once is rounded with other numbers from there on. Halves of two
    gradients add up to the half of their sum, thirds of three do not.
    """
    features = [msgspec.structs.replace(feature, dtype="bfloat16") for feature in SCHEMA.id_features]
    monkeypatch.setattr(sys.modules[__name__], "SCHEMA", msgspec.structs.replace(SCHEMA, id_features=features))
    data = batches(30)
    _, t = run(mode, data, tmp_path, of_seed(7)[:nn_workers])
    assert t.embeddings.schema.resolved_tables()["item"].dtype == "bfloat16"
    assert_replayed(tmp_path, data, t, atol=0)


@pytest.mark.parametrize("mode", [Hybrid(3, warmup=0), Hybrid(3, combine=False, warmup=0)], ids=str)
def test_the_record_has_pushes_that_take_long(mode, tmp_path, monkeypatch):
    """The NN worker that writes it does not wait for the others' rows otherwise."""
    push = EmbeddingServer.push

    def slow(self, header, gradients, map_version):
        time.sleep(0.05 * (header.rank == 2))
        return push(self, header, gradients, map_version)

    data = batches(6)
    with monkeypatch.context() as patch:
        patch.setattr(EmbeddingServer, "push", slow)
        _, t = run(mode, data, tmp_path, of_seed(0))
    assert_replayed(tmp_path, data, t)


@pytest.mark.parametrize("mode", [Hybrid(3, warmup=0), Hybrid(None), Hybrid(2, reduction="per_id", warmup=0)], ids=str)
def test_a_run_whose_pushes_overtake_each_other_is_its_replay(mode, tmp_path, monkeypatch):
    """Several pushes of each NN worker are in flight, and several steps open at two PSs, in any order."""
    push, add, open_steps = EmbeddingServer.push, StepBarrier._add, []

    def slow(self, header, gradients, map_version):
        time.sleep(np.random.default_rng().choice([0.0, 0.005, 0.03]))
        return push(self, header, gradients, map_version)

    def counted(self, step, arrived):
        open_steps.append(len(self._open))
        return add(self, step, arrived)

    data = batches(45)
    with monkeypatch.context() as patch:
        patch.setattr(EmbeddingServer, "push", slow)
        patch.setattr(StepBarrier, "_add", counted)
        _, t = run(mode, data, tmp_path, of_seed(8), servers=(2, 1))
    assert max(open_steps) >= 2
    assert_replayed(tmp_path, data, t)


def test_a_run_through_several_modes_is_its_replay(tmp_path):
    data = batches(60)
    schedule = [(0, Sync()), (4, Gba(3 * ROWS)), (9, Hybrid(2, warmup=0)), (12, Bsp(2)), (17, Sync())]
    _, t = run(Sync(), data, tmp_path, of_seed(3), mode_schedule=schedule)
    schedules = assert_replayed(tmp_path, data, t)
    assert [type(s.mode) for s in schedules] == [Sync, Gba, Hybrid, Bsp, Sync]


@pytest.mark.parametrize("moment", ["computing", "arriving", "pushing", "between"])
@pytest.mark.parametrize("mode", [Gba(3 * ROWS, tolerance=1), Async(), Bsp(2), HopBs(2), HopBw(1)], ids=str)
def test_a_run_with_a_crash_is_its_replay(mode, moment, tmp_path, monkeypatch):
    """An NN worker dies while it computes; before its push; when one of two PSs has it; between rows and network."""
    victim, servers = 1, (2, 1)
    monkeypatch.setattr("persia.dense.network.SLICE_SECONDS", 0.02)  # Until a place of the dead one is filled.
    monkeypatch.setattr("persia.nn.token_client.TokenClient.abandon", lambda self: None)  # As if killed.
    leave_batches_to(victim, monkeypatch)
    data = batches(45, seed=7)
    if moment != "computing":
        kill_at({victim: (moment, 3)}, monkeypatch)
    with in_order_of_arrival():
        outcomes, t = run(mode, data, tmp_path, of_seed(11), servers, {victim: 5} if moment == "computing" else None)
    assert isinstance(outcomes[victim], KeyboardInterrupt)
    others = [o for rank, o in enumerate(outcomes) if rank != victim]
    assert [o for o in others if isinstance(o, BaseException)] == []
    schedules = assert_replayed(tmp_path, data, t)
    report = others[0].asynchronous
    assert report.batches + report.dropped_batches == 45
    if moment == "computing":
        assert report.lost_tokens == 1
        assert_same_report(schedules, others[0])
    else:
        assert report.lost_tokens <= 1  # It may have drawn the next one.
        assert report.abandoned >= 1


@pytest.mark.parametrize(
    "mode", [Sync(), Hybrid(2, warmup=0), Hybrid(2, combine=False, warmup=0), Gba(3 * ROWS), Async()], ids=str
)
def test_a_gradient_that_a_ps_lacks_is_missing_in_the_replay(mode, tmp_path, monkeypatch):
    """As if its embedding worker had died within the push: another one sends the rest of the push empty."""
    push, first, lost = EmbeddingServer.push, [], []

    def pushed(self, header, gradients, map_version):
        first.append(self)
        if header.sequence == 3 and self is not first[0]:
            lost.append(header)
            gradients = {}
        return push(self, header, gradients, map_version)

    data = batches(30)
    with monkeypatch.context() as patch:
        patch.setattr(EmbeddingServer, "push", pushed)
        _, t = run(mode, data, tmp_path, of_seed(6), servers=(2, 1))
    schedules = assert_replayed(tmp_path, data, t)
    assert lost
    events = [event for s in schedules for event in s.events if event.server.startswith("ps")]
    assert sorted(e.worker for e in events if e.empty) == sorted(header.rank for header in lost)


def kill_at(deaths, monkeypatch):
    """Their pushes fail, the first from a sequence number on that is not dropped, and with them the NN workers.

    Args:
        deaths: moment and that number, by rank.
        monkeypatch: puts it in place.
    """
    from persia.dense import DenseServer

    first, failed = {}, set()

    def last(header):
        """At which moment this push is to fail."""
        moment, sequence = deaths.get(header.rank, ("", 0))
        return moment if header.sequence >= sequence and header.rows else ""

    def fail(server, header):
        """Once at each server: another NN worker fills the place of the push."""
        if (server, header.rank) not in failed:
            failed.add((server, header.rank))
            raise KeyboardInterrupt("killed")

    push, push_dense = EmbeddingServer.push, DenseServer.push

    def pushed(self, header, gradients, map_version):
        if moment := last(header):
            server = first.setdefault(header.rank, self)
            if moment == "arriving" or (moment == "pushing" and self is not server):
                fail(self, header)
        return push(self, header, gradients, map_version)

    def pushed_dense(self, header, part):
        if last(header) == "between":
            fail(self, header)
        return push_dense(self, header, part)

    monkeypatch.setattr(EmbeddingServer, "push", pushed)
    monkeypatch.setattr(DenseServer, "push", pushed_dense)


def modes_of(nn_workers):
    group, small = st.integers(1, 6), st.integers(0, 3)
    reduction = st.sampled_from(["per_id", "global"])
    return st.one_of(
        st.builds(Gba, group.map(lambda m: m * ROWS), small, reduction),
        st.builds(Async),
        st.builds(Bsp, group, reduction),
        st.builds(HopBs, st.integers(1, 3)),
        st.builds(HopBw, st.integers(0, nn_workers - 1), reduction),
        st.builds(Hybrid, st.sampled_from([1, 3, "auto"]), st.booleans(), reduction, st.sampled_from([0, 7])),
        st.builds(Hybrid, st.none(), st.booleans(), reduction),
        st.builds(Sync, reduction),
    )


@settings(max_examples=examples(25), deadline=None)
@given(st.data())
def test_any_interleaving_and_any_crash_are_their_replay(data):
    """Any mode, NN workers of any speed, any of which but one may die at any moment: same parameters, same drops."""
    nn_workers = data.draw(st.integers(1, 4), "NN workers")
    mode = data.draw(modes_of(nn_workers), "mode")
    servers = data.draw(st.tuples(st.integers(1, 2), st.integers(1, 2)), "PSs")
    milliseconds = st.lists(st.sampled_from([0, 0, 1, 3, 10]), min_size=1, max_size=6)
    pauses = [data.draw(milliseconds, f"milliseconds of {rank}") for rank in range(nn_workers)]
    count = data.draw(st.integers(1, 24), "batches")
    deaths = {}
    if mode.dense().value == "server" and nn_workers > 1:
        death = st.tuples(st.sampled_from(["computing", "arriving", "pushing", "between"]), st.integers(1, 6))
        deaths = data.draw(st.dictionaries(st.integers(0, nn_workers - 2), death, max_size=nn_workers - 1), "deaths")
    in_order = data.draw(st.booleans(), "pushes in order of arrival")
    loads = batches(count, seed=count)
    with tempfile.TemporaryDirectory() as directory:
        order = in_order_of_arrival() if in_order else contextlib.nullcontext()
        with pytest.MonkeyPatch.context() as patch, order:
            patch.setattr("persia.dense.network.SLICE_SECONDS", 0.02)
            patch.setattr("persia.nn.token_client.TokenClient.abandon", lambda self: None)
            kill_at(deaths, patch)
            outcomes, t = run(
                mode,
                loads,
                directory,
                [(each / 1000 for each in itertools.cycle(pause)) for pause in pauses],
                servers,
                {rank: at for rank, (moment, at) in deaths.items() if moment == "computing"},
            )
        dead = {rank for rank, outcome in enumerate(outcomes) if isinstance(outcome, KeyboardInterrupt)}
        assert dead <= deaths.keys()  # There may be too few batches for all to die.
        assert [o for rank, o in enumerate(outcomes) if isinstance(o, BaseException) and rank not in dead] == []
        schedules = assert_replayed(Path(directory), loads, t)
    if mode.dense().value == "server":
        result = outcomes[-1]
        report = result.asynchronous
        assert report.batches + report.dropped_batches == count
        if all(deaths[rank][0] == "computing" for rank in dead):
            assert report.lost_tokens == len(dead)
            if in_order:
                assert_same_report(schedules, result)


def test_a_run_with_another_bucket_map_is_its_replay(tmp_path, monkeypatch):
    buckets = BucketMap.even(3).moved(2)
    monkeypatch.setattr(threads, "BucketMap", SimpleNamespace(even=lambda servers: buckets))
    data = batches(12, seed=0)
    _, t = run(Gba(2 * ROWS), data, tmp_path, of_seed(0)[:2], servers=(2, 1))
    (schedule,) = assert_replayed(tmp_path, data, t)
    assert schedule.buckets == buckets
    training = VirtualTraining(Net(torch.float32), SCHEMA, data.__getitem__, torch.optim.Adam, Adagrad(lr=0.05))
    training.run(schedule)
    copied = VirtualTraining(Net(torch.float32), SCHEMA, data.__getitem__, torch.optim.Adam, Adagrad(lr=0.05))
    copied.load_state_dict(training.state_dict())
    np.testing.assert_array_equal(copied.evaluate(data), training.evaluate(data))
    with pytest.raises(DataError, match="other ids at each of them"):
        training.run(msgspec.structs.replace(schedule, buckets=None))


def test_only_batch_by_batch_and_with_tokens(tmp_path):
    with pytest.raises(ConfigError, match="accumulation_steps"):
        trainer(Sync(), record_dir=str(tmp_path), accumulation_steps=2)


def test_records_with_a_gap_are_refused():
    header = PushHeader(1, 0, 1, 0, ROWS)
    with pytest.raises(DataError, match="No record of the batch of push 1 of NN worker 0"):
        recorded(Sync(), 1, ROWS, 0, Records([], [], [JournalRecord(0, [header], {}, [])], []))
    read = ReadRecord(0, 1, 0, ROWS, 7, [0])
    with pytest.raises(DataError, match="contradict"):
        recorded(Sync(), 1, ROWS, 0, Records([read], [], [JournalRecord(0, [header], {7: 1}, [])], []))
    with pytest.raises(DataError, match="PS 0 has no record of the lookup of batch 0"):
        recorded(Sync(), 1, ROWS, 0, Records([read], [], [JournalRecord(0, [header], {}, [])], []))


def test_a_schedule_file_is_that_of_a_simulation(tmp_path):
    t = trainer(Gba(2 * ROWS), record_dir=str(tmp_path))
    t.fit(batches(5))
    schedule = load_timeline(tmp_path / "phase-1.jsonl")
    assert (schedule.mode, schedule.group, schedule.nn_workers, schedule.end_step) == (Gba(2 * ROWS), 2, 1, 3)
    again = tmp_path / "again.jsonl"
    schedule.save(again)
    assert msgspec.structs.asdict(load_timeline(again)) == msgspec.structs.asdict(schedule)
