"""The file that `persia predict` writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from numpy.typing import NDArray

from persia.checkpoint.exporting import replaced
from persia.errors import ConfigError, DataError

__all__ = ["check_keep", "check_output", "write_predictions"]

_WRITERS: dict[str, Any] = {".csv": pa.csv.CSVWriter, ".parquet": pa.parquet.ParquetWriter}


def check_output(path: str) -> None:
    """Raises ConfigError unless the name of a file has the ending of a known format."""
    if not path.endswith(tuple(_WRITERS)):
        raise ConfigError(
            f"--output {path} is of no known format; give a name that ends in .csv or .parquet.", field="output"
        )


def check_keep(columns: Sequence[str], predicted: Sequence[str]) -> None:
    """Raises ConfigError if two columns of a file of predictions would have the same name."""
    for number, name in enumerate(columns):
        if name in predicted:
            raise ConfigError(
                f"--keep {name!r} has the name of the predicted column; leave it out, and keep a column that "
                "identifies the row.",
                field="keep",
            )
        if name in columns[:number]:
            raise ConfigError(f"--keep names {name!r} twice.", field="keep")


def write_predictions(
    path: str,
    names: Sequence[str],
    batches: Iterator[NDArray[np.float32]],
    source_columns: Iterator[dict[str, Any]] | None = None,
) -> int:
    """Streams predictions to a CSV or Parquet file, which appears once it is complete; returns the number of samples.

    Args:
        path: path of the file.
        names: names of the columns with predictions.
        batches: predictions `[batch, names]`.
        source_columns: pyarrow arrays by column, which are written before the predictions of the same rows.

    Raises:
        DataError: a column to copy has values that the file cannot hold.
    """
    copied = _SourceColumns(path, source_columns if source_columns is not None else iter(()))
    schema = pa.schema([*copied.schema, *((name, pa.float32()) for name in names)])
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    rows = 0
    with replaced([path]) as (draft,), _WRITERS[Path(path).suffix](draft, schema) as writer:
        for predictions in batches:
            columns = [pa.array(np.ascontiguousarray(column)) for column in predictions.T]
            writer.write_table(pa.table([*copied.next_rows(len(predictions)), *columns], schema=schema))
            rows += len(predictions)
    return rows


class _SourceColumns:
    """Columns of the data, in chunks of the requested sizes, with the types of the first rows."""

    def __init__(self, path: str, pieces: Iterator[dict[str, Any]]) -> None:
        self._pieces = pieces
        first = next(pieces, {})
        self.schema = pa.schema([(name, _output_type(column.type)) for name, column in first.items()])
        for field in self.schema:
            if pa.types.is_nested(field.type) and path.endswith(".csv"):
                raise DataError(
                    f"Column {field.name!r} holds {field.type}, which a CSV file cannot hold; write a .parquet file.",
                    column=field.name,
                )
        self._buffer = self._table(first)

    def next_rows(self, count: int) -> list[Any]:
        """Returns the columns of the next rows."""
        if not self.schema.names:
            return []
        while len(self._buffer) < count:
            self._buffer = pa.concat_tables([self._buffer, self._table(next(self._pieces))])
        rows, self._buffer = self._buffer.slice(0, count), self._buffer.slice(count)
        return list(rows.columns)

    def _table(self, columns: dict[str, Any]) -> Any:
        arrays = []
        for field in self.schema:
            column = columns[field.name]
            try:
                arrays.append(column.cast(field.type))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise DataError(
                    f"Column {field.name!r} begins with {field.type}, and later has {column.type} ({error}); cast it, "
                    "or leave it out.",
                    column=field.name,
                ) from error
        return pa.table(arrays, schema=self.schema)


def _output_type(kind: Any) -> Any:
    """Returns the type in which a column is written: texts of CSV files are read as bytes."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.string() if pa.types.is_binary(kind) or pa.types.is_null(kind) else kind
