"""Selects rows of the files: a filter, and a split into training and test data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from persia.batching import ThreadPool, hash_cross
from persia.batching.id_columns import id_column
from persia.checks import MAX_SEED, check_choice, check_integer, plain_fields
from persia.config import convert
from persia.data.column_values import Values
from persia.data.expressions import Expression, Rule
from persia.errors import ConfigError, DataError
from persia.types import BoolArray, Ids, Int64Array

__all__ = ["Selection", "Split"]


class Split(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One part of data that are split in two. To read the other part, change only `part`.

    Args:
        part: "train" or "test".
        by: "random": each row by itself; "hash": rows with the same value of `column` (all of a user, say) go to the
            same part; "time": rows with `column` >= `at` are the test data.
        test: approximate fraction of the test data, in (0, 1); not for "time".
        column: column of the file.
        at: for "time": a number, or a date or timestamp as ISO text.
        seed: seed of "random" and "hash".

    Raises:
        ConfigError: an argument is invalid or does not match `by`.
    """

    part: Literal["train", "test"]
    by: Literal["random", "hash", "time"] = "random"
    test: float = 0.2
    column: str | None = None
    at: str | int | float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        plain_fields(self)
        check_choice("Split.part", self.part, ("train", "test"), field="part")
        check_choice("Split.by", self.by, ("random", "hash", "time"), field="by")
        if not isinstance(self.test, float) or not 0 < self.test < 1:
            raise ConfigError(f"Invalid Split.test = {self.test!r}; expected a share between 0 and 1.", field="test")
        check_integer("Split.seed", self.seed, 0, MAX_SEED, field="seed")
        if not isinstance(self.at, (str, int, float, type(None))):
            raise ConfigError(
                f"Invalid Split.at = {self.at!r}; expected a number, or a date or time as an ISO text.", field="at"
            )
        if (self.column is None) != (self.by == "random"):
            raise ConfigError(
                f"Split.column = {self.column!r} with by={self.by!r}; "
                + ("a random split has no column." if self.by == "random" else "name the column."),
                field="column",
            )
        if (self.at is None) == (self.by == "time"):
            raise ConfigError(f"Split.at = {self.at!r} with by={self.by!r}; it belongs to a split by time.", field="at")

    @classmethod
    def of(cls, split: Split | Mapping[str, Any] | None) -> Split | None:
        """Returns a split unchanged, or builds it from a configuration.

        Raises:
            ConfigError: `split` is neither a split nor a mapping of its arguments.
        """
        if split is not None and not isinstance(split, (Split, Mapping)):
            raise ConfigError(
                f"split = {split!r}: give Split('train') or Split('test'), or a table such as {{ part = 'train' }}.",
                field="split",
            )
        return split if split is None or isinstance(split, Split) else convert(dict(split), cls, "split")

    def rows(self, columns: Mapping[str, Any], first: int, rows: int) -> BoolArray:
        """Returns which rows belong to this part, bool `[rows]`; `first` is the number of the first over all files."""
        import pyarrow.compute as pc

        if self.column is None:
            test = self._drawn(np.arange(first, first + rows).astype(np.uint64))
        elif self.by == "hash":
            test = self._drawn(_single_ids(self.column, columns[self.column], rows))
        else:
            later = self._later(self.column, columns[self.column])
            if later.null_count:
                row = int(pc.index(pc.is_null(later), True).as_py())
                raise DataError(
                    f"Column {self.column!r}, which splits by time, has a missing value at row {row}; fill it in or "
                    "leave such rows out with `where`.",
                    column=self.column,
                    row=row,
                )
            test = later.to_numpy(zero_copy_only=False)
        return test if self.part == "test" else ~test

    def _later(self, name: str, column: Any) -> Any:
        """Returns whether each row is test data; null if the time is missing."""
        values = Values({name: column})
        times = values.column(name)
        try:
            # Texts must be parsed as times first: 10/21/2024 does not sort by time.
            return values.compare("greater_equal", values.times(times) if isinstance(self.at, str) else times, self.at)
        except DataError as error:
            raise DataError(
                f"Split by time at {self.at!r}: {error.message}", **{"column": name, **error.fields}
            ) from error

    def _drawn(self, keys: Ids) -> BoolArray:
        drawn = hash_cross([keys], ThreadPool(1), seed=self.seed)
        return drawn < np.uint64(int(self.test * 2.0**64))


def _single_ids(name: str, column: Any, rows: int) -> Ids:
    """Returns the id of each row; 0 for a missing one."""
    ids = id_column(name, column)
    if ids.offsets is None:
        return ids.values
    lengths = np.diff(ids.offsets)
    if (lengths > 1).any():
        raise DataError(f"Column {name!r} holds lists; split by a column of single values.", column=name)
    keys = np.zeros(rows, np.uint64)
    keys[lengths == 1] = ids.values
    return keys


@dataclass(frozen=True)
class Selection:
    """Selection of rows to read.

    Attributes:
        where: rule that selects rows; None for all.
        split: part of the selected rows to read; None for both parts.
    """

    where: Expression | None = None
    split: Split | None = None

    @classmethod
    def of(cls, where: Rule | None, split: Split | Mapping[str, Any] | None) -> Selection | None:
        """Makes a selection; None for all rows."""
        if where is None and split is None:
            return None
        return cls(None if where is None else Expression("where", where), Split.of(split))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the file that the selection uses."""
        named = (self.split.column,) if self.split is not None and self.split.column is not None else ()
        return (*(self.where.columns if self.where is not None else ()), *named)

    @property
    def numbered(self) -> bool:
        """Whether the number of a row over all files decides if it is selected."""
        return self.split is not None and self.split.by == "random"

    def positions(self, columns: Mapping[str, Any], first: int, rows: int) -> Int64Array:
        """Returns the ascending positions of the selected rows.

        Args:
            columns: pyarrow array `[rows]` by name.
            first: number of the first row over all files.
            rows: number of rows.

        Raises:
            DataError: a rule does not match the columns, or does not return booleans.
        """
        selected = np.ones(rows, np.bool_)
        if self.where is not None:
            # `Values` converts the result: a function, or a column of booleans in CSV, may give any type.
            result = Values({"where": self.where.evaluate(columns, rows)})
            mask = result.truth(result.column("where"))
            selected &= mask.fill_null(False).to_numpy(zero_copy_only=False)
        if self.split is not None:
            selected &= self.split.rows(columns, first, rows)
        return np.flatnonzero(selected)
