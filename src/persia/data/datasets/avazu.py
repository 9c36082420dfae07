"""Reads Avazu click logs."""

from __future__ import annotations

from datetime import date
from typing import Any, Unpack

import numpy as np

from persia.batching.numbers import number_column
from persia.data.files import Paths, expand
from persia.data.from_csv import CSV_SUFFIXES, CsvFormat, CsvSource
from persia.data.reader import StreamReader
from persia.data.row_options import RowOptions, conversion_of, order_of, with_options
from persia.errors import DataError
from persia.schema import IdFeature, Schema

__all__ = ["avazu"]

_AVAZU = [
    "C1",
    "banner_pos",
    "site_id",
    "site_domain",
    "site_category",
    "app_id",
    "app_domain",
    "app_category",
    "device_id",
    "device_ip",
    "device_model",
    "device_type",
    "device_conn_type",
    "C14",
    "C15",
    "C16",
    "C17",
    "C18",
    "C19",
    "C20",
    "C21",
]


@with_options(RowOptions)
def avazu(
    path: Paths,
    batch_size: int = 1024,
    *,
    dim: int = 16,
    **rows: Unpack[RowOptions],
) -> StreamReader:
    """Avazu click-through rate (Kaggle): comma-separated with header; the 21 categories are hashed.

    Files without a header line have the columns of Kaggle's files (id, click, hour, C1, ...; test files lack click).
    The column `hour` (YYMMDDHH) gives the feature `hour_of_day` and `Batch.day` (days since 1970). The label is
    `click`.

    Args:
        path: file, directory, glob or URL, or a list of these.
        batch_size: samples per batch.
        dim: dim of all embeddings.
        **rows: see `RowOptions`.
    """
    features = [IdFeature("hour_of_day", dim=dim), *(IdFeature(n, dim=dim, kind="text") for n in _AVAZU)]
    schema = Schema(features, labels=["click"])
    layouts = (("id", "click", "hour", *_AVAZU), ("id", "hour", *_AVAZU))
    form = CsvFormat(columns=("click", "hour", *_AVAZU), transform=_avazu_columns, layouts=layouts)
    conversion = conversion_of(schema, day="day", **rows)
    source = CsvSource(tuple(expand(path, CSV_SUFFIXES)), conversion, form)
    return StreamReader(schema, source, order_of(batch_size, **rows))


def _avazu_columns(columns: dict[str, Any]) -> dict[str, Any]:
    import pyarrow as pa

    numbers = number_column("hour", columns["hour"], fill=-1.0)
    bad = (numbers < 0) | (numbers % 1 != 0) | (numbers % 100 > 23)
    if bad.any():
        raise _invalid_hour(columns["hour"], int(bad.argmax()))
    hours = numbers.astype(np.int64)
    dates, rows, inverse = np.unique(hours // 100, return_index=True, return_inverse=True)
    days = np.array([_day(int(d), columns["hour"], int(row)) for d, row in zip(dates, rows, strict=True)], np.int64)[
        inverse
    ]
    return {**columns, "hour_of_day": pa.array(hours % 100), "day": pa.array(days)}


def _day(yymmdd: int, hours: Any, row: int) -> int:
    try:
        day = date(2000 + yymmdd // 10_000, yymmdd // 100 % 100, yymmdd % 100)
    except ValueError as error:
        raise _invalid_hour(hours, row) from error
    return (day - date(1970, 1, 1)).days


def _invalid_hour(hours: Any, row: int) -> DataError:
    value = hours[row].as_py()
    text = value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
    shown = "a missing value" if value is None else repr(text)
    return DataError(
        f"Column 'hour' has {shown} at row {row}; it takes hours of the form YYMMDDHH. Correct the value, or leave the "
        "row out with `where`.",
        column="hour",
        row=row,
        value=text,
    )
