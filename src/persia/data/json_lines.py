"""Reads files with a JSON object in each line, in blocks."""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from typing import IO

from persia.data.files import File
from persia.data.rows import COUNTED, Piece
from persia.errors import DataError

__all__ = ["JSONL_SUFFIXES", "json_blocks", "json_pieces", "refused"]

JSONL_SUFFIXES = tuple(s + z for s in (".jsonl", ".ndjson", ".json") for z in ("", ".gz", ".bz2", ".zst"))

_BLOCK_BYTES = 8 << 20
_MAX_LINE_BYTES = 1 << 27


def json_pieces(file: File, types: Mapping[str, str]) -> Iterator[Piece]:
    """Yields the rows of a file, plain or compressed; memory does not grow with its size.

    Args:
        file: the file.
        types: pyarrow type of each key to read; the value of a key that an object lacks is null.

    Raises:
        DataError: the file is missing or damaged, a line is not a JSON object, or a value is of another type.
    """
    import pyarrow as pa
    import pyarrow.json as pj

    schema = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in types.items()])
    parse = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    row = 0
    for block in json_blocks(file):
        read = pj.ReadOptions(use_threads=False, block_size=len(block) + 1)
        try:
            table = pj.read_json(pa.BufferReader(block), read, parse).combine_chunks()
        except pa.ArrowInvalid as error:
            raise refused(file, error, row) from error
        columns = {
            name: column.chunk(0) if column.num_chunks else pa.array([], column.type)
            for name, column in zip(table.column_names, table.columns, strict=True)
        }
        yield Piece(file, row, columns, table.num_rows)
        row += table.num_rows


def json_blocks(file: File) -> Iterator[bytes]:
    """Yields the lines of a file, plain or compressed, in blocks of whole lines.

    Raises:
        DataError: the file is missing or damaged, or a line is too long.
    """
    import pyarrow as pa

    with file.open() as stream:
        plain = pa.CompressedInputStream(stream, file.compression) if file.compression else stream
        yield from _blocks(file, plain)


def _blocks(file: File, stream: IO[bytes]) -> Iterator[bytes]:
    """Yields whole lines in blocks of about `_BLOCK_BYTES`."""
    rest = b""
    lines = 0
    while block := stream.read(_BLOCK_BYTES):
        block = block.removeprefix(BOM_UTF8) if not lines and not rest else block
        whole, newline, end = block.rpartition(b"\n")
        if not newline:
            rest += end
            if len(rest) > _MAX_LINE_BYTES:
                raise DataError(
                    f"{file.path}: the line after {lines} others is longer than {_MAX_LINE_BYTES >> 20} MiB; give a "
                    "file with one object in each line.",
                    path=file.path,
                )
            continue
        if (lines_of_block := rest + whole).strip():
            yield lines_of_block
        lines += lines_of_block.count(b"\n") + 1
        rest = end
    if rest.strip():
        yield rest


def refused(file: File, error: Exception, first: int) -> DataError:
    """Returns the error for lines that cannot be parsed; `first` is the row where they begin."""
    match = re.search(r"in row (\d+)", str(error))
    row = first + int(match[1]) if match else first
    near = f"at row {row}" if match else f"from row {row} on"
    return DataError(
        f"{file.path}: cannot be read as JSON lines {near} ({error}). Give a file with one JSON object in each line, "
        f"or restore it.{COUNTED}",
        path=file.path,
        row=row,
    )
