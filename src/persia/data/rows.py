"""From one piece of an arrow table to a batch: rename, hive keys, day; errors name the file and its row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from typing import Any, Literal, TypeAlias

import numpy as np

from persia.batching.batch import Batch
from persia.data.files import File
from persia.errors import ConfigError, DataError
from persia.schema import Schema

__all__ = ["Conversion", "DayUnit", "located"]

DayUnit: TypeAlias = Literal["day", "s", "ms", "us", "ns"]
"""What a whole number in a day column counts since its zero."""

_PER_DAY = {"day": 1, "s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class Conversion:
    """How the columns of a file become those of the schema.

    Attributes:
        schema: what is wanted.
        rename: column of the file for a name of the schema, where they differ.
        day: column or hive key that gives the day of a row.
        day_unit: unit of whole numbers there.
        require_labels: whether a file without the label columns is an error.
    """

    schema: Schema
    rename: Mapping[str, str] = field(default_factory=dict)
    day: str | None = None
    day_unit: DayUnit = "day"
    require_labels: bool = True

    def __post_init__(self) -> None:
        if self.day_unit not in _PER_DAY:
            raise ConfigError(f"day_unit = {self.day_unit!r}; use one of {', '.join(_PER_DAY)}.", field="day_unit")
        known = [f.name for f in self.schema.id_features if not f.cross]
        known += [*self.schema.dense_features, *self.schema.labels]
        for name in self.rename:
            if name not in known:
                raise ConfigError(
                    f"rename has {name!r}, which is no column of the schema; it maps schema names ({', '.join(known)}) "
                    "to columns of the file.",
                    field="rename",
                )

    @property
    def wanted(self) -> dict[str, str]:
        """Column of the file for each column of the schema (crossed features have none)."""
        names = [f.name for f in self.schema.id_features if not f.cross]
        names += [*self.schema.dense_features, *self.schema.labels]
        return {name: self.rename.get(name, name) for name in names}

    def columns_of(self, file: File, present: list[str]) -> list[str]:
        """The columns to read from a file that has these.

        Raises:
            DataError: the file lacks one that is needed.
        """
        columns: list[str] = []
        optional = set() if self.require_labels else set(self.schema.labels)
        wanted = [*self.wanted.items(), *([("day", self.day)] if self.day else [])]
        for name, column in wanted:
            if column in present:
                columns.append(column)
            elif column not in file.keys and name not in optional:
                raise DataError(
                    f"{file.path} has no column {column!r} (for {name!r}); correct the schema or rename "
                    f"(it has {', '.join([*present, *file.keys])}).",
                    path=file.path,
                    column=column,
                )
        return list(dict.fromkeys(columns))

    def batch(self, file: File, row: int, columns: Mapping[str, Any], rows: int) -> Batch:
        """Converts rows `row` to `row + rows` of a file, given by column of the file."""
        named = {name: self._column(file, column, columns, rows) for name, column in self.wanted.items()}
        with located(file, row):
            return Batch.from_columns(
                self.schema,
                {name: column for name, column in named.items() if column is not None},
                self._day(file, columns),
                require_labels=self.require_labels,
            )

    def _column(self, file: File, column: str, columns: Mapping[str, Any], rows: int) -> Any:
        """A column of the file, else its hive key as a constant one."""
        if column in columns or column not in file.keys:
            return columns.get(column)
        value = file.keys[column]
        if value == _HIVE_NULL:
            return [None] * rows
        return np.full(rows, int(value), np.uint64) if value.isdecimal() else [value] * rows

    def _day(self, file: File, columns: Mapping[str, Any]) -> Any:
        if self.day is None:
            return None
        if self.day not in columns:
            return _day_of_text(self.day, file.keys[self.day], _PER_DAY[self.day_unit])
        return _day_of_column(self.day, columns[self.day], self.day_unit)


@contextmanager
def located(file: File, row: int) -> Iterator[None]:
    """A DataError about rows that begin at `row` of a file becomes one that names the file and its own row."""
    try:
        yield
    except DataError as error:
        fields = {**error.fields, "path": file.path}
        where = f"{file.path}, rows from {row}"
        if "row" in fields:
            fields["row"] += row
            where = f"{file.path}, row {fields['row']}"
        raise DataError(f"{where}: {error.message}", **fields) from error


def _day_of_text(key: str, text: str, per_day: int) -> int:
    """The number or the ISO date (then days since 1970) in a hive key."""
    try:
        return (
            int(text) // per_day if text.lstrip("-").isdecimal() else (date.fromisoformat(text) - date(1970, 1, 1)).days
        )
    except ValueError as error:
        raise DataError(f"Hive key {key}={text} is neither a number nor an ISO date; rename it.", column=key) from error


def _day_of_column(name: str, column: Any, unit: DayUnit) -> Any:
    """Day numbers of an arrow column of whole numbers, dates (days since 1970) or timestamps."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_date32(kind):
        column, unit = column.cast(pa.int32()), "day"
    elif pa.types.is_date64(kind):
        column, unit = column.cast(pa.int64()), "ms"
    elif pa.types.is_timestamp(kind):
        column, unit = column.cast(pa.int64()), kind.unit
    elif not pa.types.is_integer(kind):
        raise DataError(f"Day column {name!r} is {kind}; give whole numbers, dates or timestamps.", column=name)
    if column.null_count:
        row = int(column.is_valid().to_numpy(zero_copy_only=False).argmin())
        raise DataError(f"Day column {name!r} has a missing value at row {row}; fill it in.", column=name, row=row)
    return column.to_numpy(zero_copy_only=False) // _PER_DAY[unit]
