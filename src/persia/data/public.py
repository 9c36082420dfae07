"""Readers of public data sets, by name: each with a ready schema."""

from __future__ import annotations

import os
from datetime import date
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np

from persia.data.files import Paths, expand, find
from persia.data.from_csv import CSV_SUFFIXES, CsvFormat, CsvSource
from persia.data.from_parquet import parquet
from persia.data.reader import Order, OrderOptions, StreamReader
from persia.data.rows import Conversion
from persia.errors import DataError
from persia.schema import IdFeature, Schema

__all__ = ["adult", "avazu", "criteo", "globo", "movielens"]


def criteo(path: Paths, *, dim: int = 16, **options: Unpack[OrderOptions]) -> StreamReader:
    """Criteo display advertising (Kaggle and Terabyte): tab-separated label, 13 counts I1..I13, 26 categories C1..C26.

    Counts become log(1 + x), with missing and negative ones as 0. Categories are hashed; a missing one is a sample
    without id. In a directory `*.txt`, `*.tsv`, `*.csv` and `day_*` files count, also compressed.

    Args:
        path: file, directory, glob or URL, or a list of these.
        dim: of all embeddings.
        **options: see `Order`.
    """
    counts, categories = _numbered("I", 13), _numbered("C", 26)
    schema = Schema([IdFeature(n, dim=dim) for n in categories], dense_features=counts)
    types = {"label": "double"} | dict.fromkeys(counts, "double") | dict.fromkeys(categories, "string")
    form = CsvFormat("\t", tuple(types), frozenset(categories), types=types, transform=_criteo_columns)
    suffixes = (*CSV_SUFFIXES, *(f"day_{i}{z}" for i in range(24) for z in ("", ".gz")))
    return StreamReader(schema, CsvSource(tuple(expand(path, suffixes)), Conversion(schema), form), Order(**options))


def _criteo_columns(columns: dict[str, Any]) -> dict[str, Any]:
    import pyarrow.compute as pc

    for name in _numbered("I", 13):
        counts = pc.fill_null(columns[name], 0.0).to_numpy(zero_copy_only=False)
        columns[name] = np.log1p(np.maximum(counts, 0))
    return columns


def _numbered(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{i}" for i in range(1, count + 1)]


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


def avazu(path: Paths, *, dim: int = 16, **options: Unpack[OrderOptions]) -> StreamReader:
    """Avazu click-through rate (Kaggle): comma-separated with header; the 21 categories are hashed.

    The column `hour` (YYMMDDHH) gives the feature `hour_of_day` and `Batch.day` (days since 1970). The label is
    `click`.

    Args:
        path: file, directory, glob or URL, or a list of these.
        dim: of all embeddings.
        **options: see `Order`.
    """
    features = [IdFeature(n, dim=dim) for n in ("hour_of_day", *_AVAZU)]
    schema = Schema(features, labels=["click"])
    types = {"click": "double", "hour": "string"} | dict.fromkeys(_AVAZU, "string")
    form = CsvFormat(hashed=frozenset(_AVAZU), types=types, transform=_avazu_columns)
    source = CsvSource(tuple(expand(path, CSV_SUFFIXES)), Conversion(schema, day="day"), form)
    return StreamReader(schema, source, Order(**options))


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


_MOVIELENS = {
    "ratings.csv": (",", None, ("userId", "movieId", "rating", "timestamp")),
    "ratings.dat": (
        ":",
        ("user", "", "movie", " ", "rating", "  ", "timestamp"),
        ("user", "movie", "rating", "timestamp"),
    ),
    "u.data": ("\t", ("user", "movie", "rating", "timestamp"), ("user", "movie", "rating", "timestamp")),
}


def movielens(path: str | os.PathLike[str], *, dim: int = 16, **options: Unpack[OrderOptions]) -> StreamReader:
    """MovieLens ratings in any of its forms (`ratings.csv`, `ratings.dat`, `u.data`): like is a rating of 4 or more.

    ID-type features `user` and `movie`, label `like`, `Batch.day` in days since 1970.

    Args:
        path: the file, or a directory with one of these.
        dim: of all embeddings.
        **options: see `Order`.

    Raises:
        DataError: the directory has none of the files.
    """
    text = os.fspath(path)
    form_name = text.replace("\\", "/").rsplit("/", 1)[-1].removesuffix(".gz")
    if form_name not in _MOVIELENS:
        found = [name for name in _MOVIELENS if (Path(text) / name).exists()]
        if not found:
            raise DataError(f"{text} holds none of {', '.join(_MOVIELENS)}; give the file itself.", path=text)
        text, form_name = str(Path(text) / found[0]), found[0]
    delimiter, names, (user, movie, rating, time) = _MOVIELENS[form_name]
    schema = Schema([IdFeature("user", dim=dim), IdFeature("movie", dim=dim)], labels=["like"])
    types = {user: "uint64", movie: "uint64", rating: "double", time: "int64"}
    form = CsvFormat(delimiter, names, frozenset(), types=types, transform=_movielens_columns)
    conversion = Conversion(schema, day="timestamp", day_unit="s")
    return StreamReader(schema, CsvSource(tuple(expand(text, CSV_SUFFIXES)), conversion, form), Order(**options))


def _movielens_columns(columns: dict[str, Any]) -> dict[str, Any]:
    import pyarrow.compute as pc

    user, movie, rating, time = columns.values()
    return {"user": user, "movie": movie, "like": pc.greater_equal(rating, 4.0), "timestamp": time}


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
    *,
    split: Literal["train", "test"] = "train",
    dim: int = 8,
    **options: Unpack[OrderOptions],
) -> StreamReader:
    """UCI Adult census income: 8 hashed categories (a `?` is a category), 5 standardised numbers; income above 50K?

    The numbers are age, education_num, log(1 + capital_gain), log(1 + capital_loss) and hours_per_week, minus
    38.6, 10.1, 0.73, 0.36, 40.4, over 13.6, 2.6, 2.5, 1.6, 12.3 (about mean and deviation in the training part);
    fnlwgt is left out.

    Args:
        path: a file, or a directory with `adult.data` and `adult.test`; None takes `find("adult")`.
        split: which of them, where `path` is a directory.
        dim: of all embeddings.
        **options: see `Order`.
    """
    if path is None:
        path = _found("adult")
    if isinstance(path, (str, os.PathLike)) and Path(path).is_dir():
        path = Path(path) / ("adult.data" if split == "train" else "adult.test")
    schema = Schema(
        [IdFeature(name, dim=dim) for name in _ADULT_SLOTS], dense_features=list(_ADULT_SCALES), labels=["income"]
    )
    types = dict.fromkeys((*_ADULT_SLOTS, "income"), "string") | dict.fromkeys(_ADULT_SCALES, "double")
    form = CsvFormat(",", tuple(_ADULT), frozenset(_ADULT_SLOTS), types=types, transform=_adult_columns, comment="|")
    source = CsvSource(tuple(expand(path, (".data", ".test"))), Conversion(schema), form)
    return StreamReader(schema, source, Order(**options))


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
        raise DataError(f"The income {incomes[bad]!r} at row {bad} of a block is neither <=50K nor >50K.", row=bad)
    return {**columns, "income": np.array([x[0] == ">" for x in incomes])}


def globo(path: Paths | None = None, *, dim: int = 16, **options: Unpack[OrderOptions]) -> StreamReader:
    """Clicks on a news portal in time order, 16 days: user, article, the user's last articles, six contexts.

    Parquet files `day=NN.parquet` with columns label, timestamp_ms, user_id, article_id, history (list),
    environment, device_group, os, country, region, referrer. `history` shares the table `article_id` and is
    averaged over the ten newest; the day is the hive key.

    Args:
        path: directory, file, glob or URL, or a list of these; None takes `find("globo_ctr")`.
        dim: of all embeddings.
        **options: see `Order`.
    """
    contexts = ("environment", "device_group", "os", "country", "region", "referrer")
    history = IdFeature("history", dim=dim, table="article_id", pooling="mean", max_length=10)
    plain = [IdFeature(name, dim=dim) for name in ("user_id", "article_id", *contexts)]
    schema = Schema([*plain[:2], history, *plain[2:]])
    return parquet(_found("globo_ctr") if path is None else path, schema, day="day", **options)


def _found(name: str) -> Path:
    path = find(name)
    if path is None:
        raise DataError(
            f"There are no data {name!r} here; set PERSIA_DATA to the directory that holds {name}.", path=name
        )
    return path
