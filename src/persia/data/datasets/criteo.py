"""Reads Criteo click logs."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np

from persia.batching.numbers import number_column
from persia.data.files import Paths, expand
from persia.data.from_csv import CSV_SUFFIXES, CsvFormat, CsvSource
from persia.data.reader import StreamReader
from persia.data.row_options import RowOptions, conversion_of, order_of, with_options
from persia.schema import IdFeature, Schema

__all__ = ["criteo"]


@with_options(RowOptions)
def criteo(
    path: Paths,
    batch_size: int = 1024,
    *,
    dim: int = 16,
    **rows: Unpack[RowOptions],
) -> StreamReader:
    """Criteo display advertising (Kaggle and Terabyte): tab-separated label, 13 counts I1..I13, 26 categories C1..C26.

    Counts become log(1 + x), with missing and negative counts as 0. Categories are hashed; a missing category gives a
    sample without id. Files have no header line, or one with these names; test files may lack the label (39 fields),
    with `require_labels=False`. In a directory, files `*.txt`, `*.tsv`, `*.csv` and `day_*` are read, also compressed.

    Args:
        path: file, directory, glob or URL, or a list of these.
        batch_size: samples per batch.
        dim: dim of all embeddings.
        **rows: see `RowOptions`.
    """
    counts, categories = _numbered("I", 13), _numbered("C", 26)
    schema = Schema([IdFeature(n, dim=dim, kind="text") for n in categories], dense_features=counts)
    layout = ("label", *counts, *categories)
    form = CsvFormat("\t", columns=layout, transform=_criteo_columns, layouts=(layout, layout[1:]))
    fill = dict.fromkeys(counts, 0.0)  # For servers: this reader fills values in before the logarithm.
    conversion = conversion_of(schema, fill=fill, **rows)
    suffixes = (*CSV_SUFFIXES, *(f"day_{i}{z}" for i in range(24) for z in ("", ".gz")))
    source = CsvSource(tuple(expand(path, suffixes)), conversion, form)
    return StreamReader(schema, source, order_of(batch_size, **rows))


def _criteo_columns(columns: dict[str, Any]) -> dict[str, Any]:
    for name in _numbered("I", 13):
        columns[name] = np.log1p(np.maximum(number_column(name, columns[name], fill=0.0), 0))
    return columns


def _numbered(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{i}" for i in range(1, count + 1)]
