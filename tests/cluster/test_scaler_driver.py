"""What a `Scaler` measures, and what its driver does with the decisions, without processes."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from persia.cluster import Scaler
from persia.cluster.measured_load import measure
from persia.cluster.ray.scaler_driver import ScalerDriver
from persia.cluster.scaler import MeasuredLoad
from persia.errors import ClosedError, ConfigError
from persia.membership.observing import Answer
from persia.telemetry.catalogue import CATALOGUE
from persia.telemetry.metrics import Health, Latency, Metric, Readings
from persia.types import Member

WINDOW = 10.0


def answer(
    role: str, rank: int = 0, pid: int = 7, state: str = "alive", waited: float = 0.0, **counts: float
) -> Answer:
    latencies = [Latency("nn_wait_seconds", {}, [0] * 14, waited)] if role == "nn_worker" else []
    metrics = [Metric(name, float(value), {}) for name, value in counts.items()]
    return Answer(
        Member(role, rank, 1, "tcp://h:1", state), Health(role, rank, 1, pid, "h", 1.0, "", metrics, latencies)
    )


def cluster(time: float, servers: int = 2, memory: float = 0.5, **of_loaders: float) -> list[Answer]:
    """A cluster that has trained for this time: NN workers wait for half of it, for data in a fifth of it."""
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
        answer("nn_worker", 0, waited=0.6 * time, nn_loading_seconds=0.3 * time, nn_step=time),
        answer("nn_worker", 1, waited=0.4 * time, nn_loading_seconds=0.1 * time, nn_step=time),
    ]


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
    assert measure(cluster(1.0), cluster(11.0), WINDOW, reserved=8 * 10**9, rows_stay=True) == pytest.approx(
        load._replace(ps_memory=0.75, rows_stay=True)
    )


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
    load = measure(cluster(1.0), cluster(11.0, **metrics), WINDOW)
    assert load is not None
    assert load.source_idle == idle


def test_windows_that_are_not_measured():
    before, now = cluster(1.0), cluster(11.0)
    assert measure(before, now, WINDOW) is not None
    silent = Answer(Member("embedding_ps", 0, 1, "tcp://h:1"), None, "no answer")
    for changed in (
        cluster(11.0, servers=3),
        [*now[1:], silent],
        [a for a in now if a.member.role != "nn_worker"],
        [*now[:-1], now[-1]._replace(health=now[-1].health._replace(pid=8))],
        [*now[:-1], now[-1]._replace(health=now[-1].health._replace(incarnation=2))],
        [*now[:-1], now[-1]._replace(member=now[-1].member._replace(state="leaving"))],
        cluster(1.0),  # No step was made.
    ):
        assert measure(before, changed, WINDOW) is None


class Run:
    """A run whose PSs have too little memory, with a driver of a scaler."""

    def __init__(self, scaler: Scaler) -> None:
        self.time = 0.0
        self.servers, self.memory = 2, 0.9
        self.scaled: list[dict[str, int]] = []
        self.error: Exception | None = None
        self.reports: list[Readings] = []
        ask = lambda: cluster(self.time, self.servers, self.memory)  # noqa: E731
        self.driver = ScalerDriver(scaler, ask, self.scale, self.reports.append, lambda: self.time)

    def scale(self, **counts: int) -> None:
        self.scaled.append(counts)
        assert self.reports[-1].notes[-1].endswith("begun")
        if self.error is not None:
            raise self.error
        self.servers, self.memory = counts["ps"], 0.5

    def look(self, seconds: float = WINDOW) -> str | None:
        self.time += seconds
        decision = self.driver.look()
        return None if decision is None else decision.reason

    def metrics(self, name: str) -> dict[str, float]:
        assert {metric.name for metric in self.reports[-1].metrics} <= set(CATALOGUE)
        found = [metric for metric in self.reports[-1].metrics if metric.name == name]
        return {" ".join(metric.labels.values()): metric.value for metric in found}

    @property
    def note(self) -> str:
        return self.reports[-1].notes[-1][20:]


FULL = "ps 2 -> 3: 90% of the memory of an embedding PS is used, above 80%"


def test_a_decision_is_carried_out(caplog):
    caplog.set_level(logging.WARNING)
    run = Run(Scaler(ps=(1, 4), dry_run=False, waiting=1.0, cool_down_seconds=30.0))
    assert [run.look(), run.look()] == [None, "memory"]
    assert run.scaled == [{"ps": 3}]
    assert run.note == f"{FULL}; done"
    assert run.metrics("scaler_processes") == {"ps": 3, "embedding_workers": 1, "data_loaders": 1}
    assert run.metrics("scaler_decisions") == {"ps memory done": 1}
    assert run.metrics("scaler_share")["ps_memory"] == 0.9
    assert [record.message for record in caplog.records] == [f"scaler: {FULL}; {state}" for state in ("begun", "done")]
    # The window in which processes have started is not measured, and the next one is.
    assert [run.look(), run.look()] == [None, None]
    assert run.metrics("scaler_share")["ps_memory"] == 0.5


def test_a_dry_run_changes_nothing(caplog):
    caplog.set_level(logging.WARNING)
    run = Run(Scaler(ps=(1, 4), waiting=1.0, cool_down_seconds=15.0))
    assert [run.look() for _ in range(4)] == [None, "memory", None, "memory"]
    assert run.scaled == []
    assert run.note == f"{FULL}; dry run"
    assert run.metrics("scaler_processes")["ps"] == 3
    assert run.metrics("scaler_decisions") == {"ps memory dry_run": 2}
    assert len(caplog.records) == 2


def test_what_is_blocked_is_noted_once():
    run = Run(Scaler(ps=(1, 2), dry_run=False, waiting=1.0))
    for _ in range(4):
        run.look()
    assert run.scaled == []
    assert run.note == f"{FULL}; not done: 2 is the maximum"
    assert run.metrics("scaler_decisions") == {"ps memory blocked": 1}
    assert len(run.reports[-1].notes) == 1


def test_what_fails_is_tried_again_after_the_cool_down():
    run = Run(Scaler(ps=(1, 4), dry_run=False, waiting=1.0, cool_down_seconds=20.0))
    run.error = ConfigError("No host has 100 GB.", field="place")
    run.look()
    run.look()
    assert run.note == f"{FULL}; failed: No host has 100 GB."
    assert run.metrics("scaler_decisions") == {"ps memory failed": 1}
    run.error = None
    assert [run.look(), run.look()] == [None, "memory"]
    assert (run.servers, run.note) == (3, f"{FULL}; done")


def test_the_end_of_the_cluster_ends_a_change():
    run = Run(Scaler(ps=(1, 4), dry_run=False, waiting=1.0))
    run.error = ClosedError("This cluster is closed.")
    run.look()
    with pytest.raises(ClosedError):
        run.look()


def test_what_is_not_trained_is_not_measured():
    run = Run(Scaler(ps=(1, 4), waiting=1.0))
    run.look()
    run.driver.forget()
    assert [run.look(), run.look()] == [None, "memory"]
