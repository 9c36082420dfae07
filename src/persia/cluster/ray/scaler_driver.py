"""Runs a `Scaler` in the driver: measures by health checks, reports its decisions, and changes the numbers."""

from __future__ import annotations

import functools
import math
import textwrap
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence

from persia import rpc
from persia.cluster.measured_load import NO_STEP, measure
from persia.cluster.ray.roles import Roles
from persia.cluster.ray.scaling import check_capacity
from persia.cluster.scaler import SCALED, MeasuredLoad, ScaledRole, Scaler, ScalingDecision, ScalingRules
from persia.errors import ConfigError
from persia.membership.observing import Answer, ask_members
from persia.schema import Table
from persia.services import BucketMaps
from persia.telemetry.logs import get_logger
from persia.telemetry.metrics import Metric, Readings

__all__ = ["ScalerDriver", "run_scaler", "start_scaler"]

LOG = get_logger("persia.cluster")

ANSWER_SECONDS = 5.0
"""Seconds within which a process must answer."""

POLL_SECONDS = 0.5
"""Interval at which the thread notices that the cluster is closed, and that rows move."""

MOST_NOTES = 8
"""Number of decisions that are shown."""

MOST_CHARACTERS = 300
"""Length of an error in a note."""

SHARES = ("lookups", "loading", "ps_memory", "ps_processors", "worker_processors", "loaders_busy")


def start_scaler(roles: Roles, scaler: Scaler, scale: Callable[[ScaledRole, int, int], bool]) -> None:
    """Starts a thread that measures and decides until the cluster is closed.

    Args:
        roles: the processes of the cluster, whose coordinator has started.
        scaler: bounds and limits.
        scale: see `ScalerDriver`.
    """
    _, plan, coordinator = roles.started(check=False)
    maps = rpc.cast_to(BucketMaps, coordinator)
    ask = functools.partial(ask_members, plan.coordinator, ANSWER_SECONDS)
    rules = ScalingRules(scaler, lambda counts: capacity_problem(counts, roles.counts["nn_worker"]))
    driver = ScalerDriver(scaler, rules, ask, scale, maps.report_scaler, lambda: roles.closed)
    threading.Thread(target=run_scaler, args=(roles, scaler, driver), name="persia-scaler", daemon=True).start()


def run_scaler(
    roles: Roles,
    scaler: Scaler,
    driver: ScalerDriver,
    sleep: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Measures a window after the other while a function runs and no rows move, until the cluster is closed.

    Args:
        roles: the processes of the cluster.
        scaler: bounds and limits.
        driver: measures and acts.
        sleep: waits for some seconds.
        clock: time in seconds.
    """
    window = clock()
    while not roles.closed:
        try:
            if roles.moving.locked():
                driver.interrupt()
            elif not roles.running.locked():
                driver.forget()
            elif clock() >= window:
                window = clock() + scaler.window_seconds
                stay, bounded = (
                    memory_rules(roles.service.schema.resolved_tables()) if roles.service else (False, False)
                )
                driver.measure_window(reserved=roles.placer.server_memory(), rows_stay=stay, memory_bounded=bounded)
        except Exception as error:  # Such as of a coordinator that restarts; the next window is measured.
            driver.forget()
            if not roles.closed:
                LOG.warning("The scaler has not measured this window: %s", error, exc_info=True)
        sleep(min(POLL_SECONDS, scaler.window_seconds))


def memory_rules(tables: Mapping[str, Table]) -> tuple[bool, bool]:
    """Returns whether rows cannot leave a PS (see `Ray.scale`), and whether tables bound the memory of PSs.

    Tables with `spill` fill a part of the memory by design, and so may those with a declared capacity.
    """
    declared = [table.capacity is not None for table in tables.values()]
    return any(declared), all(declared) or any(table.spill is not None for table in tables.values())


def capacity_problem(counts: Mapping[ScaledRole, int], nn_workers: int) -> str:
    """Returns why embedding workers cannot hold the batches of the data loaders; empty if they can."""
    try:
        check_capacity(counts["embedding_workers"], counts["data_loaders"], nn_workers)
    except ConfigError as error:
        return str(error)
    return ""


class ScalerDriver:
    """Decides at the end of each window of training, and acts. For one thread.

    Args:
        scaler: bounds and limits.
        rules: rules of this scaler.
        ask: returns the answers of all processes to a health check.
        scale: changes the number of processes of a role to the second number unless it differs from the first one, and
            returns whether it was equal. Blocks until it is changed.
        report: shows metrics and notes; see `persia.services.BucketMaps.report_scaler`.
        closed: returns whether the cluster is closed.
        clock: time in seconds.
    """

    def __init__(
        self,
        scaler: Scaler,
        rules: ScalingRules,
        ask: Callable[[], Sequence[Answer]],
        scale: Callable[[ScaledRole, int, int], bool],
        report: Callable[[Readings], object],
        closed: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scaler = scaler
        self._rules = rules
        self._ask = ask
        self._scale = scale
        self._report = report
        self._closed = closed
        self._clock = clock
        self._before: tuple[float, Sequence[Answer]] | None = None
        self._notes: deque[str] = deque(maxlen=MOST_NOTES)
        self._decisions: Counter[tuple[str, str, str]] = Counter()
        """Number of decisions by role, reason and state."""
        self._due_at: dict[tuple[object, ...], float] = {}
        """By decision, when it was last due, so that one that stays blocked is noted once."""

    def forget(self) -> None:
        """Begins another window with the next measurement: nothing is trained, or something has changed."""
        self._before = None

    def interrupt(self) -> None:
        """Begins another window and a cool-down: rows move."""
        self.forget()
        self._rules.interrupt(self._clock())

    def measure_window(
        self, *, reserved: int | None = None, rows_stay: bool = False, memory_bounded: bool = False
    ) -> list[ScalingDecision]:
        """Ends a window and begins the next one. Blocks while processes start or end.

        Args:
            reserved: see `measure`.
            rows_stay: see `measure`.
            memory_bounded: see `measure`.

        Returns:
            The decisions of the window, of which at most one was carried out.

        Raises:
            PersiaError: the coordinator does not answer, or the cluster is closed.
        """
        answers, now = self._ask(), self._clock()
        if self._before is None:
            self._before = now, answers
            return []
        then, before = self._before
        load = measure(
            before,
            answers,
            max(1e-3, now - then),
            reserved=reserved,
            rows_stay=rows_stay,
            memory_bounded=memory_bounded,
        )
        if load == NO_STEP:  # The window continues, as a step takes longer.
            return []
        self._before = now, answers
        if isinstance(load, str):
            LOG.info("The scaler has not measured this window: %s", load)
            return []
        decisions = self._rules.decide(load, now)
        for decision in decisions:
            if decision.blocked:
                self._note_due(decision, "blocked", str(decision))
            elif self._scaler.dry_run:
                self._note_due(decision, "dry_run", f"{decision}; dry run")
        possible = [decision for decision in decisions if not decision.blocked]
        if possible and not self._scaler.dry_run:
            del possible[1:]
            self._change(possible[0], load)
        self._report(self._readings(load, possible))
        return decisions

    def _change(self, decision: ScalingDecision, load: MeasuredLoad) -> None:
        begun = f"{decision}; begun"
        LOG.warning("scaler: %s", begun)
        self._report(self._readings(load, [decision], _stamped(begun)))  # Processes start and rows move for minutes.
        failure, unchanged = "", False
        try:
            unchanged = self._scale(decision.role, decision.before, decision.after)
        except Exception as error:  # Processes start elsewhere, for any reason that there can be.
            if self._closed():
                raise
            failure = textwrap.shorten(str(error), MOST_CHARACTERS, placeholder="…") or type(error).__name__
        self.forget()
        if failure:
            self._rules.failed(decision, failure, self._clock())
            self._note(decision, "failed", f"{decision}; failed: {failure}")
        elif unchanged:
            self._rules.changed(decision, self._clock())
            self._note(decision, "done", f"{decision}; done")
        else:
            self._rules.interrupt(self._clock())
            self._note(decision, "blocked", str(decision._replace(blocked="changed meanwhile")))

    def _note_due(self, decision: ScalingDecision, state: str, text: str) -> None:
        """Notes a decision, unless it was due a moment ago."""
        key, now = (decision.role, decision.before, decision.reason, state), self._clock()
        due_at, self._due_at[key] = self._due_at.get(key, -math.inf), now
        if now > due_at + max(self._scaler.cool_down_seconds, 2 * self._scaler.window_seconds):
            self._note(decision, state, text)

    def _note(self, decision: ScalingDecision, state: str, text: str) -> None:
        self._decisions[decision.role, decision.reason, state] += 1
        self._notes.append(_stamped(text))
        LOG.warning("scaler: %s", text)

    def _readings(self, load: MeasuredLoad, decisions: Collection[ScalingDecision], *notes: str) -> Readings:
        counts = {role: float(load.count(role)) for role in SCALED}
        counts |= {decision.role: float(decision.after) for decision in reversed([*decisions])}
        metrics = [Metric("scaler_processes", count, {"of": role}) for role, count in counts.items()]
        metrics += [Metric("scaler_share", getattr(load, name), {"of": name}) for name in SHARES]
        metrics += [
            Metric("scaler_decisions", count, {"of": role, "reason": reason, "state": state})
            for (role, reason, state), count in self._decisions.items()
        ]
        return Readings(metrics, [], (*self._notes, *notes))


def _stamped(text: str) -> str:
    """Returns a text as one line with the time."""
    return f"{time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(text.split())}"
