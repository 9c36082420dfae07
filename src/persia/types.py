"""Small typed records that several layers share: what crosses from one role to another.

Only arrays, numbers, strings, lists, dicts with string keys and records of these: so `rpc` can carry all of them.
docs/reference/protocol.md tells what they mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from persia.packed import Gradients, Packed, PackedGradients

__all__ = [
    "BatchId",
    "BoolArray",
    "Bytes",
    "Caller",
    "Contribution",
    "Delivery",
    "DenseState",
    "Event",
    "FedBatch",
    "Feed",
    "Floats",
    "Gradients",
    "Halves",
    "Ids",
    "Int32Array",
    "Int64Array",
    "Inverse",
    "Journaled",
    "Lap",
    "LookedUp",
    "Member",
    "Membership",
    "Packed",
    "PackedGradients",
    "Pulled",
    "PushHeader",
    "PushedDense",
    "Read",
    "Rest",
    "RowsAt",
    "Segment",
    "SlotCounts",
    "TensorSpec",
    "Ticket",
    "Token",
    "UpdateCounts",
    "WireRows",
]

COUNTER_BITS = 40
INCARNATION_BITS = 16
RANK_BITS = 16
MERGED = 1 << 48
"""Marks the client of a step whose gradients a PS has summed: no NN worker's own."""

Ids: TypeAlias = NDArray[np.uint64]
"""Ids within a table, uint64 `[n]`."""

Floats: TypeAlias = NDArray[np.float32]
"""float32 of any shape."""

Halves: TypeAlias = NDArray[np.float16]
"""float16 rows `[n, dim]`, to be multiplied by a scale per row."""

Int64Array: TypeAlias = NDArray[np.int64]
Int32Array: TypeAlias = NDArray[np.int32]
BoolArray: TypeAlias = NDArray[np.bool_]
Bytes: TypeAlias = NDArray[np.uint8]
"""Tensors of any dtypes, packed."""

Inverse: TypeAlias = NDArray[np.uint16 | np.uint32]
"""Index of each id of a batch in its table's unique rows; uint16 while they fit."""

WireRows: TypeAlias = NDArray[np.float32 | np.float16]
"""Rows as they travel, `[n, dim]`: float32, or float16 that is to be multiplied by a scale per row."""


class BatchId(NamedTuple):
    """What a batch id says: it fits a uint64, and its first byte finds the embedding worker.

    Attributes:
        rank: of the embedding worker that buffers the batch, 0 to 255.
        incarnation: of that embedding worker, 1 to 65,535.
        counter: number of the batch there, below 2^40.
    """

    rank: int
    incarnation: int
    counter: int

    def pack(self) -> int:
        """The batch id."""
        return (self.rank << INCARNATION_BITS | self.incarnation) << COUNTER_BITS | self.counter

    @classmethod
    def unpack(cls, batch_id: int) -> BatchId:
        """What a batch id says."""
        worker, counter = divmod(batch_id, 1 << COUNTER_BITS)
        return cls(*divmod(worker, 1 << INCARNATION_BITS), counter)


class PushHeader(NamedTuple):
    """Whose gradients a push carries, and for which step; a retry has the same header.

    Attributes:
        generation: of the NN workers: rises, from 1, whenever they start anew; the coordinator gives it.
        rank: of the NN worker.
        sequence: number of the push at that NN worker in this generation, from 1; all parts of a push have the same.
        step: global step that the gradients are a part of.
        weight: rows (samples) of the batches; 0 for a contribution without data.
        part: number of this part, when the batches of one step lie on several embedding workers.
        parts: how many parts this NN worker pushes for this step.
        slot: place within the step in asynchronous modes, from 0; -1 elsewhere.
        group: slots that make a step there.
        token: of the gradients there.
    """

    generation: int
    rank: int
    sequence: int
    step: int
    weight: int
    part: int = 0
    parts: int = 1
    slot: int = -1
    group: int = 0
    token: int = 0

    @property
    def client(self) -> int:
        """Identity in the push log of a shard, for a push that is applied by itself. Not 0."""
        return self.generation << RANK_BITS | self.rank

    @property
    def merged_client(self) -> int:
        """Identity in the push log of a shard, for the sum of a step; its sequence number is `step + 1`."""
        return MERGED | self.generation << RANK_BITS


class UpdateCounts(NamedTuple):
    """What became of the gradients of one push to one table, in rows."""

    applied: int = 0
    absent: int = 0
    non_finite: int = 0
    duplicate: int = 0


class LookedUp(NamedTuple):
    """What an NN worker gets for the ID features of a batch: every unique row once, and where each id's row is.

    Attributes:
        rows: by table, float32 `[unique ids, dim]`; float16 where there are scales.
        narrow: by feature, index of each id's row in its table's `rows`: of tables with at most 65,536 unique ids.
        wide: likewise, of the others.
        offsets: by feature, int64 `[batch + 1]` into its index; features whose samples have one id each are left out.
        scales: by table, float32 `[unique ids]`: a row is `rows * scale`. None without compression.
        versions: steps that were applied in the rows of each embedding PS; exact only while these are recorded.
    """

    rows: Packed[np.float32 | np.float16]
    narrow: Packed[np.uint16]
    wide: Packed[np.uint32]
    offsets: Packed[np.int64]
    scales: Packed[np.float32] | None = None
    versions: list[int] | None = None

    @property
    def inverse(self) -> dict[str, Inverse]:
        """`narrow` and `wide` together."""
        return {**self.narrow, **self.wide}


class RowsAt(NamedTuple):
    """Rows of one embedding PS.

    Attributes:
        rows: by table, float32 `[n, dim]`.
        version: steps that were applied in them; in Hybrid, pushes. While the PS is recorded all are of this one.
    """

    rows: Packed[np.float32]
    version: int


class Contribution(NamedTuple):
    """The gradients of one batch.

    Attributes:
        batch_id: what `register` returned for the batch.
        gradients: by table, `[unique ids, dim]`, row by row the gradient of `LookedUp.rows`; tables that took no part
            in the loss are left out. float32, or float16 where there are scales.
        scales: as in `LookedUp`.
    """

    batch_id: int
    gradients: Packed[np.float32 | np.float16]
    scales: Packed[np.float32] | None = None


class Feed(NamedTuple):
    """Which batches of which pass a data loader is to have ready.

    Batch `number` of the pass goes to NN worker `(number - start) % nn_workers`, and is read by data loader
    `number % loaders`.

    Attributes:
        epoch: number of the pass over the data.
        start: number of the first batch that is wanted.
        nn_workers: how many NN workers take batches.
        loader: number of this loader, 0 to `loaders - 1`.
        loaders: how many share the reading.
        ahead: most batches that wait for any one NN worker.
        generation: of the NN workers. A new one begins anew, also at the same batch: those before may have used theirs.
        on_demand: whether NN workers take whatever number they are given, in any order. They all call themselves rank 0
            then, and `nn_workers` is 1.
    """

    epoch: int
    start: int
    nn_workers: int
    loader: int
    loaders: int
    ahead: int
    generation: int = 1
    on_demand: bool = False

    def same_pass(self, other: Feed) -> bool:
        """Whether the other one only divides the same reading in another way."""
        mine = (self.generation, self.epoch, self.start, self.nn_workers, self.on_demand)
        return mine == (other.generation, other.epoch, other.start, other.nn_workers, other.on_demand)


class FedBatch(NamedTuple):
    """A batch whose ID features lie at an embedding worker.

    Attributes:
        batch_id: tells which one, and is the key there.
        dense: float32 `[batch, dense features]`.
        labels: float32 `[batch, labels]`.
        day: int32 `[batch]`, or None.
    """

    batch_id: int
    dense: Floats
    labels: Floats
    day: Int32Array | None


class Delivery(NamedTuple):
    """What a data loader answers.

    Attributes:
        number: that was asked for.
        batch: None when the pass has no batch of this number, nor any later one.
    """

    number: int
    batch: FedBatch | None


class Member(NamedTuple):
    """One process of a role.

    Attributes:
        role: "embedding_ps", "embedding_worker", "data_loader" or "nn_worker".
        rank: number within the role, from 0.
        incarnation: rises with each restart of the rank, from 1. For an NN worker it is the generation.
        address: where it listens; empty if nobody connects to it.
        state: "alive"; "leaving": finishes what it has and takes nothing new; "dead".
        reason: what a dead one died of, with its last lines.
    """

    role: str
    rank: int
    incarnation: int
    address: str
    state: str = "alive"
    reason: str = ""


class Membership(NamedTuple):
    """All members as of one moment.

    Attributes:
        version: rises with every change.
        generation: of the NN workers.
        members: the newest incarnation of each rank of each role.
    """

    version: int
    generation: int
    members: list[Member]


# --- asynchronous modes: docs/reference/protocol.md, section 12 -------------------------------------------------


@dataclass
class SlotCounts:
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


class Segment(NamedTuple):
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


class Rest(NamedTuple):
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


class Event(NamedTuple):
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


class Read(NamedTuple):
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


class Journaled(NamedTuple):
    """What took effect at a server while it was recorded.

    Attributes:
        version: of the server when it began.
        headers: of the pushes, in the order in which they took effect.
    """

    version: int
    headers: list[PushHeader]


class Lap(NamedTuple):
    """How long an NN worker computed one batch, without its waits for others.

    Attributes:
        ago: seconds since it began.
        seconds: that it took.
    """

    ago: float
    seconds: float


class Pulled(NamedTuple):
    """Dense parameters of one version.

    Attributes:
        version: steps that are applied in them.
        values: parameters and buffers of this dense PS, one after another (`persia.dense.flat`); None if the caller
            has this version.
    """

    version: int
    values: Bytes | None


class PushedDense(NamedTuple):
    """The dense part of a push to one dense PS.

    Attributes:
        weight: 0 or 1.
        gradients: of its parameters, one after another; None without any.
        present: which of them have a gradient, bool `[parameters]`.
        buffers: as the forward pass left them, one after another.
    """

    weight: float
    gradients: Bytes | None
    present: BoolArray | None
    buffers: Bytes | None


class TensorSpec(NamedTuple):
    """A tensor without its values; `dtype` is torch's name of it, such as "float32"."""

    name: str
    dtype: str
    shape: list[int]


class DenseState(NamedTuple):
    """A network and its optimizer, or what one dense PS owns of them.

    Attributes:
        parameters: of the whole network, in the order of the optimizer's making.
        owned: numbers of those that are meant.
        values: the owned parameters, one after another, then the buffers.
        buffers: of the network; one dense PS has them all, the others none.
        groups: the optimizer's parameter groups as JSON, parameters by number.
        tensors: the optimizer's state, as "number/key".
        state: the values of `tensors`, one after another.
        scalars: the rest of the optimizer's state as JSON: by number, by key.
        updates: how far the learning-rate schedule is; -1 without one.
    """

    parameters: list[TensorSpec]
    owned: list[int]
    values: Bytes
    buffers: list[TensorSpec]
    groups: str
    tensors: list[TensorSpec]
    state: Bytes
    scalars: str
    updates: int
