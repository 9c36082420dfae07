"""What a `Scaler` measures, and what its driver does with the decisions, without processes."""

from __future__ import annotations

import contextlib
import logging
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from persia.cluster import Scaler
from persia.cluster.measured_load import NO_STEP, measure
from persia.cluster.ray import scaler_driver
from persia.cluster.ray.ps_scaling import scale_servers
from persia.cluster.ray.scaler_driver import ScalerDriver, capacity_problem, memory_rules, run_scaler, start_scaler
from persia.cluster.ray.scaling import scale
from persia.cluster.scaler import MeasuredLoad, ScalingDecision, ScalingRules
from persia.errors import ClosedError, ConfigError, RoleDiedError
from persia.membership.observing import Answer
from persia.schema import Table
from persia.telemetry.catalogue import CATALOGUE
from persia.telemetry.metrics import Health, Latency, Metric, Readings
from persia.types import Member

WINDOW = 10.0


def answer(
    role: str,
    rank: int = 0,
    pid: int = 7,
    state: str = "alive",
    waited: float = 0.0,
    computed: float = 0.0,
    **counts: float,
) -> Answer:
    waits = Latency("nn_wait_seconds", {}, [0] * 14, waited), Latency("nn_step_seconds", {}, [0] * 14, computed)
    latencies = [*waits] if role == "nn_worker" else []
    metrics = [Metric(name, float(value), {}) for name, value in counts.items()]
    return Answer(
        Member(role, rank, 1, "tcp://h:1", state), Health(role, rank, 1, pid, "h", 1.0, "", metrics, latencies)
    )


def cluster(
    time: float, servers: int = 2, memory: float = 0.5, trained: float | None = None, **of_loaders: float
) -> list[Answer]:
    """A cluster that runs, and has trained, for this time: NN workers wait for half of it, a fifth of it for data."""
    trained = time if trained is None else trained
    return [
        answer("coordinator"),
        *(
            answer(
                "embedding_ps",
                rank,
                cpu_seconds=(1 + rank) * time,
                process_processors=4,
                process_bytes=6e9,
                host_memory_share=memory,
            )
            for rank in range(servers)
        ),
        answer("embedding_worker", cpu_seconds=3 * time, process_processors=4),
        answer("data_loader", loader_idle_seconds=0.75 * time, **of_loaders),
        trainer(0, trained, 0.6, 0.3),
        trainer(1, trained, 0.4, 0.1),
    ]


def trainer(rank: int, trained: float, waits: float, loading: float) -> Answer:
    """An NN worker that has trained for this time, with these shares of it."""
    waited = waits * trained
    counts = {"nn_loading_seconds": loading * trained, "nn_step": trained}
    return answer("nn_worker", rank, waited=waited, computed=trained - waited, **counts)


def test_shares_are_of_the_window():
    load = measure(cluster(100.0), cluster(110.0), WINDOW)
    assert load == pytest.approx(
        MeasuredLoad(
            2,
            1,
            1,
            lookups=0.3,
            loading=0.2,
            ps_memory=0.5,
            ps_processors=0.5,
            worker_processors=0.75,
            loaders_busy=0.25,
        )
    )
    assert measure(
        cluster(1.0), cluster(11.0), WINDOW, reserved=8 * 10**9, rows_stay=True, memory_bounded=True
    ) == pytest.approx(load._replace(ps_memory=0.75, rows_stay=True, memory_bounded=True))


def test_waits_are_shares_of_the_time_of_training():
    load = measure(cluster(10.0), cluster(20.0, trained=18.5), WINDOW)  # Then it has written a checkpoint.
    assert (load.lookups, load.loading) == pytest.approx((0.3, 0.2))
    problem = "NN workers trained for 75% of it, below 80%"
    assert measure(cluster(10.0), cluster(20.0, trained=17.5), WINDOW) == problem


def test_waits_that_begin_before_the_window_are_at_most_all_of_it():
    before, now = cluster(10.0)[:-2], cluster(20.0)[:-2]
    load = measure([*before, trainer(0, 10.0, 1.0, 1.0)], [*now, trainer(0, 60.0, 1.0, 1.0)], WINDOW)
    assert (load.lookups, load.loading) == (0.0, 1.0)


def test_data_loaders_without_a_source_are_not_busy():
    before, now = ([a for a in cluster(t) if a.member.role != "data_loader"] for t in (1.0, 11.0))
    load = measure([*before, answer("data_loader")], [*now, answer("data_loader")], WINDOW)
    assert (load.data_loaders, load.loaders_busy) == (1, 0.0)


@pytest.mark.parametrize(
    ("metrics", "idle"),
    [
        ({}, False),
        ({"stream_lag": 0, "stream_delay_seconds": 100.0}, True),
        ({"stream_lag": 7, "stream_delay_seconds": 1.0}, True),
        ({"stream_lag": 7, "stream_delay_seconds": 100.0}, False),
    ],
)
def test_a_stream_that_is_read_to_its_end_is_idle(metrics, idle):
    assert measure(cluster(1.0), cluster(11.0, **metrics), WINDOW).source_idle == idle


def test_windows_that_are_not_measured():
    before, now = cluster(1.0), cluster(11.0)
    assert isinstance(measure(before, now, WINDOW), MeasuredLoad)
    silent = Answer(Member("embedding_ps", 0, 1, "tcp://h:1"), None, "no answer")
    joined = "a process joined, left or restarted"
    leaving = answer("embedding_worker", 1, state="leaving")
    for first, later, problem in (
        (before, cluster(11.0, servers=3), joined),
        (before, [*now[1:], silent], "a process did not answer"),
        (before, [a for a in now if a.member.role != "nn_worker"], joined),
        (before, [*now[:-1], now[-1]._replace(health=now[-1].health._replace(pid=8))], joined),
        (before, [*now[:-1], now[-1]._replace(health=now[-1].health._replace(incarnation=2))], joined),
        ([*before, leaving], [*now, leaving], "a process is leaving"),
        (before, before, NO_STEP),
    ):
        assert measure(first, later, WINDOW) == problem


class Run:
    """A run whose PSs have too little memory, with a driver of a scaler."""

    def __init__(self, scaler: Scaler) -> None:
        self.time = self.trained = 0.0
        self.servers, self.memory = 2, 0.9
        self.scaled: list[tuple[str, int, int]] = []
        self.error: Exception | None = None
        self.by_hand = 0
        self.closed = False
        self.reports: list[Readings] = []
        self.rules = ScalingRules(scaler)
        self.driver = ScalerDriver(
            scaler,
            self.rules,
            lambda: cluster(self.time, self.servers, self.memory, self.trained),
            self.scale,
            self.reports.append,
            lambda: self.closed,
            lambda: self.time,
        )

    def scale(self, role: str, before: int, after: int) -> bool:
        self.scaled.append((role, before, after))
        assert self.reports[-1].notes[-1].endswith("begun")
        if self.error is not None:
            raise self.error
        self.servers = self.by_hand or self.servers
        if before != self.servers:
            return False
        self.servers, self.memory = after, 0.5
        return True

    def window(self, trained: float = WINDOW) -> list[ScalingDecision]:
        self.time += WINDOW
        self.trained += trained
        return self.driver.measure_window()

    def until_decided(self, windows: int = 20) -> int:
        """Runs until there is a decision, and returns after how many windows."""
        return next(number for number in range(1, windows + 1) if self.window())

    def metrics(self, name: str) -> dict[str, float]:
        assert {metric.name for metric in self.reports[-1].metrics} <= set(CATALOGUE)
        found = [metric for metric in self.reports[-1].metrics if metric.name == name]
        return {" ".join(metric.labels.values()): metric.value for metric in found}

    @property
    def note(self) -> str:
        return self.reports[-1].notes[-1][20:]


FULL = "ps 2 -> 3: 90% of the memory of an embedding PS is used, above 80%"


def scaler(*, ps=(1, 4), dry_run=False, cool_down=20.0, **others):
    return Scaler(ps=ps, dry_run=dry_run, waiting=1.0, window_seconds=WINDOW, cool_down_seconds=cool_down, **others)


def test_a_decision_is_carried_out(caplog):
    caplog.set_level(logging.WARNING)
    run = Run(scaler())
    assert run.until_decided() == 4  # Answers to compare with, and a cool-down.
    assert run.scaled == [("ps", 2, 3)]
    assert run.note == f"{FULL}; done"
    assert run.metrics("scaler_processes") == {"ps": 3, "embedding_workers": 1, "data_loaders": 1}
    assert run.metrics("scaler_decisions") == {"ps memory done": 1}
    assert run.metrics("scaler_share")["ps_memory"] == 0.9
    assert [record.message for record in caplog.records] == [f"scaler: {FULL}; {state}" for state in ("begun", "done")]
    # The window in which processes have started is not measured, and the next one is.
    assert [run.window(), run.window()] == [[], []]
    assert run.metrics("scaler_share")["ps_memory"] == 0.5


def test_a_dry_run_changes_nothing_and_shows_all_decisions_once(caplog):
    caplog.set_level(logging.WARNING)
    run = Run(scaler(dry_run=True, embedding_workers=(1, 4), processors=0.7))
    run.until_decided()
    for _ in range(20):
        run.window()
    assert run.scaled == []
    assert [note[20:] for note in run.reports[-1].notes] == [f"{FULL}; dry run"]
    assert run.metrics("scaler_processes")["ps"] == 3
    assert run.metrics("scaler_decisions") == {"ps memory dry_run": 1}
    assert len(caplog.records) == 1
    assert [decision.role for decision in run.window()] == ["ps"]


def test_a_dry_run_shows_decisions_behind_the_first_one():
    run = Run(Scaler(ps=(1, 4), embedding_workers=(1, 4), window_seconds=WINDOW, cool_down_seconds=20.0))
    run.until_decided()
    assert run.metrics("scaler_decisions") == {"ps memory dry_run": 1, "embedding_workers lookups dry_run": 1}
    assert run.metrics("scaler_processes") == {"ps": 3, "embedding_workers": 2, "data_loaders": 1}


def test_what_is_blocked_is_noted_once():
    run = Run(scaler(ps=(1, 2), cool_down=40.0))
    for _ in range(20):
        run.memory = 0.9 if int(run.time / WINDOW) % 4 else 0.7
        run.window()
    assert run.scaled == []
    assert run.note == f"{FULL}; not done: 2 is the maximum"
    assert run.metrics("scaler_decisions") == {"ps memory blocked": 1}
    assert len(run.reports[-1].notes) == 1


def test_what_fails_is_blocked_and_tried_again():
    run = Run(scaler())
    run.error = ConfigError("No host has 100 GB. " + "a " * 1000, field="place")
    run.until_decided()
    assert run.note.startswith(f"{FULL}; failed: No host has 100 GB. a a")
    assert len(run.note) <= len(f"{FULL}; failed: ") + 300
    assert run.metrics("scaler_decisions") == {"ps memory failed": 1}
    run.error = None
    run.until_decided()
    assert "not done: it has failed, and is tried again after 40 s: No host has 100 GB." in run.note
    run.until_decided()
    assert (run.servers, run.note) == (3, f"{FULL}; done")


def test_nothing_is_changed_if_somebody_else_has_changed_the_number_meanwhile():
    run = Run(scaler())
    run.by_hand = 4
    run.until_decided()
    assert (run.servers, run.note) == (4, f"{FULL}; not done: changed meanwhile")
    assert run.metrics("scaler_decisions") == {"ps memory blocked": 1}


@pytest.mark.parametrize("error", [ClosedError("This cluster is closed."), RoleDiedError("ended", role="ps", rank=0)])
def test_an_error_because_the_cluster_is_closed_is_no_failure(error):
    run = Run(scaler())
    run.error, run.closed = error, True
    with pytest.raises(type(error)):
        run.until_decided()
    assert run.driver._decisions == {}


def test_a_window_without_a_step_continues():
    run = Run(scaler())
    run.window()
    run.window(0.0)
    assert run.reports == []
    run.window(2 * WINDOW)  # The step has ended.
    assert run.metrics("scaler_share")["lookups"] == pytest.approx(0.3)
    run.window(0.0)
    run.window(WINDOW)  # In a half of the time there was something else.
    assert len(run.reports) == 1


def test_what_is_not_trained_is_not_measured():
    run = Run(scaler())
    run.window()
    run.driver.forget()
    run.window()
    assert run.reports == []
    run.window()
    assert len(run.reports) == 1


# --- the thread ---------------------------------------------------------------------------------------------------


class Passes:
    """A cluster whose scaler runs for these passes: "trains", "moves", "rests" or an error of its measurement."""

    def __init__(self, *passes):
        self.passes, self.calls, self.closed, self.now = list(passes), [], False, 0.0
        self.moving, self.running = threading.Lock(), threading.Lock()
        self.service, self.placer = None, SimpleNamespace(server_memory=lambda: None)
        self.failure = None
        self._prepare()
        run_scaler(self, scaler(), self, self.sleep, lambda: self.now)

    def _prepare(self):
        for lock in (self.moving, self.running):
            if lock.locked():
                lock.release()
        what = self.passes.pop(0)
        if what != "rests":
            self.running.acquire()
        if what == "moves":
            self.moving.acquire()
        self.failure = what if isinstance(what, Exception) else None

    def sleep(self, seconds):
        self.now += WINDOW
        if self.passes:
            self._prepare()
        else:
            self.closed = True

    def measure_window(self, **_):
        self.calls.append("measure")
        if self.failure is not None:
            self.closed = isinstance(self.failure, ClosedError)
            raise self.failure

    def forget(self):
        self.calls.append("forget")

    def interrupt(self):
        self.calls.append("interrupt")


def test_windows_are_measured_while_a_function_runs_and_no_rows_move():
    assert Passes("rests", "trains", "moves", "moves", "trains").calls == [
        "forget",
        "measure",
        "interrupt",
        "interrupt",
        "measure",
    ]


def test_errors_do_not_end_the_thread_and_closing_is_no_error(caplog):
    passes = Passes("trains", KeyError("lost"), "trains", ClosedError("closed"))
    assert passes.calls == ["measure", "measure", "forget", "measure", "measure", "forget"]
    (record,) = caplog.records
    assert record.message == "The scaler has not measured this window: 'lost'"
    assert record.exc_info is not None


def test_a_move_begins_a_window_and_a_cool_down():
    run = Run(scaler(cool_down=50.0))
    for _ in range(6):
        run.window()
    run.driver.interrupt()
    assert run.until_decided() == 5
    assert run.servers == 3


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ([Table("a", dim=4)], (False, False)),
        ([Table("a", dim=4, spill="/ssd"), Table("b", dim=4)], (False, True)),
        ([Table("a", dim=4, capacity=100), Table("b", dim=4)], (True, False)),
        ([Table("a", dim=4, capacity=100)], (True, True)),
    ],
)
def test_what_tables_let_a_scaler_do(tables, expected):
    assert memory_rules({table.name: table for table in tables}) == expected


def test_more_batches_than_embedding_workers_hold_are_a_problem():
    assert capacity_problem({"embedding_workers": 1, "data_loaders": 1}, 1) == ""
    assert "Use more embedding workers or fewer data loaders" in capacity_problem(
        {"embedding_workers": 1, "data_loaders": 256}, 256
    )


def test_capacity_is_judged_by_the_number_of_nn_workers_at_that_time(monkeypatch):
    rules = []
    monkeypatch.setattr(scaler_driver, "ScalerDriver", lambda _, made, *others: rules.append(made))
    roles = SimpleNamespace(counts={"nn_worker": 1}, closed=True)
    coordinator = SimpleNamespace(report_scaler=None)
    roles.started = lambda check: (None, SimpleNamespace(coordinator="tcp://h:1"), coordinator)
    start_scaler(roles, scaler(), lambda *_: True)
    counts = {"embedding_workers": 1, "data_loaders": 256}
    assert rules[0]._problem(counts) == ""
    roles.counts["nn_worker"] = 256
    assert "Use more embedding workers or fewer data loaders" in rules[0]._problem(counts)


# --- the numbers have changed meanwhile ---------------------------------------------------------------------------


def roles_of(**fields):
    lock, moving = threading.RLock(), threading.Lock()
    return SimpleNamespace(lock=lock, moving=moving, plan=None, service=None, processes=None, **fields)


def test_the_number_of_pss_is_compared_once_nobody_else_changes_it():
    roles = roles_of(counts={"embedding_ps": 2})
    assert scale_servers(roles, 3, lambda: None, 2)
    assert not scale_servers(roles, 1, lambda: None, 2)
    assert roles.counts == {"embedding_ps": 3}

    @contextlib.contextmanager
    def waited():  # Until a program had scaled to 4.
        roles.counts["embedding_ps"] = 4
        yield

    roles.moving = waited()
    assert not scale_servers(roles, 1, lambda: None, 3)
    assert roles.counts == {"embedding_ps": 4}
    roles.moving = threading.Lock()
    assert scale_servers(roles, 2, lambda: None)


def test_the_number_of_other_roles_is_compared_too():
    roles = roles_of(counts={"data_loader": 2})
    assert not scale(roles, "data_loader", 1, 3)
    assert roles.counts == {"data_loader": 2}
    assert scale(roles, "data_loader", 3, 2)
    assert roles.counts == {"data_loader": 3}
    staying, leaving = SimpleNamespace(leaving=False), SimpleNamespace(leaving=True)
    roles.service, roles.processes = object(), SimpleNamespace(of=lambda role: [staying, leaving])
    assert not scale(roles, "data_loader", 3, 2)
