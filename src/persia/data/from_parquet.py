"""Reads Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from persia.batching.batch import Batch
from persia.data.expressions import Rule
from persia.data.file_source import FileSource
from persia.data.files import Paths, expand
from persia.data.reader import Order, StreamReader
from persia.data.rows import Conversion, DayUnit, Piece
from persia.data.selection import Selection, Split
from persia.schema import Schema

__all__ = ["PARQUET_SUFFIXES", "ParquetSource", "parquet"]

PARQUET_SUFFIXES = (".parquet", ".pq")

_CHUNK_ROWS = 65_536


def parquet(
    paths: Paths,
    schema: Schema,
    batch_size: int = 1024,
    *,
    rename: Mapping[str, str] | None = None,
    labels: Mapping[str, Rule] | None = None,
    fill: Mapping[str, float] | None = None,
    where: Rule | None = None,
    split: Split | Mapping[str, Any] | None = None,
    day: str | None = None,
    day_unit: DayUnit = "day",
    shuffle_rows: int = 0,
    seed: int = 0,
    drop_last: bool = False,
    shard: tuple[int, int] = (0, 1),
    require_labels: bool = True,
) -> StreamReader:
    """Reads Parquet files, one after another, in pieces of 65,536 rows, so memory does not grow with their size.

    Resuming skips files and row groups by their metadata; with shuffling, those before the current block. With `where`
    or `split`, resuming reads all rows from the beginning.

    Args:
        paths: file, glob, directory (searched for `*.parquet`), URL of one of these, or a list; read in sorted order.
        schema: columns to read. A column may also be a hive key, a part `key=value` of the path.
        batch_size: samples per batch; a batch may span files and days.
        rename: column of the file by name in the schema, where they differ.
        labels: rule by label, for labels that are not a column: `{"click": "rating >= 4"}`, or a function of pyarrow
            arrays whose parameters are named like columns. It returns booleans or numbers from 0 to 1.
        fill: replacement of missing values, by dense feature or label; without it, a missing value is an error.
        where: only rows for which this rule is true: `"country != 'XX' and price > 0"`.
        split: only one part of the rows: `Split("train")`, `Split("test", by="hash", column="user")`, ...
        day: column or hive key that gives `Batch.day`: whole numbers, dates, timestamps.
        day_unit: unit of whole numbers in `day`; "ms" divides by 86,400,000.
        shuffle_rows: size of the blocks within which rows are permuted, differently in each epoch; 0 keeps the order.
        seed: seed of the permutations.
        drop_last: drop a last batch that is not full.
        shard: (index, count): only batches i with i % count == index.
        require_labels: if False, files without the label columns give `labels` of shape `[batch, 0]`.

    Raises:
        DataError: no file; while iterating: a file is missing or corrupt, lacks a column or has invalid values, or
            there are no rows at all.
        MissingExtraError: the protocol of a URL needs a package that is not installed.
        ConfigError: an argument is invalid.
    """
    order = Order(batch_size, shuffle_rows, seed, drop_last, shard)
    conversion = Conversion(
        schema,
        dict(rename or {}),
        day,
        day_unit,
        require_labels,
        dict(labels or {}),
        dict(fill or {}),
        Selection.of(where, split),
    )
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

    def columns(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """See `ColumnSource.columns`."""
        conversion = replace(self.conversion, kept=tuple(names))
        return conversion.kept_columns(piece for piece, _ in replace(self, conversion=conversion)._pieces(0))

    def count(self) -> int:
        """Returns the number of rows, by the metadata of the files."""
        import pyarrow.parquet as pq

        rows = 0
        for file in self.files:
            with file.open() as stream:
                rows += pq.ParquetFile(stream, pre_buffer=False).metadata.num_rows
        return rows

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
