"""The numbers of the tables of a PS, and checks of gradients against the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from persia.errors import StoreError
from persia.schema import Table
from persia.store import EmbeddingStore
from persia.types import Gradients, Ids, Packed, PackedGradients

__all__ = ["TableNumbers"]


class TableNumbers:
    """The numbers of tables in the store of a PS. Safe to call from several threads.

    Args:
        store: the store, with its tables in the order of `tables`.
        tables: tables by name.

    Attributes:
        by_name: number of each table.
    """

    def __init__(self, store: EmbeddingStore, tables: Mapping[str, Table]) -> None:
        self._store = store
        self._tables = tables
        self.by_name = {name: number for number, name in enumerate(tables)}
        self._last_places: tuple[Sequence[str], list[int], list[int], list[int]] = ([], [], [], [])

    def number(self, table: str) -> int:
        """Returns the number of a table.

        Raises:
            StoreError: the table is unknown.
        """
        number = self.by_name.get(table)
        if number is None:
            raise StoreError(
                f"There is no table {table!r}; this server has {', '.join(self.by_name)}. "
                "Train and serve with the same schema.",
                table=table,
            )
        return number

    def places(self, names: Sequence[str]) -> tuple[list[int], list[int], list[int]]:
        """Returns numbers of tables, dims, and words of a row.

        Caches the last result, as nearly all calls are for the same tables.

        Raises:
            StoreError: a table is unknown.
        """
        known, numbers, dims, words = self._last_places
        if known != names:
            numbers = [self.number(name) for name in names]
            dims = [self._tables[name].dim for name in names]
            words = [self._store.config(number).row_words for number in numbers]
            self._last_places = list(names), numbers, dims, words
        return numbers, dims, words

    def keys(self, table: str, ids: Ids) -> Packed[np.uint64]:
        """Returns ids of one table. Raises StoreError unless they are uint64 `[n]`."""
        try:
            return Packed.of({table: ids}, np.uint64)
        except ValueError as error:
            raise StoreError(f"Rows of table {table!r}: {error}; ids are uint64 [n].", table=table) from error

    def packed(self, gradients: Mapping[str, Gradients]) -> PackedGradients:
        """Checks gradients before a step holds them, so that they cannot fail other NN workers; returns two buffers.

        Raises:
            StoreError: dtypes or shapes do not match the tables.
        """
        if not isinstance(gradients, PackedGradients):
            try:
                gradients = PackedGradients.of(gradients)
            except ValueError as error:
                raise StoreError(f"Gradients: {error}; ids are uint64 [n], values float32 [n, dim].") from error
        ids, rows = gradients.ids, gradients.rows
        _, dims, _ = self.places(ids.names)
        if rows.names != ids.names or rows.counts != ids.counts or (dims and rows.widths != dims) or ids.widths:
            raise StoreError(
                "Gradients must be ids uint64 [n] and values float32 [n, dim] for the same tables; got "
                f"{ids!r}, and {rows!r} with columns {rows.widths}, where the tables have {dims}."
            )
        return gradients
