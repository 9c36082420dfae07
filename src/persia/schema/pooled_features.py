"""Features that an embedding worker may pool: names and tables of their values."""

from __future__ import annotations

import msgspec

from persia.schema.features import IdFeature, Schema
from persia.schema.tables import Table

__all__ = ["poolable_features", "pooled_feature", "sent_tables", "values_name"]


def poolable_features(schema: Schema) -> dict[str, list[IdFeature]]:
    """Returns the features of each table that has only pooled ones: their values can take the place of its rows."""
    features: dict[str, list[IdFeature]] = {}
    for feature in schema.id_features:
        features.setdefault(feature.table_name, []).append(feature)
    return {table: of_table for table, of_table in features.items() if all(f.pooling is not None for f in of_table)}


def values_name(feature: IdFeature) -> str:
    """Returns the name under which the values of a pooled feature are sent. No table has it, as names have no slash."""
    return f"{feature.table_name}/{feature.name}"


def pooled_feature(name: str) -> str | None:
    """Returns the feature of which this is the `values_name`; None for the name of a table."""
    return name.partition("/")[2] or None


def sent_tables(schema: Schema) -> dict[str, Table]:
    """Returns all tables and, by `values_name`, one for the values of each feature that may be pooled."""
    tables = schema.resolved_tables()
    return tables | {
        values_name(feature): msgspec.structs.replace(tables[table], dtype="float32")
        for table, features in poolable_features(schema).items()
        for feature in features
    }
