"""Names of array types by their contents."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["BoolArray", "Bytes", "Floats", "Halves", "Ids", "Int32Array", "Int64Array", "Inverse", "WireRows"]

Ids: TypeAlias = NDArray[np.uint64]
"""Ids within a table, uint64 `[n]`."""

Floats: TypeAlias = NDArray[np.float32]
"""float32 of any shape."""

Halves: TypeAlias = NDArray[np.float16]
"""float16 rows `[n, dim]`, which are multiplied by a scale per row."""

Int64Array: TypeAlias = NDArray[np.int64]
Int32Array: TypeAlias = NDArray[np.int32]
BoolArray: TypeAlias = NDArray[np.bool_]
Bytes: TypeAlias = NDArray[np.uint8]
"""Tensors of any dtypes, packed."""

Inverse: TypeAlias = NDArray[np.uint16 | np.uint32]
"""Index of each id of a batch in its table's unique rows; uint16 while they fit."""

WireRows: TypeAlias = NDArray[np.float32 | np.float16]
"""Rows in messages, `[n, dim]`: float32, or float16 that is multiplied by a scale per row."""
