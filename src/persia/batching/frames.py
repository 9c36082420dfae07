"""Recognizes frames and their columns without importing pandas, polars or pyarrow."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from persia.errors import DataError

__all__ = ["as_mapping", "from_frame", "is_arrow", "is_frame", "refuse_duplicates"]


def as_mapping(columns: Any) -> Mapping[str, Any]:
    """Columns by name, of a mapping, a pyarrow table or record batch, or a pandas or polars frame.

    Raises:
        DataError: two columns have one name, or `columns` is of another type.
    """
    if isinstance(columns, Mapping):
        return columns
    root = _library(columns)
    if type(columns).__name__ == "LazyFrame":
        raise DataError("Columns are given as a LazyFrame, which has no rows yet; call collect() first.")
    if root == "pyarrow" and hasattr(columns, "column_names"):
        refuse_duplicates(list(columns.column_names), "The table")
        return dict(zip(columns.column_names, columns.columns, strict=True))
    if root in ("pandas", "polars") and hasattr(columns, "columns"):
        names = list(columns.columns)
        refuse_duplicates(names, "The frame")
        return {name: columns[name] for name in names}
    raise DataError(
        f"Columns are given as {type(columns).__name__}; give a dict of columns, a pyarrow table, or a pandas or "
        "polars frame."
    )


def from_frame(name: str, column: Any) -> Any:
    """A pandas or polars column as a pyarrow array, or as a list if Arrow has no type for it; other columns unchanged.

    A masked numpy array becomes a list in which masked values are None.

    Raises:
        DataError: `column` is a frame.
    """
    if isinstance(column, np.ma.MaskedArray):
        return _unmasked(column) if np.ma.getmaskarray(column).any() else column.data
    root = _library(column)
    if root not in ("pandas", "polars"):
        return column
    if hasattr(column, "columns"):
        raise DataError(f"Column {name!r} is a whole {type(column).__name__}; give one column of it.", column=name)
    import pyarrow as pa

    try:
        if root == "polars" and str(column.dtype) != "Object":
            return column.to_arrow()
        if root == "pandas":
            array = pa.Array.from_pandas(column)
            if str(column.dtype) != "object" or "double" not in str(array.type):  # Else ints would become floats.
                return array
    except (pa.ArrowException, OverflowError):  # Values of several kinds, or whole numbers above 64 bits.
        pass
    return column.to_list()


def _unmasked(column: Any) -> list[Any]:
    if column.ndim > 1:
        return [_unmasked(row) for row in column]
    masked = np.ma.getmaskarray(column)
    return [None if missing else value for value, missing in zip(column.data, masked, strict=True)]


def is_arrow(column: Any) -> bool:
    """Whether a column is a pyarrow array."""
    return _library(column) == "pyarrow"


def is_frame(data: Any) -> bool:
    """Whether data are a frame, table or column of pandas, polars or pyarrow."""
    return _library(data) in ("pandas", "polars", "pyarrow")


def refuse_duplicates(names: list[str], owner: str) -> None:
    """Raises DataError if a name occurs twice, which makes it ambiguous."""
    if len(set(names)) == len(names):
        return
    for name in names:
        if names.count(name) > 1:
            raise DataError(
                f"{owner} has {names.count(name)} columns named {name!r}; rename or remove all but one.", column=name
            )


def _library(thing: Any) -> str:
    """The library that defines the class of `thing` or one of its base classes."""
    kind: Any = type(thing)
    name: str = _library_of(kind)
    return name


@functools.lru_cache(maxsize=1024)
def _library_of(kind: Any) -> str:
    roots: list[str] = [cls.__module__.split(".")[0] for cls in kind.__mro__]
    return next((root for root in roots if root in ("pyarrow", "pandas", "polars")), roots[0])
