"""Simulation of a run in any mode: computes the times of all events from the speeds of the NN workers.

No gradient is computed, as the timeline depends only on the mode and on time. It has the best rate that a mode can
reach with these latencies, its drops and its staleness; :func:`persia.replay.replay` trains along it with real
gradients.

Assumptions: as on a cluster, an NN worker has one lookup and one push in flight, or several pushes if the pushes of a
step are combined. Servers and the all-reduce take no time. With replicas a step starts when all have finished the
previous step, rows are looked up as early as the gate allows, and a push is answered when its step is applied. With a
dense PS an NN worker looks up, pulls and draws its token when the push of the previous batch is answered, which is when
it has arrived. At equal times gradients arrive before reads, in the order of ranks.

With `refresh` lookups run ahead without a bound, and updates of rows follow: an NN worker has them one lookup latency
after they are applied. A batch sees those that it has when its computation begins. The bound of the mode is on the
steps that a batch misses, so the computation waits where a lookup would have waited. With a dense PS rows are found
ahead, and the token is drawn, parameters and changed rows are read, one lookup latency before the batch before is
computed, so that nothing waits; where the gate lets no second batch pass, they are read as without `refresh`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from persia.checks import check_integer, check_number, plain_fields
from persia.errors import ConfigError
from persia.modes import Action, Arrival, Dense, Hybrid, Mode
from persia.nn.gate import WINDOW, Window
from persia.nn.pass_threads import MOST_READY
from persia.nn.step_pass import MOST_PUSHES
from persia.replay.schedule import Kind, ScheduleEvent, Timeline
from persia.replay.speed_trace import Trace

__all__ = ["Setting", "simulate"]

PS, DENSE_PS = "ps-0", "dense-0"


class Setting(msgspec.Struct, frozen=True):
    """Settings of a simulation.

    Args:
        trace: speeds of the NN workers, and their number.
        compute: compute time of a batch at full speed, in seconds.
        local_batch: rows of a batch.
        crashes: (seconds, rank): the NN worker loses its batch and restarts immediately. Only with a dense PS, as
            replicas restart together from a checkpoint.
        lookup: latency of a lookup in seconds; rows are read halfway.
        push: latency of a push in seconds, without waiting for the step; the gradient arrives halfway.
    """

    trace: Trace
    compute: float = 1.0
    local_batch: int = 1
    crashes: Sequence[tuple[float, int]] = ()
    lookup: float = 0.0
    push: float = 0.0

    def __post_init__(self) -> None:
        plain_fields(self)
        check_number("Setting.compute", self.compute, 0, open_low=True)
        check_integer("Setting.local_batch", self.local_batch, 1)
        check_number("Setting.lookup", self.lookup, 0)
        check_number("Setting.push", self.push, 0)

    @property
    def nn_workers(self) -> int:
        """Number of NN workers."""
        return len(self.trace.workers)


class _Batch(NamedTuple):
    number: int
    token: int


class _Values(NamedTuple):
    """The age of rows: k, and the number of steps of the NN worker that they contain. The larger is the newer."""

    version: int
    own_steps: int


class _Ready(NamedTuple):
    """A batch whose rows have arrived, the time of arrival, and the time by which the gate delayed the lookup."""

    batch: _Batch
    at: float
    gate_delay: float
    values: _Values


class _Worker:
    """State of an NN worker."""

    def __init__(self, rank: int, depth: int | None, start: float) -> None:
        self.rank = rank
        self.depth = depth
        self.looking: _Batch | None = None
        self.read = _Values(0, 0)
        """The age of the rows that its lookup has read."""
        self.looked_up: deque[_Ready] = deque()
        self.computing: _Batch | None = None
        self.unpushed: deque[_Batch] = deque()
        """Batches whose push is not answered yet: not applied, or with a dense PS not arrived."""
        self.arrived = 0
        """Number of these pushes, from the first one, that have arrived."""
        self.began = 0
        self.finished = 0
        self.settled = 0
        self.applied = 0
        """Number of own steps that are applied to rows."""
        self.incarnation = 0
        self.draws_at = 0.0
        """When it draws the next token, while it computes."""
        # The inputs of `Window`, as `StalenessGate` and `PassThreads` measure them.
        self.window = Window(1)
        self.gate_asked = start
        self.gate_delay = 0.0
        self.wants_batch = start
        self.drawn_at: float | None = None


class _Server:
    """Counters of a PS, which follows the decisions of the mode."""

    def __init__(self, name: str, mode: Mode, group: int, step: int) -> None:
        self.name, self._mode, self._group = name, mode, group
        self.step = step
        self.held: list[tuple[_Worker, _Batch]] = []

    def arrive(self, token: int) -> Action:
        return self._mode.arrive(Arrival(self.step, len(self.held), token, self._group)).action


class _Replicas(_Server):
    """An all-reduce as a server: it applies a step when the gradients of all NN workers have arrived."""

    def arrive(self, token: int) -> Action:
        return Action.APPLY if len(self.held) + 1 >= self._group else Action.HOLD


_MESSAGES = ("_pushed", "_answered", "_read", "_deliver", "_updated", "_advanced")
"""Methods of the simulation that run when a message arrives, in their order at equal times."""


class _Simulation:
    def __init__(self, mode: Mode, setting: Setting, batches: range, step: int, start: float, refresh: bool) -> None:
        count = setting.nn_workers
        self.mode, self.setting, self.start = mode, setting, start
        self.group = mode.group(count, setting.local_batch)
        self.replicas = mode.dense() is Dense.ALL_REDUCE
        if self.replicas and setting.crashes:
            raise ConfigError(
                f"{type(mode).__name__} trains replicas, which do not survive a crash: leave `crashes` empty, or use a "
                "mode with dense PSs.",
                field="crashes",
            )
        adapts = isinstance(mode, Hybrid) and mode.staleness == "auto"
        if refresh and adapts:
            raise ConfigError(
                f'Invalid refresh = True with {mode!r}: the rule of "auto" is for rows that are not refreshed. Use '
                "Hybrid with a number or None.",
                field="refresh",
            )
        self.refresh = refresh and self.replicas
        self.draws_ahead = refresh and not self.replicas and mode.gate(1, mode.initial_depth(), 1)
        self.batches = batches
        self.workers = [_Worker(rank, mode.initial_depth(), start) for rank in range(count)]
        on_arrival = self.replicas and self.group == 1  # Then k of a PS counts pushes, N per step.
        self.rows = _Server(PS, mode, self.group, step * count if on_arrival else step)
        self.dense = (_Replicas if self.replicas else _Server)(
            DENSE_PS, mode, count if self.replicas else self.group, step
        )
        self.newest = [_Values(self.rows.step, 0)] * count
        """The newest rows that each NN worker has, with `refresh`."""
        self.updates: deque[list[_Values]] = deque()
        """The next ones, which are on their way."""
        self.most_pushes = MOST_PUSHES if self.replicas and self.group > 1 else 1
        """Pushes arrive at a PS in order by themselves: a step starts when all have finished the previous one, and all
        pushes take the same time."""
        self.first_step = step
        self.drawn = 0  # Batches handed out.
        self.numbers = step * self.group  # Token numbers handed out; the next token's value continues from k.
        self.reissue = 0
        self.now = start
        self.events: list[ScheduleEvent] = []
        self.queue: list[tuple[float, int, int, bool]] = []  # time, rank, incarnation, whether it is a crash
        self.messages: list[tuple[float, int, int]] = []  # time, index into `_MESSAGES`, rank

    def run(self) -> Timeline:
        for time, rank in self.setting.crashes:
            heapq.heappush(self.queue, (time, rank, -1, True))
        self._advance()
        while self.messages or any(worker.computing for worker in self.workers):
            self.now = min(queue[0][0] for queue in (self.queue, self.messages) if queue)
            while self.queue and self.queue[0][0] == self.now:
                _, rank, incarnation, crash = heapq.heappop(self.queue)
                worker = self.workers[rank]
                if crash:
                    self._crash(worker)
                elif incarnation == worker.incarnation:
                    self._finish(worker)
            while self.messages and self.messages[0][0] == self.now:
                _, message, rank = heapq.heappop(self.messages)
                getattr(self, _MESSAGES[message])(self.workers[rank])
            self._advance()
        for server in (self.rows, self.dense):
            if server.held:  # The remainder, and a last step without a batch for every NN worker.
                self._apply(server, *server.held[-1])
        setting = self.setting
        return Timeline(
            self.mode, setting.nn_workers, setting.local_batch, self.group, self.events, self.first_step, self.start
        )

    # --- NN workers ---------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Advances all NN workers as far as the gates currently allow."""
        slowest = min(worker.finished for worker in self.workers)
        for worker in self.workers:
            while self._may_look_up(worker, slowest):
                self._look_up(worker)
        for worker in self.workers:
            self._begin(worker)

    def _may_look_up(self, worker: _Worker, slowest: int) -> bool:
        if not self.replicas and not self._may_draw(worker):
            return False
        if worker.looking or len(worker.looked_up) >= MOST_READY or self._next_batch(worker) is None:
            return False
        if self.refresh:
            return True
        step = worker.began + len(worker.looked_up)  # Step of this NN worker, since the start.
        depth = self.mode.depth_at(worker.depth, self.first_step + step)
        return self.mode.gate(step - worker.settled, depth, (worker.finished if self.replicas else step) - slowest)

    def _may_draw(self, worker: _Worker) -> bool:
        """Returns whether an NN worker needs its next token, and has at most one whose gradient has not arrived."""
        if worker.looked_up:
            return False
        if not self.draws_ahead:
            return not (worker.computing or worker.unpushed)
        if worker.computing is not None and self.now < worker.draws_at:
            return False
        return len(worker.unpushed) - worker.arrived + (worker.computing is not None) <= 1

    def _next_batch(self, worker: _Worker) -> int | None:
        """Returns the next batch of an NN worker: in order of ranks for replicas, otherwise in order of requests."""
        index = self.drawn
        if self.replicas:
            index = (worker.began + len(worker.looked_up)) * len(self.workers) + worker.rank
        return self.batches[index] if index < len(self.batches) else None

    def _look_up(self, worker: _Worker) -> None:
        number = self._next_batch(worker)
        assert number is not None
        if self.replicas:
            token = self.first_step + worker.began + len(worker.looked_up)
        else:
            token = self.mode.token(self.numbers, self.dense.step, self.group)
            self.drawn += 1
            if self.reissue:
                self.reissue -= 1
            else:
                self.numbers += 1
        worker.looking, worker.gate_delay = _Batch(number, token), self.now - worker.gate_asked
        if self.setting.lookup:
            self._send("_read", worker, self.setting.lookup / 2)
        else:
            self._read(worker)

    def _read(self, worker: _Worker) -> None:
        assert worker.looking is not None
        worker.read = _Values(self.rows.step, worker.applied)
        if not self.refresh:
            self._note("lookup", self.rows, worker, worker.looking)
        if not self.replicas:
            self._note("pull", self.dense, worker, worker.looking)
        if self.setting.lookup:
            self._send("_deliver", worker, self.setting.lookup / 2)
        else:
            self._deliver(worker)

    def _deliver(self, worker: _Worker) -> None:
        assert worker.looking is not None
        worker.looked_up.append(_Ready(worker.looking, self.now, worker.gate_delay, worker.read))
        worker.looking, worker.gate_asked = None, self.now

    def _send(self, message: str, worker: _Worker, seconds: float) -> None:
        heapq.heappush(self.messages, (self.now + seconds, _MESSAGES.index(message), worker.rank))

    def _begin(self, worker: _Worker) -> None:
        if worker.computing or not worker.looked_up or len(worker.unpushed) > MOST_READY:
            return
        if self.replicas and worker.began > self.dense.step - self.first_step:
            return
        ready = worker.looked_up[0]
        if self.refresh:
            values = max(ready.values, self.newest[worker.rank])
            depth = self.mode.depth_at(worker.depth, self.first_step + worker.began)
            if not self.mode.gate(worker.began - values.own_steps, depth):
                return
            self._note_use(worker, ready.batch, values.version)
        worker.looked_up.popleft()
        worker.computing = ready.batch
        if self.replicas:
            self._adapt(worker, ready)
            self._note("pull", self.dense, worker, worker.computing)
        worker.began += 1
        done = self.setting.trace.finish(worker.rank, self.now, self.setting.compute)
        worker.draws_at = max(self.now, done - self.setting.lookup)
        if self.draws_ahead and self.setting.lookup:
            heapq.heappush(self.messages, (worker.draws_at, _MESSAGES.index("_advanced"), worker.rank))
        heapq.heappush(self.queue, (done, worker.rank, worker.incarnation, False))

    def _adapt(self, worker: _Worker, drawn: _Ready) -> None:
        """Adapts the depth as `StalenessGate.drawn` does."""
        previous, worker.drawn_at = worker.drawn_at, self.now
        least = worker.depth if worker.depth is None else max(worker.depth, 1)
        warm = self.mode.depth_at(least, self.first_step + worker.began) == least
        if previous is None or not warm:
            return
        worker.window.add(self.now - previous, worker.wants_batch - drawn.at, drawn.gate_delay)
        if worker.window.draws < WINDOW:
            return
        depth = self.mode.next_depth(worker.depth, worker.window.observation())
        if depth is not None and worker.depth is not None and depth != worker.depth:
            worker.window.changed(depth - worker.depth)
            worker.depth = depth

    def _crash(self, worker: _Worker) -> None:
        worker.incarnation += 1
        if worker.computing is None:
            return
        ahead = [*(ready.batch for ready in worker.looked_up), worker.looking]
        lost = [worker.computing, *(batch for batch in ahead if batch is not None)]
        worker.computing = worker.looking = None
        worker.looked_up.clear()
        reading = [(_MESSAGES.index(message), worker.rank) for message in ("_read", "_deliver")]
        self.messages = [message for message in self.messages if message[1:] not in reading]
        heapq.heapify(self.messages)
        worker.began -= 1
        self.reissue += len(lost)  # Reissues tokens of the current value, so that tokens and steps stay aligned.
        for batch in lost:
            for server in (self.rows, self.dense):
                self._note("lost", server, worker, batch)

    # --- servers ------------------------------------------------------------------------------------------------

    def _finish(self, worker: _Worker) -> None:
        batch = worker.computing
        assert batch is not None
        worker.computing = None
        worker.unpushed.append(batch)
        if not self.setting.push:
            self._pushed(worker)
        elif len(worker.unpushed) <= self.most_pushes:
            self._send("_pushed", worker, self.setting.push / 2)
        if self.replicas:
            self._arrive(self.dense, worker, batch)

    def _pushed(self, worker: _Worker) -> None:
        batch = worker.unpushed[worker.arrived]
        worker.arrived += 1
        worker.finished += 1
        self._arrive(self.rows, worker, batch)
        if not self.replicas:
            self._arrive(self.dense, worker, batch)
            self._answer(worker)

    def _answer(self, worker: _Worker) -> None:
        if self.setting.push:
            self._send("_answered", worker, self.setting.push / 2)
        else:
            self._answered(worker)

    def _answered(self, worker: _Worker) -> None:
        worker.unpushed.popleft()
        worker.arrived -= 1
        worker.settled += self.replicas
        if len(worker.unpushed) >= self.most_pushes:
            self._send("_pushed", worker, self.setting.push / 2)

    def _arrive(self, server: _Server, worker: _Worker, batch: _Batch) -> None:
        action = server.arrive(batch.token)
        if action is Action.DROP:
            self._note("drop", server, worker, batch)
            worker.settled += server is self.rows
            return
        self._note("push", server, worker, batch)
        server.held.append((worker, batch))
        if action is Action.APPLY:
            self._apply(server, worker, batch)

    def _apply(self, server: _Server, worker: _Worker, batch: _Batch) -> None:
        self._note("apply", server, worker, batch)
        for owner, _ in server.held:
            owner.applied += server is self.rows
            if server is self.dense:
                owner.wants_batch = self.now
            elif self.replicas:
                self._answer(owner)
            else:
                owner.settled += 1
        server.held.clear()
        server.step += 1
        if self.refresh and server is self.rows:
            self.updates.append([_Values(server.step, owner.applied) for owner in self.workers])
            if self.setting.lookup:
                self._send("_updated", worker, self.setting.lookup)
            else:
                self._updated(worker)

    def _updated(self, _: _Worker) -> None:
        """An update of rows reaches all NN workers."""
        self.newest = self.updates.popleft()

    def _advanced(self, _: _Worker) -> None:
        """No-op: a token may be drawn from now on."""

    def _note_use(self, worker: _Worker, batch: _Batch, version: int) -> None:
        """Inserts the lookup of a batch that begins now after the last update that it sees."""
        at = len(self.events)
        while at and not self._precedes(self.events[at - 1], version):
            at -= 1
        time = self.events[at - 1].time if at else self.start
        self.events.insert(at, self._event(time, "lookup", self.rows, worker, batch, version))

    def _precedes(self, event: ScheduleEvent, version: int) -> bool:
        """Returns whether an event is an update that rows of this version contain."""
        return event.kind == "apply" and event.server == self.rows.name and event.version < version

    def _note(self, kind: Kind, server: _Server, worker: _Worker, batch: _Batch) -> None:
        self.events.append(self._event(self.now, kind, server, worker, batch, server.step))

    def _event(
        self, time: float, kind: Kind, server: _Server, worker: _Worker, batch: _Batch, version: int
    ) -> ScheduleEvent:
        rows = self.setting.local_batch
        return ScheduleEvent(time, kind, server.name, worker.rank, batch.number, batch.token, version, rows)


def simulate(
    mode: Mode,
    setting: Setting,
    batches: int | range,
    *,
    step: int = 0,
    start: float = 0.0,
    refresh: bool = False,
) -> Timeline:
    """Returns the timeline of a run that trains batches in a mode and drains at the end.

    Args:
        mode: any mode.
        setting: NN workers and their speeds.
        batches: number of batches, or their numbers in the source.
        step: k at the start, such as `Timeline.end_step` of the previous run.
        start: time of the start in seconds.
        refresh: whether rows that are looked up ahead stay fresh: a batch misses only the updates that are not applied
            one lookup latency before its computation begins, whatever the depth of the mode. `Sync` waits for them,
            but not for lookups. The time of a "lookup" is then the time of the last update that the batch sees. In
            modes with dense PSs tokens are drawn and rows read just before they are needed. Not for `Hybrid("auto")`.

    Raises:
        ConfigError: the mode cannot run in this setting, or cannot refresh rows.
    """
    numbers = range(batches) if isinstance(batches, int) else batches
    return _Simulation(mode, setting, numbers, step, start, refresh).run()
