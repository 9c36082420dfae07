"""`Scaler`: rules by which the numbers of processes of a cluster follow what was measured.

Pure functions and a small state: `ScalingRules` gets what was measured in a window, and returns what to change, with
its evidence. `persia.cluster.ray.scaler_driver` measures, and changes the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from persia.checks import check_flag, check_integer, check_number, check_seconds, plain, plain_fields
from persia.errors import ConfigError

__all__ = [
    "MAX_PROCESSES",
    "SCALED",
    "MeasuredLoad",
    "Reason",
    "ScaledRole",
    "Scaler",
    "ScalingDecision",
    "ScalingRules",
]

ScaledRole: TypeAlias = Literal["ps", "embedding_workers", "data_loaders"]
Reason: TypeAlias = Literal["memory", "processors", "lookups", "loading", "idle"]

SCALED: tuple[ScaledRole, ...] = ("ps", "embedding_workers", "data_loaders")
"""Roles that a `Scaler` changes, as arguments of `Ray.scale`."""

MAX_PROCESSES = 256
"""Maximum number of processes of a role: the rank of an embedding worker is one byte of the batch id."""

TARGET = 0.75
"""Part of a limit at which processes are after a change, so that the next one is not due soon."""

BUSY = 0.5
"""Part of its time, or of the limit of its processors, from which on a role is taken to be what NN workers wait for."""

GROWTH = 1.25
"""Factor of the processes that NN workers wait for: a few at a time, as waits do not say how many are missing."""

HELPED = 0.9
"""Maximum ratio of a measurement after an increase to that before it for which the increase has helped."""

SOON = 3
"""Cool-downs after a decrease in which an increase shows that the decrease was a mistake, which is not repeated."""

LEAST = 24
"""Cool-downs for which a decrease that was a mistake is not repeated."""

INCREASE_WINDOWS = 2
"""Consecutive windows that must call for an increase of a role."""

DECREASE_WINDOWS = 5
"""Consecutive windows that must allow a decrease of a role."""

QUIET_WINDOWS = 5
"""Consecutive windows outside cool-downs without the reason of an increase, after which it has helped."""

DOUBLINGS = 6
"""Number of times that the pause after a failure is doubled."""


class Scaler(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Changes the numbers of processes of a cluster on Ray by what is measured while a `Trainer` trains.

        options = persia.cluster.RayOptions(scaler=persia.cluster.Scaler(ps=(2, 8), embedding_workers=(1, 4)))

    With `dry_run` it only reports what it would do: in the log, in `persia top` and on the page, and as metrics.
    Between two changes are at least `cool_down_seconds`. See docs/guide/cluster.md for the rules.

    Args:
        ps: minimum and maximum number of embedding PSs; None leaves their number alone.
        embedding_workers: minimum and maximum number of embedding workers; None leaves their number alone.
        data_loaders: minimum and maximum number of data loaders; None leaves their number alone.
        dry_run: whether to report decisions without changing anything.
        waiting: share of the time of NN workers; if they wait longer for lookups or for data, processes are added.
        memory: share of the memory that PSs may use; above it, PSs are added, unless the tables bound it.
        processors: share of its processors that a PS may use; above it, PSs are added.
        window_seconds: duration of a measurement. A decision needs several windows of training.
        cool_down_seconds: seconds after training begins, and after any change, in which nothing is changed.

    Raises:
        ConfigError: an argument is not valid.
    """

    ps: tuple[int, int] | None = None
    embedding_workers: tuple[int, int] | None = None
    data_loaders: tuple[int, int] | None = None
    dry_run: bool = True
    waiting: float = 0.1
    memory: float = 0.8
    processors: float = 0.8
    window_seconds: float = 60.0
    cool_down_seconds: float = 300.0

    def __post_init__(self) -> None:
        plain_fields(self)
        check_flag("dry_run", self.dry_run)
        for name in ("waiting", "memory", "processors"):
            check_number(name, getattr(self, name), 0, 1, open_low=True)
        for name in ("window_seconds", "cool_down_seconds"):
            check_seconds(name, getattr(self, name))
        for role in SCALED:
            if (bounds := self.bounds(role)) is None:
                continue
            if not isinstance(bounds, tuple | list) or len(bounds) != 2:
                raise ConfigError(
                    f"Invalid {role} = {bounds!r}; expected a minimum and a maximum number of processes, such as "
                    "(2, 8).",
                    field=role,
                )
            low, high = map(plain, bounds)
            check_integer(f"minimum of {role}", low, 1, MAX_PROCESSES, field=role)
            check_integer(f"maximum of {role}", high, low, MAX_PROCESSES, field=role)
            msgspec.structs.force_setattr(self, role, (low, high))

    def bounds(self, role: ScaledRole) -> tuple[int, int] | None:
        """Returns the minimum and maximum number of processes of a role; None if their number is left alone."""
        bounds: tuple[int, int] | None = getattr(self, role)
        return bounds

    def check_count(self, role: ScaledRole, count: int) -> None:
        """Raises ConfigError unless a number of processes with which a cluster starts is within its bounds."""
        bounds = self.bounds(role)
        if bounds is not None and not bounds[0] <= count <= bounds[1]:
            raise ConfigError(
                f"Invalid Ray.{role} = {count}: the scaler keeps it from {bounds[0]} to {bounds[1]}. Start with a "
                f"number between these, or change Scaler.{role}.",
                field=f"cluster.{role}",
            )


class MeasuredLoad(NamedTuple):
    """Measurements of a window in which a cluster trained. Shares are from 0 to about 1.

    Attributes:
        ps: number of embedding PSs.
        embedding_workers: number of embedding workers.
        data_loaders: number of data loaders.
        lookups: share of the time for which NN workers waited for a batch that was read and not looked up; their mean.
        loading: share of the time for which NN workers waited for a batch that was not read; their mean.
        ps_memory: share of its memory that is used, of the PS with the highest one.
        ps_processors: share of its processors that was used, of the PS with the highest one.
        worker_processors: share of their processors that embedding workers used; their mean.
        loaders_busy: share of the time for which data loaders read or registered batches; their mean.
        source_idle: whether the data loaders read a stream that has no more data at the moment.
        rows_stay: whether rows cannot leave a PS, as a table has a declared capacity.
        memory_bounded: whether PSs use as much memory as the tables let them, so that its share calls for nothing.
    """

    ps: int
    embedding_workers: int
    data_loaders: int
    lookups: float = 0.0
    loading: float = 0.0
    ps_memory: float = 0.0
    ps_processors: float = 0.0
    worker_processors: float = 0.0
    loaders_busy: float = 0.0
    source_idle: bool = False
    rows_stay: bool = False
    memory_bounded: bool = False

    def count(self, role: ScaledRole) -> int:
        """Returns the number of processes of a role."""
        count: int = getattr(self, role)
        return count


class ScalingDecision(NamedTuple):
    """A change of the number of processes of a role, with its evidence.

    Attributes:
        role: the role.
        before: number of its processes.
        after: number that they should be.
        reason: the rule.
        value: the measurement that the rule compares with a limit.
        evidence: sentence with the measurements.
        blocked: why the change is not made; empty if it is.
    """

    role: ScaledRole
    before: int
    after: int
    reason: Reason
    value: float
    evidence: str
    blocked: str = ""

    @property
    def direction(self) -> tuple[ScaledRole, bool]:
        """The role, and whether it gets more processes."""
        return self.role, self.after > self.before

    def __str__(self) -> str:
        change = f"{self.role} {self.before} -> {self.after}: {self.evidence}"
        return f"{change}; not done: {self.blocked}" if self.blocked else change


class _Increase(NamedTuple):
    """The last increase of a role for a reason, until the reason has ended.

    Attributes:
        before: number of processes before.
        after: number of processes after it.
        value: measurement before it.
        quiet: consecutive windows without the reason.
    """

    before: int
    after: int
    value: float
    quiet: int = 0


class _Failures(NamedTuple):
    """Failures of changes of a role in a direction, since one was made: how many, until when it waits, and why."""

    times: int = 0
    until: float = -math.inf
    why: str = ""


class ScalingRules:
    """Decides by windows of measurements. For one thread.

    Calls are in the order of time. At most one change is made after a window, so that the next one shows its effect.

    Args:
        scaler: bounds and limits.
        problem: returns why there cannot be these numbers of processes; empty if there can.
    """

    def __init__(self, scaler: Scaler, problem: Callable[[Mapping[ScaledRole, int]], str] = lambda _: "") -> None:
        self._scaler = scaler
        self._problem = problem
        self._counts: dict[ScaledRole, int] = {}
        self._changed_at = -math.inf
        self._windows: dict[tuple[ScaledRole, bool], int] = {}
        """By direction, the number of consecutive windows that call for it."""
        self._failures: dict[tuple[ScaledRole, bool], _Failures] = {}
        self._increased: dict[tuple[ScaledRole, Reason], _Increase] = {}
        self._decreased: dict[ScaledRole, tuple[int, float]] = {}
        """By role, the number before the last decrease, and its time."""
        self._least: dict[ScaledRole, tuple[int, float]] = {}
        """By role, the number below which it is not decreased, as it had to be increased again soon, and until when."""

    def decide(self, load: MeasuredLoad, now: float) -> list[ScalingDecision]:
        """Returns what to change after a window. Call `changed` or `failed` after a change.

        Args:
            load: what was measured in the window.
            now: time in seconds.

        Returns:
            Increases that are due, the most urgent first, also blocked ones; then decreases that are possible. Empty
            in a cool-down.
        """
        counts = {role: load.count(role) for role in SCALED}
        if counts != self._counts:  # Training begins, or a command or the program has changed them.
            self.interrupt(now)
        self._counts = counts
        due = [*_increases(self._scaler, load), *_decreases(self._scaler, load)]
        self._windows = {key: self._windows.get(key, 0) + 1 for key in {decision.direction for decision in due}}
        if now < self._changed_at + self._scaler.cool_down_seconds:
            return []
        self._note_quiet({(decision.role, decision.reason) for decision in due})
        lasting = [
            self._judged(decision, now)
            for decision in due
            if self._windows[decision.direction] >= (INCREASE_WINDOWS if decision.direction[1] else DECREASE_WINDOWS)
        ]
        return [decision for decision in lasting if decision.direction[1] or not decision.blocked]

    def interrupt(self, now: float) -> None:
        """Begins a cool-down, after which windows before it do not count: something has changed until now."""
        self._changed_at = now
        self._windows = {}

    def failed(self, decision: ScalingDecision, why: str, now: float) -> None:
        """Notes that a change has failed: it is blocked, the longer the more often it has failed in a row."""
        self.interrupt(now)
        times = self._failures.get(decision.direction, _Failures()).times + 1
        pause = self._scaler.cool_down_seconds * 2 ** min(times, DOUBLINGS)
        why = f"it has failed, and is tried again after {pause:g} s: {why}"
        self._failures[decision.direction] = _Failures(times, now + pause, why)

    def changed(self, decision: ScalingDecision, now: float) -> None:
        """Notes that a change was made: the cool-down begins."""
        self.interrupt(now)
        role, before, after, reason, value = decision[:5]
        self._counts[role] = after
        self._failures.pop(decision.direction, None)
        if after < before:
            self._increased = {key: last for key, last in self._increased.items() if key[0] != role}
            self._decreased[role] = before, now
            return
        self._increased[role, reason] = _Increase(before, after, value)
        number, decreased_at = self._decreased.pop(role, (0, -math.inf))
        if now < decreased_at + SOON * self._scaler.cool_down_seconds:
            self._least[role] = number, now + LEAST * self._scaler.cool_down_seconds

    def _note_quiet(self, due: set[tuple[ScaledRole, Reason]]) -> None:
        """Forgets increases whose reasons have ended."""
        quiet = {key: 0 if key in due else last.quiet + 1 for key, last in self._increased.items()}
        self._increased = {
            key: last._replace(quiet=quiet[key]) for key, last in self._increased.items() if quiet[key] < QUIET_WINDOWS
        }

    def _judged(self, decision: ScalingDecision, now: float) -> ScalingDecision:
        """Returns a decision within its bounds, with the reason if it cannot be made."""
        role, before = decision.role, decision.before
        bounds = self._scaler.bounds(role)
        if bounds is None:
            return decision._replace(blocked=f"Scaler.{role} has no bounds")
        low, high = bounds
        if not low <= before <= high:
            outside = f"{before} is outside Scaler.{role} = {bounds}; call scale({role}={min(max(low, before), high)})"
            return decision._replace(blocked=outside)
        least, until = self._least.get(role, (0, -math.inf))
        if decision.after < before and now < until:
            low = max(low, min(least, before))
        after = max(low, min(decision.after, high))
        if after == before:
            return decision._replace(blocked=f"{before} is the {'maximum' if decision.after > before else 'minimum'}")
        failures = self._failures.get(decision.direction, _Failures())
        blocked = failures.why if now < failures.until else self._problem({**self._counts, role: after})
        decision = decision._replace(after=after, blocked=blocked)
        last = self._increased.get((role, decision.reason))
        if blocked or last is None or decision.value <= HELPED * last.value:
            return decision
        return decision._replace(
            blocked=f"{last.before} -> {last.after} did not help: {last.value:.0%} before, {decision.value:.0%} after"
        )


def _increases(scaler: Scaler, load: MeasuredLoad) -> Iterator[ScalingDecision]:
    """Yields the increases that the measurements call for, the most urgent first, without regard to bounds."""
    ps, workers = load.ps_processors / scaler.processors, load.worker_processors / scaler.processors
    servers = f"an embedding PS uses {load.ps_processors:.0%} of its processors"
    use = f"{servers}, embedding workers {load.worker_processors:.0%} of theirs"

    if load.ps_memory > scaler.memory and not load.memory_bounded:
        after = _needed(load.ps, load.ps_memory / scaler.memory)
        evidence = f"{load.ps_memory:.0%} of the memory of an embedding PS is used, above {scaler.memory:.0%}"
        yield ScalingDecision("ps", load.ps, after, "memory", load.ps_memory, evidence)
    if ps > 1:
        evidence = f"{servers}, above {scaler.processors:.0%}"
        yield ScalingDecision("ps", load.ps, _needed(load.ps, ps), "processors", load.ps_processors, evidence)
    if load.lookups > scaler.waiting and max(ps, workers) >= BUSY:
        evidence = (
            f"NN workers wait for lookups for {load.lookups:.0%} of their time, above {scaler.waiting:.0%}; {use}"
        )
        yield _more(load, "ps" if ps >= workers else "embedding_workers", "lookups", load.lookups, evidence)
    if load.loading > scaler.waiting and not load.source_idle:
        evidence = (
            f"NN workers wait for data for {load.loading:.0%} of their time, above {scaler.waiting:.0%}; data loaders "
            f"are busy for {load.loaders_busy:.0%} of theirs, embedding workers use {load.worker_processors:.0%} of "
            "their processors"
        )
        if workers >= 1:  # Data loaders wait for them, to register batches.
            yield _more(load, "embedding_workers", "loading", load.loading, evidence)
        elif load.loaders_busy >= BUSY:
            yield _more(load, "data_loaders", "loading", load.loading, evidence)


def _decreases(scaler: Scaler, load: MeasuredLoad) -> Iterator[ScalingDecision]:
    """Yields the decreases by one process that the measurements allow, without regard to bounds.

    The processes that stay would have less work than an increase needs.
    """
    loading = 0.0 if load.source_idle else load.loading
    if max(load.lookups, loading) > BUSY * scaler.waiting:
        return
    waits = f"NN workers wait for lookups for {load.lookups:.0%} of their time, for data for {load.loading:.0%}"

    def fits(role: ScaledRole, share: float, limit: float) -> bool:
        count = load.count(role)
        return count > 1 and share * count / (count - 1) <= TARGET * limit

    light = fits("ps", load.ps_memory, scaler.memory) and fits("ps", load.ps_processors, BUSY * scaler.processors)
    if light and not load.rows_stay:
        evidence = f"{waits}; an embedding PS uses {load.ps_processors:.0%} of its processors"
        evidence += f", and {load.ps_memory:.0%} of its memory is used"
        yield ScalingDecision("ps", load.ps, load.ps - 1, "idle", load.ps_processors, evidence)
    if fits("embedding_workers", load.worker_processors, BUSY * scaler.processors):
        count = load.embedding_workers
        evidence = f"{waits}; embedding workers use {load.worker_processors:.0%} of their processors"
        yield ScalingDecision("embedding_workers", count, count - 1, "idle", load.worker_processors, evidence)
    if fits("data_loaders", load.loaders_busy, BUSY) and not load.source_idle:
        count = load.data_loaders
        evidence = f"{waits}; data loaders are busy for {load.loaders_busy:.0%} of their time"
        yield ScalingDecision("data_loaders", count, count - 1, "idle", load.loaders_busy, evidence)


def _needed(count: int, load: float) -> int:
    """Returns how many processes bring a load above its limit, which is 1, to the target; at most twice as many."""
    return max(count + 1, min(2 * count, math.ceil(count * load / TARGET)))


def _more(load: MeasuredLoad, role: ScaledRole, reason: Reason, value: float, evidence: str) -> ScalingDecision:
    """Returns an increase of what NN workers wait for."""
    count = load.count(role)
    return ScalingDecision(role, count, max(count + 1, math.ceil(count * GROWTH)), reason, value, evidence)
