"""The view of a running cluster: a row for each process, from two of its health snapshots."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from persia.cluster.embedded import Embedded
from persia.errors import ConfigError, PersiaError
from persia.membership.observing import Answer, ask_members
from persia.metrics.result import titled
from persia.services import Cluster
from persia.telemetry.metrics import Health
from persia.types import TITLES, Member

__all__ = ["ClusterView", "ProcessView", "Watch", "asking", "mean_others", "view"]

ANSWER_SECONDS = 5.0
"""Seconds within which a process must answer."""

MOST_VIEWS = 1800
"""Maximum number of views; beyond it every second one of the older half is dropped."""

RATES = {
    "nn_worker": ("nn_rows", "samples/s"),
    "embedded": ("nn_rows", "samples/s"),
    "data_loader": ("loader_rows", "samples/s"),
    "embedding_worker": ("worker_looked_up", "batches/s"),
    "embedding_ps": ("ps_lookups", "ids/s"),
    "dense_ps": ("dense_pushes", "pushes/s"),
}
"""By role, the counter of its work, and the unit of its rate. The work of other roles is counted in calls."""

QUEUES = {
    "nn_worker": "nn_ready",
    "embedded": "nn_ready",
    "data_loader": "loader_ready",
    "embedding_worker": "worker_buffered",
}
"""By role, the gauge of waiting batches. Other roles have a gauge of waiting requests."""


class ProcessView(msgspec.Struct, frozen=True):
    """One process. Numbers that it does not have, or not yet, are None.

    Attributes:
        name: role and rank.
        role: role of the process.
        place: host and process id, or the address of a process that does not answer.
        problem: reason why it does not answer; empty if it does.
        uptime: seconds since its start.
        rate: work per second since the last view.
        unit: unit of `rate`.
        cpu: number of processors in use.
        wait: share of the time that the network waited for batches.
        queue: number of waiting batches or requests.
        memory: bytes of the process.
        step: global step.
        loss: loss of the last batch.
        auc: progressive AUC of this `fit` call; in later passes over the data, training AUC.
        others: metrics of labels that are not binary, by title: "watch RMSE".
        held_out: last value of the watched metric of the data for evaluation.
        staleness: mean staleness over all lookups so far.
        hit_rate: share of ids looked up since the last view that had a row.
    """

    name: str
    role: str
    place: str
    problem: str = ""
    uptime: float | None = None
    rate: float | None = None
    unit: str = ""
    cpu: float | None = None
    wait: float | None = None
    queue: float | None = None
    memory: float | None = None
    step: float | None = None
    loss: float | None = None
    auc: float | None = None
    held_out: float | None = None
    staleness: float | None = None
    hit_rate: float | None = None
    others: dict[str, float] = {}


class ClusterView(msgspec.Struct, frozen=True):
    """All processes at a point in time.

    Attributes:
        time: Unix time.
        processes: the processes, the coordinator first.
        problem: reason why there are none.
        notes: the last decisions of the scaler, the newest one last.
    """

    time: float
    processes: list[ProcessView]
    problem: str = ""
    notes: list[str] = []

    def total(self, field: str) -> float | None:
        """Returns the sum of a number over the processes that train; None if none has it."""
        values = [value for value in self._of_training(field) if value is not None]
        return sum(values) if values else None

    def mean(self, field: str) -> float | None:
        """Returns the mean of a number over the processes that train; None if none has it."""
        values = [value for value in self._of_training(field) if value is not None]
        return sum(values) / len(values) if values else None

    def _of_training(self, field: str) -> list[float | None]:
        return [getattr(process, field) for process in self.processes if process.role in ("nn_worker", "embedded")]


def asking(cluster: Cluster) -> Callable[[], Sequence[Answer]]:
    """Returns a function that queries all processes of a cluster, for `Watch`. Starts a cluster of processes if needed.

    Raises:
        ConfigError: the cluster reports no health.
    """
    if isinstance(cluster, Embedded):
        return lambda: [Answer(Member("embedded", 0, 1, ""), cluster.health())]
    address: str | None = getattr(cluster, "control_address", None)
    if address is None:
        raise ConfigError(f"{type(cluster).__name__} reports no health; use Embedded or Ray.", field="cluster")
    return functools.partial(ask_members, address, ANSWER_SECONDS)


def view(before: Sequence[Answer], now: Sequence[Answer], seconds: float) -> list[ProcessView]:
    """Returns the processes, with rates since the previous answers.

    Args:
        before: previous answers; empty for no rates.
        now: current answers.
        seconds: seconds between both.
    """
    earlier = {(a.member.role, a.member.rank): a.health for a in before}
    return [_process(answer, earlier.get((answer.member.role, answer.member.rank)), seconds) for answer in now]


def mean_others(seen: ClusterView) -> dict[str, float]:
    """Returns the means of `ProcessView.others` over the processes that train."""
    names = dict.fromkeys(name for process in seen.processes for name in process.others)
    shares = {name: [p.others[name] for p in seen.processes if name in p.others] for name in names}
    return {name: sum(values) / len(values) for name, values in shares.items()}


def _process(answer: Answer, before: Health | None, seconds: float) -> ProcessView:
    member, health, problem = answer
    name = f"{TITLES.get(member.role, member.role)} {member.rank}"
    if member.state == "leaving":
        name += " (leaving)"
    if health is None:
        return ProcessView(name, member.role, member.address, problem)
    if before is not None and before.pid != health.pid:  # Counters have restarted at 0.
        before = None

    def rate(counter: str) -> float | None:
        if before is None or not _has(health, counter):
            return None
        return max(0.0, health.total(counter) - before.total(counter)) / seconds

    def gauge(metric: str) -> float | None:
        return _finite(health.total(metric)) if _has(health, metric) else None

    counter, unit = RATES.get(member.role, ("rpc_calls", "calls/s"))
    lookups, hits = rate("ps_lookups"), rate("ps_hits")
    staleness = health.total("nn_staleness_sum") / max(1.0, health.total("nn_staleness_lookups"))
    return ProcessView(
        name,
        member.role,
        f"{health.host} {health.pid}",
        uptime=health.uptime,
        rate=rate(counter),
        unit=unit,
        cpu=rate("cpu_seconds"),
        wait=_wait(before, health, seconds),
        queue=gauge(QUEUES.get(member.role, "rpc_requests_held")),
        memory=gauge("process_bytes"),
        step=gauge("nn_step"),
        loss=gauge("nn_loss"),
        auc=gauge("nn_auc"),
        held_out=gauge("nn_held_out"),
        staleness=staleness if _has(health, "nn_staleness_lookups") else None,
        hit_rate=hits / lookups if lookups and hits is not None else None,
        others={
            titled(f"{metric.labels['label']}:{metric.labels['metric']}"): metric.value
            for metric in health.metrics
            if metric.name == "nn_metric" and math.isfinite(metric.value)
        },
    )


def _wait(before: Health | None, health: Health, seconds: float) -> float | None:
    waited = [sum(t.seconds for t in h.latencies if t.name == "nn_wait_seconds") for h in (before, health) if h]
    trains = any(latency.name == "nn_wait_seconds" for latency in health.latencies)
    return min(1.0, max(0.0, waited[1] - waited[0]) / seconds) if trains and len(waited) == 2 else None


def _has(health: Health, name: str) -> bool:
    return any(metric.name == name for metric in health.metrics)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class Watch:
    """Polls the health of a cluster at intervals, in a thread, until it is closed.

    Args:
        ask: returns the answers of all processes; a PersiaError becomes the problem of the view.
        interval: seconds between two polls.
    """

    def __init__(self, ask: Callable[[], Sequence[Answer]], interval: float) -> None:
        self._ask = ask
        self._interval = interval
        self._changed = threading.Condition()
        self._views: deque[ClusterView] = deque()
        self._number = 0
        self._closed = False
        self.answers: Sequence[Answer] = []
        """The last answers."""
        self._asked_at = 0.0
        self._thread = threading.Thread(target=self._run, name="persia-watch", daemon=True)
        self._thread.start()

    def views(self, since: float = 0.0) -> list[ClusterView]:
        """Returns the views after a time, oldest first."""
        with self._changed:
            return [seen for seen in self._views if seen.time > since]

    def next(self, number: int, timeout: float) -> tuple[int, ClusterView | None]:
        """Waits up to `timeout` seconds for a view with a higher number; returns the newest number and view."""
        with self._changed:
            self._changed.wait_for(lambda: self._number > number or self._closed, timeout)
            return self._number, self._views[-1] if self._views else None

    def close(self) -> None:
        """Ends the thread after a poll in progress."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            seen = self._look()
            with self._changed:
                self._views.append(seen)
                if len(self._views) > MOST_VIEWS:
                    views = list(self._views)
                    half = len(views) // 2
                    self._views = deque([*views[:half:2], *views[half:]])
                self._number += 1
                self._changed.notify_all()
                if self._changed.wait_for(lambda: self._closed, self._interval):
                    return

    def _look(self) -> ClusterView:
        before, asked_at = self.answers, self._asked_at
        self._asked_at = time.monotonic()
        try:
            self.answers = self._ask()
        except PersiaError as error:
            return ClusterView(time.time(), [], error.message)
        processes = view(before, self.answers, max(1e-3, self._asked_at - asked_at))
        notes = [note for answer in self.answers if answer.health is not None for note in answer.health.notes]
        return ClusterView(time.time(), processes, notes=notes)
