"""Reads JSON lines: files with a JSON object in each line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from persia.batching.batch import Batch
from persia.data.expressions import Rule
from persia.data.file_source import FileSource
from persia.data.files import Paths, expand
from persia.data.json_columns import JsonDecoder
from persia.data.json_lines import JSONL_SUFFIXES, json_blocks
from persia.data.reader import Order, StreamReader
from persia.data.rows import Conversion, DayUnit, Piece
from persia.data.selection import Selection, Split
from persia.schema import Schema

__all__ = ["jsonl"]


def jsonl(
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
    """Reads JSON lines in blocks of 8 MiB, plain or compressed (.gz, .bz2, .zst).

    Columns are the keys of the objects; a list is a list of ids. An object may lack a key, whose value is then missing,
    but a key that the first block of a file lacks is an error. The value alone counts: 5, 5.0 and "5" may stand in one
    column.

    Args:
        paths: as for `parquet`; in directories, files `*.jsonl`, `*.ndjson` and `*.json`, optionally compressed.
        schema: columns to read.
        batch_size: samples per batch.
        rename: key of the objects by name in the schema, where they differ.
        labels: rule by label, for labels that are not a column; see `parquet`.
        fill: replacement of missing values, by dense feature or label; without it, a missing value is an error.
        where: only rows for which this rule is true; see `parquet`.
        split: only one part of the rows; see `parquet`.
        day: column or hive key that gives `Batch.day`: whole numbers, or dates and times such as 2024-05-01.
        day_unit: unit of whole numbers in `day`.
        shuffle_rows: see `parquet`.
        seed: seed of the permutations.
        drop_last: drop a last batch that is not full.
        shard: (index, count): only batches i with i % count == index.
        require_labels: if False, files without the label columns give `labels` of shape `[batch, 0]`.

    Raises:
        DataError: no file; while iterating: a file is missing or corrupt, a line is not an object, a column is missing
            or has invalid values, or there are no rows at all.
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
    return StreamReader(schema, JsonlSource(tuple(expand(paths, JSONL_SUFFIXES)), conversion), order)


@dataclass(frozen=True)
class JsonlSource(FileSource):
    """Rows of files of JSON lines."""

    kind: ClassVar = "jsonl"

    def chunks(self, skip: int) -> Iterator[Batch]:
        """See `RowSource.chunks`. Skipped rows are parsed but not converted."""
        return self.checked(self.conversion.batches(self.pieces(), skip), skip)

    def columns(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """See `ColumnSource.columns`."""
        conversion = replace(self.conversion, kept=tuple(names))
        return conversion.kept_columns(replace(self, conversion=conversion).pieces())

    def pieces(self) -> Iterator[Piece]:
        """Yields the needed columns of all files."""
        import pyarrow as pa

        ids = {self.conversion.wanted[f.name]: f.kind for f in self.conversion.schema.id_features if not f.computed}
        for place, file in enumerate(self.files):
            decoder = JsonDecoder(file, ids)
            columns: list[str] | None = None
            for block in json_blocks(file):
                row, table = decoder.row, decoder.table(block, columns)
                if columns is None:
                    columns = self.conversion.columns_of(file, table.column_names)
                read = {name: table.column(name).combine_chunks() for name in columns if name in table.column_names}
                missing = {name: pa.nulls(table.num_rows) for name in columns if name not in read}
                yield Piece(file, row, read | missing, table.num_rows)._replace(counted=place in self.counted)
