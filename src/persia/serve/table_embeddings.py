"""Rows of a table by id, as servers and clients return them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["TableEmbeddings"]


class TableEmbeddings(NamedTuple):
    """Rows of a table.

    Attributes:
        found: bool `[n]`: whether each id has a row.
        rows: float32 `[n, dim]`; zeros for ids without a row.
        step: minimum number of global steps that the rows contain.
        epoch: epoch of the rows in the log of changes.
    """

    found: NDArray[np.bool_]
    rows: NDArray[np.float32]
    step: int
    epoch: int
