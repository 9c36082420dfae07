"""Modes over dense PSs and switches between modes, on one NN worker and on several."""

import itertools
import threading
import time

import numpy as np
import pytest
import torch

import persia
from persia import Batch, IdColumn
from persia.coordinator import TokenScheduler
from persia.errors import ConfigError, PersiaError
from persia.modes import Async, Bsp, Gba, HopBs, HopBw, Hybrid, Sync
from persia.nn.token_client import TokenClient
from persia.optim import Adagrad, Adam, APMSqueeze, APMSqueezeOptions, OneBit, Uncompressed
from persia.testing import Threads
from support.switching_samples import (
    DEADLINE,
    ROWS,
    SCHEMA,
    CrashingNet,
    Net,
    assert_same,
    batches,
    leave_batches_to,
    trainer,
)


@pytest.mark.parametrize("reduction", ["per_id", "global"])
def test_gba_of_one_batch_on_one_nn_worker_is_sync(reduction):
    data = batches(50)
    sync, gba = trainer(Sync(reduction), dtype=torch.float64), trainer(Gba(ROWS, 3, reduction), dtype=torch.float64)
    expected, result = sync.fit(data), gba.fit(data)
    assert_same(sync, gba, 1e-9)
    assert (result.steps, result.rows, gba.global_step, gba.position) == (50, expected.rows, 50, 0)
    assert result.progressive.auc == expected.progressive.auc


def test_gba_on_one_nn_worker_accumulates_by_token():
    gba = trainer(Gba(4 * ROWS, reduction="global"), optimizer=lambda p: torch.optim.SGD(p, 0.1))
    large = trainer(Sync(), optimizer=lambda p: torch.optim.SGD(p, 0.1))
    data = batches(22)

    def joined(part):
        return Batch(
            {name: IdColumn(np.concatenate([b.id_features[name].values for b in part])) for name in ("user", "item")},
            np.concatenate([b.dense for b in part]),
            np.concatenate([b.labels for b in part]),
        )

    result = gba.fit(data)
    large.fit([joined(data[i : i + 4]) for i in range(0, 22, 4)])  # The last one has the remainder of 2.
    assert result.steps == 6
    assert_same(gba, large, 2e-6)


@pytest.mark.parametrize("mode", [Async(), Bsp(3), HopBs(2), HopBw(1), Gba(4 * ROWS)], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("ps", [1, 2])
def test_all_rows_are_trained_by_several_nn_workers(mode, ps):
    data = batches(41)
    cluster = Threads(nn_workers=4, ps=1, dense_ps=ps, timeout=DEADLINE)

    def work(member):
        t = trainer(mode, member)
        return t.fit(data), t

    found = cluster.run(work)
    results, trainers = [r for r, _ in found], [t for _, t in found]
    assert results[0].rows == 41 * ROWS
    assert {t.global_step for t in trainers} == {results[0].global_step}
    report = results[0].asynchronous
    assert report.batches + report.dropped_batches == 41
    assert sum(w.batches + w.dropped for w in report.workers.values()) == 41
    for t in trainers[1:]:
        for p, q in zip(trainers[0].model.parameters(), t.model.parameters(), strict=True):
            assert torch.equal(p, q)
    if isinstance(mode, (Async, HopBs)):
        assert results[0].steps == 41
    if isinstance(mode, Bsp):
        assert results[0].steps == 14
    if isinstance(mode, Gba):
        assert results[0].steps == 11
        assert report.token_staleness_max <= 3


def test_steps_are_exact_and_training_goes_on_where_it_was():
    data = batches(40)
    t = trainer(Gba(4 * ROWS))
    assert t.fit(data, max_steps=3).steps == 3
    assert (t.global_step, t.position) == (3, 12)
    t.fit(data)
    whole = trainer(Gba(4 * ROWS))
    whole.fit(data)
    assert_same(t, whole, 0)


def test_a_schedule_of_all_modes_equals_sync_on_one_nn_worker():
    """All these modes are Sync with one NN worker and one batch a step; so switching must change nothing."""
    data = batches(50)
    modes = [Sync(), Gba(ROWS), Bsp(1), Sync(), HopBw(0), Async(), HopBs(1), Gba(ROWS), Sync()]
    switching = trainer(
        Sync(),
        dtype=torch.float64,
        embedding_optimizer=Adam(lr=0.01),
        mode_schedule=[(5 * i, mode) for i, mode in enumerate(modes)],
        schedule=persia.Schedule(warmup_steps=20, decay="cosine", total_steps=60),
    )
    plain = trainer(
        Sync(),
        dtype=torch.float64,
        embedding_optimizer=Adam(lr=0.01),
        schedule=persia.Schedule(warmup_steps=20, decay="cosine", total_steps=60),
    )
    result = switching.fit(data)
    plain.fit(data)
    assert result.steps == 50
    assert_same(switching, plain, 1e-12)
    assert [(s.step, s.after) for s in switching.switches] == [(5 * i, m) for i, m in enumerate(modes) if i]
    theirs = plain.step.optimizer.state_dict()["state"]
    for number, mine in switching.step.optimizer.state_dict()["state"].items():
        for key, value in mine.items():
            torch.testing.assert_close(value, theirs[number][key], rtol=0, atol=1e-12)


class CountingNet(Net):
    """Remembers which batches it was trained with, by their first dense value."""

    def __init__(self):
        super().__init__(torch.float32)
        self.seen = []

    def forward(self, dense, embeddings):
        if self.training:
            self.seen.append(float(dense[0, 0]))
        return super().forward(dense, embeddings)


class Stream:
    """Batches without end, until somebody ends them; the dense values of each are its number, from 1."""

    def __init__(self):
        self.template = batches(1)[0]
        self.lock = threading.Lock()
        self.read, self.limit = 0, None

    def batches(self, epoch=0, start=0):
        for number in itertools.count(start):
            with self.lock:
                if self.limit is not None and number >= self.limit:
                    return
                self.read = max(self.read, number + 1)
            dense = np.full_like(self.template.dense, number + 1)
            yield Batch(self.template.id_features, dense, self.template.labels)

    def __iter__(self):
        return self.batches()

    def end(self):
        with self.lock:
            self.limit = self.read + 5


@pytest.mark.parametrize(("nn_workers", "switches"), [(1, 24), (3, 24), pytest.param(3, 1000, marks=pytest.mark.slow)])
def test_switches_at_any_time_train_each_batch_once(nn_workers, switches):
    data = Stream()
    cluster = Threads(nn_workers=nn_workers, timeout=DEADLINE)
    random = np.random.default_rng(0)
    modes = [Sync(), Hybrid(2, warmup=0), Gba(2 * ROWS), Async(), Bsp(2), Hybrid(None), HopBs(2), HopBw(0)]
    made = []
    ready = threading.Barrier(nn_workers + 1)
    over = threading.Event()
    refused = []

    def work(member):
        t = persia.Trainer(
            CountingNet(),
            SCHEMA,
            optimizer=lambda p: torch.optim.SGD(p, 1e-9),  # The numbers of the batches are large.
            embedding_optimizer=Adagrad(lr=0.05),
            mode=Sync(),
            cluster=member,
            options=persia.TrainerOptions(progress=False, timeout=DEADLINE),
        )
        made.append(t)
        ready.wait(DEADLINE)
        try:
            return t.fit(data)
        finally:
            over.set()

    def switch():
        ready.wait(DEADLINE)
        try:
            while len(made[0].switches) < switches and not over.wait(random.exponential(0.005)):
                try:
                    made[random.integers(nn_workers)].switch(modes[random.integers(len(modes))])
                except PersiaError as error:
                    refused.append(str(error))
        finally:
            data.end()

    switcher = threading.Thread(target=switch)
    switcher.start()
    try:
        results = cluster.run(work)
    finally:
        over.set()
        switcher.join(DEADLINE)
    assert results[0].rows == data.limit * ROWS
    seen = sorted(value for t in made for value in t.model.seen if value)  # A batch that is made up has zeros.
    assert seen == [float(n + 1) for n in range(data.limit)]
    assert len(made[0].switches) >= switches
    assert all("in progress" in text for text in refused)


@pytest.mark.parametrize("mode", [Sync(), Hybrid(2, warmup=0)])
def test_quiescing_without_data_on_one_nn_worker_is_one_step(mode):
    def work(member):
        t = persia.Trainer(
            CountingNet(),
            SCHEMA,
            optimizer=lambda p: torch.optim.SGD(p, 1e-9),
            embedding_optimizer=Adagrad(lr=0.05),
            mode=mode,
            cluster=member,
            options=persia.TrainerOptions(progress=False, timeout=DEADLINE),
        )

        def wish(_net, _inputs):
            if t.global_step == 1:
                t.step.replicas.request_stop()

        t.model.register_forward_pre_hook(wish)  # In the second step, so the third is the last before the rest.
        return t.fit(batches(5)).steps

    assert Threads(nn_workers=2, timeout=DEADLINE).run(work) == [3, 3]


def test_a_switch_that_cannot_be_is_refused_and_training_goes_on():
    data = batches(20)
    t = trainer(Sync())
    t.fit(data[:10])
    with pytest.raises(ConfigError, match="no multiple"):
        t.switch(Gba(ROWS + 1))
    with pytest.raises(ConfigError, match="backup"):
        t.switch(HopBw(1))
    t.switch(Gba(2 * ROWS))
    with pytest.raises(PersiaError, match="in progress"):
        t.switch(Async())
    result = t.fit(data)
    assert [type(s.after) for s in t.switches] == [Gba]
    assert result.steps == 10
    with pytest.raises(ConfigError, match="accumulation_steps"):
        trainer(Gba(ROWS), accumulation_steps=2)
    with pytest.raises(ConfigError, match="fp16"):
        trainer(Async(), precision="fp16")
    with pytest.raises(ConfigError, match="mode_schedule"):
        trainer(Sync(), mode_schedule=[(5, Sync()), (5, Async())])


def test_advice_with_far_fewer_nn_workers_than_gradients(caplog):
    t = trainer(Gba(8 * ROWS))
    t.fit(batches(9))
    advice = "Gba applies 8 gradients per step, from 1 NN workers"
    assert [r.levelname for r in caplog.records if advice in r.getMessage()] == ["WARNING"]
    t.fit(batches(9), again=True)
    assert sum(advice in r.getMessage() for r in caplog.records) == 2
    caplog.clear()
    trainer(Gba(2 * ROWS)).fit(batches(4))
    assert caplog.text == ""


def test_a_mode_that_does_not_fit_the_batches_says_so():
    with pytest.raises(ConfigError, match="no multiple"):
        trainer(Gba(ROWS + 1)).fit(batches(3))


class LockStep(TokenScheduler):
    """All NN workers draw together, after all pushes, and arrive by rank; batches go to them in turn."""

    def __init__(self, nn_workers):
        super().__init__(DEADLINE)
        self.nn_workers = nn_workers
        self.barrier = threading.Barrier(nn_workers)
        self.arrived = 0
        self.turn = threading.Condition()

    def take(self, caller, request):
        with self._changed:
            self._enter(caller)
            phase = self._state.current
            if request > phase.steps:
                return None
            number = phase.position + (request - 1) * self.nn_workers + caller.rank
            self._state.following = max(self._state.following, number + 1)
            return number

    def draw(self, *arguments):
        self.barrier.wait(DEADLINE)
        return super().draw(*arguments[:-1])  # Without a request for the next batch: `take` hands it out.

    def arrive(self, caller, *arguments):
        with self.turn:
            assert self.turn.wait_for(lambda: self.arrived % self.nn_workers == caller.rank, DEADLINE)
            return super().arrive(caller, *arguments)

    def pushed(self):
        """The next NN worker arrives, as PSs sum gradients in the order in which they come."""
        with self.turn:
            self.arrived += 1
            self.turn.notify_all()


@pytest.fixture
def after_all_pushes(monkeypatch):
    """A batch is drawn when the push of the one before has returned; pushes follow each other by rank."""
    passed, push = TokenClient.pass_lookup, TokenClient.push

    def in_turn(client, *arguments):
        result = push(client, *arguments)
        client._tokens.pushed()
        return result

    def wait(draws, *, ahead):
        open_ = passed(draws)
        end = time.monotonic() + DEADLINE
        while open_ and draws._done != draws.sequence:
            assert time.monotonic() < end
            time.sleep(0.0005)
        return open_

    monkeypatch.setattr(TokenClient, "pass_lookup", wait)
    monkeypatch.setattr(TokenClient, "push", in_turn)


def in_lock_step(nn_workers, mode, data, dtype, reduction="per_id", **options):
    cluster = Threads(nn_workers, timeout=DEADLINE, tokens=LockStep(nn_workers))

    def work(member):
        t = trainer(mode, member, dtype, embedding_optimizer=Adam(lr=0.01), **options)
        t.fit(data, max_steps=len(data) // nn_workers)
        return t

    return cluster.run(work)[0]


@pytest.mark.parametrize("reduction", ["per_id", "global"])
@pytest.mark.parametrize("nn_workers", [2, 4])
def test_gba_in_lock_step_is_sync(nn_workers, reduction, after_all_pushes):
    data = batches(12 * nn_workers)
    sync = in_lock_step(nn_workers, Sync(reduction), data, torch.float64)
    gba = in_lock_step(nn_workers, Gba(nn_workers * ROWS, 3, reduction), data, torch.float64)
    assert gba.global_step == sync.global_step == 12
    assert_same(sync, gba, 1e-9)


@pytest.mark.parametrize("nn_workers", [2, 4])
def test_to_gba_and_back_in_lock_step_is_never_having_switched(nn_workers, after_all_pushes):
    data = batches(12 * nn_workers)
    schedule = [(0, Sync()), (4, Gba(nn_workers * ROWS)), (9, Sync())]
    plain = in_lock_step(nn_workers, Sync(), data, torch.float64)
    switching = in_lock_step(nn_workers, Sync(), data, torch.float64, mode_schedule=schedule)
    assert [s.step for s in switching.switches] == [4, 9]
    assert_same(plain, switching, 1e-9)
    theirs = plain.step.optimizer.state_dict()["state"]
    for number, mine in switching.step.optimizer.state_dict()["state"].items():
        for key, value in mine.items():
            torch.testing.assert_close(value, theirs[number][key], rtol=0, atol=1e-9)


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("mode", [Gba(3 * ROWS), HopBw(1), HopBs(2)], ids=lambda m: type(m).__name__)
def test_a_crash_of_any_nn_worker_costs_no_more_than_its_tokens(victim, mode, monkeypatch):
    data = batches(40)
    monkeypatch.setattr("persia.dense.network.SLICE_SECONDS", 0.02)  # Until a place of the dead one is filled.
    held = []  # Not given back, as if killed.
    monkeypatch.setattr("persia.nn.token_client.TokenClient.abandon", lambda client: held.extend(client._open))
    leave_batches_to(victim, monkeypatch)
    cluster = Threads(nn_workers=3, timeout=DEADLINE)

    def work(member):
        t = persia.Trainer(
            CrashingNet(4 if member.rank == victim else 10**9),
            SCHEMA,
            optimizer=lambda p: torch.optim.SGD(p, 0.01),
            embedding_optimizer=Adagrad(lr=0.05),
            mode=mode,
            cluster=member,
            options=persia.TrainerOptions(progress=False, timeout=DEADLINE),
        )
        return t.fit(data)

    results = cluster.outcomes(work)
    assert isinstance(results[victim], KeyboardInterrupt)
    others = [r for rank, r in enumerate(results) if rank != victim]
    assert [r for r in others if isinstance(r, BaseException)] == []
    report = others[0].asynchronous
    assert report.lost_tokens == len(held)
    assert len(held) in (1, 2)  # The next one may have been drawn while the network computed.
    # What the dead one had in its hands was trained by the others, and nothing twice.
    assert report.batches + report.dropped_batches == 40


@pytest.mark.slow
def test_a_crash_in_a_mode_with_all_reduce_is_told_to_the_others():
    cluster = Threads(nn_workers=2, timeout=DEADLINE)

    def work(member):
        if member.rank == 1:
            raise KeyboardInterrupt("killed")
        return trainer(Sync(), member).fit(batches(4))

    first, second = cluster.outcomes(work)
    assert isinstance(second, KeyboardInterrupt)
    assert isinstance(first, PersiaError)


@pytest.mark.parametrize("mode", [Sync(), Hybrid(3, warmup=0)], ids=str)
def test_an_nn_worker_that_fails_within_a_step_ends_the_others(mode, monkeypatch):
    """Their pushes wait for its push at the PS, up to the deadline; their error does not."""
    monkeypatch.setattr("persia.nn.pass_threads.PUSH_GRACE", 0.1)
    cluster = Threads(nn_workers=3, timeout=DEADLINE)
    ended = {}

    def work(member):
        model = CrashingNet(5 if member.rank == 1 else 10**9)
        try:
            return trainer(mode, member, model=model).fit(batches(60))
        finally:
            ended[member.rank] = time.monotonic()

    outcomes = cluster.outcomes(work)
    assert max(ended.values()) - ended[1] < DEADLINE / 2
    assert isinstance(outcomes[1], KeyboardInterrupt)
    for rank in (0, 2):
        with pytest.raises(PersiaError, match="NN worker 1 is dead: KeyboardInterrupt: killed"):
            raise outcomes[rank]


def squeezed(compressor=None, **options):
    chosen = APMSqueezeOptions(compressor=compressor or OneBit(), **options)
    return lambda p: APMSqueeze(p, 1e-2, options=chosen)


def test_apmsqueeze_goes_to_dense_pss_and_comes_back():
    data = batches(24)
    away = [(2, Gba(ROWS)), (5, Sync()), (12, Gba(ROWS)), (17, Sync())]
    make = squeezed(Uncompressed(), warmup=8)
    always = trainer(Sync(), optimizer=make)
    switched = trainer(Sync(), optimizer=make, mode_schedule=away)
    always.fit(data)
    switched.fit(data)
    assert [s.step for s in switched.switches] == [2, 5, 12, 17]
    assert switched.step.optimizer.statistics()["steps"] == 24
    assert switched.step.optimizer.phase == "compressed"
    assert_same(always, switched, 1e-6)


def test_apmsqueeze_of_several_nn_workers_on_dense_pss(tmp_path):
    """Whatever is stale: the state comes back the same to all, and a checkpoint there is whole."""
    data = batches(36)
    cluster = Threads(nn_workers=3, ps=1, dense_ps=2, timeout=DEADLINE)
    schedule = [(4, Gba(3 * ROWS)), (8, Sync())]
    options = {"mode_schedule": schedule, "checkpoint_dir": str(tmp_path), "checkpoint_every_steps": 6}

    def work(member):
        t = trainer(Sync(), member, optimizer=squeezed(warmup=3), **options)
        t.fit(data)
        return t

    found = cluster.run(work)
    for t in found:
        assert t.global_step == 12
        assert t.step.optimizer.statistics()["steps"] == 12
        for p, q in zip(found[0].model.parameters(), t.model.parameters(), strict=True):
            assert torch.equal(p, q)
    resumed = persia.Trainer.resume(str(tmp_path), Net(torch.float32), optimizer=squeezed(warmup=3))
    assert resumed.step.optimizer.phase == "compressed"


def test_a_manual_mode_holds_until_the_next_scheduled_mode(tmp_path):
    data = batches(30)
    options = {"mode_schedule": [(0, Sync()), (10, Hybrid(2, warmup=0)), (20, Gba(ROWS))]}
    first = trainer(Sync(), **options)
    first.fit(data, max_steps=12)
    assert first.mode == Hybrid(2, warmup=0)
    first.switch(Bsp(1))
    first.fit(data, max_steps=2)
    assert first.mode == Bsp(1)
    first.save(str(tmp_path))
    resumed = trainer(Sync(), **options)
    resumed.load(str(tmp_path))
    resumed.fit(data, max_steps=2)
    assert resumed.mode == Bsp(1)
    resumed.fit(data)
    assert resumed.mode == Gba(ROWS)
