"""The three public data sets of the Persia paper's Table 2 as they are published, in directories of PERSIA_DATA.

criteo     Kaggle's train.txt (Display Advertising Challenge), or Terabyte's day_0 to day_23; also compressed.
           Tab-separated without header: label, 13 counts, 26 categories. Kaggle's test.txt has no labels: left out.
avazu      Kaggle's train (Click-Through Rate Prediction), as train.gz, train.csv or train. Its test has no labels.
taobao_ad  Tianchi's data set 56 (Taobao-Ad): raw_sample.csv, each row joined with its ad of ad_feature.csv and its user
           of user_profile.csv; also compressed. Not `persia.data.taobao`, which reads UserBehavior.csv.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import shapes
from persia import Batch, IdFeature, Schema, data
from persia.errors import DataError

__all__ = ["DIRECTORIES", "Source", "avazu", "criteo", "taobao"]

Source = tuple[Schema, Iterable[Batch]]
"""Schema and rows, in the order of the files."""

DIRECTORIES = {"criteo_file": "criteo", "avazu_file": "avazu", "taobao_file": "taobao_ad"}
"""Directory in PERSIA_DATA by the name of a source."""
PLAIN_OR_COMPRESSED = ("", ".gz")


def criteo(batch_size: int) -> Source:
    """Reads Criteo's files."""
    folder = _folder("criteo")
    days = [name for number in range(24) for name in (f"day_{number}", f"day_{number}.gz")]
    files = _first(folder, "train.txt", "train.csv", "train") or [folder / n for n in days if (folder / n).exists()]
    reader = data.criteo(_needed(folder, files, "train.txt or day_0"), batch_size)
    return reader.schema, reader


def avazu(batch_size: int) -> Source:
    """Reads Avazu's file."""
    folder = _folder("avazu")
    reader = data.avazu(_needed(folder, _first(folder, "train", "train.csv"), "train or train.csv"), batch_size)
    return reader.schema, reader


def taobao(_batch_size: int) -> Source:
    """Joins Taobao's files. Missing values and "NULL" give samples without id, as does a user without a profile."""
    names = [field.name for field in shapes.TAOBAO.fields]
    schema = Schema([IdFeature(n, dim=16, kind="text") for n in names], dense_features=["price"], labels=["clk"])
    return schema, _taobao_batches(schema)


def _taobao_batches(schema: Schema) -> Iterator[Batch]:
    import pyarrow.compute as pc
    from pyarrow import csv

    ads, users = _table("ad_feature.csv", "adgroup_id"), _table("user_profile.csv", "userid")
    for part in csv.open_csv(_path("raw_sample.csv"), convert_options=_as_text("user", "adgroup_id")):
        columns = {name: part[name] for name in ("user", "adgroup_id", "pid", "clk")}
        for table, key, own in ((ads, "adgroup_id", "adgroup_id"), (users, "userid", "user")):
            at = pc.index_in(part[own], value_set=table[key])
            columns |= {name: table[name].take(at) for name in table.column_names if name not in (key, own)}
        price = columns["price"].to_numpy(zero_copy_only=False).astype(np.float32)
        columns["price"] = np.log1p(np.nan_to_num(price))
        yield Batch.from_columns(schema, columns)


def _table(name: str, key: str) -> Any:
    from pyarrow import csv

    table = csv.read_csv(_path(name), convert_options=_as_text(key))
    return table.rename_columns([column.strip() for column in table.column_names])  # One name ends with a space.


def _as_text(*columns: str) -> Any:
    """Returns options with which ids that are joined have one type in all files."""
    import pyarrow as pa
    from pyarrow import csv

    return csv.ConvertOptions(column_types=dict.fromkeys(columns, pa.string()), null_values=["", "NULL"])


def _path(name: str) -> Path:
    folder = _folder("taobao_ad")
    return _needed(folder, _first(folder, name), name)[0]


def _first(folder: Path, *names: str) -> list[Path]:
    """Returns the first of the files that is there, compressed or not. An archive and its content are the same rows."""
    paths = (folder / f"{name}{suffix}" for name in names for suffix in PLAIN_OR_COMPRESSED)
    return [path for path in paths if path.exists()][:1]


def _needed(folder: Path, files: list[Path], names: str) -> list[Path]:
    if not files:
        raise DataError(f"{folder} has no {names}; put the published files there.", path=str(folder))
    return files


def _folder(name: str) -> Path:
    folder = data.find(name)
    assert folder is not None  # `is_here` was asked.
    return folder
