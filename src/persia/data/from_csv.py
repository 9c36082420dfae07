"""Reads CSV and other delimited text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from csv import Error as CsvError
from csv import reader
from dataclasses import dataclass, field, replace
from typing import IO, Any, ClassVar, Unpack

from persia.batching.batch import Batch
from persia.data.csv_batches import csv_batches
from persia.data.file_source import FileSource
from persia.data.files import File, Paths, expand
from persia.data.reader import StreamReader
from persia.data.row_options import ReaderOptions, conversion_of, order_of, with_options
from persia.data.rows import COUNTED, Conversion, Piece, present_columns
from persia.errors import ConfigError, DataError
from persia.schema import InputRules, Schema

__all__ = ["CSV_SUFFIXES", "CsvFormat", "CsvSource", "csv"]

_BLOCK_BYTES = 4 << 20
_ENCODING = "convert the file, or give it the suffix of its compression (.gz, .bz2, .zst)."
_DELIMITERS = (",", ";", "\t", "|", " ", ":", "\x01")

CSV_SUFFIXES = tuple(s + z for s in (".csv", ".tsv", ".txt") for z in ("", ".gz", ".bz2", ".zst"))


@with_options(ReaderOptions)
def csv(
    paths: Paths,
    schema: Schema,
    batch_size: int = 1024,
    *,
    column_names: Sequence[str] | None = None,
    delimiter: str = ",",
    lists: Mapping[str, str] | None = None,
    **options: Unpack[ReaderOptions],
) -> StreamReader:
    """Reads delimited text in blocks of 4 MiB, plain or compressed (.gz, .bz2, .zst).

    Each field is converted on its own; types are not inferred from the column. `IdFeature.kind` determines how it
    becomes an id. Dense features and labels accept decimal numbers, `true` and `false`. Empty fields are missing
    values; in dense features, labels and ids of the kind "number", so are NA, NULL, NaN and others (see
    `persia.batching.text_numbers`).

    Args:
        paths: as for `parquet`; in directories, files `*.csv`, `*.tsv` and `*.txt`, optionally compressed.
        schema: columns to read.
        batch_size: samples per batch.
        column_names: names of the columns; None reads them from the first line of each file.
        delimiter: one character.
        lists: separator of the ids within a field, by feature, for example {"genres": "|"}.
        **options: see `RowOptions` and `ColumnOptions`. Functions in `labels` get texts.

    Raises:
        DataError: no file; while iterating: a file is missing or corrupt, lacks a column or has invalid values, or
            there are no rows at all.
        MissingExtraError: the protocol of a URL needs a package that is not installed.
        ConfigError: an argument is invalid.
    """
    order = order_of(batch_size, **options)
    conversion = conversion_of(schema, InputRules(lists=dict(lists or {})), **options)
    if isinstance(column_names, str):
        raise ConfigError(f"column_names = {column_names!r} is one text; give a list of texts.", field="column_names")
    for feature in lists or {}:
        if feature not in [f.name for f in schema.id_features] or feature not in conversion.source_columns:
            raise ConfigError(
                f"Invalid key {feature!r} in lists; expected an ID-type feature that is not computed.", field="lists"
            )
    names = None if column_names is None else tuple(column_names)
    source = CsvSource(tuple(expand(paths, CSV_SUFFIXES)), conversion, CsvFormat(delimiter, names))
    return StreamReader(schema, source, order)


@dataclass(frozen=True)
class CsvFormat:
    """Format of delimited text.

    Attributes:
        delimiter: one character.
        column_names: names of the columns; None reads them from the first line.
        columns: columns that `transform` reads, if they differ from those of the schema.
        transform: converts the file's columns to those that the conversion expects.
        labels: columns among `columns` from which `transform` makes the labels, if the names differ.
        layouts: names of the columns in formats of fixed order, tried if the first line has no column names.
        comment: prefix of comment lines, which are skipped if they have another number of fields.
        aliases: name of a column by its other name in the first line of some files.
    """

    delimiter: str = ","
    column_names: tuple[str, ...] | None = None
    columns: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    transform: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    layouts: tuple[tuple[str, ...], ...] = ()
    comment: str | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.delimiter, str) or len(self.delimiter.encode()) != 1:
            raise ConfigError(f"delimiter = {self.delimiter!r} is not one ASCII character.", field="delimiter")
        names = self.column_names or ()
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"column_names has {name!r} twice; rename one.", field="column_names")


@dataclass(frozen=True)
class CsvSource(FileSource):
    """Rows of delimited text files.

    Attributes:
        format: format of the files.
    """

    kind: ClassVar = "csv"

    format: CsvFormat = field(default_factory=CsvFormat)

    def chunks(self, skip: int) -> Iterator[Batch]:
        """See `RowSource.chunks`. Skipped rows are parsed but not converted."""
        pieces = (
            piece._replace(counted=place in self.counted)
            for place, file in enumerate(self.files)
            for piece in self.pieces(file)
        )
        return self.checked(self._parsed.batches(pieces, skip, self.format.transform), skip)

    def inputs(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """See `InputSource.inputs`."""
        source = self.reading(names)
        pieces = (piece for file in self.files for piece in source.pieces(file))
        return source._parsed.inputs(pieces, self.format.transform)

    def columns(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """See `ColumnSource.columns`. Values are bytes."""
        conversion = replace(self.conversion, passthrough=tuple(names))
        source = replace(self, conversion=conversion)
        return source._parsed.passthrough_columns(piece for file in self.files for piece in source.pieces(file))

    @property
    def _parsed(self) -> Conversion:
        """The conversion of columns in which Arrow has found the missing values."""
        return replace(self.conversion, texts=replace(self.conversion.texts, null_values=()))

    def pieces(self, file: File) -> Iterator[Piece]:
        """Reads the needed columns unconverted: each field is a text, or null if empty."""
        import pyarrow as pa

        first, more = self._first_line(file)
        if first is None:
            return
        names, header = self._names(file, first)
        columns = self._columns(file, names)
        if header and not more:
            return
        written = dict(zip(names, first, strict=True)) if header else dict(zip(names, names, strict=True))
        included = [written[name] for name in columns]
        convert = {
            # Bytes, not text: they are interpreted later, and UTF-8 need not be checked twice.
            "column_types": dict.fromkeys(included, pa.binary()),
            "include_columns": included,
            "null_values": ["", *self.conversion.texts.null_values],
            "strings_can_be_null": True,
        }
        row = 0
        with file.open() as stream:
            invalid: list[Any] = []
            try:
                for piece in self._open(file, stream, convert, None if header else names, invalid):
                    read = dict(zip(columns, piece.columns, strict=True))
                    yield Piece(file, row, read, len(piece))
                    row += len(piece)
            except pa.ArrowInvalid as error:
                if "straddling" in str(error):
                    raise DataError(
                        f"{file.path}: the line at row {row} or one soon after it is longer than "
                        f"{_BLOCK_BYTES >> 20} MiB. Close a quote that is left open, shorten the line, or convert the "
                        f"file to Parquet.{COUNTED}",
                        path=file.path,
                        row=row,
                    ) from error
                if not invalid:
                    raise
                line, number = invalid[0]
                raise self._ragged(file, line, number - header, len(names)) from error

    def _names(self, file: File, first: list[str]) -> tuple[list[str], bool]:
        """Returns the names of the columns, and whether the first line holds them."""
        form = self.format
        if form.column_names is not None:
            if first == list(form.column_names):
                raise DataError(
                    f"{file.path}: the first line has the names of the columns; leave column_names out.",
                    path=file.path,
                    row=0,
                )
            return list(form.column_names), False
        named = [form.aliases.get(name, name) for name in first]
        if not form.layouts or any(name.strip() and name in layout for layout in form.layouts for name in named):
            return named, True
        for layout in form.layouts:
            if len(layout) == len(first):
                return list(layout), False
        expected = " or ".join(str(len(layout)) for layout in form.layouts)
        raise DataError(
            f"{file.path}: the first line has {len(first)} fields, the format {expected}, separated by "
            f"{form.delimiter!r}; give files of this format, or use persia.data.csv.",
            path=file.path,
        )

    def _first_line(self, file: File) -> tuple[list[str] | None, bool]:
        """Returns the fields of the first data line or None, and whether another line follows."""
        comment = self.format.comment
        with file.open_text() as stream:
            parts = iter(lambda: stream.readline(_BLOCK_BYTES), "")  # Bounded, as the file may not be text.
            full = (line for line in parts if line.strip("\r\n"))
            lines = (line for line in full if comment is None or not line.startswith(comment))
            try:
                fields = next(reader(lines, delimiter=self.format.delimiter), None)
            except CsvError as error:
                raise DataError(
                    f"{file.path}: the first line is not one of column names ({error}); close open quotes, set the "
                    "delimiter, or give column_names.",
                    path=file.path,
                    row=0,
                ) from error
            return fields, fields is not None and next(lines, None) is not None

    def _columns(self, file: File, present: list[str]) -> list[str]:
        """Returns the columns to read.

        Raises:
            DataError: a column is missing or occurs twice.
        """
        form, conversion = self.format, self.conversion
        if "\0" in "".join(present):  # UTF-16, Parquet, an archive, ...
            raise DataError(f"{file.path}: the first line is not UTF-8 text; {_ENCODING}", path=file.path, row=0)
        if not form.columns:
            hint = self._hint(present, list(conversion.source_columns.values())) or " Correct the schema, or rename."
            return conversion.columns_of(file, present, hint)
        selected = conversion.selection.columns if conversion.selection is not None else ()
        needed = [(name, name) for name in (*form.columns, *conversion.passthrough)]
        needed += [("where or split", name) for name in selected]
        labels = (*form.labels, *conversion.schema.label_names)
        hint = self._hint(present, list(form.columns)) or " Give a file of this format."
        return present_columns(file, present, needed, labels, conversion.require_labels, hint)

    def _hint(self, present: list[str], needed: list[str]) -> str:
        """Returns the remedy for a first line that lacks a column; empty if unknown."""
        line = self.format.delimiter.join(present)
        if "\ufffd" in line:
            return f" The first line is not UTF-8 text: {_ENCODING}"
        if any(name in needed for name in present) or self.format.column_names is not None:
            return ""
        other = next((d for d in _DELIMITERS if any(name.strip() in needed for name in line.split(d))), None)
        if other is not None and other != self.format.delimiter:
            return f" The first line looks as if fields were separated by {other!r}: set delimiter={other!r}."
        return " If the file has no line of column names, give column_names."

    def _ragged(self, file: File, line: Any, row: int, columns: int) -> DataError:
        text = line.text if len(line.text) <= 80 else line.text[:80] + "..."
        others = (d for d in _DELIMITERS if line.actual_columns == 1 and line.text.count(d) == columns - 1)
        other = next(others, None)
        looks = f" Its fields look separated by {other!r}: set delimiter={other!r}." if other is not None else ""
        return DataError(
            f"{file.path}: the line {text!r} at row {row} has {line.actual_columns} fields instead of {columns}. Quote "
            "fields that hold the delimiter, close open quotes, restore the file if it is cut off here, or leave the "
            f"line out.{looks}{COUNTED}",
            path=file.path,
            row=row,
            value=line.text,
        )

    def _open(
        self, file: File, stream: IO[bytes], convert: Mapping[str, Any], names: list[str] | None, invalid: list[Any]
    ) -> Iterator[Any]:
        """Opens a stream of record batches; appends lines with a wrong number of fields to `invalid`."""
        comment = self.format.comment
        comments = 0

        def refuse(line: Any) -> str:
            nonlocal comments
            if comment is not None and line.text.startswith(comment):
                comments += 1
                return "skip"
            invalid.append((line, line.number - 1 - comments))
            return "error"

        return csv_batches(
            stream,
            file.compression,
            refuse,
            delimiter=self.format.delimiter,
            names=names,
            block_bytes=_BLOCK_BYTES,
            convert=convert,
        )
