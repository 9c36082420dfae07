"""Criteo click logs."""

from __future__ import annotations

from typing import Any

import numpy as np

from persia.data.files import Paths, expand
from persia.data.from_csv import CSV_SUFFIXES, CsvFormat, CsvSource
from persia.data.reader import Order, StreamReader
from persia.data.rows import Conversion
from persia.schema import IdFeature, Schema

__all__ = ["criteo"]


def criteo(
    path: Paths,
    batch_size: int = 1024,
    *,
    dim: int = 16,
    shuffle_rows: int = 0,
    seed: int = 0,
    drop_last: bool = False,
    shard: tuple[int, int] = (0, 1),
) -> StreamReader:
    """Criteo display advertising (Kaggle and Terabyte): tab-separated label, 13 counts I1..I13, 26 categories C1..C26.

    Counts become log(1 + x), with missing and negative ones as 0. Categories are hashed; a missing one is a sample
    without id. In a directory `*.txt`, `*.tsv`, `*.csv` and `day_*` files count, also compressed.

    Args:
        path: file, directory, glob or URL, or a list of these.
        batch_size: samples of a batch.
        dim: of all embeddings.
        shuffle_rows: see `parquet`.
        seed: of the permutations.
        drop_last: leave out a last batch that is not full.
        shard: (index, count): only batches i with i % count == index.
    """
    counts, categories = _numbered("I", 13), _numbered("C", 26)
    schema = Schema([IdFeature(n, dim=dim) for n in categories], dense_features=counts)
    types = {"label": "double"} | dict.fromkeys(counts, "double") | dict.fromkeys(categories, "string")
    form = CsvFormat("\t", tuple(types), frozenset(categories), types=types, transform=_criteo_columns)
    suffixes = (*CSV_SUFFIXES, *(f"day_{i}{z}" for i in range(24) for z in ("", ".gz")))
    return StreamReader(
        schema,
        CsvSource(tuple(expand(path, suffixes)), Conversion(schema), form),
        Order(batch_size, shuffle_rows, seed, drop_last, shard),
    )


def _criteo_columns(columns: dict[str, Any]) -> dict[str, Any]:
    import pyarrow.compute as pc

    for name in _numbered("I", 13):
        counts = pc.fill_null(columns[name], 0.0).to_numpy(zero_copy_only=False)
        columns[name] = np.log1p(np.maximum(counts, 0))
    return columns


def _numbered(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{i}" for i in range(1, count + 1)]
