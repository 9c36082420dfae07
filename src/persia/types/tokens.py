"""Records of asynchronous modes: docs/reference/protocol.md, section 12."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from persia.types.arrays import BoolArray
from persia.types.batches import PushHeader, PushId

__all__ = [
    "NO_LOSSES",
    "ArrivalRecord",
    "Caller",
    "JournalRecord",
    "Losses",
    "PhaseRecord",
    "QuiesceResult",
    "ReadRecord",
    "RowStaleness",
    "StepTiming",
    "Ticket",
    "Token",
    "TokenReport",
    "WorkerReport",
]


@dataclass
class RowStaleness:
    """Staleness of rows that received gradients in asynchronous modes. Not thread-safe.

    The staleness of a row is the number of steps from the token of the gradient to the row's last change; 0 for a row
    that was last changed before the token.

    Attributes:
        rows: number of rows of gradients.
        stale: number of rows whose gradient was too old and had decay 0.
        staleness_sum: sum over the other rows.
        staleness_max: maximum over the other rows.
    """

    rows: int = 0
    stale: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0

    def add(self, behind: NDArray[np.int64], counts: BoolArray) -> None:
        """Adds the rows of a gradient.

        Args:
            behind: step of the last change minus the token, `[n]`.
            counts: whether the gradient has decay 1, `[n]`.
        """
        self.rows += len(behind)
        self.stale += len(behind) - int(np.count_nonzero(counts))
        fresh = np.maximum(behind[counts] + 1, 0)
        if len(fresh):
            self.staleness_sum += int(fresh.sum())
            self.staleness_max = max(self.staleness_max, int(fresh.max()))


class Caller(NamedTuple):
    """Identifies an NN worker in a phase."""

    generation: int
    phase: int
    rank: int


class Losses(NamedTuple):
    """Batches that an NN worker has lost because of embedding workers since it started.

    Attributes:
        batches: number of batches whose rows could not be looked up.
        rows: number of samples of these batches.
        gradients: number of batches whose gradient could not be pushed.
    """

    batches: int = 0
    rows: int = 0
    gradients: int = 0

    def plus(self, other: Losses) -> Losses:
        """Returns the sums."""
        return Losses(*(a + b for a, b in zip(self, other, strict=True)))


NO_LOSSES = Losses()


class Token(NamedTuple):
    """Result of `TokenService.draw`.

    Attributes:
        value: the token; None if abandoned pushes must be filled before a token is drawn.
        least: minimum version of the dense parameters for training on the batch.
        after: push of this NN worker that the dense parameters must have counted; None if any will do.
        abandoned: pushes of dead NN workers; push each without gradients to every PS.
        request: number of the last request of this NN worker for a batch that is answered.
        following: answer to that request, as of `TokenService.take`.
    """

    value: int | None
    least: int
    after: PushId | None
    abandoned: list[PushHeader]
    request: int = 0
    following: int | None = None


class Ticket(NamedTuple):
    """Result of `TokenService.arrive`.

    Attributes:
        dropped: whether the gradient is too late and must not be pushed.
        header: header of the push.
        decay: decay of the dense gradient, 0 or 1. A gradient of decay 1 may be too old once dense PSs count it.
    """

    dropped: bool
    header: PushHeader
    decay: float


class QuiesceResult(NamedTuple):
    """Result of `TokenService.quiesce`: the point at which a phase has ended.

    Attributes:
        leader: rank of the NN worker that drains the PSs.
        step: number of complete steps.
        held: number of gradients that have arrived since the last complete step.
        position: number of trained batches of the pass.
        ended: whether the pass has no more batches.
        abandoned: pushes of dead NN workers; if any, fill them and call again.
        dead: ranks of NN workers that died in the phase.
        lost: losses that these NN workers have reported; unreported ones are among their abandoned pushes.
    """

    leader: int
    step: int
    held: int
    position: int
    ended: bool
    abandoned: list[PushHeader]
    dead: list[int]
    lost: Losses


class ArrivalRecord(NamedTuple):
    """The arrival of a gradient, for replays.

    Attributes:
        rank: rank of the NN worker.
        number: number of the batch.
        rows: rows of the batch.
        token: token of the gradient.
        version: version of the dense parameters from which it was computed.
        step: step that it belongs to; for a dropped gradient, the current step.
        slot: position within that step; -1 if it was dropped.
        decay: decay of its dense part.
    """

    rank: int
    number: int
    rows: int
    token: int
    version: int
    step: int
    slot: int
    decay: float


class ReadRecord(NamedTuple):
    """The inputs of a gradient, for replays.

    Attributes:
        rank: rank of the NN worker.
        sequence: sequence number of its push.
        number: number of the batch.
        rows: rows of the batch.
        batch_id: id of the batch, the key of the version of its rows in the journals of embedding PSs.
        dense: version of the parameters of each dense PS; without dense PSs, the NN worker's own step.
    """

    rank: int
    sequence: int
    number: int
    rows: int
    batch_id: int
    dense: list[int]


class JournalRecord(NamedTuple):
    """The pushes that took effect at a PS during a recording.

    Attributes:
        version: number of updates since step 0 at the start of the recording.
        headers: headers of the pushes, in the order in which they took effect.
        reads: version of the rows that were looked up for a batch, by batch id. Empty at a dense PS.
        empty: ascending positions in `headers` of pushes without gradients: they were lost, their decay is 0, or the
            batch has no id there.
    """

    version: int
    headers: list[PushHeader]
    reads: dict[int, int]
    empty: list[int]


class PhaseRecord(NamedTuple):
    """The records of a token scheduler over a phase.

    Attributes:
        reads: inputs of all gradients, of all NN workers.
        arrivals: arrivals in order; empty in modes with all-reduce.
    """

    reads: list[ReadRecord]
    arrivals: list[ArrivalRecord]


class StepTiming(NamedTuple):
    """The compute time of a batch at an NN worker, without waiting for others.

    Attributes:
        ago: seconds since the start of the batch.
        seconds: duration.
    """

    ago: float
    seconds: float


class WorkerReport(msgspec.Struct):
    """Counts of one NN worker over all asynchronous phases: batches and rows applied, batches dropped."""

    batches: int = 0
    rows: int = 0
    dropped: int = 0


class TokenReport(msgspec.Struct):
    """Counts over all asynchronous phases so far, of gradients as they arrive at the token scheduler.

    A gradient that is pushed late may be applied in a later step than the one of its arrival, or have become too old.

    Attributes:
        seconds: duration of these phases.
        workers: counts by rank.
        batches: number of gradients applied with decay 1.
        rows: number of samples of these gradients.
        dropped_batches: number of gradients that were dropped, or whose dense part had decay 0.
        dropped_rows: number of samples of dropped gradients.
        staleness_sum: sum over applied gradients of the steps between the parameters from which they were computed and
            the parameters to which they were applied.
        staleness_max: maximum of these steps.
        token_staleness_max: maximum number of steps between token and application of gradients with decay 1.
        lost_tokens: number of tokens of dead NN workers.
        lost_batches: number of batches of dead NN workers that were not trained, or may not have been.
        abandoned: number of pushes of dead NN workers that others have filled.
        since: time at which the current phase started or was last counted; None between phases.
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
    abandoned: int = 0
    since: float | None = None

    @property
    def staleness_mean(self) -> float:
        """Mean staleness of the gradients that were applied, in steps."""
        return self.staleness_sum / max(1, self.batches)

    def rates(self) -> dict[int, float]:
        """Returns the applied samples per second of each NN worker, by rank."""
        return {rank: worker.rows / max(self.seconds, 1e-9) for rank, worker in sorted(self.workers.items())}

    def begin(self, now: float) -> None:
        """Starts the clock."""
        self.since = now

    def end(self, now: float) -> None:
        """Stops the clock."""
        if self.since is not None:
            self.seconds += max(0.0, now - self.since)
        self.since = None

    def count(self, rank: int, ticket: Ticket, version: int, now: float) -> None:
        """Counts an arrival."""
        worker = self.workers.setdefault(rank, WorkerReport())
        header = ticket.header
        if ticket.dropped or not ticket.decay:
            worker.dropped += 1
            self.dropped_batches += 1
            self.dropped_rows += header.rows
        else:
            worker.batches += 1
            worker.rows += header.rows
            self.batches += 1
            self.rows += header.rows
            self.staleness_sum += max(0, header.step - version)
            self.staleness_max = max(self.staleness_max, header.step - version)
            self.token_staleness_max = max(self.token_staleness_max, header.step - header.token)
        if self.since is not None:  # The caller saves the report, which must include the current phase.
            self.seconds += max(0.0, now - self.since)
            self.since = now
