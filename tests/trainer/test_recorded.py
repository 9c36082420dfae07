"""Runs of several NN workers against their replay in virtual time: same parameters, drops and staleness."""

import time

import msgspec
import numpy as np
import pytest
import torch
from switching_samples import DEADLINE, ROWS, SCHEMA, Net, batches, rows_of, trainer

import persia
from persia.cluster import Threads
from persia.errors import ConfigError, DataError
from persia.modes import Async, Bsp, Gba, HopBs, HopBw, Hybrid, Sync
from persia.modes.replay import Records, load_schedule, recorded
from persia.optim import Adagrad
from persia.types import Journaled, PushHeader, Read
from persia.virtual import VirtualTraining

WORKERS = 3
MODES = [
    Sync(),
    Sync("global"),
    Hybrid(3),
    Async(),
    Async(staleness=1),
    Bsp(4),
    HopBs(2),
    HopBw(1),
    Gba(3 * ROWS),
    Gba(4 * ROWS, tolerance=0),
    Gba(2 * ROWS, reduction="global"),
]


class Uneven(Net):
    """Takes as long as it likes, and dies when it is told to."""

    def __init__(self, seed, dies_at=None):
        super().__init__(torch.float32)
        self.random = np.random.default_rng(seed)
        self.left = dies_at

    def forward(self, dense, embeddings):
        if self.training:
            time.sleep(self.random.exponential(0.002) * self.random.choice([1, 1, 6]))
            if self.left is not None:
                self.left -= 1
                if self.left == 0:
                    raise KeyboardInterrupt("killed")
        return super().forward(dense, embeddings)


def run(mode, data, directory, seed, servers=(1, 1), victim=None, dies_at=None, **options):
    """Trains; returns what each NN worker returned or raised, and a trainer that lives."""
    cluster = Threads(WORKERS, ps=servers[0], dense_ps=servers[1], timeout=DEADLINE)
    trainers = {}

    def work(member):
        model = Uneven((seed, member.rank), dies_at if member.rank == victim else None)
        trainers[member.rank] = t = persia.Trainer(
            model,
            SCHEMA,
            optimizer=lambda p: torch.optim.Adam(p, 1e-2),
            embedding_optimizer=Adagrad(lr=0.05),
            mode=mode,
            cluster=member,
            options=persia.TrainerOptions(progress=False, timeout=DEADLINE, record_dir=str(directory), **options),
        )
        return t.fit(data)

    outcomes = cluster.outcomes(work)
    survivor = next(rank for rank in range(WORKERS) if rank != victim)
    return outcomes, trainers[survivor]


def assert_replayed(directory, data, t):
    """The replay of all segments arrives at the same parameters and rows. Returns their schedules."""
    files = sorted(directory.iterdir(), key=lambda path: int(path.stem.split("-")[1]))
    schedules = [load_schedule(path) for path in files]
    virtual = VirtualTraining(
        Net(torch.float32), SCHEMA, data.__getitem__, lambda p: torch.optim.Adam(p, 1e-2), Adagrad(lr=0.05)
    )
    for schedule in schedules:
        virtual.run(schedule)
    virtual.evaluate(data[:1])
    for mine, theirs in zip(virtual.model.parameters(), t.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
    rows, found = rows_of(t), {}
    for store in virtual.stores:
        for chunk in store.export_rows():
            ids, values = chunk.arrays["ids"], chunk.arrays["embeddings"]
            found.update({(chunk.table, int(i)): v for i, v in zip(ids, values, strict=True)})
    assert found.keys() == rows.keys()
    for key, row in rows.items():
        np.testing.assert_allclose(found[key], row, rtol=0, atol=1e-6)
    return schedules


def assert_same_report(schedules, result):
    report = result.asynchronous
    summaries = [schedule.summary() for schedule in schedules]
    assert sum(s.dropped + s.decayed for s in summaries) == report.dropped_batches
    assert sum(s.applied_rows for s in summaries) == report.rows
    assert max(s.staleness_max for s in summaries) == report.staleness_max
    ages = sum(s.staleness_mean * report.batches for s in summaries)
    assert ages == pytest.approx(report.staleness_sum)
    if isinstance(schedules[0].mode, Gba):
        assert report.token_staleness_max <= schedules[0].mode.tolerance


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_run_is_its_replay(mode, seed, tmp_path):
    data = batches(40, seed=seed)
    outcomes, t = run(mode, data, tmp_path, seed)
    schedules = assert_replayed(tmp_path, data, t)
    assert len(schedules) == 1
    if schedules[0].mode.dense().value == "server":
        assert_same_report(schedules, outcomes[0])


@pytest.mark.parametrize("mode", [Hybrid(2), Async(), HopBw(1), Gba(4 * ROWS, tolerance=1)], ids=str)
def test_with_several_ps_of_both_kinds(mode, tmp_path):
    data = batches(31)
    _, t = run(mode, data, tmp_path, 5, servers=(2, 2))
    assert_replayed(tmp_path, data, t)


def test_a_run_through_several_modes_is_its_replay(tmp_path):
    data = batches(60)
    schedule = [(0, Sync()), (4, Gba(3 * ROWS)), (9, Hybrid(2)), (12, Bsp(2)), (17, Sync())]
    _, t = run(Sync(), data, tmp_path, 3, mode_schedule=schedule)
    schedules = assert_replayed(tmp_path, data, t)
    assert [type(s.mode) for s in schedules] == [Sync, Gba, Hybrid, Bsp, Sync]


@pytest.mark.parametrize("moment", ["computing", "arriving", "pushing", "between"])
@pytest.mark.parametrize("mode", [Gba(3 * ROWS, tolerance=1), Async(), Bsp(2), HopBs(2), HopBw(1)], ids=str)
def test_a_run_with_a_crash_is_its_replay(mode, moment, tmp_path, monkeypatch):
    """An NN worker dies while it computes; before its push; when one of two PSs has it; between rows and network."""
    victim, servers = 1, (2, 1)
    monkeypatch.setattr("persia.nn.draws.Draws.abandon", lambda self: None)  # A process that is killed tells nobody.
    data = batches(45, seed=7)
    if moment != "computing":
        kill_at(moment, victim, monkeypatch)
    outcomes, t = run(mode, data, tmp_path, 11, servers, victim, 5 if moment == "computing" else None)
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
        assert report.orphans >= 1


def kill_at(moment, victim, monkeypatch):
    """Its push fails, the first one from the third on that is not dropped, and with it the NN worker."""
    from persia.dense import DenseServer
    from persia.ps import EmbeddingServer

    first = {}

    def last(header):
        return header.rank == victim and header.sequence >= 3 and header.weight  # An orphan has none.

    push, push_dense = EmbeddingServer.push, DenseServer.push

    def pushed(self, header, gradients):
        if last(header):
            first.setdefault("server", self)
            if moment == "arriving" or (moment == "pushing" and self is not first["server"]):
                raise KeyboardInterrupt("killed")
        return push(self, header, gradients)

    def pushed_dense(self, header, part):
        if last(header) and moment == "between":
            raise KeyboardInterrupt("killed")
        return push_dense(self, header, part)

    monkeypatch.setattr(EmbeddingServer, "push", pushed)
    monkeypatch.setattr(DenseServer, "push", pushed_dense)


def test_only_batch_by_batch_and_with_tokens(tmp_path):
    with pytest.raises(ConfigError, match="accumulation_steps"):
        trainer(Sync(), record_dir=str(tmp_path), accumulation_steps=2)


def test_records_with_a_gap_are_refused():
    header = PushHeader(1, 0, 1, 0, ROWS)
    with pytest.raises(DataError, match="nobody has noted"):
        recorded(Sync(), 1, ROWS, 0, Records([], [], [Journaled(0, [header])], []))
    read = Read(0, 1, 0, ROWS, [1], [0])
    with pytest.raises(DataError, match="contradict"):
        recorded(Sync(), 1, ROWS, 0, Records([read], [], [Journaled(0, [header])], []))


def test_a_schedule_file_is_that_of_a_simulation(tmp_path):
    t = trainer(Gba(2 * ROWS), record_dir=str(tmp_path))
    t.fit(batches(5))
    schedule = load_schedule(tmp_path / "segment-1.jsonl")
    assert (schedule.mode, schedule.group, schedule.nn_workers, schedule.end_step) == (Gba(2 * ROWS), 2, 1, 3)
    again = tmp_path / "again.jsonl"
    schedule.save(again)
    assert msgspec.structs.asdict(load_schedule(again)) == msgspec.structs.asdict(schedule)
