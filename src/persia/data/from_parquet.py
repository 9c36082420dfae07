"""Reads Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Unpack

from persia.batching.batch import Batch
from persia.data.file_source import FileSource
from persia.data.files import Paths, expand
from persia.data.reader import StreamReader
from persia.data.row_options import ReaderOptions, conversion_of, order_of, with_options
from persia.data.rows import Piece
from persia.schema import Schema

__all__ = ["PARQUET_SUFFIXES", "ParquetSource", "parquet"]

PARQUET_SUFFIXES = (".parquet", ".pq")

_CHUNK_ROWS = 65_536


@with_options(ReaderOptions)
def parquet(
    paths: Paths,
    schema: Schema,
    batch_size: int = 1024,
    **options: Unpack[ReaderOptions],
) -> StreamReader:
    """Reads Parquet files, one after another, in pieces of 65,536 rows, so memory does not grow with their size.

    Resuming skips files and row groups by their metadata; with shuffling, those before the current block. With `where`
    or `split`, resuming reads all rows from the beginning.

    Args:
        paths: file, glob, directory (searched for `*.parquet`), URL of one of these, or a list; read in sorted order.
        schema: columns to read. A column may also be a hive key, a part `key=value` of the path.
        batch_size: samples per batch; a batch may span files and days.
        **options: see `RowOptions` and `ColumnOptions`.

    Raises:
        DataError: no file; while iterating: a file is missing or corrupt, lacks a column or has invalid values, or
            there are no rows at all.
        MissingExtraError: the protocol of a URL needs a package that is not installed.
        ConfigError: an argument is invalid.
    """
    order = order_of(batch_size, **options)
    conversion = conversion_of(schema, **options)
    return StreamReader(schema, ParquetSource(tuple(expand(paths, PARQUET_SUFFIXES)), conversion), order)


@dataclass(frozen=True)
class ParquetSource(FileSource):
    """Rows of Parquet files."""

    kind: ClassVar = "parquet"

    def chunks(self, skip: int) -> Iterator[Batch]:
        """See `RowSource.chunks`. Without a selection, skips whole files and row groups by their metadata."""
        selection = self.conversion.selection
        if selection is not None:
            batches = self.conversion.batches((p for p, _ in self._pieces(0)), skip)
        else:
            batches = (b for p, left in self._pieces(skip) for b in self.conversion.batches(iter([p]), left))
        return self.checked(batches, skip)

    def inputs(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """See `InputSource.inputs`."""
        source = self.reading(names)
        return source.conversion.inputs(piece for piece, _ in source._pieces(0))

    def columns(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """See `ColumnSource.columns`."""
        conversion = replace(self.conversion, passthrough=tuple(names))
        return conversion.passthrough_columns(piece for piece, _ in replace(self, conversion=conversion)._pieces(0))

    def count(self) -> int:
        """Returns the number of rows, by the metadata of the files."""
        import pyarrow.parquet as pq

        rows = 0
        for file in self.files:
            with file.open() as stream:
                rows += pq.ParquetFile(stream, pre_buffer=False).metadata.num_rows
        return rows

    def pieces(self) -> Iterator[Piece]:
        """Yields the needed columns of all files."""
        return (piece for piece, _ in self._pieces(0))

    def _pieces(self, skip: int) -> Iterator[tuple[Piece, int]]:
        """Yields pieces from the row group of row `skip` on, each with the number of its rows to skip."""
        for place, file in enumerate(self.files):
            with file.open() as stream:
                import pyarrow.parquet as pq

                table = pq.ParquetFile(stream, pre_buffer=False)
                total = table.metadata.num_rows
                if place in self.counted:
                    yield Piece(file, 0, {}, total, counted=True), skip
                    continue
                if skip >= total:
                    skip -= total
                    continue
                columns = self.conversion.columns_of(file, table.schema_arrow.names)
                groups = list(range(table.num_row_groups))
                row = 0
                while (rows := table.metadata.row_group(groups[0]).num_rows) <= skip:
                    groups, skip, row = groups[1:], skip - rows, row + rows
                for piece in table.iter_batches(_CHUNK_ROWS, groups, columns, use_threads=False):
                    data = dict(zip(piece.schema.names, piece.columns, strict=True))
                    yield Piece(file, row, data, len(piece)), skip
                    skip, row = max(skip - len(piece), 0), row + len(piece)
