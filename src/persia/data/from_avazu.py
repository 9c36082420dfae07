"""Avazu click logs."""

from __future__ import annotations

from datetime import date
from typing import Any

import numpy as np

from persia.data.files import Paths, expand
from persia.data.from_csv import CSV_SUFFIXES, CsvFormat, CsvSource
from persia.data.reader import Order, StreamReader
from persia.data.rows import Conversion
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


def avazu(
    path: Paths,
    batch_size: int = 1024,
    *,
    dim: int = 16,
    shuffle_rows: int = 0,
    seed: int = 0,
    drop_last: bool = False,
    shard: tuple[int, int] = (0, 1),
) -> StreamReader:
    """Avazu click-through rate (Kaggle): comma-separated with header; the 21 categories are hashed.

    The column `hour` (YYMMDDHH) gives the feature `hour_of_day` and `Batch.day` (days since 1970). The label is
    `click`.

    Args:
        path: file, directory, glob or URL, or a list of these.
        batch_size: samples of a batch.
        dim: of all embeddings.
        shuffle_rows: see `parquet`.
        seed: of the permutations.
        drop_last: leave out a last batch that is not full.
        shard: (index, count): only batches i with i % count == index.
    """
    features = [IdFeature(n, dim=dim) for n in ("hour_of_day", *_AVAZU)]
    schema = Schema(features, labels=["click"])
    types = {"click": "double", "hour": "string"} | dict.fromkeys(_AVAZU, "string")
    form = CsvFormat(hashed=frozenset(_AVAZU), types=types, transform=_avazu_columns)
    source = CsvSource(tuple(expand(path, CSV_SUFFIXES)), Conversion(schema, day="day"), form)
    return StreamReader(schema, source, Order(batch_size, shuffle_rows, seed, drop_last, shard))


def _avazu_columns(columns: dict[str, Any]) -> dict[str, Any]:
    import pyarrow as pa

    hours = columns["hour"].cast(pa.int64()).to_numpy()
    dates, inverse = np.unique(hours // 100, return_inverse=True)
    days = np.array([_day(int(d)) for d in dates], np.int64)[inverse]
    return {**columns, "hour_of_day": pa.array(hours % 100), "day": pa.array(days)}


def _day(yymmdd: int) -> int:
    try:
        day = date(2000 + yymmdd // 10_000, yymmdd // 100 % 100, yymmdd % 100)
    except ValueError as error:
        raise DataError(f"The hour {yymmdd:06d}HH is no date of the form YYMMDDHH.", column="hour") from error
    return (day - date(1970, 1, 1)).days
