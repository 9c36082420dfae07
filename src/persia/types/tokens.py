"""Asynchronous modes: docs/reference/protocol.md, section 12."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from persia.types.arrays import BoolArray
from persia.types.batches import PushHeader

__all__ = [
    "ArrivalRecord",
    "Caller",
    "JournalRecord",
    "QuiesceResult",
    "ReadRecord",
    "RowStaleness",
    "StepTiming",
    "Ticket",
    "Token",
    "TrainingPhase",
]


@dataclass
class RowStaleness:
    """How stale the rows were to which gradients came, in asynchronous modes. Not thread-safe.

    A row is as many steps stale as lie between its last change and the token of the gradient; one that was last changed
    before the token is not.

    Attributes:
        rows: of gradients.
        stale: of those, rows whose gradient was too old and had weight 0.
        staleness_sum: over rows whose gradient counted.
        staleness_max: likewise.
    """

    rows: int = 0
    stale: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0

    def add(self, behind: NDArray[np.int64], counts: BoolArray) -> None:
        """Counts rows.

        Args:
            behind: step of the last change less the token, `[n]`.
            counts: whether the gradient has a weight, `[n]`.
        """
        self.rows += len(behind)
        self.stale += len(behind) - int(np.count_nonzero(counts))
        fresh = np.maximum(behind[counts] + 1, 0)
        if len(fresh):
            self.staleness_sum += int(fresh.sum())
            self.staleness_max = max(self.staleness_max, int(fresh.max()))


class TrainingPhase(NamedTuple):
    """What is trained between two rests, in one asynchronous mode.

    Attributes:
        generation: of the NN workers.
        number: of the segment within the generation, from 1.
        mode: `persia.modes.encode`.
        nn_workers: how many take part.
        epoch: pass over the data.
        position: batches of the pass that are trained.
        step: global step to begin with.
        steps: so many steps are wanted; None for all data.
        local_batch: rows of a batch; 0 if that is not known before the first.
    """

    generation: int
    number: int
    mode: str
    nn_workers: int
    epoch: int
    position: int
    step: int
    steps: int | None
    local_batch: int = 0


class Caller(NamedTuple):
    """Which NN worker asks for a token, and in which segment."""

    generation: int
    segment: int
    rank: int


class Token(NamedTuple):
    """What `Tokens.draw` answers.

    Attributes:
        value: of the token; None where there are orphans to be pushed before it is drawn again.
        least: version of the dense parameters that the batch must at least be trained with.
        orphans: slots of dead NN workers; push each without gradients to every PS.
    """

    value: int | None
    least: int
    orphans: list[PushHeader]


class Ticket(NamedTuple):
    """What `Tokens.arrive` answers.

    Attributes:
        dropped: the gradient came too late: push it nowhere.
        header: to push it with.
        weight: of its dense part, 0 or 1.
    """

    dropped: bool
    header: PushHeader
    weight: float


class QuiesceResult(NamedTuple):
    """Where a segment has ended.

    Attributes:
        leader: rank of the NN worker that drains the PSs.
        step: complete steps.
        held: gradients that have arrived since.
        position: batches of the pass that are trained.
        ended: whether the pass has no more.
        orphans: slots of dead NN workers; while there are some, push them, and call again.
        dead: ranks of NN workers that died in the segment.
    """

    leader: int
    step: int
    held: int
    position: int
    ended: bool
    orphans: list[PushHeader]
    dead: list[int]


class ArrivalRecord(NamedTuple):
    """An arrival, for replays.

    Attributes:
        rank: of the NN worker.
        number: of the batch.
        rows: of the batch.
        token: of the gradient.
        version: of the dense parameters that it was computed with.
        step: that it became a part of; of one that was dropped, the step in work.
        slot: in that step; -1 if it was dropped.
        weight: of its dense part.
    """

    rank: int
    number: int
    rows: int
    token: int
    version: int
    step: int
    slot: int
    weight: float


class ReadRecord(NamedTuple):
    """What a gradient was computed from, for replays.

    Attributes:
        rank: of the NN worker.
        sequence: of its push.
        number: of the batch.
        rows: of the batch.
        versions: steps that were applied in the rows of each embedding PS.
        dense: steps that were applied in the parameters of each dense PS; one number, the own step, without any.
    """

    rank: int
    sequence: int
    number: int
    rows: int
    versions: list[int]
    dense: list[int]


class JournalRecord(NamedTuple):
    """What took effect at a server while it was recorded.

    Attributes:
        version: of the server when it began.
        headers: of the pushes, in the order in which they took effect.
    """

    version: int
    headers: list[PushHeader]


class StepTiming(NamedTuple):
    """How long an NN worker computed one batch, without its waits for others.

    Attributes:
        ago: seconds since it began.
        seconds: that it took.
    """

    ago: float
    seconds: float
