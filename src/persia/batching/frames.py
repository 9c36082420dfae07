"""Frames and their columns, without importing the libraries that they are from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from persia.errors import DataError

__all__ = ["as_mapping", "from_frame", "is_arrow", "refuse_duplicates"]


def as_mapping(columns: Any) -> Mapping[str, Any]:
    """Columns by name, of a mapping, a pyarrow table or record batch, or a pandas or polars frame.

    Raises:
        DataError: two columns have one name, or it is none of these.
    """
    if isinstance(columns, Mapping):
        return columns
    root = _library(columns)
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
    """A pandas or polars column as a pyarrow array, or as a list where Arrow has no one type for it; else the column.

    Raises:
        DataError: it is a frame: the name stands for several columns.
    """
    root = _library(column)
    if root not in ("pandas", "polars"):
        return column
    if hasattr(column, "columns"):
        refuse_duplicates([name, name], "The frame")
    if root == "polars":
        return column.to_arrow()
    import pyarrow as pa

    try:
        return pa.Array.from_pandas(column)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        return column.tolist()


def is_arrow(column: Any) -> bool:
    """Whether it is a pyarrow array."""
    return _library(column) == "pyarrow"


def refuse_duplicates(names: list[str], owner: str) -> None:
    """Raises DataError if a name occurs twice: which of the columns is meant cannot be known."""
    for name in names:
        if names.count(name) > 1:
            raise DataError(
                f"{owner} has {names.count(name)} columns named {name!r}; rename or remove all but one.", column=name
            )


def _library(thing: Any) -> str:
    return type(thing).__module__.split(".")[0]
