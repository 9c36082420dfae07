"""Access of a PS to the storage of checkpoints, without the NN worker in between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from persia.types import PartCheck, PlaceCheck, RowsRead, RowsToRead, RowsToWrite, WrittenState

if TYPE_CHECKING:
    from persia.services import EmbeddingPS

__all__ = ["StorageAccess"]


class StorageAccess:
    """Methods of a PS that access checkpoints. Their code is imported at the first use, so a PS restarts faster."""

    def check_place(self, url: str, path: str, checksum: str) -> PlaceCheck:
        """Checks whether this PS sees a file, and can write; see `persia.services.EmbeddingPS`."""
        from persia.checkpoint.row_writing import check_place

        return check_place(url, path, checksum)

    def write_state(self, order: RowsToWrite) -> Iterator[WrittenState]:
        """Writes the state besides rows to a checkpoint; see `persia.services.EmbeddingPS`."""
        from persia.checkpoint.row_writing import write_state

        return write_state(order, cast("EmbeddingPS", self).export_state())

    def check_row_parts(
        self, url: str, step: int | None, checksum: str, share: int, shares: int
    ) -> Iterator[PartCheck]:
        """Checks some of the parts of the rows of a checkpoint; see `persia.services.EmbeddingPS`."""
        from persia.checkpoint.row_reading import check_row_parts

        return check_row_parts(url, step, checksum, share, shares)

    def read_own_rows(self, order: RowsToRead) -> Iterator[RowsRead]:
        """Imports the rows of a checkpoint that this PS owns; see `persia.services.EmbeddingPS`."""
        from persia.checkpoint.row_reading import read_own_rows

        return read_own_rows(cast("EmbeddingPS", self), order)
