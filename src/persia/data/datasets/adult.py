"""Reads the Adult census income data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np

from persia.batching.numbers import number_column
from persia.data.files import Paths, dataset_path, expand
from persia.data.from_csv import CsvFormat, CsvSource
from persia.data.reader import StreamReader
from persia.data.row_options import UnsplitRowOptions, conversion_of, order_of, with_options
from persia.errors import DataError
from persia.schema import IdFeature, Schema

__all__ = ["adult"]

_ADULT = [
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education_num",
    "marital_status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital_gain",
    "capital_loss",
    "hours_per_week",
    "native_country",
    "income",
]
_ADULT_SLOTS = [
    "workclass",
    "education",
    "marital_status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "native_country",
]
_ADULT_SCALES = {  # centre and width; capital gain and loss after log1p
    "age": (38.6, 13.6),
    "education_num": (10.1, 2.6),
    "capital_gain": (0.73, 2.5),
    "capital_loss": (0.36, 1.6),
    "hours_per_week": (40.4, 12.3),
}


@with_options(UnsplitRowOptions)
def adult(
    path: Paths | None = None,
    batch_size: int = 1024,
    *,
    split: Literal["train", "test"] = "train",
    dim: int = 8,
    **rows: Unpack[UnsplitRowOptions],
) -> StreamReader:
    """UCI Adult census income: 8 hashed categories (a `?` is a category), 5 standardised numbers; income above 50K?

    The numbers are age, education_num, log(1 + capital_gain), log(1 + capital_loss) and hours_per_week, minus
    38.6, 10.1, 0.73, 0.36, 40.4, over 13.6, 2.6, 2.5, 1.6, 12.3 (approximate mean and deviation of the training part);
    fnlwgt is left out.

    Args:
        path: a file, or a directory with `adult.data` and `adult.test`; None uses `find("adult")`.
        split: file to read if `path` is a directory.
        batch_size: samples per batch.
        dim: dim of all embeddings.
        **rows: see `RowOptions`.
    """
    if path is None:
        path = dataset_path("adult")
    if isinstance(path, (str, os.PathLike)) and Path(path).is_dir():
        path = Path(path) / ("adult.data" if split == "train" else "adult.test")
    schema = Schema(
        [IdFeature(name, dim=dim, kind="text") for name in _ADULT_SLOTS],
        dense_features=list(_ADULT_SCALES),
        labels=["income"],
    )
    columns = (*_ADULT_SLOTS, *_ADULT_SCALES, "income")
    layouts = (tuple(_ADULT), tuple(_ADULT[:-1]))
    form = CsvFormat(columns=columns, transform=_adult_columns, layouts=layouts, comment="|")
    conversion = conversion_of(schema, **rows)
    source = CsvSource(tuple(expand(path, (".data", ".test"))), conversion, form)
    return StreamReader(schema, source, order_of(batch_size, **rows))


def _adult_columns(columns: dict[str, Any]) -> dict[str, Any]:
    import pyarrow as pa
    import pyarrow.compute as pc

    for name in _ADULT_SLOTS:
        columns[name] = pc.utf8_trim_whitespace(columns[name].cast(pa.string()))
    for name, (centre, width) in _ADULT_SCALES.items():
        values = number_column(name, columns[name])
        columns[name] = ((np.log1p(values) if name.startswith("capital") else values) - centre) / width
    if "income" not in columns:
        return columns
    incomes = pc.utf8_trim_whitespace(columns["income"].cast(pa.string())).to_pylist()
    bad = next((i for i, x in enumerate(incomes) if x not in ("<=50K", ">50K", "<=50K.", ">50K.")), None)
    if bad is not None:
        raise DataError(
            f"Column 'income' has {incomes[bad]!r} at row {bad}; it takes <=50K and >50K. Correct the value, or leave "
            "the row out with `where`.",
            column="income",
            row=bad,
            value=incomes[bad],
        )
    return {**columns, "income": np.array([x[0] == ">" for x in incomes])}
