"""CSV and other delimited text as batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from persia.batching.batch import Batch
from persia.data.files import File, Paths, expand
from persia.data.reader import Order, StreamReader
from persia.data.rows import Conversion, DayUnit, located
from persia.errors import DataError
from persia.schema import Schema

__all__ = ["CsvFormat", "CsvSource", "csv"]

_BLOCK_BYTES = 4 << 20


def csv(
    paths: Paths,
    schema: Schema,
    batch_size: int = 1024,
    *,
    column_names: Sequence[str] | None = None,
    delimiter: str = ",",
    hashed: Collection[str] | None = None,
    lists: Mapping[str, str] | None = None,
    rename: Mapping[str, str] | None = None,
    day: str | None = None,
    day_unit: DayUnit = "day",
    shuffle_rows: int = 0,
    seed: int = 0,
    drop_last: bool = False,
    shard: tuple[int, int] = (0, 1),
    require_labels: bool = True,
) -> StreamReader:
    """Reads delimited text in blocks of 4 MiB, plain or compressed (.gz, .bz2, .zst); empty fields are missing values.

    Args:
        paths: as for `parquet`; in directories `*.csv`, `*.tsv` and `*.txt`, also compressed.
        schema: what to take from the files.
        batch_size: samples of a batch.
        column_names: names of the columns; None reads them from the first line of each file.
        delimiter: one character.
        hashed: ID-type features (schema names) whose fields are categories to hash; all others must be whole
            numbers. None decides by the first block of the first file: whole numbers only, or categories.
        lists: for features with several ids in a field, the text between them, for example {"genres": "|"}.
        rename: column of the file by name of the schema, where they differ.
        day: column or hive key that gives `Batch.day`.
        day_unit: unit of whole numbers in `day`.
        shuffle_rows: see `parquet`.
        seed: of the permutations.
        drop_last: leave out a last batch that is not full.
        shard: (index, count): only batches i with i % count == index.
        require_labels: if False, files without the label columns give `labels` of shape `[batch, 0]`.

    Raises:
        DataError: no file; while iterating: a file is missing or corrupt, lacks a column, or holds bad values.
        MissingExtraError: the protocol of a URL needs a package that is not installed.
        ConfigError: an argument is not valid.
    """
    order = Order(batch_size, shuffle_rows, seed, drop_last, shard)
    conversion = Conversion(schema, dict(rename or {}), day, day_unit, require_labels)
    names = None if column_names is None else tuple(column_names)
    form = CsvFormat(delimiter, names, None if hashed is None else frozenset(hashed), dict(lists or {}))
    return StreamReader(schema, CsvSource(tuple(expand(paths, CSV_SUFFIXES)), conversion, form), order)


CSV_SUFFIXES = tuple(s + z for s in (".csv", ".tsv", ".txt") for z in ("", ".gz", ".bz2", ".zst"))


@dataclass(frozen=True)
class CsvFormat:
    """How the text is to be read.

    Attributes:
        delimiter: one character.
        column_names: None reads them from the first line.
        hashed: features to hash; None decides by looking.
        lists: separator within a field, by feature.
        types: arrow type of further columns by name, for `transform`.
        transform: from the file's columns to those that the conversion expects.
        comment: lines that start so are left out, where they have another number of fields.
    """

    delimiter: str = ","
    column_names: tuple[str, ...] | None = None
    hashed: frozenset[str] | None = None
    lists: Mapping[str, str] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    transform: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    comment: str | None = None

    def skip_row(self, row: Any) -> str:
        """Answers pyarrow's question what to do with a line of a wrong number of fields."""
        return "skip" if self.comment is not None and row.text.startswith(self.comment) else "error"


@dataclass(frozen=True)
class CsvSource:
    """Rows of delimited text files."""

    files: tuple[File, ...]
    conversion: Conversion
    format: CsvFormat = field(default_factory=CsvFormat)

    def chunks(self, skip: int) -> Iterator[Batch]:
        """See `Source.chunks`; rows to skip are parsed, but not converted."""
        types = self._types()
        for file in self.files:
            row = 0
            for piece in self._pieces(file, types):
                begin, skip = min(skip, len(piece)), max(skip - len(piece), 0)
                kept = piece.slice(begin)
                if len(kept):
                    with located(file, row + begin):
                        columns = self._columns(kept, types)
                    yield self.conversion.batch(file, row + begin, columns, len(kept))
                row += len(piece)

    def _types(self) -> dict[str, Any]:
        """Arrow type by column of the file; that of an ID-type feature is uint64 or string."""
        import pyarrow as pa

        schema, wanted, form = self.conversion.schema, self.conversion.wanted, self.format
        types = {wanted[name]: pa.float64() for name in (*schema.dense_features, *schema.labels)}
        ids = [f.name for f in schema.id_features if not f.cross]
        if form.hashed is not None:
            types |= {wanted[n]: pa.string() if n in form.hashed else pa.uint64() for n in ids}
        elif ids:
            text = {wanted[name]: pa.string() for name in ids}
            first = next(self._pieces(self.files[0], text), None)
            columns = {} if first is None else self._columns(first, text)
            types |= {wanted[n]: _id_type(columns.get(wanted[n])) for n in ids}
        return types | {name: pa.type_for_alias(alias) for name, alias in form.types.items()}

    def _pieces(self, file: File, types: Mapping[str, Any]) -> Iterator[Any]:
        """Record batches of the columns that are needed."""
        import pyarrow as pa
        import pyarrow.csv as pc

        form = self.format
        fields = {self.conversion.wanted[name] for name in form.lists}
        present = list(form.column_names or self._header(file))
        columns = [*form.types] if form.transform else self.conversion.columns_of(file, present)
        convert = pc.ConvertOptions(
            column_types={n: pa.string() if n in fields else types[n] for n in columns if n in types},
            include_columns=columns,
            null_values=[""],
            strings_can_be_null=True,
        )
        with file.open() as stream:
            try:
                yield from self._open(file, stream, convert)
            except pa.ArrowInvalid as error:
                if "onversion error to uint64" not in str(error):
                    raise
                raise DataError(
                    f"{file.path}: {error}; ids are whole numbers from 0 to 2**64 - 1: name the feature in `hashed` "
                    "if it holds categories.",
                    path=file.path,
                ) from error

    def _header(self, file: File) -> list[str]:
        with file.open() as stream:
            return list(self._open(file, stream, None).schema.names)

    def _open(self, file: File, stream: Any, convert: Any) -> Any:
        import pyarrow as pa
        import pyarrow.csv as pc

        form = self.format
        if file.compression:
            stream = pa.CompressedInputStream(stream, file.compression)
        read = pc.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES, column_names=form.column_names)
        parse = pc.ParseOptions(delimiter=form.delimiter, invalid_row_handler=form.skip_row)
        return pc.open_csv(stream, read_options=read, parse_options=parse, convert_options=convert)

    def _columns(self, piece: Any, types: Mapping[str, Any]) -> dict[str, Any]:
        import pyarrow as pa
        import pyarrow.compute as pc

        columns = dict(zip(piece.schema.names, piece.columns, strict=True))
        for name, separator in self.format.lists.items():
            column = self.conversion.wanted[name]
            parts = pc.split_pattern(columns[column], separator)
            columns[column] = parts.cast(pa.list_(types[column]))
        return self.format.transform(columns) if self.format.transform else columns


def _id_type(column: Any) -> Any:
    """uint64 if all texts of the column are whole numbers in its range, else string."""
    import pyarrow as pa

    if column is None or column.null_count == len(column):
        return pa.string()
    texts = column.flatten() if pa.types.is_list(column.type) else column
    try:
        texts.cast(pa.uint64())
    except pa.ArrowInvalid:
        return pa.string()
    return pa.uint64()
