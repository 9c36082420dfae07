"""Small typed records that several layers share: what crosses from one role to another.

Only arrays, numbers, strings, lists, dicts with string keys and records of these: so `rpc` can carry all of them.
docs/reference/protocol.md tells what they mean.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BatchId",
    "BoolArray",
    "Contribution",
    "Delivery",
    "FedBatch",
    "Feed",
    "Floats",
    "Gradients",
    "Halves",
    "Ids",
    "Int32Array",
    "Int64Array",
    "Inverse",
    "LookedUp",
    "Member",
    "Membership",
    "PushHeader",
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
        step: global step (later: token).
        weight: rows (samples) of the batches; 0 for a contribution without data.
        part: number of this part, when the batches of one step lie on several embedding workers.
        parts: how many parts this NN worker pushes for this step.
    """

    generation: int
    rank: int
    sequence: int
    step: int
    weight: int
    part: int = 0
    parts: int = 1

    @property
    def client(self) -> int:
        """Identity in the push log of a shard, for a push that is applied by itself. Not 0."""
        return self.generation << RANK_BITS | self.rank

    @property
    def merged_client(self) -> int:
        """Identity in the push log of a shard, for the sum of a step; its sequence number is `step + 1`."""
        return MERGED | self.generation << RANK_BITS


class Gradients(NamedTuple):
    """Gradients of rows of one table.

    Attributes:
        ids: distinct, uint64 `[n]`.
        values: float32 `[n, dim]`.
    """

    ids: Ids
    values: Floats


class UpdateCounts(NamedTuple):
    """What became of the gradients of one push to one table, in rows."""

    applied: int = 0
    absent: int = 0
    non_finite: int = 0
    duplicate: int = 0


class LookedUp(NamedTuple):
    """What an NN worker gets for the ID features of a batch: every unique row once, and where each id's row is.

    Attributes:
        rows: by table, float32 `[unique ids, dim]`; float16 where `scales` has the table.
        inverse: by feature, index of each id's row in its table's `rows`.
        offsets: by feature, int64 `[batch + 1]` into `inverse`, or None where each sample has one id.
        scales: by table, float32 `[unique ids]`: a row is `rows * scale`. None without compression.
    """

    rows: dict[str, WireRows]
    inverse: dict[str, Inverse]
    offsets: dict[str, Int64Array | None]
    scales: dict[str, Floats] | None = None


class Contribution(NamedTuple):
    """The gradients of one batch.

    Attributes:
        batch_id: what `register` returned for the batch.
        gradients: by table, `[unique ids, dim]`, row by row the gradient of `LookedUp.rows`; tables that took no part
            in the loss are left out. float32, or float16 where `scales` has the table.
        scales: as in `LookedUp`.
    """

    batch_id: int
    gradients: dict[str, WireRows]
    scales: dict[str, Floats] | None = None


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
    """

    epoch: int
    start: int
    nn_workers: int
    loader: int
    loaders: int
    ahead: int
    generation: int = 1

    def same_pass(self, other: Feed) -> bool:
        """Whether the other one only divides the same reading in another way."""
        mine = (self.generation, self.epoch, self.start, self.nn_workers)
        return mine == (other.generation, other.epoch, other.start, other.nn_workers)


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
