"""Pools the unique rows of tables to inputs of the network, and the gradients back to rows; on the CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from persia.batching.native import Scratch, ThreadPool, as_data_error, core
from persia.errors import DataError
from persia.types import BoolArray, Floats, Int64Array, Inverse

__all__ = ["FeaturePlan", "Pooled", "Pooler", "pool_backward", "pool_forward"]

# The numbers of `persia::Pooling`.
_POOLINGS = {"sum": 0, "mean": 1, "sqrtn": 2, None: 3}


@dataclass(frozen=True, slots=True)
class FeaturePlan:
    """The positions of the values of one feature among the unique rows of its table, and how to pool them.

    Attributes:
        table: index of the table in the call.
        inverse: uint16 or uint32 `[n]`, each less than the number of rows.
        offsets: int64 `[batch + 1]`, from 0 to n, not decreasing: `inverse[offsets[i]:offsets[i + 1]]` belong to
            sample i. None when each sample has exactly one value (n = batch).
        pooling: "sum", "mean" or "sqrtn" (sum / sqrt(count)) of a sample's rows; None keeps them as a sequence.
        max_length: number of values of a sample that count, from the first; None for all. Required for a sequence.
        weights: float32 `[n]`, the factor of each value's row; None for 1, and for a sequence. "mean" then divides by
            the sum of a sample's weights, "sqrtn" by the root of the sum of their squares; a sample for which that is 0
            has zeros.
    """

    table: int
    inverse: Inverse
    offsets: Int64Array | None = None
    pooling: Literal["sum", "mean", "sqrtn"] | None = "sum"
    max_length: int | None = None
    weights: Floats | None = None

    @property
    def batch(self) -> int:
        """Number of samples."""
        return len(self.inverse) if self.offsets is None else max(0, len(self.offsets) - 1)


class Pooled(NamedTuple):
    """Pooled embeddings of a batch, in the order of the features.

    Attributes:
        values: float32 `[batch, dim]`, or `[batch, max_length, dim]` for a sequence.
        masks: bool `[batch, max_length]` for a sequence, True at values and False at padding; None for others.
    """

    values: list[Floats]
    masks: list[BoolArray | None]


_Fields = tuple[int, Inverse, Int64Array | None, int, int | None, Floats | None]


def _fields(plans: Sequence[FeaturePlan]) -> list[_Fields]:
    try:
        return [(p.table, p.inverse, p.offsets, _POOLINGS[p.pooling], p.max_length, p.weights) for p in plans]
    except KeyError as error:
        raise DataError(f"Unknown pooling {error}: use 'sum', 'mean', 'sqrtn' or None.") from error


def _shape(feature: int, plan: FeaturePlan, rows: Sequence[Floats]) -> tuple[int, ...]:
    if not 0 <= plan.table < len(rows) or rows[plan.table].ndim != 2:
        raise DataError(f"feature {feature}: table {plan.table} must be one of {len(rows)} arrays [rows, dim].")
    if plan.pooling is not None:
        return plan.batch, rows[plan.table].shape[1]
    if plan.max_length is None or plan.max_length < 1:
        raise DataError(f"feature {feature}: an un-pooled sequence needs a max_length >= 1.")
    return plan.batch, plan.max_length, rows[plan.table].shape[1]


def pool_forward(
    rows: Sequence[Floats],
    plans: Sequence[FeaturePlan],
    pool: ThreadPool,
    out: Sequence[Floats | None] | None = None,
) -> Pooled:
    """Expands and pools the rows of a batch, for all features in one call.

    A bag is summed in its order, in float32, each row times its weight if there are weights; mean and sqrtn divide the
    sum. An empty bag and the padding of a sequence are zeros.

    Args:
        rows: for each table its unique rows, contiguous float32 `[u, dim]`.
        plans: the features. Their arrays must not change during the call.
        pool: threads to run on, in parallel over features and samples.
        out: for each feature None or a float32 array to write to, shaped like the result; only the last axis must be
            contiguous, so several features may share one `[batch, total]` buffer as column slices. They must not
            overlap.

    Returns:
        Values and masks by feature; values are the arrays of `out` if given.

    Raises:
        DataError: a dtype, shape or content is invalid; names the feature. The contents of `out` are then undefined.

    Blocks until done, without the GIL. Thread-safe.
    """
    fields = _fields(plans)
    if out is not None and len(out) != len(plans):
        raise DataError(f"out has {len(out)} entries for {len(plans)} features.")
    values: list[Floats] = []
    masks: list[BoolArray | None] = []
    with as_data_error:
        for f, plan in enumerate(plans):
            shape = _shape(f, plan, rows)
            target = out[f] if out is not None else None
            values.append(np.empty(shape, np.float32) if target is None else target)
            masks.append(np.empty(shape[:2], np.bool_) if plan.pooling is None else None)
        core.pool_forward(list(rows), fields, values, masks, pool)
    return Pooled(values, masks)


class Pooler:
    """`pool_forward` for batches of the same features; computes once what the batches share. Thread-safe.

    Args:
        features: table, pooling and maximum length of each feature; see `FeaturePlan`. Sequences have a maximum length.
        dims: row width of each table.
        pool: threads to run on.
        scratch: memory reused from call to call; results are borrowed from it.
    """

    def __init__(
        self,
        features: Sequence[tuple[int, Literal["sum", "mean", "sqrtn"] | None, int | None]],
        dims: Sequence[int],
        pool: ThreadPool,
        scratch: Scratch,
    ) -> None:
        self._features = [
            (table, _POOLINGS[pooling], most if pooling is None else None) for table, pooling, most in features
        ]
        self._columns = [(dims[table],) if most is None else (most, dims[table]) for table, _, most in self._features]
        self._pool = pool
        self._scratch = scratch
        self._layout: tuple[int, list[tuple[int, int, tuple[int, ...]]], int] = (-1, [], 0)

    def __call__(
        self,
        rows: list[Floats],
        inverse: Sequence[Inverse],
        offsets: Sequence[Int64Array | None],
        weights: Sequence[Floats | None],
        samples: int,
    ) -> Pooled:
        """Returns the same as `pool_forward`, in the same places relative to cache lines.

        Args:
            rows: for each table its unique rows, contiguous float32 `[u, dim]`.
            inverse: for each feature uint16 or uint32 `[n]`.
            offsets: for each feature int64 `[samples + 1]`, or None if each sample has one value.
            weights: for each feature float32 `[n]`, or None; see `FeaturePlan`.
            samples: size of the batch.

        Raises:
            DataError: an array has another dtype or shape.
        """
        layout = self._layout
        if layout[0] != samples:  # Most batches have one size. Another thread may change the attribute concurrently.
            self._layout = layout = self._laid_out(samples)
        _, places, total = layout
        block = self._scratch.floats(total)
        values = [block[begin:end].reshape(shape) for begin, end, shape in places]
        masks = [None if most is None else np.empty((samples, most), np.bool_) for _, _, most in self._features]
        fields = [
            (table, index, ends, code, most, factors)
            for (table, code, most), index, ends, factors in zip(self._features, inverse, offsets, weights, strict=True)
        ]
        with as_data_error:
            core.pool_forward(rows, fields, values, masks, self._pool)
        return Pooled(values, masks)

    def _laid_out(self, samples: int) -> tuple[int, list[tuple[int, int, tuple[int, ...]]], int]:
        places, begin = [], 0
        for columns in self._columns:
            shape = (samples, *columns)
            size = math.prod(shape)
            places.append((begin, begin + size, shape))
            begin += -(-size // 16) * 16
        return samples, places, begin


def pool_backward(
    shapes: Sequence[tuple[int, int]],
    plans: Sequence[FeaturePlan],
    gradients: Sequence[Floats | None],
    pool: ThreadPool,
    scratch: Scratch | None = None,
    out: Sequence[Floats | None] | None = None,
) -> list[Floats]:
    """The gradient of every unique row, from the gradients of the values that :func:`pool_forward` returned.

    A row's gradient is summed in float32 in the order of the features, then of the samples, then within the bag:
    bit-identical whatever the number of threads.

    Args:
        shapes: for each table the shape of its rows, (u, dim).
        plans: the features, as in the forward call.
        gradients: for each feature float32 `[batch, dim]`, or `[batch, max_length, dim]` for a sequence; any strides
            (the last axis is copied if it is not contiguous); None counts as zero. Padding is not read.
        pool: threads to run on: over tables, and over the columns of a large table (16 at least per thread).
        scratch: memory reused from call to call.
        out: for each table None or a contiguous float32 array of its shape to overwrite. Fresh memory can cost more
            than the sums.

    Returns:
        For each table float32 `[u, dim]`; zeros where no sample has the row.

    Raises:
        DataError: a dtype, shape or content is invalid; names the feature.

    Blocks until done, without the GIL. Thread-safe.
    """
    fields = _fields(plans)
    dense = [
        gradient if gradient is None or gradient.strides[-1:] == (4,) else np.ascontiguousarray(gradient)
        for gradient in gradients
    ]
    if out is None:
        out = [None] * len(shapes)
    if [shape if target is None else target.shape for shape, target in zip(shapes, out, strict=True)] != list(shapes):
        raise DataError("Each array of out must have the shape of the rows of its table.")
    with as_data_error:
        sums = [np.empty(s, np.float32) if target is None else target for s, target in zip(shapes, out, strict=True)]
        core.pool_backward(fields, dense, sums, pool, scratch or Scratch())
    return sums
