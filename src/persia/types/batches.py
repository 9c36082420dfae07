"""Records of batches, looked-up rows and pushed gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np

from persia.types.arrays import Floats, Ids, Int32Array, Int64Array, Inverse
from persia.types.packed import Packed

__all__ = [
    "COUNTER_BITS",
    "INCARNATION_BITS",
    "MERGED",
    "RANK_BITS",
    "BatchId",
    "Contribution",
    "Delivery",
    "Feed",
    "FreshRows",
    "LookedUp",
    "Moment",
    "Offsets",
    "PushHeader",
    "PushId",
    "RegisteredBatch",
    "RowsAhead",
    "UpdateCounts",
    "sum_counts",
]


COUNTER_BITS = 40
INCARNATION_BITS = 16
RANK_BITS = 16
MERGED = 1 << 48
"""Marks the client of a push that is the sum of a step and belongs to no single NN worker."""

Offsets: TypeAlias = dict[str, dict[int, int]]
"""Position in a stream: the offset of the next message, by topic and partition.

If lateness matters, `TOPIC@event_time` has the latest event time of each partition, in milliseconds; names of topics
contain no "@".
"""


class BatchId(NamedTuple):
    """The parts of a batch id, which fits a uint64. Its first byte identifies the embedding worker.

    Attributes:
        rank: rank of the embedding worker that buffers the batch, 0 to 255.
        incarnation: incarnation of that embedding worker, 1 to 65,535.
        counter: number of the batch at that embedding worker, below 2^40.
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
    """Identifies a push: its sender, its step and its position in the step. A retry has the same header.

    Attributes:
        generation: generation of the NN workers, assigned by the coordinator; rises from 1 with each of their restarts.
        rank: rank of the NN worker.
        sequence: number of the push at that NN worker in this generation, from 1; equal for all parts of a push.
        step: global step to which the gradients belong.
        rows: samples of the batches, even if their gradients are lost; 0 for a contribution without data.
        part: number of this part, if the batches of a step are buffered at several embedding workers.
        parts: number of parts that this NN worker pushes for this step.
        slot: position in `step` by arrival at the token scheduler, from 0; -1 in modes without tokens. In asynchronous
            modes a PS counts pushes itself, so the step there may be another one.
        group: number of pushes of a step in asynchronous modes.
        token: token of the gradients in asynchronous modes.
    """

    generation: int
    rank: int
    sequence: int
    step: int
    rows: int
    part: int = 0
    parts: int = 1
    slot: int = -1
    group: int = 0
    token: int = 0

    @property
    def client(self) -> int:
        """Identity in the push log of a shard for a push that is applied by itself. Not 0."""
        return self.generation << RANK_BITS | self.rank

    @property
    def merged_client(self) -> int:
        """Identity in the push log of a shard for the sum of a step; its sequence number is `step + 1`."""
        return MERGED | self.generation << RANK_BITS


class PushId(NamedTuple):
    """A push of an NN worker in the current generation."""

    rank: int
    sequence: int


class UpdateCounts(NamedTuple):
    """Result of a push to one table, in rows. Counts can be added with `+`.

    Attributes:
        applied: rows updated.
        absent: rows skipped as they are not in the table (not admitted, or evicted).
        non_finite: rows left unchanged as their gradient, or their updated value, is not finite.
        duplicate: rows of a repeated push, skipped as they were updated before.
    """

    applied: int = 0
    absent: int = 0
    non_finite: int = 0
    duplicate: int = 0

    def __add__(self, other: tuple[int, ...]) -> UpdateCounts:  # type: ignore[override]
        """Adds the counts elementwise."""
        applied, absent, non_finite, duplicate = other
        sums = self.applied + applied, self.absent + absent, self.non_finite + non_finite, self.duplicate + duplicate
        return UpdateCounts(*sums)


def sum_counts(answers: Iterable[Mapping[str, UpdateCounts]]) -> dict[str, UpdateCounts]:
    """Sums the answers to several pushes, by table."""
    total: dict[str, UpdateCounts] = {}
    for answer in answers:
        for table, counts in answer.items():
            total[table] = total[table] + counts if table in total else counts
    return total


class Moment(NamedTuple):
    """A moment of an embedding PS: its rows have all updates up to this one.

    Attributes:
        epoch: random number of the PS process, or of its last import; moments of two epochs cannot be compared.
        version: number of updates in this epoch.
    """

    epoch: int
    version: int


class RowsAhead(NamedTuple):
    """Rows of a PS that were looked up ahead of their use.

    Attributes:
        rows: as from `EmbeddingPS.lookup`.
        seen: they have all updates up to this moment.
    """

    rows: Packed[np.float32]
    seen: Moment


class FreshRows(NamedTuple):
    """The current values of those rows of a batch that may have changed since they were looked up.

    From an embedding worker, also the rows that its lookup has left out.

    Attributes:
        places: index of each row among the ids that were looked up, by table, uint32 `[changed]`.
        rows: values by table, `[changed, dim]`, in the form in which they were looked up.
        seen: moments that these, and the rows that have not changed, are of: one for each PS.
        scales: as in `LookedUp`.
        late: from a PS, the rows of the ids that are looked up only now, by table, `[late ids, dim]`; else None.
    """

    places: Packed[np.uint32]
    rows: Packed[np.float32 | np.float16]
    seen: list[Moment]
    scales: Packed[np.float32] | None = None
    late: Packed[np.float32] | None = None


class LookedUp(NamedTuple):
    """Rows for the ID features of a batch, as sent to an NN worker: distinct rows, and indices into them.

    Attributes:
        rows: rows by table, `[unique ids, dim]`: float32, or float16 with compression. 16-bit rows are sent as stored,
            see `persia.types.half_floats`: their bits in items of either dtype, without scales.
        narrow: index of each id's row in its table's `rows`, by feature; for tables with at most 65,536 unique ids.
        wide: the same for all other tables.
        offsets: offsets into the index, by feature, int64 `[batch + 1]`; without features that have one id per sample.
        scales: scales by float32 table, float32 `[unique ids]`: a row is `rows * scale`. None without compression.
        weights: weight of each id by which its row is multiplied in pooling, by feature with weights, float32, as long
            as its index. None if no feature has weights.
        seen: moments of the PSs that the rows are of, if they were looked up ahead: one for each PS, in order.
        pooled: number of distinct ids by table, for tables whose features were pooled by the embedding worker: `rows`
            has the values of each such feature by `persia.schema.pooled_features.values_name`, `[batch, dim]`, and
            the other fields lack the feature. None if it pooled none.
        left_out: whether each distinct row is missing in `rows`, by table, bool `[unique ids]`: `refresh` brings it.
            None if no row is.
    """

    rows: Packed[np.float32 | np.float16]
    narrow: Packed[np.uint16]
    wide: Packed[np.uint32]
    offsets: Packed[np.int64]
    scales: Packed[np.float32] | None = None
    weights: Packed[np.float32] | None = None
    seen: list[Moment] | None = None
    pooled: dict[str, int] | None = None
    left_out: Packed[np.bool_] | None = None

    @property
    def inverse(self) -> dict[str, Inverse]:
        """`narrow` and `wide` together."""
        return dict(self.narrow.items()) | dict(self.wide.items())  # Views are made at once, not by name.


class Contribution(NamedTuple):
    """The gradients of one batch.

    Attributes:
        batch_id: id that `register` returned for the batch.
        gradients: gradients of `LookedUp.rows` by table, `[unique ids, dim]`; tables that do not contribute to the loss
            are left out. float32, or float16 with scales.
        scales: scales by table, float32 `[unique ids]`: a gradient is `gradients * scale`. None without compression.
        part: whether the gradient of each row is included, by table of the batch, bool `[unique ids]`; None if all are.
    """

    batch_id: int
    gradients: Packed[np.float32 | np.float16]
    scales: Packed[np.float32] | None = None
    part: Packed[np.bool_] | None = None


class Feed(NamedTuple):
    """The batches of a pass that a data loader prepares.

    Batch `number` of the pass goes to NN worker `(number - start) % nn_workers`, and is read by data loader
    `number % loaders`.

    Attributes:
        epoch: number of the pass over the data.
        start: number of the first requested batch.
        nn_workers: number of NN workers that take batches.
        loader: number of this loader, 0 to `loaders - 1`.
        loaders: number of data loaders that share the reading.
        ahead: maximum number of batches that wait for an NN worker.
        generation: generation of the NN workers. A new one restarts the reading, even at the same batch, as the
            previous generation may have used batches.
        on_demand: whether NN workers take batches in any order, as they draw tokens. Then all of them have rank 0,
            and `nn_workers` is 1.
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
        """Identity of the reading: feeds with the same identity differ only in how loaders share the reading."""
        return self.generation, self.epoch, self.start, self.nn_workers, self.on_demand


class RegisteredBatch(NamedTuple):
    """A batch whose ID features are buffered at an embedding worker.

    Attributes:
        batch_id: identifies the embedding worker, and is the key of the batch at it.
        dense: dense features, float32 `[batch, Schema.dense_width]`.
        labels: labels, float32 `[batch, labels]`; NaN where one is missing.
        day: day of each sample, int32 `[batch]`, or None.
        id_counts: counts of the ids in a sample of its rows, int64; see `persia.batching.sampling`. None for most
            batches.
        weights: weight of each sample, float32 `[batch]`, or None.
        groups: group of each sample, uint64 `[batch]`, or None.
    """

    batch_id: int
    dense: Floats
    labels: Floats
    day: Int32Array | None
    id_counts: Int64Array | None = None
    weights: Floats | None = None
    groups: Ids | None = None


class Delivery(NamedTuple):
    """Response of a data loader to `take`.

    Attributes:
        number: requested number of the batch.
        batch: the batch; None if the pass ends before this number.
    """

    number: int
    batch: RegisteredBatch | None
