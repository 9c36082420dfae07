"""Parts of a schema: a subset of a model's features, for samples that lack the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec
import numpy as np

from persia.batching.batch import Batch
from persia.errors import DataError
from persia.nn.item_catalogue import TowerFeatures
from persia.schema import IdFeature, Schema

__all__ = ["check_user_columns", "columns_of", "part_of", "schema_of_columns", "with_all_dense"]


def part_of(schema: Schema, features: Collection[str]) -> Schema:
    """Returns the schema of some ID-type features whose ids are given, so that none of them is computed.

    Args:
        schema: schema of all features.
        features: names of the ID-type features to keep. All dense features and labels stay.
    """
    selected = [
        msgspec.structs.replace(
            feature,
            cross=(),
            of=None,
            mapping=None,
            age_since=None,
            bucketize=None,
            time=None,
            tokens=None,
            split=None,
            fill=None,
            aligned_with=feature.aligned_with if feature.aligned_with in features else None,
        )
        for feature in schema.id_features
        if feature.name in features
    ]
    used = {feature.table_name for feature in selected}
    tables = [table for name, table in schema.resolved_tables().items() if name in used]
    return msgspec.structs.replace(schema, id_features=selected, tables=tables)


def schema_of_columns(schema: Schema, names: Collection[str]) -> Schema:
    """Returns the schema of the available columns, for a part of the features.

    It includes computed features whose sources are all available.
    """
    features = [
        f for f in schema.id_features if (f.column in names if not f.computed else _has_sources(schema, f, names))
    ]
    selected = {f.name for f in features}
    independent = [
        msgspec.structs.replace(f, aligned_with=None, dim=schema.resolved_tables()[f.table_name].dim)
        if f.aligned_with not in selected
        else f
        for f in features
    ]
    tables = [table for table in schema.tables if table.name in {f.table_name for f in independent}]
    dense = [each for each in schema.dense if each.name in names]
    return msgspec.structs.replace(schema, id_features=independent, dense_features=dense, tables=tables)


def _has_sources(schema: Schema, feature: IdFeature, names: Collection[str]) -> bool:
    if feature.of is not None:
        source = schema.feature(feature.of)
        return _has_sources(schema, source, names) if source.computed else source.column in names
    return all(schema.feature(part).column in names for part in feature.cross)


def columns_of(schema: Schema, features: Iterable[str]) -> set[str]:
    """Returns the columns that some ID-type features are computed from."""
    columns: set[str] = set()
    for name in features:
        feature = schema.feature(name)
        if feature.of is not None:
            columns |= columns_of(schema, [feature.of])
        elif feature.cross:
            columns |= columns_of(schema, feature.cross)
        else:
            columns |= {column for column in (feature.column, feature.age_since, feature.weights) if column}
    return columns


def check_user_columns(schema: Schema, features: TowerFeatures, columns: Collection[str]) -> None:
    """Checks that columns are those that the vector of a user is computed from.

    Args:
        schema: schema of all features.
        features: features of users.
        columns: names of the columns.

    Raises:
        DataError: one is missing, or is not of the user.
    """
    required = columns_of(schema, features.ids) | set(features.dense)
    for name in columns:
        if name not in required:
            known = ", ".join(map(repr, sorted(required)))
            raise DataError(f"{name!r} is not a feature of the user; leave it out, and give {known}.", feature=name)
    if missing := required.difference(columns):
        raise DataError(f"Feature {min(missing)!r} of the user is missing; give it.", feature=min(missing))


def with_all_dense(batch: Batch, names: Iterable[str], schema: Schema) -> Batch:
    """Returns a batch with all dense features of a schema, zeros for missing ones, and no labels.

    Args:
        batch: batch with some features.
        names: names of its dense features.
        schema: schema of all features.
    """
    places = schema.dense_slices
    dense = np.zeros((len(batch), schema.dense_width), np.float32)
    columns = [column for name in names for column in range(places[name].start, places[name].stop)]
    dense[:, columns] = batch.dense
    return Batch(batch.id_features, dense, np.empty((len(batch), 0), np.float32))
