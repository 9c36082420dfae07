"""What the list of tokens knows in a segment, and what follows from it: no locks, no waiting (protocol, section 12)."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from persia.errors import StalePushError
from persia.modes import Mode
from persia.services import TrainingPhase
from persia.telemetry.metrics import Readings, figures
from persia.types import PushHeader, Ticket, Token, TokenReport

__all__ = ["OpenToken", "SchedulerState", "WorkerState", "report_metrics"]


class OpenToken(msgspec.Struct):
    """A token that was drawn, and whose gradient has not arrived."""

    number: int
    value: int
    least: int


class WorkerState(msgspec.Struct):
    """One NN worker in a segment.

    Attributes:
        alive: False once it is dead.
        ended: there are no more batches for it.
        resting: it waits for the others.
        requests: number of its last request for a batch, and the answer.
        answer: see there.
        taken: numbers of batches that it reads.
        drawn: tokens by sequence number.
        slots: its slots of steps that are not complete, or whose pushes are not known to have returned.
        ticket: the last one.
        finished: gradients that have arrived, dropped ones included.
        least: step after the last one that it has completed.
        done: pushes up to this one have returned.
        handed: slots of dead NN workers that it was asked to fill.
        filled: how many of them it has.
    """

    alive: bool = True
    ended: bool = False
    resting: bool = False
    requests: int = 0
    answer: int | None = None
    taken: list[int] = msgspec.field(default_factory=list)
    drawn: dict[int, OpenToken] = msgspec.field(default_factory=dict)
    slots: dict[int, PushHeader] = msgspec.field(default_factory=dict)
    ticket: Ticket | None = None
    finished: int = 0
    least: int = 0
    done: int = 0
    handed: list[PushHeader] = msgspec.field(default_factory=list)
    filled: int = 0

    def came(self, sequence: int) -> bool:
        """Whether a token was drawn for this push: a call may come twice, and the second one late."""
        pushed = self.ticket is not None and self.ticket.header.sequence >= sequence
        return pushed or sequence in self.drawn

    def token_of(self, sequence: int) -> Token:
        """The token of a push that has drawn one.

        Raises:
            StalePushError: it has been pushed: nobody waits for this answer.
        """
        drawn = self.drawn.get(sequence)
        if drawn is None:
            raise StalePushError(f"This NN worker has drawn and pushed {sequence} already.", sequence=sequence)
        return Token(drawn.value, drawn.least, [])


class SchedulerState(msgspec.Struct):
    """All that has to survive a restart."""

    segment: TrainingPhase | None = None
    settled: int | None = 0
    """Global step at which the segment is at rest; None while it is under way."""
    group: int = 0
    step: int = 0
    held: int = 0
    tokens: int = 0
    """Drawn and not lost, since step 0."""
    spare: int = 0
    """Tokens of dead NN workers: the next draws are of the current value."""
    following: int = 0
    """Batch number that is handed out next."""
    returned: list[int] = msgspec.field(default_factory=list)
    """Numbers of dead NN workers' batches: handed out first."""
    end: int | None = None
    stopped: bool = False
    accounts: dict[int, WorkerState] = msgspec.field(default_factory=dict)
    orphans: list[PushHeader] = msgspec.field(default_factory=list)
    """Slots that nobody has been asked to fill yet."""
    report: TokenReport = msgspec.field(default_factory=TokenReport)
    wanted: Mode | None = None
    """The mode that was requested."""
    nn_workers: int = 0
    local_batch: int = 0
    leader: int | None = None
    """Rank of the NN worker that drains the PSs, once all rest."""

    @property
    def current(self) -> TrainingPhase:
        """The segment, once one has begun."""
        assert self.segment is not None
        return self.segment

    def set_group(self, group: int) -> None:
        """M, once the local batch is known."""
        self.group = group
        self.tokens = self.step * group

    def want(self, mode: Mode) -> None:
        """A switch at the next boundary.

        Raises:
            ConfigError: batches do not fit the mode.
        """
        if self.nn_workers and self.local_batch:
            mode.group(self.nn_workers, self.local_batch)
        self.wanted = mode
        self.stopped = True

    def lacking(self) -> int:
        """How many more batches the steps of the segment need, if none is dropped."""
        segment = self.current
        if segment.steps is None or not self.group:
            return 1
        out = sum(len(a.taken) + len(a.drawn) for a in self.accounts.values())
        return max(0, (segment.step + segment.steps - self.step) * self.group - self.held - out)

    def may_take(self, mode: Mode) -> bool:
        """Whether it is known that the segment needs another batch, or that it needs none."""
        segment = self.current
        if segment.steps is None or self.stopped:
            return True
        if not self.group:  # It is known with the first draw, which needs a batch.
            return self.end is not None or not any(a.taken or a.drawn for a in self.accounts.values())
        if self.lacking() or self.step >= segment.step + segment.steps:
            return True
        return not mode.waits_for_step  # Else one that is under way may be dropped.

    def next_number(self) -> int | None:
        """The batch that is handed out now; None: no more."""
        if self.stopped:
            return None
        if self.returned and self.lacking():
            return self.returned.pop(0)
        if self.end is not None and self.following >= self.end:
            return None
        if self.current.steps is not None and self.group and not self.lacking():
            return None
        self.following += 1
        return self.following - 1

    def gate(self, mode: Mode, rank: int, waiting: Collection[int], taking: Collection[int]) -> bool:
        """May this NN worker draw? If all wait for each other, yes: the step lacks those that have no data any more.

        Args:
            mode: of the segment.
            rank: of the NN worker.
            waiting: ranks that want to draw.
            taking: ranks that wait for whether there is a batch for them: all that are needed are out.
        """
        account = self.accounts[rank]
        in_step = sum(header.step == self.step for header in account.slots.values()) if self.held else 0
        active = {
            r: a
            for r, a in self.accounts.items()
            if a.alive and ((not a.ended and r not in taking) or a.taken or a.drawn)
        }
        ahead = account.finished - min((a.finished for a in active.values()), default=account.finished)
        if mode.gate(len(account.drawn) + in_step, mode.initial_depth(), max(0, ahead)):
            return True
        return not ahead and all(other == rank or other in waiting for other in active)

    def draw(self, mode: Mode, account: WorkerState, number: int) -> OpenToken:
        """A token for a batch."""
        # A lost token is drawn again as one more of the current value, so that values and steps stay aligned.
        if self.spare:
            self.spare -= 1
            at = max(0, self.tokens - 1)
        else:
            at = self.tokens
            self.tokens += 1
        value = mode.token(at, self.step, self.group)
        least = self.step if mode.waits_for_step else account.least
        return OpenToken(number, value, max(least, self.current.step))

    def confirm(self, account: WorkerState, done: int, filled: int) -> None:
        """Pushes up to `done` have returned, and so many orphans are filled."""
        for sequence in [s for s in account.slots if s <= done and account.slots[s].step < self.step]:
            del account.slots[sequence]
        account.done = max(account.done, done)
        account.filled = max(account.filled, filled)

    def orphans_for(self, account: WorkerState) -> list[PushHeader]:
        """Slots that this NN worker is to fill; those it was told of, again, until it has."""
        if account.filled >= len(account.handed) and self.orphans:
            account.handed += self.orphans
            self.orphans = []
        return account.handed[account.filled :]

    def leaderless(self) -> bool:
        """Whether the NN worker that should drain the PSs is dead."""
        return self.leader is not None and not self.accounts[self.leader].alive

    def at_rest(self) -> bool:
        """Whether all NN workers are done."""
        return all(a.resting and not a.handed[a.filled :] for a in self.accounts.values() if a.alive)


def report_metrics(report: TokenReport) -> Readings:
    """Returns a report as metrics."""
    names = ("batches", "rows", "dropped_batches", "dropped_rows", "staleness_sum", "staleness_max")
    counts = {name: float(getattr(report, name)) for name in names}
    return Readings(figures("tokens", {**counts, "lost": report.lost_tokens}), [])
