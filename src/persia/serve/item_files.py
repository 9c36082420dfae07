"""Reads the catalogue of items from Parquet files."""

from __future__ import annotations

import os
from collections.abc import Iterator

from persia.batching.batch import Batch
from persia.nn.item_catalogue import TowerFeatures
from persia.schema import NO_RULES, InputRules, Schema
from persia.serve.schema_parts import columns_of, schema_of_columns, with_all_dense

__all__ = ["read_items"]

BATCH_ROWS = 65536


def read_items(
    paths: str | os.PathLike[str], schema: Schema, features: TowerFeatures, rules: InputRules = NO_RULES
) -> Iterator[Batch]:
    """Yields the items of Parquet files, with the features of their tower. Blocks for the file system.

    Args:
        paths: file, directory, glob or URL, as in `persia.data.parquet`.
        schema: schema of the model.
        features: features of the items. For computed features, the columns that they are computed from are read.
        rules: rules for missing values and lists.

    Raises:
        DataError: there is no such file, or it lacks a column or has invalid values.
        MissingExtraError: a package for the URL's file system is not installed.
    """
    from persia.data.files import expand
    from persia.data.from_parquet import PARQUET_SUFFIXES, ParquetSource
    from persia.data.reader import Order, StreamReader
    from persia.data.rows import Conversion

    file_schema = schema_of_columns(schema, columns_of(schema, features.ids) | set(features.dense))
    fill = {name: value for name, value in rules.fill.items() if name in file_schema.dense_names}
    conversion = Conversion(file_schema, require_labels=False, fill=fill, rules=rules)
    source = ParquetSource(tuple(expand(os.fspath(paths), PARQUET_SUFFIXES)), conversion)
    for batch in StreamReader(file_schema, source, Order(BATCH_ROWS)):
        yield with_all_dense(batch, file_schema.dense_names, schema)
