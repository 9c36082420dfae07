"""Records of batches, looked-up rows and pushed gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np

from persia.types.arrays import Floats, Int32Array, Int64Array, Inverse
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
    "Offsets",
    "PushHeader",
    "UpdateCounts",
    "sum_counts",
]


COUNTER_BITS = 40
INCARNATION_BITS = 16
RANK_BITS = 16
MERGED = 1 << 48
"""Marks the client of a push that is the sum of a step, and so of no single NN worker."""

Offsets: TypeAlias = dict[str, dict[int, int]]
"""Position in a stream: the offset of the next message, by topic and partition.

Where lateness matters, `TOPIC@event_time` has the latest event time of each partition, in milliseconds; no topic has an
"@" in its name.
"""


class BatchId(NamedTuple):
    """The parts of a batch id, which fits a uint64. Its first byte finds the embedding worker.

    Attributes:
        rank: of the embedding worker that buffers the batch, 0 to 255.
        incarnation: of that embedding worker, 1 to 65,535.
        counter: number of the batch there, below 2^40.
    """

    rank: int
    incarnation: int
    counter: int

    def pack(self) -> int:
        """Returns the batch id."""
        return (self.rank << INCARNATION_BITS | self.incarnation) << COUNTER_BITS | self.counter

    @classmethod
    def unpack(cls, batch_id: int) -> BatchId:
        """Splits a batch id into its parts."""
        worker, counter = divmod(batch_id, 1 << COUNTER_BITS)
        return cls(*divmod(worker, 1 << INCARNATION_BITS), counter)


class PushHeader(NamedTuple):
    """Identifies a push: its sender, its step and its place there. A retry has the same header.

    Attributes:
        generation: of the NN workers, assigned by the coordinator; rises from 1 with each restart of them.
        rank: of the NN worker.
        sequence: number of the push at that NN worker in this generation, from 1; all parts of a push have the same.
        step: global step to which the gradients belong.
        weight: rows (samples) of the batches, also where their gradients are lost; 0 for a contribution without data.
        part: number of this part, when the batches of one step lie on several embedding workers.
        parts: number of parts that this NN worker pushes for this step.
        slot: place within the step in asynchronous modes, from 0; -1 elsewhere.
        group: slots of a step in asynchronous modes.
        token: of the gradients in asynchronous modes.
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
        """Identity in the push log of a shard for a push that is applied on its own. Not 0."""
        return self.generation << RANK_BITS | self.rank

    @property
    def merged_client(self) -> int:
        """Identity in the push log of a shard for the sum of a step; its sequence number is `step + 1`."""
        return MERGED | self.generation << RANK_BITS


class UpdateCounts(NamedTuple):
    """Outcome of the gradients that were pushed to one table, in rows. Counts add up with `+`.

    Attributes:
        applied: rows updated.
        absent: rows that are not in the table (not admitted, or evicted): skipped.
        non_finite: rows that stay as they were, as their gradient, or a value after it, is not finite.
        duplicate: rows of a repeated push that were updated before: skipped.
    """

    applied: int = 0
    absent: int = 0
    non_finite: int = 0
    duplicate: int = 0

    def __add__(self, other: tuple[int, ...]) -> UpdateCounts:  # type: ignore[override]
        """Adds count by count."""
        applied, absent, non_finite, duplicate = other
        mine = self.applied + applied, self.absent + absent, self.non_finite + non_finite, self.duplicate + duplicate
        return UpdateCounts(*mine)


def sum_counts(answers: Iterable[Mapping[str, UpdateCounts]]) -> dict[str, UpdateCounts]:
    """Sums the answers to several pushes, by table."""
    total: dict[str, UpdateCounts] = {}
    for answer in answers:
        for table, counts in answer.items():
            total[table] = total[table] + counts if table in total else counts
    return total


class LookedUp(NamedTuple):
    """Rows for the ID features of a batch, as they travel to an NN worker: distinct rows, and indices into them.

    Attributes:
        rows: by table `[unique ids, dim]`: float32, or with compression float16. 16-bit rows are as stored, see
            `persia.types.values`: their bits in items of either dtype, without scales.
        narrow: by feature, index of each id's row in its table's `rows`; for tables with at most 65,536 unique ids.
        wide: the same for all other tables.
        offsets: by feature, int64 `[batch + 1]` into its index; features whose samples have one id each are left out.
        scales: by float32 table, float32 `[unique ids]`: a row is `rows * scale`. None without compression.
    """

    rows: Packed[np.float32 | np.float16]
    narrow: Packed[np.uint16]
    wide: Packed[np.uint32]
    offsets: Packed[np.int64]
    scales: Packed[np.float32] | None = None

    @property
    def inverse(self) -> dict[str, Inverse]:
        """`narrow` and `wide` together."""
        return {**self.narrow, **self.wide}


class Contribution(NamedTuple):
    """The gradients of one batch.

    Attributes:
        batch_id: what `register` returned for the batch.
        gradients: by table, `[unique ids, dim]`, row by row the gradient of `LookedUp.rows`; tables without a
            part in the loss are left out. float32, or float16 where there are scales.
        scales: by table, float32 `[unique ids]`: a gradient is `gradients * scale`. None without compression.
    """

    batch_id: int
    gradients: Packed[np.float32 | np.float16]
    scales: Packed[np.float32] | None = None


class Feed(NamedTuple):
    """The batches of a pass that a data loader keeps ready.

    Batch `number` of the pass goes to NN worker `(number - start) % nn_workers`, and is read by data loader
    `number % loaders`.

    Attributes:
        epoch: number of the pass over the data.
        start: number of the first batch that is wanted.
        nn_workers: number of NN workers that take batches.
        loader: number of this loader, 0 to `loaders - 1`.
        loaders: number of data loaders that share the reading.
        ahead: maximum number of batches that wait for any one NN worker.
        generation: of the NN workers. A new one restarts the reading, even at the same batch: the one before may have
            used batches.
        on_demand: whether NN workers take batches in any order, as tokens are drawn. All of them are rank 0 then, and
            `nn_workers` is 1.
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
        """Identity of the reading: feeds with the same one differ only in how loaders share it."""
        return self.generation, self.epoch, self.start, self.nn_workers, self.on_demand


class FedBatch(NamedTuple):
    """A batch whose ID features are buffered at an embedding worker.

    Attributes:
        batch_id: names the embedding worker, and is the key there.
        dense: float32 `[batch, dense features]`.
        labels: float32 `[batch, labels]`.
        day: int32 `[batch]`, or None.
        id_counts: of the ids of a sample of its rows, int64; see `persia.batching.sampling`. None for most batches.
    """

    batch_id: int
    dense: Floats
    labels: Floats
    day: Int32Array | None
    id_counts: Int64Array | None = None


class Delivery(NamedTuple):
    """Answer of a data loader to `take`.

    Attributes:
        number: of the batch, as requested.
        batch: None when the pass has no batch of this number, nor any later one.
    """

    number: int
    batch: FedBatch | None
