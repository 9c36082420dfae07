"""Reads Arrow data: frames, tables, data sets of other libraries, and streams of record batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Unpack
from weakref import WeakSet

import msgspec

from persia.batching.batch import Batch
from persia.data.files import File
from persia.data.fingerprints import fingerprint_of_files, fingerprint_of_frame, selecting_options
from persia.data.reader import StreamReader
from persia.data.row_options import ReaderOptions, conversion_of, order_of, with_options
from persia.data.rows import Conversion, Piece, require_rows
from persia.errors import DataError, PersiaError
from persia.schema import InputRules, Schema
from persia.services import fingerprint_of
from persia.types import SourceFingerprint, SourcePart

__all__ = ["ArrowSource", "arrow", "check_source"]

_CHUNK_ROWS = 65_536


@with_options(ReaderOptions)
def arrow(
    source: Any,
    schema: Schema,
    batch_size: int = 1024,
    **options: Unpack[ReaderOptions],
) -> StreamReader:
    """Reads a frame, or a data set of another library, in pieces of at most 65,536 rows.

    The source has to give the same rows in the same order each time. A resumed run reads it from the beginning, and
    converts only what it has not trained.

    Args:
        source: one of
            - a pandas or polars DataFrame, a pyarrow Table or RecordBatch, or any object with `__arrow_c_stream__`;
            - a `pyarrow.dataset.Dataset`, and so a Lance data set: only the columns that are needed are read. Each file
              of Parquet, Arrow or ORC is read in its own types, unless the data set's schema has another type than its
              first file;
            - a Hugging Face `datasets.Dataset` or `IterableDataset`;
            - a Ray Data `Dataset`, with `execution_options.preserve_order` of its context set;
            - a function without arguments that returns one of these, or a RecordBatchReader, which can be read only
              once: `lambda: table.scan().to_arrow_batch_reader()` for Iceberg, `lambda: con.cursor().sql(...)` for
              DuckDB. Each call has to open a new reader. On a cluster the function has to be picklable.
        schema: columns to read.
        batch_size: samples per batch.
        **options: see `RowOptions` and `ColumnOptions`.

    Raises:
        DataError: the source is of another kind, or can be read only once; while iterating: it cannot be read, lacks a
            column or has invalid values, or there are no rows at all.
        ConfigError: an argument is invalid.
    """
    check_source(source)
    conversion = conversion_of(schema, **options)
    return StreamReader(schema, ArrowSource(source, conversion), order_of(batch_size, **options))


def check_source(source: Any) -> None:
    """Raises DataError unless a source is of a known kind, and can be read repeatedly."""
    if any(cls.__name__ == "RecordBatchReader" for cls in type(source).__mro__):
        raise DataError(
            "A RecordBatchReader can be read only once; give a function that opens a new one: "
            "persia.data.arrow(lambda: table.scan().to_arrow_batch_reader(), ...) for a table of Iceberg, "
            "persia.data.arrow(lambda: con.cursor().sql(...), ...) for a query of DuckDB."
        )
    _opener(source)


@dataclass(frozen=True)
class ArrowSource:
    """Rows of a source of Arrow data."""

    source: Any
    conversion: Conversion
    _opened: WeakSet[Any] = field(default_factory=WeakSet, init=False, repr=False, compare=False)
    """RecordBatchReaders that the function has returned. Each can be read only once."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles without the readers that are open."""
        return ArrowSource, (self.source, self.conversion)

    def fingerprint(self) -> SourceFingerprint | None:
        """Returns content, files or version of the source, and the selection; None if they cannot be determined."""
        base = fingerprint_of(self.source) or _fingerprint(self.source)
        if base is None:
            return None
        selection = self.conversion.selection
        numbered = selection is not None and selection.numbered
        return msgspec.structs.replace(base, rows=base.rows | selecting_options(selection), numbered=numbered)

    @property
    def input_rules(self) -> InputRules:
        """See `Conversion.input_rules`."""
        return self.conversion.input_rules

    def chunks(self, skip: int) -> Iterator[Batch]:
        """See `RowSource.chunks`."""
        file = self._file
        selection = self.conversion.selection
        return require_rows(self.conversion.batches(self._pieces(file), skip), (file,), skip, selection)

    def columns(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """See `ColumnSource.columns`."""
        source = ArrowSource(self.source, replace(self.conversion, passthrough=tuple(names)))
        return source.conversion.passthrough_columns(source._pieces(source._file))

    def inputs(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """See `InputSource.inputs`."""
        source = ArrowSource(self.source, replace(self.conversion, only=frozenset(names)))
        return source.conversion.inputs(source._pieces(source._file))

    def with_schema(self, schema: Schema) -> ArrowSource:
        """See `InputSource.with_schema`."""
        return ArrowSource(self.source, replace(self.conversion, schema=schema))

    @property
    def name(self) -> str:
        """The kind of the source, for error messages."""
        return self._file.path

    def pieces(self) -> Iterator[Piece]:
        """Yields the needed columns of all rows."""
        return self._pieces(self._file)

    @property
    def _file(self) -> File:
        return File(f"{_root(self.source)}.{type(self.source).__name__}")

    def _pieces(self, file: File) -> Iterator[Piece]:
        row, rows = 0, 0
        parts = self._parts(file)
        while True:
            try:
                part = next(parts, None)
            except (PersiaError, MemoryError):
                raise
            except Exception as error:  # Each library raises its own errors.
                raise DataError(
                    f"{file.path} cannot be read as Arrow data from row {row} on ({type(error).__name__}: {error}); "
                    "correct it, or cast columns that have values of several kinds.",
                    path=file.path,
                ) from error
            if part is None:
                if not rows:  # Also for a stream that was read before, wherever this pass begins.
                    raise DataError(
                        f"{file.path} is empty: there are no rows; give another source, or if it can be read only "
                        "once, a function that opens a new one.",
                        path=file.path,
                    )
                return
            if part.file != file:
                file, row = part.file, 0
            columns = self.conversion.columns_of(file, part.batch.schema.names)
            yield Piece(file, row, {name: part.batch.column(name) for name in columns}, part.batch.num_rows)
            row += part.batch.num_rows
            rows += part.batch.num_rows

    def _parts(self, file: File) -> Iterator[_Part]:
        import pyarrow as pa

        source = self.source() if _opener(self.source) == "function" else self.source
        if isinstance(source, pa.RecordBatchReader):
            if source in self._opened:
                raise DataError(
                    "The function returned a RecordBatchReader that it had returned before, which can be read only "
                    "once; open a new one in each call."
                )
            self._opened.add(source)
        columns = None
        if _opener(source) == "dataset":
            columns = self.conversion.columns_of(file, source.schema.names)
            if _root(source) == "pyarrow":
                yield from _fragments(source, columns, file)
                return
        for part in _tables(source, columns):
            table = pa.Table.from_batches([part]) if isinstance(part, pa.RecordBatch) else part
            for batch in table.to_batches(max_chunksize=_CHUNK_ROWS):
                yield _Part(file, batch)


class _Part(NamedTuple):
    """Consecutive rows as a record batch, and the file or object that they come from."""

    file: File
    batch: Any


_OWN_TYPES = ("parquet", "ipc", "feather", "orc")
"""Formats whose files have types. Text is converted to the types of the data set's schema."""


def _fragments(source: Any, columns: list[str], whole: File) -> Iterator[_Part]:
    """Yields the rows of a data set of pyarrow, each file in its own types.

    pyarrow itself casts later files to the schema of the first file: if that has texts, the number 978867001940.0
    becomes "9.78867001940e+11", and NaN becomes a text.
    """
    import pyarrow as pa

    row_filter = source._scanner_options({}).get("filter")  # `get_fragments` refuses filtered data sets.
    declared: set[str] | None = None
    for fragment in source._get_fragments(row_filter):
        schema = source.schema
        if getattr(getattr(fragment, "format", None), "default_extname", "parquet") in _OWN_TYPES:
            own = fragment.physical_schema
            if declared is None:
                shared = set(own.names) & set(schema.names)
                declared = {name for name in shared if own.field(name).type != schema.field(name).type}
            exact = set(own.names) - declared
            # Keys of paths, and columns that this file lacks, are only in the schema of the data set.
            schema = pa.schema([own.field(f.name) if f.name in exact else f for f in schema])
        file = File(fragment.path) if getattr(fragment, "path", None) else whole
        for batch in fragment.to_batches(schema=schema, columns=columns, filter=row_filter, batch_size=_CHUNK_ROWS):
            yield _Part(file, batch)


def _fingerprint(source: Any) -> SourceFingerprint | None:
    """Returns the fingerprint of a source that is not a function; None if its content cannot be determined."""
    name = f"{_root(source)}.{type(source).__name__}"
    match _opener(source):
        case "batch" | "stream":
            return fingerprint_of_frame(name, source)
        case "datasets" if isinstance(text := getattr(source, "_fingerprint", None), str):
            return SourceFingerprint(name, (SourcePart(text),))
        case "dataset" if hasattr(source, "version") and hasattr(source, "uri"):  # Lance
            return SourceFingerprint(name, (SourcePart(f"{source.uri}, version {source.version}"),))
        case "dataset" if files := getattr(source, "files", None):
            of_files = fingerprint_of_files(name, [File(path) for path in files], None).merged(name)
            return msgspec.structs.replace(of_files, rows={"filter": str(getattr(source, "_scan_options", ""))})
    return None


def _opener(source: Any) -> str:
    """Returns how to read a source."""
    root = _root(source)
    if root == "ray" and hasattr(source, "iter_batches"):
        return "ray"
    if root == "datasets" and hasattr(source, "iter"):
        return "datasets"
    if hasattr(source, "to_batches") and hasattr(source, "get_fragments"):
        return "dataset"
    if type(source).__name__ == "RecordBatch" and root == "pyarrow":
        return "batch"
    if hasattr(source, "__arrow_c_stream__"):
        return "stream"
    if callable(source):
        return "function"
    raise DataError(
        f"Data are given as {type(source).__name__}; give a pandas or polars DataFrame, a pyarrow table or data set, a "
        "data set of Hugging Face, Ray or Lance, or a function that returns one."
    )


def _tables(source: Any, columns: list[str] | None) -> Iterator[Any]:
    """Yields tables or record batches."""
    import pyarrow as pa

    match _opener(source):
        case "ray":
            yield from source.iter_batches(batch_size=_CHUNK_ROWS, batch_format="pyarrow")
        case "datasets":
            yield from source.with_format("arrow").iter(batch_size=_CHUNK_ROWS)
        case "dataset":
            yield from source.to_batches(columns=columns, batch_size=_CHUNK_ROWS)
        case "batch":
            yield source
        case "stream":
            yield from pa.RecordBatchReader.from_stream(source)
        case _:
            raise DataError("The function returned another function; return a frame, a table or a data set.")


def _root(source: Any) -> str:
    return type(source).__module__.split(".")[0]
