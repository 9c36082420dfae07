"""Training along a timeline, with real gradients, in one process.

The timeline may be simulated or recorded by a run: the same order of events leads to the same parameters, drops and
staleness. Every event is checked against the decisions of the mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from persia.errors import DataError
from persia.modes import Action, Arrival
from persia.replay.replay_servers import ReplayServer, TakenGradient
from persia.replay.schedule import DENSE, ScheduleEvent, Timeline

__all__ = ["Compute", "replay"]

Compute: TypeAlias = Callable[[int, Mapping[str, Any]], Mapping[str, Any]]
"""Takes the number of a batch and the result of each server's `read`; returns the gradient for each server."""


class _Follower:
    """Counters of one server, derived from its events."""

    def __init__(self, name: str, server: ReplayServer, schedule: Timeline) -> None:
        self.server = server
        self._schedule = schedule
        self._dense = name.startswith(DENSE)
        self._step: int | None = None
        self._pending = 0
        self._complete = False

    def check(self, event: ScheduleEvent, number: int) -> None:
        """Raises DataError if an event contradicts earlier events."""
        expected = self._step
        if expected is not None and event.version != expected:
            raise self._error(event, number, f"k is {expected} here after the earlier events")
        if self._complete and event.kind in ("push", "drop"):
            raise self._error(event, number, f"{self._pending} gradients were complete and must be applied first")
        self._step = event.version
        if event.kind in ("push", "drop") and self._decides:
            arrival = Arrival(event.version, self._pending, event.token, self._schedule.group)
            action = self._schedule.mode.arrive(arrival).action
            if (action is Action.DROP) != (event.kind == "drop"):
                raise self._error(event, number, f"the mode decides {action.value!r}")
            self._complete = action is Action.APPLY
        if event.kind == "push":
            self._pending += 1

    def applied(self) -> None:
        assert self._step is not None
        self._step, self._pending, self._complete = self._step + 1, 0, False

    @property
    def _decides(self) -> bool:
        """Whether the mode decides. It does not for replicas, which have no dense PS."""
        return not (self._dense and self._schedule.by_rows)

    def _error(self, event: ScheduleEvent, number: int, why: str) -> DataError:
        return DataError(
            f"Event {number} of the schedule, {event.kind!r} of batch {event.batch} at {event.server} with k = "
            f"{event.version}, is inconsistent: {why}. The schedule belongs to another mode, or the server has a bug.",
            event=number,
            server=event.server,
        )


def replay(
    schedule: Timeline,
    servers: Mapping[str, ReplayServer],
    compute: Compute,
    on_event: Callable[[ScheduleEvent, Any], None] | None = None,
) -> None:
    """Trains along a timeline.

    Args:
        schedule: the timeline, simulated or recorded.
        servers: all servers of the timeline by name. They continue from their current state.
        compute: called once per batch, when its gradient first arrives at a server; not for dropped or lost batches.
        on_event: called with each event and the gradient for that server, or None.

    Raises:
        DataError: the timeline contradicts itself, or the decisions of its mode; the error names the event.
    """
    followers = {}
    for name in schedule.servers:
        if name not in servers:
            raise DataError(
                f"The schedule has a server {name!r}, but there are only {', '.join(servers)}.", server=name
            )
        servers[name].begin(schedule.mode)
        followers[name] = _Follower(name, servers[name], schedule)
    reads: dict[int, dict[str, Any]] = {}
    gradients: dict[int, dict[str, Any]] = {}
    settled: dict[int, int] = {}
    for number, event in enumerate(schedule.events):
        follower = followers[event.server]
        server = follower.server
        follower.check(event, number)
        gradient = None
        if event.kind in ("lookup", "pull"):
            reads.setdefault(event.batch, {})[event.server] = server.read(event.batch)
        elif event.kind == "apply":
            # Rows of Hybrid follow their NN worker's own step; all others follow k.
            server.apply(event.token if schedule.by_rows else event.version)
            follower.applied()
        else:
            if event.kind == "push":
                has_gradient = event.rows and not event.empty
                if has_gradient and event.batch not in gradients:
                    inputs = reads.get(event.batch, {})
                    if len(inputs) < len(followers):
                        missing = ", ".join(sorted(followers.keys() - inputs.keys()))
                        raise DataError(f"Event {number}: batch {event.batch} was not read at {missing}.", event=number)
                    gradients[event.batch] = dict(compute(event.batch, inputs))
                gradient = gradients[event.batch][event.server] if has_gradient else None
                weight = 1.0 if schedule.by_rows else schedule.mode.decay(event.version, event.token)
                unit = 1 if schedule.by_rows else schedule.local_batch
                server.add(gradient, TakenGradient(event.version, event.token, weight, event.rows / unit))
            settled[event.batch] = settled.get(event.batch, 0) + 1
            if settled[event.batch] == len(followers):
                del settled[event.batch]
                reads.pop(event.batch, None)
                gradients.pop(event.batch, None)
        if on_event is not None:
            on_event(event, gradient)
