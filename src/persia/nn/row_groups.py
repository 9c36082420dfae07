"""The rows of a batch on a device: by dim, as each operation on the rows of a table would be a kernel."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch

from persia.schema import Table
from persia.types import Int64Array, Packed

__all__ = ["GroupLayout", "RowGroup", "group_layouts"]


class GroupLayout(NamedTuple):
    """The tables of a batch that have one dim, and of which all get gradients or none does.

    Attributes:
        tables: their names, in order.
        counts: number of rows of each.
        dim: of a row.
        frozen: whether they get no gradient.
    """

    tables: list[str]
    counts: list[int]
    dim: int
    frozen: bool

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(self.counts)

    def first(self) -> dict[str, int]:
        """Returns the place of the first row of each table."""
        return dict(zip(self.tables, itertools.accumulate(self.counts, initial=0), strict=False))

    def places(self, of_tables: Packed[Any]) -> Int64Array:
        """Returns the places in the group of rows, int64, from those in each table; some tables may be missing."""
        own = [of_tables[name].astype(np.int64) + start for name, start in self.first().items() if name in of_tables]
        return np.concatenate(own) if own else np.empty(0, np.int64)


class RowGroup(NamedTuple):
    """The rows of a group on a device.

    Attributes:
        layout: of the rows.
        values: float32 `[rows, dim]`.
    """

    layout: GroupLayout
    values: torch.Tensor

    def by_table(self) -> dict[str, torch.Tensor]:
        """Returns a view of the rows of each table."""
        return dict(zip(self.layout.tables, self.values.split(self.layout.counts), strict=True))


def group_layouts(
    names: Sequence[str], counts: Sequence[int], tables: Mapping[str, Table], frozen: Set[str]
) -> list[GroupLayout]:
    """Returns the groups of tables, in the order of their first ones.

    Args:
        names: of the tables of a batch.
        counts: number of rows of each.
        tables: by name, at least these.
        frozen: tables that get no gradient.
    """
    keys = [(tables[name].dim, name in frozen) for name in names]
    if len(set(keys)) == 1:
        return [GroupLayout(list(names), list(counts), *keys[0])]
    groups: dict[tuple[int, bool], GroupLayout] = {}
    for key, name, count in zip(keys, names, counts, strict=True):
        group = groups.setdefault(key, GroupLayout([], [], *key))
        group.tables.append(name)
        group.counts.append(count)
    return list(groups.values())
