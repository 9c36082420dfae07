"""What the list of tokens knows of each NN worker, and what it counts."""

from __future__ import annotations

import msgspec

from persia.errors import StalePushError
from persia.telemetry.metrics import Readings, figures
from persia.types import PushHeader, Ticket, Token

__all__ = ["OpenToken", "TokenReport", "WorkerReport", "WorkerState"]


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


class WorkerReport(msgspec.Struct):
    """One NN worker over all asynchronous segments: batches and rows that were applied, batches that were dropped."""

    batches: int = 0
    rows: int = 0
    dropped: int = 0


class TokenReport(msgspec.Struct):
    """All asynchronous segments so far.

    Attributes:
        seconds: that they have lasted.
        workers: by rank.
        batches: gradients that were applied with some weight.
        rows: samples of those.
        dropped_batches: gradients that were dropped, or of which the dense part had weight 0.
        dropped_rows: samples of those.
        staleness_sum: over gradients that were applied, steps between the parameters they were computed with and those
            they were applied to.
        staleness_max: likewise.
        token_staleness_max: steps between token and application, of gradients of weight 1.
        lost_tokens: of dead NN workers.
        lost_batches: of dead NN workers, which nobody could train.
        orphans: slots of dead NN workers that others have filled.
    """

    seconds: float = 0.0
    workers: dict[int, WorkerReport] = msgspec.field(default_factory=dict)
    batches: int = 0
    rows: int = 0
    dropped_batches: int = 0
    dropped_rows: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    token_staleness_max: int = 0
    lost_tokens: int = 0
    lost_batches: int = 0
    orphans: int = 0
    since: float | None = None

    def observe(self) -> Readings:
        """As figures."""
        names = ("batches", "rows", "dropped_batches", "dropped_rows", "staleness_sum", "staleness_max")
        counts = {name: float(getattr(self, name)) for name in names}
        return Readings(figures("tokens", {**counts, "lost": self.lost_tokens}), [])

    @property
    def staleness_mean(self) -> float:
        """Over gradients that were applied."""
        return self.staleness_sum / max(1, self.batches)

    def rates(self) -> dict[int, float]:
        """Applied samples per second of each NN worker, by rank."""
        return {rank: worker.rows / max(self.seconds, 1e-9) for rank, worker in sorted(self.workers.items())}

    def begin(self, now: float) -> None:
        """The clock runs."""
        self.since = now

    def rest(self, now: float) -> None:
        """The clock stands still."""
        if self.since is not None:
            self.seconds += max(0.0, now - self.since)
        self.since = None

    def count(self, rank: int, ticket: Ticket, version: int, now: float) -> None:
        """Counts an arrival."""
        worker = self.workers.setdefault(rank, WorkerReport())
        header = ticket.header
        if ticket.dropped or not ticket.weight:
            worker.dropped += 1
            self.dropped_batches += 1
            self.dropped_rows += header.weight
        else:
            worker.batches += 1
            worker.rows += header.weight
            self.batches += 1
            self.rows += header.weight
            self.staleness_sum += max(0, header.step - version)
            self.staleness_max = max(self.staleness_max, header.step - version)
            self.token_staleness_max = max(self.token_staleness_max, header.step - header.token)
        if self.since is not None:  # What is under way counts too, should the coordinator restart.
            self.seconds += max(0.0, now - self.since)
            self.since = now
