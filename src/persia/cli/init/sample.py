"""Reads the first rows of Parquet, JSON lines or delimited text, and detects how the text is delimited.

`csv.Sniffer` does not replace it: on the files of tests/cli/test_init.py it takes the spaces in quoted names as the
delimiter of a file with commas, and a line of names as a row. pyarrow does not detect either.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from persia.batching.numerals import Numerals
from persia.cli.init.numerals import guess_numerals, guess_units, normalized_columns
from persia.data.csv_batches import csv_batches
from persia.data.files import File, expand
from persia.data.from_csv import CSV_SUFFIXES
from persia.data.json_columns import JsonDecoder
from persia.data.json_lines import JSONL_SUFFIXES, json_blocks
from persia.errors import DataError

__all__ = ["MAX_ROWS", "Sample", "read_column", "read_sample"]

MAX_ROWS = 100_000
MAX_COLUMNS = 1_000
MIN_ROWS = 20
_HEAD_BYTES = 1 << 20
_BLOCK_BYTES = 4 << 20
_DELIMITERS = (",", "\t", ";", "|", "\x01", " ")
_PARQUET_SUFFIXES = (".parquet", ".pq")
_DELIMITED = "Give a CSV file with a line for each sample, JSON lines, or a Parquet file"
_MAGIC = {
    b"PAR1": "is a Parquet file; give it the suffix .parquet",
    b"PK\x03\x04": "is an archive, or a spreadsheet; save the sheet as CSV, or unpack it",
    b"\x1f\x8b": "is compressed; give it the suffix .gz, as in data.csv.gz",
    b"\xff\xfe": "is text in UTF-16, not UTF-8; convert it: iconv -f utf-16 -t utf-8 IN > OUT",
    b"\xfe\xff": "is text in UTF-16, not UTF-8; convert it: iconv -f utf-16 -t utf-8 IN > OUT",
    b"{": "looks like JSON; if it has an object in each line, give it the suffix .jsonl",
    b"[": "looks like JSON; convert it, for example with pandas.read_json(path).to_parquet(...)",
    b"<": "looks like HTML or XML; save the table as CSV",
}


class Sample(NamedTuple):
    """The first rows of a data set.

    Attributes:
        path: file, directory, glob or URL, as given.
        kind: the reader of `persia.data`.
        files: files of the data set.
        columns: pyarrow array `[rows]` by column; of delimited text, each field as a text, or null if empty.
        rows: number of rows.
        complete: whether these are all rows of the data set.
        delimiter: separator of fields; empty for other formats.
        header: whether the first line has the names of the columns.
        numerals: writing of numbers in texts; `columns` has them as Python writes them.
        units: units of amounts in texts, by column; `columns` has the numbers without them.
    """

    path: str
    kind: Literal["csv", "parquet", "jsonl"]
    files: tuple[File, ...]
    columns: dict[str, Any]
    rows: int
    complete: bool
    delimiter: str = ""
    header: bool = True
    numerals: Numerals = Numerals()
    units: Mapping[str, str] = MappingProxyType({})


def read_sample(path: str) -> Sample:
    """Reads at most the first 100,000 rows.

    Raises:
        DataError: there are no such files, they are neither Parquet, JSON lines nor delimited text in UTF-8, lines
            differ in their number of fields, or there are too few rows or too many columns.
    """
    files = tuple(expand(path, (*_PARQUET_SUFFIXES, *JSONL_SUFFIXES, *CSV_SUFFIXES)))
    read = _reader(files[0])
    if any(_reader(file) is not read for file in files):
        raise DataError(
            f"{path} has files of several formats; give files of one format, such as {path}/*.parquet.", path=path
        )
    sample = _with_plain_numbers(read(path, files))
    if sample.rows < MIN_ROWS:
        raise DataError(
            f"{files[0].path} has {sample.rows} rows; give a file with at least {MIN_ROWS}, better some thousands.",
            path=path,
        )
    return sample


def _reader(file: File) -> Callable[[str, tuple[File, ...]], Sample]:
    """Returns the function for files of a format."""
    if file.path.endswith(_PARQUET_SUFFIXES):
        return _parquet_sample
    return _jsonl_sample if file.path.endswith(JSONL_SUFFIXES) else _text_sample


def read_column(sample: Sample, column: str) -> Any:
    """Reads one column of all files, as a chunked pyarrow array."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    chunks: list[Any] = []
    for file in sample.files:
        if sample.kind == "jsonl":
            chunks += [table.select([column]) for table in _json_tables(file, [column])]
            continue
        with file.open() as stream:
            if sample.kind == "parquet":
                chunks += pq.ParquetFile(stream).read([column]).column(column).chunks
            else:
                chunks += [b.column(0) for b in _open_text(file, stream, list(sample.columns), sample, [column])]
    return _joined(chunks).column(column) if sample.kind == "jsonl" else pa.chunked_array(chunks)


def _with_plain_numbers(sample: Sample) -> Sample:
    """Detects how numbers are written in texts, and returns them as Python writes them."""
    texts = {name: text for name, column in sample.columns.items() if (text := _texts(column)) is not None}
    units = guess_units(texts)
    numerals = guess_numerals(texts, units)
    if numerals.plain and not units:
        return sample
    read = normalized_columns(texts, numerals, units)
    units = {name: unit for name, unit in units.items() if read[name] is not texts[name]}
    return sample._replace(columns=sample.columns | read, numerals=numerals, units=units)


def _texts(column: Any) -> Any:
    """Returns a column of texts of any type as plain ones; None for other columns."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_large_string(column.type) or str(column.type) == "string_view":
        column = column.cast(pa.string())
    return column if pa.types.is_string(column.type) else None


def _parquet_sample(path: str, files: tuple[File, ...]) -> Sample:
    import pyarrow as pa
    import pyarrow.parquet as pq

    batches: list[Any] = []
    rows, complete = 0, True
    schema = None
    for file in files:
        with file.open() as stream:
            table = pq.ParquetFile(stream)
            if schema is None:
                schema = table.schema_arrow
                _check_names(file.path, schema.names)
            complete = complete and table.schema_arrow.equals(schema) and rows + table.metadata.num_rows <= MAX_ROWS
            if not complete and batches:
                break
            for batch in table.iter_batches(1 << 16):
                batches.append(batch.slice(0, MAX_ROWS - rows))
                rows += len(batches[-1])
                if rows == MAX_ROWS:
                    break
    read = pa.Table.from_batches(batches, schema)
    return Sample(path, "parquet", files, _columns(read), rows, complete)


def _text_sample(path: str, files: tuple[File, ...]) -> Sample:
    import pyarrow as pa

    file = files[0]
    head, whole = _head(file)
    lines = [line for line in head.splitlines() if line]
    lines = lines if whole or len(lines) == 1 else lines[:-1]
    if not lines:
        raise DataError(f"{file.path} is empty; correct the path.", path=path)
    delimiter = _delimiter(file.path, lines)
    first, *rest = _fields(lines, delimiter)
    header = _has_header(first, rest)
    if header:
        _check_names(file.path, first)
        names = first
    else:
        names = [f"column_{number}" for number in range(1, len(first) + 1)]
        _check_names(file.path, names)
    if header and not rest:
        raise DataError(f"{file.path} has only one line; give a file with samples.", path=path)
    opened = Sample(path, "csv", files, {}, 0, False, delimiter, header)
    batches: list[Any] = []
    rows = 0
    complete = True
    for file in files:
        if not complete:
            break
        with file.open() as stream:
            for batch in _open_text(file, stream, names, opened, names):
                complete = len(batch) <= MAX_ROWS - rows
                batches.append(batch.slice(0, MAX_ROWS - rows))
                rows += len(batches[-1])
                if not complete:
                    break
    table = pa.Table.from_batches(batches) if batches else pa.table({name: pa.array([], pa.string()) for name in names})
    return opened._replace(columns=_columns(table), rows=rows, complete=complete)


def _jsonl_sample(path: str, files: tuple[File, ...]) -> Sample:
    import pyarrow as pa

    tables: list[Any] = []
    rows, complete = 0, True
    for table in (table for file in files for table in _json_tables(file, None)):
        complete = table.num_rows <= MAX_ROWS - rows
        tables.append(table.slice(0, MAX_ROWS - rows))
        rows += tables[-1].num_rows
        if not complete:
            break
    read = _joined(tables) if tables else pa.table({})
    _check_names(path, read.column_names)
    return Sample(path, "jsonl", files, _columns(read), rows, complete)


def _json_tables(file: File, columns: list[str] | None) -> Iterator[Any]:
    """Yields the rows of a file of JSON lines."""
    decoder = JsonDecoder(file, {})
    for block in json_blocks(file):
        yield decoder.table(block, columns)


def _joined(tables: list[Any]) -> Any:
    """Joins tables whose columns may have several types, or be missing in some."""
    import pyarrow as pa

    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowTypeError:  # Numbers and texts.
        kinds: dict[str, set[Any]] = {}
        for field in (field for table in tables for field in table.schema):
            kinds.setdefault(field.name, set()).add(field.type)
        mixed = {name for name, types in kinds.items() if any(map(pa.types.is_string, types))}
        return pa.concat_tables([_as_texts(table, mixed) for table in tables], promote_options="permissive")


def _as_texts(table: Any, names: set[str]) -> Any:
    import pyarrow as pa

    for number, field in enumerate(table.schema):
        if field.name in names and not pa.types.is_nested(field.type):
            table = table.set_column(number, field.name, table.column(number).cast(pa.string()))
    return table


def _columns(table: Any) -> dict[str, Any]:
    import pyarrow as pa

    arrays = (column.combine_chunks() for column in table.columns)
    flat = (pa.concat_arrays(a.chunks) if isinstance(a, pa.ChunkedArray) else a for a in arrays)
    return dict(zip(table.column_names, flat, strict=True))


def _head(file: File) -> tuple[str, bool]:
    """Returns the beginning of a text file, and whether it is the whole file.

    Raises:
        DataError: it is not text in UTF-8.
    """
    import pyarrow as pa

    with file.open() as stream:
        plain = pa.CompressedInputStream(stream, file.compression) if file.compression else stream
        data: bytes = plain.read(_HEAD_BYTES)
        whole = len(data) < _HEAD_BYTES
    for magic, problem in _MAGIC.items():
        if data.lstrip().startswith(magic):
            raise DataError(f"{file.path} {problem}.", path=file.path)
    if b"\0" in data:
        raise DataError(f"{file.path} is not text: it has zero bytes. {_DELIMITED}.", path=file.path)
    try:
        return data.decode("utf-8-sig"), whole
    except UnicodeDecodeError as error:
        if not whole and error.start > len(data) - 4:  # The last character is cut off.
            return data[: error.start].decode("utf-8-sig"), whole
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{file.path} is not UTF-8 text: line {line} has the byte 0x{data[error.start]:02x}. Convert it: "
            "iconv -f latin1 -t utf-8 IN > OUT.",
            path=file.path,
        ) from error


def _fields(lines: list[str], delimiter: str) -> list[list[str]]:
    return [row for row in csv.reader(io.StringIO("\n".join(lines)), delimiter=delimiter) if row]


def _delimiter(path: str, lines: list[str]) -> str:
    """Returns the delimiter that splits most lines into the same number of fields, two or more.

    Raises:
        DataError: no delimiter does.
    """
    best, score = "", (0.0, 0)
    for delimiter in _DELIMITERS:
        try:
            widths = Counter(len(row) for row in _fields(lines[:200], delimiter))
        except csv.Error:
            continue
        width, count = max(widths.items(), key=lambda item: (item[1], item[0]))
        share = count / widths.total()
        if width > 1 and (share, width) > score and share >= 0.5:
            best, score = delimiter, (share, width)
    if not best:
        shown = lines[0] if len(lines[0]) <= 80 else lines[0][:80] + "..."
        raise DataError(
            f"{path} has no columns that a comma, tab, semicolon, bar or space divides; it begins with {shown!r}. "
            f"{_DELIMITED}.",
            path=path,
        )
    return best


def _has_header(first: list[str], rest: list[list[str]]) -> bool:
    """Whether the first line has names: words above numbers, or words that their columns do not have."""
    body = [row for row in rest if len(row) == len(first)]
    if not body:
        return not any(map(_is_number, first))
    columns = list(zip(*body, strict=True))
    numeric = [i for i, column in enumerate(columns) if _mostly_numbers(column)]
    if numeric:
        named = sum(not _is_number(first[i]) and bool(first[i].strip()) for i in numeric)
        return 2 * named > len(numeric) or (named > 0 and not any(map(_is_number, first)))
    return all(name.strip() and name not in columns[i] for i, name in enumerate(first)) and len(set(first)) == len(
        first
    )


def _mostly_numbers(column: tuple[str, ...]) -> bool:
    filled = [text for text in column if text.strip()]
    return bool(filled) and sum(map(_is_number, filled)) >= 0.9 * len(filled)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _check_names(path: str, names: list[str]) -> None:
    """Raises DataError if there are duplicate names, or too many."""
    duplicates = sorted(name for name, count in Counter(names).items() if count > 1)
    if duplicates:
        raise DataError(
            f"{path} has {names.count(duplicates[0])} columns named {duplicates[0]!r}; rename or remove all but one.",
            path=path,
        )
    if len(names) > MAX_COLUMNS:
        raise DataError(
            f"{path} has {len(names):,} columns, more than the {MAX_COLUMNS:,} that `persia init` takes. Write a file "
            "with those that matter, put sparse ones into one column of lists, or write the configuration yourself.",
            path=path,
        )


def _open_text(file: File, stream: Any, names: list[str], sample: Sample, include: list[str]) -> Any:
    """Yields record batches of texts.

    Raises:
        DataError: a line has another number of fields, or is not UTF-8.
    """
    import pyarrow as pa

    ragged: list[Any] = []

    def refuse(line: Any) -> str:
        ragged.append(line)
        return "error"

    convert = {
        "column_types": dict.fromkeys(include, pa.string()),
        "include_columns": include,
        "null_values": [""],
        "strings_can_be_null": True,
    }
    try:
        yield from csv_batches(
            stream,
            file.compression,
            refuse,
            delimiter=sample.delimiter,
            names=names,
            skip_rows=1 if sample.header else 0,
            block_bytes=_BLOCK_BYTES,
            convert=convert,
        )
    except pa.ArrowInvalid as error:
        if ragged:
            line = ragged[0]
            shown = line.text if len(line.text) <= 80 else line.text[:80] + "..."
            raise DataError(
                f"{file.path}: line {line.number} has {line.actual_columns} fields instead of {line.expected_columns}: "
                f"{shown!r}. Quote fields that hold the separator {sample.delimiter!r}, close open quotes, or "
                "leave the line out.",
                path=file.path,
            ) from error
        raise DataError(
            f"{file.path} cannot be read as text separated by {sample.delimiter!r} ({error}). {_DELIMITED}.",
            path=file.path,
        ) from error
