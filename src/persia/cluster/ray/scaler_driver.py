"""Runs a `Scaler` in the driver: measures by health checks, reports its decisions, and changes the numbers."""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from persia import rpc
from persia.cluster.measured_load import measure
from persia.cluster.ray.roles import Roles
from persia.cluster.scaler import SCALED, MeasuredLoad, Scaler, ScalingDecision, ScalingRules
from persia.errors import ClosedError, PersiaError
from persia.membership.observing import Answer, ask_members
from persia.services import BucketMaps
from persia.telemetry.logs import get_logger
from persia.telemetry.metrics import Metric, Readings

__all__ = ["ScalerDriver", "start_scaler"]

LOG = get_logger("persia.cluster")

ANSWER_SECONDS = 5.0
"""Seconds within which a process must answer."""

POLL_SECONDS = 0.5
"""Interval at which the thread notices that the cluster is closed."""

MOST_NOTES = 8
"""Number of decisions that are shown."""

SHARES = ("lookups", "loading", "ps_memory", "ps_processors", "worker_processors", "loaders_busy")


def start_scaler(roles: Roles, scaler: Scaler, scale: Callable[..., object]) -> None:
    """Starts a thread that measures and decides until the cluster is closed.

    Args:
        roles: the processes of the cluster, whose coordinator has started.
        scaler: bounds and limits.
        scale: `Ray.scale`.
    """
    _, plan, coordinator = roles.started(check=False)
    maps = rpc.cast_to(BucketMaps, coordinator)
    ask = functools.partial(ask_members, plan.coordinator, ANSWER_SECONDS)
    driver = ScalerDriver(scaler, ask, scale, maps.report_scaler)

    def work() -> None:
        window = time.monotonic()
        while not roles.closed:
            if not roles.running.locked():
                driver.forget()
            elif time.monotonic() >= window:
                reserved, stay = roles.placer.server_memory(), _rows_stay(roles)
                try:
                    driver.look(reserved=reserved, rows_stay=stay)
                except ClosedError:
                    return
                except PersiaError as error:  # The coordinator restarts, or the cluster is being closed.
                    driver.forget()
                    LOG.info("The scaler has not measured: %s", error)
                window = time.monotonic() + scaler.window_seconds
            time.sleep(min(POLL_SECONDS, scaler.window_seconds))

    threading.Thread(target=work, name="persia-scaler", daemon=True).start()


def _rows_stay(roles: Roles) -> bool:
    """Returns whether rows cannot leave a PS; see `Ray.scale`."""
    service = roles.service
    return service is not None and any(t.capacity is not None for t in service.schema.resolved_tables().values())


class ScalerDriver:
    """Decides at the end of each window of training, and acts. For one thread.

    Args:
        scaler: bounds and limits.
        ask: returns the answers of all processes to a health check.
        scale: changes numbers of processes; see `Ray.scale`. Blocks until they are changed.
        report: shows metrics and notes; see `persia.services.BucketMaps.report_scaler`.
        clock: time in seconds.
    """

    def __init__(
        self,
        scaler: Scaler,
        ask: Callable[[], Sequence[Answer]],
        scale: Callable[..., object],
        report: Callable[[Readings], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scaler = scaler
        self._ask = ask
        self._scale = scale
        self._report = report
        self._clock = clock
        self._rules = ScalingRules(scaler)
        self._before: tuple[float, Sequence[Answer]] | None = None
        self._notes: deque[str] = deque(maxlen=MOST_NOTES)
        self._decisions: Counter[tuple[str, str, str]] = Counter()
        """Number of decisions by role, reason and state."""
        self._noted: tuple[object, ...] | None = None
        """The decision of the last window, so that one that stays blocked is noted once."""

    def forget(self) -> None:
        """Begins another window with the next look: nothing is trained, or something has changed."""
        self._before = None

    def look(self, *, reserved: int | None = None, rows_stay: bool = False) -> ScalingDecision | None:
        """Ends a window and begins the next one. Blocks while processes start or end.

        Args:
            reserved: see `measure`.
            rows_stay: see `measure`.

        Returns:
            The decision, if the window had one.

        Raises:
            PersiaError: the coordinator does not answer.
        """
        answers, now = self._ask(), self._clock()
        before, self._before = self._before, (now, answers)
        if before is None:
            return None
        load = measure(before[1], answers, max(1e-3, now - before[0]), reserved=reserved, rows_stay=rows_stay)
        if load is None:
            return None
        decision = self._rules.decide(load, now)
        if decision is not None:
            self._act(decision, load)
        else:
            self._noted = None
        self._report(self._readings(load, decision))
        return decision

    def _act(self, decision: ScalingDecision, load: MeasuredLoad) -> None:
        if decision.blocked:
            self._note(decision, "blocked", str(decision))
        elif self._scaler.dry_run:
            self._note(decision, "dry_run", f"{decision}; dry run")
            self._rules.changed(decision, self._clock(), failed=True)
        else:
            self._change(decision, load)

    def _change(self, decision: ScalingDecision, load: MeasuredLoad) -> None:
        begun = f"{decision}; begun"
        LOG.warning("scaler: %s", begun)
        self._report(self._readings(load, decision, _stamped(begun)))  # Processes start and rows move for minutes.
        failure = ""
        try:
            self._scale(**{decision.role: decision.after})
        except ClosedError:
            raise
        except Exception as error:  # Processes start elsewhere, for any reason that there can be.
            failure = str(error) or type(error).__name__
        if failure:
            self._note(decision, "failed", f"{decision}; failed: {failure}")
        else:
            self._note(decision, "done", f"{decision}; done")
        self._rules.changed(decision, self._clock(), failed=bool(failure))
        self.forget()

    def _note(self, decision: ScalingDecision, state: str, text: str) -> None:
        noted = (decision.role, decision.before, decision.after, decision.reason, state)
        if noted == self._noted:
            return
        self._noted = noted
        self._decisions[decision.role, decision.reason, state] += 1
        self._notes.append(_stamped(text))
        LOG.warning("scaler: %s", text)

    def _readings(self, load: MeasuredLoad, decision: ScalingDecision | None, *notes: str) -> Readings:
        wanted = {role: float(load.count(role)) for role in SCALED}
        if decision is not None:
            wanted[decision.role] = decision.after
        metrics = [Metric("scaler_processes", count, {"of": role}) for role, count in wanted.items()]
        metrics += [Metric("scaler_share", getattr(load, name), {"of": name}) for name in SHARES]
        metrics += [
            Metric("scaler_decisions", count, {"of": role, "reason": reason, "state": state})
            for (role, reason, state), count in self._decisions.items()
        ]
        return Readings(metrics, [], (*self._notes, *notes))


def _stamped(text: str) -> str:
    """Returns a text as one line with the time."""
    return f"{time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(text.split())}"
