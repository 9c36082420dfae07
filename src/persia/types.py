"""Small typed records that several layers share: what crosses from one role to another."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BoolArray",
    "Contribution",
    "Floats",
    "Ids",
    "Int32Array",
    "Int64Array",
    "Inverse",
    "LookedUp",
    "UpdateCounts",
]

Ids: TypeAlias = NDArray[np.uint64]
"""Ids within a table, uint64 `[n]`."""

Floats: TypeAlias = NDArray[np.float32]
"""float32 of any shape."""

Int64Array: TypeAlias = NDArray[np.int64]
Int32Array: TypeAlias = NDArray[np.int32]
BoolArray: TypeAlias = NDArray[np.bool_]

Inverse: TypeAlias = NDArray[np.uint16 | np.uint32]
"""Index of each id of a batch in its table's unique rows; uint16 while they fit."""


class UpdateCounts(NamedTuple):
    """What became of the gradients of one push to one table, in rows."""

    applied: int = 0
    absent: int = 0
    non_finite: int = 0
    duplicate: int = 0


class LookedUp(NamedTuple):
    """What an NN worker gets for the ID features of a batch: every unique row once, and where each id's row is.

    Attributes:
        rows: by table, float32 `[unique ids, dim]`.
        inverse: by feature, index of each id's row in its table's `rows`.
        offsets: by feature, int64 `[batch + 1]` into `inverse`, or None where each sample has one id.
    """

    rows: dict[str, Floats]
    inverse: dict[str, Inverse]
    offsets: dict[str, Int64Array | None]


class Contribution(NamedTuple):
    """The gradients of one batch.

    Attributes:
        batch_id: what `register` returned for the batch.
        gradients: by table, float32 `[unique ids, dim]`, row by row the gradient of `LookedUp.rows`; tables that
            took no part in the loss are left out.
    """

    batch_id: int
    gradients: dict[str, Floats]
