"""`persia.Batch`: the samples of one step, as flat arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from persia.types import Floats, Ids, Int32Array, Int64Array

__all__ = ["Batch", "IdColumn"]


@dataclass(frozen=True, slots=True)
class IdColumn:
    """The ids of one feature: `values[offsets[i]:offsets[i + 1]]` belong to sample i, like a jagged tensor.

    Attributes:
        values: uint64 `[n]`.
        offsets: int64 `[batch + 1]`, from 0 to n; None when each sample has exactly one id (n = batch).
    """

    values: Ids
    offsets: Int64Array | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one step.

    Attributes:
        id_features: for each ID-type feature of the schema its ids.
        dense: float32 `[batch, dense features]`, in the order of the schema.
        labels: float32 `[batch, labels]`, each in [0, 1].
        day: int32 `[batch]` or None: the period that progressive validation groups by.
    """

    id_features: Mapping[str, IdColumn]
    dense: Floats
    labels: Floats
    day: Int32Array | None = None

    def __len__(self) -> int:
        return len(self.labels)
