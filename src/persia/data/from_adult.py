"""The Adult census income data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import numpy as np

from persia.data.files import Paths, expand, found
from persia.data.from_csv import CsvFormat, CsvSource
from persia.data.reader import Order, StreamReader
from persia.data.rows import Conversion
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


def adult(
    path: Paths | None = None,
    batch_size: int = 1024,
    *,
    split: Literal["train", "test"] = "train",
    dim: int = 8,
    shuffle_rows: int = 0,
    seed: int = 0,
    drop_last: bool = False,
    shard: tuple[int, int] = (0, 1),
) -> StreamReader:
    """UCI Adult census income: 8 hashed categories (a `?` is a category), 5 standardised numbers; income above 50K?

    The numbers are age, education_num, log(1 + capital_gain), log(1 + capital_loss) and hours_per_week, minus
    38.6, 10.1, 0.73, 0.36, 40.4, over 13.6, 2.6, 2.5, 1.6, 12.3 (about mean and deviation in the training part);
    fnlwgt is left out.

    Args:
        path: a file, or a directory with `adult.data` and `adult.test`; None takes `find("adult")`.
        split: which of them, where `path` is a directory.
        batch_size: samples of a batch.
        dim: of all embeddings.
        shuffle_rows: see `parquet`.
        seed: of the permutations.
        drop_last: leave out a last batch that is not full.
        shard: (index, count): only batches i with i % count == index.
    """
    if path is None:
        path = found("adult")
    if isinstance(path, (str, os.PathLike)) and Path(path).is_dir():
        path = Path(path) / ("adult.data" if split == "train" else "adult.test")
    schema = Schema(
        [IdFeature(name, dim=dim) for name in _ADULT_SLOTS], dense_features=list(_ADULT_SCALES), labels=["income"]
    )
    types = dict.fromkeys((*_ADULT_SLOTS, "income"), "string") | dict.fromkeys(_ADULT_SCALES, "double")
    form = CsvFormat(",", tuple(_ADULT), frozenset(_ADULT_SLOTS), types=types, transform=_adult_columns, comment="|")
    source = CsvSource(tuple(expand(path, (".data", ".test"))), Conversion(schema), form)
    return StreamReader(schema, source, Order(batch_size, shuffle_rows, seed, drop_last, shard))


def _adult_columns(columns: dict[str, Any]) -> dict[str, Any]:
    import pyarrow.compute as pc

    for name in (*_ADULT_SLOTS, "income"):
        columns[name] = pc.utf8_trim_whitespace(columns[name])
    for name, (centre, width) in _ADULT_SCALES.items():
        values = pc.fill_null(columns[name], np.nan).to_numpy(zero_copy_only=False)
        columns[name] = ((np.log1p(values) if name.startswith("capital") else values) - centre) / width
    incomes = columns["income"].to_pylist()
    bad = next((i for i, x in enumerate(incomes) if x not in ("<=50K", ">50K", "<=50K.", ">50K.")), None)
    if bad is not None:
        raise DataError(f"The income {incomes[bad]!r} is neither <=50K nor >50K.", row=bad)
    return {**columns, "income": np.array([x[0] == ">" for x in incomes])}
