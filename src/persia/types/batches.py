"""Batches and what is asked and pushed for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from persia.types.arrays import Floats, Int32Array, Inverse
from persia.types.packed import Packed

__all__ = [
    "COUNTER_BITS",
    "INCARNATION_BITS",
    "MERGED",
    "RANK_BITS",
    "BatchId",
    "Contribution",
    "Delivery",
    "FedBatch",
    "Feed",
    "LookedUp",
    "PushHeader",
    "RowsAt",
    "UpdateCounts",
    "sum_counts",
]


COUNTER_BITS = 40
INCARNATION_BITS = 16
RANK_BITS = 16
MERGED = 1 << 48
"""Marks the client of a step whose gradients a PS has summed: no NN worker's own."""


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
    """Outcome of the gradients that were pushed to one table, in rows. Counts add up with `+`.

    Attributes:
        applied: rows updated.
        absent: rows that are not in the table (not admitted, or evicted): skipped.
        non_finite: rows whose gradient has a NaN or Inf: dropped.
        duplicate: rows of a repeated push that were updated before: skipped.
    """

    applied: int = 0
    absent: int = 0
    non_finite: int = 0
    duplicate: int = 0

    def __add__(self, other: tuple[int, ...]) -> UpdateCounts:  # type: ignore[override]
        """Adds count by count."""
        return UpdateCounts(*map(sum, zip(self, other, strict=True)))


def sum_counts(answers: Iterable[Mapping[str, UpdateCounts]]) -> dict[str, UpdateCounts]:
    """Sums the answers to several pushes, by table."""
    total: dict[str, UpdateCounts] = {}
    for answer in answers:
        for table, counts in answer.items():
            total[table] = total[table] + counts if table in total else counts
    return total


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

    @property
    def reading(self) -> tuple[int, ...]:
        """What is read, and for whom: feeds that agree in it only divide it in another way."""
        return self.generation, self.epoch, self.start, self.nn_workers, self.on_demand


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
