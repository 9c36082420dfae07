"""Reads JSON lines: files with a JSON object in each line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Unpack

from persia.batching.batch import Batch
from persia.data.file_source import FileSource
from persia.data.files import Paths, expand
from persia.data.json_columns import JsonDecoder
from persia.data.json_lines import JSONL_SUFFIXES, json_blocks
from persia.data.reader import StreamReader
from persia.data.row_options import ReaderOptions, conversion_of, order_of, with_options
from persia.data.rows import Piece
from persia.schema import Schema

__all__ = ["jsonl"]


@with_options(ReaderOptions)
def jsonl(
    paths: Paths,
    schema: Schema,
    batch_size: int = 1024,
    **options: Unpack[ReaderOptions],
) -> StreamReader:
    """Reads JSON lines in blocks of 8 MiB, plain or compressed (.gz, .bz2, .zst).

    Columns are the keys of the objects; a list is a list of ids. An object may lack a key, whose value is then missing,
    but a key that the first block of a file lacks is an error. Only the value counts: one column may hold 5, 5.0 and
    "5".

    Args:
        paths: as for `parquet`; in directories, files `*.jsonl`, `*.ndjson` and `*.json`, optionally compressed.
        schema: columns to read.
        batch_size: samples per batch.
        **options: see `RowOptions` and `ColumnOptions`.

    Raises:
        DataError: no file; while iterating: a file is missing or corrupt, a line is not an object, a column is missing
            or has invalid values, or there are no rows at all.
        MissingExtraError: the protocol of a URL needs a package that is not installed.
        ConfigError: an argument is invalid.
    """
    order = order_of(batch_size, **options)
    conversion = conversion_of(schema, **options)
    return StreamReader(schema, JsonlSource(tuple(expand(paths, JSONL_SUFFIXES)), conversion), order)


@dataclass(frozen=True)
class JsonlSource(FileSource):
    """Rows of files of JSON lines."""

    kind: ClassVar = "jsonl"

    def chunks(self, skip: int) -> Iterator[Batch]:
        """See `RowSource.chunks`. Skipped rows are parsed but not converted."""
        return self.checked(self.conversion.batches(self.pieces(), skip), skip)

    def inputs(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """See `InputSource.inputs`."""
        source = self.reading(names)
        return source.conversion.inputs(source.pieces())

    def columns(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """See `ColumnSource.columns`."""
        conversion = replace(self.conversion, passthrough=tuple(names))
        return conversion.passthrough_columns(replace(self, conversion=conversion).pieces())

    def pieces(self) -> Iterator[Piece]:
        """Yields the needed columns of all files."""
        import pyarrow as pa

        columns_of_features = self.conversion.source_columns
        features = self.conversion.schema.id_features
        ids = {
            columns_of_features[feature.name]: feature.kind
            for feature in features
            if not feature.computed and feature.column == feature.name in columns_of_features
        }
        written = self.conversion.written_numbers
        for place, file in enumerate(self.files):
            decoder = JsonDecoder(file, ids, written)
            columns: list[str] | None = None
            for block in json_blocks(file):
                row, table = decoder.row, decoder.table(block, columns)
                if columns is None:
                    columns = self.conversion.columns_of(file, table.column_names)
                read = {name: table.column(name).combine_chunks() for name in columns if name in table.column_names}
                missing = {name: pa.nulls(table.num_rows) for name in columns if name not in read}
                yield Piece(file, row, read | missing, table.num_rows)._replace(counted=place in self.counted)
