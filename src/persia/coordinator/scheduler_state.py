"""State and rules of the token scheduler in a phase, without locks or waiting (protocol, section 12)."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from persia.errors import StalePushError
from persia.modes import Action, Arrival, Mode
from persia.services import TrainingPhase
from persia.telemetry.metrics import Readings, metrics_of
from persia.types import NO_LOSSES, Losses, PushHeader, PushId, Ticket, Token, TokenReport

__all__ = ["OpenToken", "SchedulerState", "StateChange", "WorkerState", "apply_change", "report_metrics"]


class OpenToken(msgspec.Struct, array_like=True):
    """A drawn token whose gradient has not arrived."""

    number: int
    value: int
    least: int
    after: PushId | None


class WorkerState(msgspec.Struct, array_like=True):
    """State of one NN worker in a phase.

    Attributes:
        alive: False once it is dead.
        ended: whether there are no more batches for it.
        waiting: whether it has called `quiesce`.
        requests: number of its last request for a batch.
        answer: answer to that request.
        taken: numbers of the batches that it has taken, but drawn no token for.
        drawn: open tokens by sequence number.
        pushes: its pushes of incomplete steps, and its pushes that are not known to have returned.
        ticket: its last ticket.
        finished: number of gradients that have arrived, dropped ones included.
        completed: its last push that completed a step.
        done: sequence number up to which all pushes have returned.
        assigned: abandoned pushes that it must still fill.
        filled: number of abandoned pushes that it has filled.
        lost: its losses since it started, as last reported.
    """

    alive: bool = True
    ended: bool = False
    waiting: bool = False
    requests: int = 0
    answer: int | None = None
    taken: list[int] = msgspec.field(default_factory=list)
    drawn: dict[int, OpenToken] = msgspec.field(default_factory=dict)
    pushes: dict[int, PushHeader] = msgspec.field(default_factory=dict)
    ticket: Ticket | None = None
    finished: int = 0
    completed: PushId | None = None
    done: int = 0
    assigned: list[PushHeader] = msgspec.field(default_factory=list)
    filled: int = 0
    lost: Losses = NO_LOSSES

    def has_drawn(self, sequence: int) -> bool:
        """Returns whether a token was drawn for this push, as calls may be repeated, and repetitions may be late."""
        pushed = self.ticket is not None and self.ticket.header.sequence >= sequence
        return pushed or sequence in self.drawn

    def token_of(self, sequence: int) -> Token:
        """Returns the token that was drawn for a push.

        Raises:
            StalePushError: the gradient has arrived already, so this call is a late repetition.
        """
        drawn = self.drawn.get(sequence)
        if drawn is None:
            raise StalePushError(f"Token {sequence} is already used: the call is a late repetition.", sequence=sequence)
        return Token(drawn.value, drawn.least, drawn.after, [], self.requests, self.answer)


class SchedulerState(msgspec.Struct):
    """The state that survives a restart."""

    phase: TrainingPhase | None = None
    quiesced: int | None = 0
    """Global step at which the phase is quiesced; None while it runs."""
    group: int = 0
    step: int = 0
    held: int = 0
    tokens: int = 0
    """Number of tokens drawn and not lost since step 0."""
    spare: int = 0
    """Number of tokens lost with dead NN workers; the next draws repeat the current value."""
    following: int = 0
    """Number of the next batch to hand out."""
    returned: list[int] = msgspec.field(default_factory=list)
    """Numbers of batches of dead NN workers, which are handed out first."""
    again: list[int] = msgspec.field(default_factory=list)
    """Numbers of returned batches from before the phase that are handed out in it."""
    open: int = 0
    """Number of batches that NN workers have taken, and whose gradients have not arrived."""
    slowest: int = 0
    """A lower bound of the gradients that any living NN worker has finished."""
    end: int | None = None
    stopped: bool = False
    workers: dict[int, WorkerState] = msgspec.field(default_factory=dict)
    abandoned: list[PushHeader] = msgspec.field(default_factory=list)
    """Abandoned pushes that are not assigned to an NN worker yet."""
    report: TokenReport = msgspec.field(default_factory=TokenReport)
    requested: Mode | None = None
    """Requested mode."""
    nn_workers: int = 0
    local_batch: int = 0
    leader: int | None = None
    """Rank of the NN worker that drains the PSs once all have finished the phase."""

    @property
    def current(self) -> TrainingPhase:
        """The phase, once one has begun."""
        assert self.phase is not None
        return self.phase

    def set_group(self, group: int) -> None:
        """Sets M, once the local batch is known."""
        self.group = group
        self.tokens = self.step * group

    def request(self, mode: Mode) -> None:
        """Requests a switch at the next boundary.

        Raises:
            ConfigError: the mode cannot run with these NN workers or batches.
        """
        if self.nn_workers and self.local_batch:
            mode.group(self.nn_workers, self.local_batch)
        self.requested = mode
        self.stopped = True

    def lacking(self) -> int:
        """Returns the number of batches that the steps of the phase still need, if none is dropped."""
        phase = self.current
        if phase.steps is None or not self.group:
            return 1
        return max(0, (phase.step + phase.steps - self.step) * self.group - self.held - self.open)

    def may_take(self, mode: Mode) -> bool:
        """Returns whether `TokenScheduler.take` can answer now, without waiting for open batches."""
        phase = self.current
        if phase.steps is None or self.stopped:
            return True
        if not self.group:  # The first draw sets it, and needs a batch.
            return self.end is not None or not self.open
        if self.lacking() or self.step >= phase.step + phase.steps:
            return True
        # A mode that waits for each step may drop an open batch; the step then needs another one.
        return not mode.waits_for_step

    def take(self, worker: WorkerState, request: int) -> None:
        """Answers a request for a batch."""
        worker.requests, worker.answer = request, self._next_number()
        if worker.answer is None:
            worker.ended = True
        else:
            worker.taken.append(worker.answer)
            self.open += 1

    def untake(self, worker: WorkerState, numbers: Collection[int]) -> None:
        """Closes batches that an NN worker has taken and draws no token for."""
        self.open -= len(numbers)
        worker.taken = [number for number in worker.taken if number not in numbers]

    def _next_number(self) -> int | None:
        if self.stopped:
            return None
        if self.returned and self.lacking():
            number = self.returned.pop(0)
            if number < self.current.position:
                self.again.append(number)
            return number
        if self.end is not None and self.following >= self.end:
            return None
        if self.current.steps is not None and self.group and not self.lacking():
            return None
        self.following += 1
        return self.following - 1

    def untrained(self, position: int) -> tuple[list[int], int]:
        """Returns the batches below the position of a restart that are still to be handed out.

        The second result is the number of further batches that may not have been trained. After a restart from a
        recovery point, batches from the position on are handed out in any case.
        """
        if self.quiesced is not None:
            return [n for n in self.returned if n < position], 0
        # The phase did not end, so its last steps may be lost with a PS. Taken and drawn batches were not trained.
        taken = {n for w in self.workers.values() for n in (*w.taken, *(token.number for token in w.drawn.values()))}
        again = [n for n in self.again if n < position]
        left = {n for n in self.returned if n < position} | taken.intersection(again)
        return sorted(left), sum(n not in left for n in again)

    def gate(self, mode: Mode, rank: int, waiting: Collection[int], taking: Collection[int]) -> bool:
        """Returns whether this NN worker may draw a token.

        The gate also opens when every active NN worker waits here: the step then lacks the gradients of workers that
        have no more data.

        Args:
            mode: mode of the phase.
            rank: rank of the NN worker.
            waiting: ranks that wait to draw.
            taking: ranks that wait in `take`; they do not count as active, unless they have an open batch.
        """
        worker = self.workers[rank]
        in_step = sum(header.step == self.step for header in worker.pushes.values()) if self.held else 0
        begun = worker.finished + len(worker.drawn)
        in_flight, depth = len(worker.drawn) + in_step, mode.initial_depth()
        if mode.gate(in_flight, depth, begun - self.slowest):  # Less far ahead, it is open too.
            return True
        self.slowest = min(w.finished for w in self.workers.values() if w.alive)
        active = {
            r: w
            for r, w in self.workers.items()
            if w.alive and ((not w.ended and r not in taking) or w.taken or w.drawn)
        }
        ahead = begun - min((w.finished for w in active.values()), default=begun)
        if mode.gate(in_flight, depth, max(0, ahead)):
            return True
        return not ahead and all(other == rank or other in waiting for other in active)

    def draw(self, mode: Mode, worker: WorkerState, sequence: int, number: int) -> None:
        """Draws a token for a batch, which the NN worker then holds."""
        # A lost token is drawn again with the current value, so that values and steps stay aligned.
        if self.spare:
            self.spare -= 1
            at = max(0, self.tokens - 1)
        else:
            at = self.tokens
            self.tokens += 1
        value = mode.token(at, self.step, self.group)
        least = self.step if mode.waits_for_step else self.current.step
        worker.drawn[sequence] = OpenToken(number, value, least, worker.completed)
        self.open += 1
        if number in worker.taken:
            self.untake(worker, [number])

    def arrive(self, mode: Mode, rank: int, sequence: int, rows: int) -> tuple[Ticket, OpenToken]:
        """Places a gradient in the order of arrivals. Returns the ticket of its push, and its token.

        Raises:
            StalePushError: no token is open for this push.
        """
        worker = self.workers[rank]
        drawn = worker.drawn.pop(sequence, None)
        if drawn is None:
            raise StalePushError(f"NN worker {rank} has no token for its push {sequence}.", rank=rank)
        self.open -= 1
        step, held = self.step, self.held
        decision = mode.arrive(Arrival(step, held, drawn.value, self.group))
        dropped = decision.action is Action.DROP
        slot = -1 if dropped else held
        generation = self.current.generation
        header = PushHeader(generation, rank, sequence, step, rows, slot=slot, group=self.group, token=drawn.value)
        worker.ticket = Ticket(dropped, header, decision.decay)
        worker.finished += 1
        if not dropped:
            worker.pushes[sequence] = header
            self.held += 1
            if decision.action is Action.APPLY:
                self.step, self.held = step + 1, 0
                worker.completed = PushId(rank, sequence)
        return worker.ticket, drawn

    def cancel(self, rank: int) -> None:
        """Marks an NN worker as dead: its batches go back, its tokens are lost, and its pushes abandoned."""
        worker = self.workers[rank]
        worker.alive, worker.ended = False, True
        lost = list(worker.drawn.values())
        self.spare += len(lost)
        self.open -= len(worker.taken) + len(lost)
        self.report.lost_tokens += len(lost)
        self.returned = sorted([*self.returned, *worker.taken, *(drawn.number for drawn in lost)])
        self.report.abandoned += len(worker.pushes)  # Its assigned pushes are already counted.
        self.abandoned += [*worker.pushes.values(), *worker.assigned]
        worker.taken, worker.drawn, worker.pushes, worker.assigned = [], {}, {}, []

    def confirm(self, worker: WorkerState, done: int, filled: int, lost: Losses | None = None) -> None:
        """Records the losses, that pushes up to `done` have returned, and that `filled` pushes are filled."""
        for sequence in [s for s in worker.pushes if s <= done and worker.pushes[s].step < self.step]:
            del worker.pushes[sequence]
        worker.done = max(worker.done, done)
        if filled > worker.filled:  # Else a repeated call.
            worker.assigned = worker.assigned[filled - worker.filled :]
            worker.filled = filled
        if lost is not None:
            worker.lost = Losses(*map(max, zip(worker.lost, lost, strict=True)))  # A repeated call may be late.

    def assign(self, worker: WorkerState) -> list[PushHeader]:
        """Returns the abandoned pushes that this NN worker must fill; the same ones until it has filled them."""
        if not worker.assigned:
            worker.assigned, self.abandoned = self.abandoned, []
        return worker.assigned

    def leaderless(self) -> bool:
        """Returns whether the NN worker that drains the PSs is dead."""
        return self.leader is not None and not self.workers[self.leader].alive

    def lost_by_dead(self) -> Losses:
        """Returns the losses of dead NN workers."""
        total = NO_LOSSES
        for worker in self.workers.values():
            total = total if worker.alive else total.plus(worker.lost)
        return total

    def all_waiting(self) -> bool:
        """Returns whether all NN workers have finished the phase."""
        return all(w.waiting and not w.assigned for w in self.workers.values() if w.alive)


class SharedState(msgspec.Struct, array_like=True):
    """The fields of `SchedulerState` that a call of an NN worker for a batch can change, besides its own state."""

    group: int
    step: int
    held: int
    tokens: int
    spare: int
    following: int
    returned: list[int]
    again: list[int]
    open: int
    abandoned: list[PushHeader]
    local_batch: int


SHARED = SharedState.__struct_fields__


class StateChange(msgspec.Struct, array_like=True):
    """The part of the state that a call of an NN worker for a batch can change.

    Attributes:
        rank: rank of the NN worker.
        worker: its state.
        shared: the fields that all NN workers share.
        report: the report, with the counts of this NN worker only; None if unchanged.
    """

    rank: int
    worker: WorkerState
    shared: SharedState
    report: TokenReport | None = None

    @classmethod
    def of(cls, state: SchedulerState, rank: int, *, counted: bool = False) -> StateChange:
        """Returns the part of the state after a call; `counted` says whether the report has changed."""
        report = None
        if counted:
            report = msgspec.structs.replace(state.report, workers={rank: state.report.workers[rank]})
        return cls(rank, state.workers[rank], SharedState(*(getattr(state, name) for name in SHARED)), report)


def apply_change(state: SchedulerState, change: StateChange) -> None:
    """Applies a change to the state before it."""
    state.workers[change.rank] = change.worker
    for name in SHARED:
        setattr(state, name, getattr(change.shared, name))
    if change.report is not None:
        workers = {**state.report.workers, **change.report.workers}
        state.report = msgspec.structs.replace(change.report, workers=workers)


def report_metrics(report: TokenReport) -> Readings:
    """Returns a report as metrics."""
    names = ("batches", "rows", "dropped_batches", "dropped_rows", "staleness_sum", "staleness_max")
    counts = {name: float(getattr(report, name)) for name in names}
    return Readings(metrics_of("tokens", {**counts, "lost": report.lost_tokens}), [])
