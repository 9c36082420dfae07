"""`persia.Batch`: the samples of one step, as flat arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from persia.batching.id_column import IdColumn
from persia.errors import DataError
from persia.schema import Schema
from persia.types import BoolArray, Floats, Ids, Int32Array, Int64Array, RegisteredBatch

__all__ = ["Batch"]

_OPTIONAL = ("day", "weights", "groups")
"""Fields of a batch that may be None."""


@dataclass(frozen=True, slots=True, repr=False)
class Batch:
    """The samples of one step. Build it with `from_columns`, or from arrays that are already in this form.

    Picklable, so torch DataLoader workers can return it. persia never changes its arrays.

    Attributes:
        id_features: ids of each ID-type feature of the schema.
        dense: float32 `[batch, Schema.dense_width]`: values of the non-ID-type features, in the order of the schema.
        labels: float32 `[batch, labels]`: numbers, or the numbers of classes; `[batch, 0]` if there are none
            (prediction). NaN where a label that may be missing is, see `mask`.
        day: int32 `[batch]` or None: the period that progressive validation groups by.
        weights: float32 `[batch]`, from 0 on: the weight of each sample in loss and metrics; None weighs all 1.
        groups: uint64 `[batch]`: the group of each sample; None without groups.
    """

    id_features: Mapping[str, IdColumn]
    dense: Floats
    labels: Floats
    day: Int32Array | None = None
    weights: Floats | None = None
    groups: Ids | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def mask(self) -> BoolArray:
        """Bool `[batch, labels]`: whether a label is known."""
        return ~np.isnan(self.labels)

    def __repr__(self) -> str:
        parts = (f"{len(self)} rows", ", ".join(self.id_features) or "no ID-type features")
        return f"<Batch of {': '.join(parts)}; {self.dense.shape[1:]} dense, {self.labels.shape[1:]} labels>"

    @classmethod
    def from_columns(
        cls, schema: Schema, columns: Mapping[str, Any], day: Any = None, *, require_labels: bool = True
    ) -> Batch:
        """Builds a batch from columns of almost any kind.

        A column is a numpy array, torch tensor, pyarrow (chunked) array, pandas or polars column, Python list, or, for
        ids, a pair `(values, offsets)`. `IdFeature.kind` sets how a value becomes an id, whatever the type of its
        column. A missing id (None, null, NaN, an empty text) gives a sample without ids; a missing id within a list
        is left out. Two-dimensional ids `[batch, k]` are k ids for each sample. Crossed features are computed; a
        sample that lacks a part of a cross has no id for it. Columns that the schema does not name are ignored.

        Args:
            schema: names the columns to use.
            columns: columns by name, all of one length; also a pandas or polars frame, a pyarrow table or record batch.
            day: whole number for each sample, or one for all, or None.
            require_labels: if False, and a label column is missing, `labels` is `[batch, 0]`.

        Raises:
            DataError: a column is missing or invalid; names the column, the first bad row and the remedy.
        """
        from persia.batching.columns import from_columns
        from persia.batching.id_weights import with_id_weights

        made = from_columns(schema, columns, day, require_labels=require_labels)
        if any(feature.weights is not None for feature in schema.id_features):
            made = made._replace(id_features=with_id_weights(schema, columns, made.id_features))
        return Batch(*made)

    def validate(self, schema: Schema, *, require_labels: bool = True) -> None:
        """Checks a batch that was built by hand, in a few vectorised passes without copies.

        Args:
            schema: the schema that the batch must match.
            require_labels: if False, labels of shape `[batch, 0]` are accepted too.

        Raises:
            DataError: names the feature, the first bad row and the remedy.
        """
        from persia.batching.validation import validate

        validate(
            self.id_features,
            self.dense,
            self.labels,
            self.day,
            self.weights,
            self.groups,
            schema,
            require_labels=require_labels,
        )

    def registered(self, batch_id: int, id_counts: Int64Array | None = None) -> RegisteredBatch:
        """Returns the samples without their ids, which an embedding worker buffers under this batch id."""
        return RegisteredBatch(batch_id, self.dense, self.labels, self.day, id_counts, self.weights, self.groups)

    def slice(self, start: int, stop: int) -> Batch:
        """Samples `start` to `stop` (clipped to the batch, as in a Python slice) as views of this batch's arrays."""
        start, stop, _ = slice(start, stop).indices(len(self))
        stop = max(start, stop)
        return Batch(
            {name: column.slice(start, stop) for name, column in self.id_features.items()},
            self.dense[start:stop],
            self.labels[start:stop],
            None if self.day is None else self.day[start:stop],
            None if self.weights is None else self.weights[start:stop],
            None if self.groups is None else self.groups[start:stop],
        )

    def take(self, rows: Int64Array) -> Batch:
        """These samples in this order (each in [0, len)), as a copy."""
        return Batch(
            {name: column.take(rows) for name, column in self.id_features.items()},
            self.dense[rows],
            self.labels[rows],
            None if self.day is None else self.day[rows],
            None if self.weights is None else self.weights[rows],
            None if self.groups is None else self.groups[rows],
        )

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """The samples of all batches, one after another; a single batch is returned as it is.

        Raises:
            DataError: there are no batches, or they have different features.
        """
        if not batches:
            raise DataError("Batch.concat got no batches; give at least one.")
        first = batches[0]
        if len(batches) == 1:
            return first
        for other in batches[1:]:
            if (
                other.id_features.keys() != first.id_features.keys()
                or other.dense.shape[1:] != first.dense.shape[1:]
                or other.labels.shape[1:] != first.labels.shape[1:]
                or any((getattr(other, part) is None) != (getattr(first, part) is None) for part in _OPTIONAL)
            ):
                raise DataError("Batch.concat got batches of different columns; build all with one schema.")
        return Batch(
            {name: IdColumn.concat([b.id_features[name] for b in batches]) for name in first.id_features},
            np.concatenate([b.dense for b in batches]),
            np.concatenate([b.labels for b in batches]),
            *(
                None if getattr(first, part) is None else np.concatenate([getattr(b, part) for b in batches])
                for part in _OPTIONAL
            ),
        )
