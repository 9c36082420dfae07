"""The fitted values of a schema: what `persia.fit_features` has found, apart from what is declared."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from persia.schema.dense import DenseFeature, DenseStatistics
from persia.schema.derivations import Buckets
from persia.schema.features import IdFeature, Schema

__all__ = ["FittedValue", "fitted_values", "with_values_of", "without_values"]

SHOWN = 4
"""Quantiles or edges of a feature in a `FittedValue`."""


class FittedValue(NamedTuple):
    """Description of the fitted values of a feature, for people.

    Attributes:
        feature: name of the feature.
        rule: its rules that are fitted, such as "fill=mean, scale=standard".
        found: their values.
    """

    feature: str
    rule: str
    found: str


def without_values(schema: Schema) -> Schema:
    """Returns the schema as it is declared, without fitted values."""
    if not any(each.fitted for each in schema.dense) and not any(_fitted(each) for each in schema.id_features):
        return schema
    return msgspec.structs.replace(
        schema,
        dense_features=[_without(each) if isinstance(each, DenseFeature) else each for each in schema.dense_features],
        id_features=[_with_edges(each, None) for each in schema.id_features],
    )


def with_values_of(schema: Schema, other: Schema) -> Schema:
    """Returns the schema with the fitted values of another one, for features that both declare with the same rules.

    Args:
        schema: the schema. Its own fitted values are replaced where the other one has some.
        other: such as the schema of the checkpoint that a run continues.
    """
    dense = {each.name: each for each in other.dense}
    ids = {each.name: each for each in other.id_features}
    return msgspec.structs.replace(
        schema,
        dense_features=[_dense_like(each, dense) for each in schema.dense_features],
        id_features=[_ids_like(each, ids) for each in schema.id_features],
    )


def fitted_values(schema: Schema) -> list[FittedValue]:
    """Returns the fitted values of a schema, one entry for each feature that has some."""
    values: list[FittedValue] = []
    for feature in schema.dense:
        if feature.fitted is not None:
            rules = [f"fill={feature.fill}"] if feature.fill == "mean" else []
            rules += [f"scale={feature.scale}"] if isinstance(feature.scale, str) else []
            values.append(FittedValue(feature.name, ", ".join(rules), _found(feature.fitted)))
    for each in schema.id_features:
        edges = _fitted(each)
        if edges is not None:
            rule = f"buckets of {each.column}"
            values.append(FittedValue(each.name, rule, f"{len(edges)} edges: {_listed(edges)}"))
    return values


def _found(fitted: DenseStatistics) -> str:
    parts = [f"mean {fitted.mean:.6g}"] if fitted.mean is not None else []
    if fitted.centre is not None and fitted.width is not None:
        parts.append(f"centre {fitted.centre:.6g}, width {fitted.width:.6g}")
    if fitted.quantiles:
        parts.append(f"{len(fitted.quantiles)} quantiles: {_listed(fitted.quantiles)}")
    return "; ".join([*parts, f"{fitted.rows} rows"])


def _listed(numbers: tuple[float, ...]) -> str:
    """Formats numbers, or some of many, equally distant from the first to the last."""
    if len(numbers) > SHOWN + 1:
        step = (len(numbers) - 1) / SHOWN
        return ", ".join(f"{numbers[round(place * step)]:.6g}" for place in range(SHOWN + 1)) + " at equal ranks"
    return ", ".join(f"{number:.6g}" for number in numbers)


def _without(feature: DenseFeature) -> DenseFeature:
    return msgspec.structs.replace(feature, fitted=None)


def _fitted(feature: IdFeature) -> tuple[float, ...] | None:
    return None if feature.bucketize is None else feature.bucketize.fitted


def _with_edges(feature: IdFeature, edges: tuple[float, ...] | None) -> IdFeature:
    if feature.bucketize is None or feature.bucketize.quantiles is None:
        return feature
    buckets: Buckets = msgspec.structs.replace(feature.bucketize, fitted=edges)
    return msgspec.structs.replace(feature, bucketize=buckets)


def _dense_like(feature: str | DenseFeature, others: dict[str, DenseFeature]) -> str | DenseFeature:
    if isinstance(feature, str):
        return feature
    other = others.get(feature.name)
    if other is None or other.fitted is None or _without(other) != _without(feature):
        return feature
    return other


def _ids_like(feature: IdFeature, others: dict[str, IdFeature]) -> IdFeature:
    other = others.get(feature.name)
    edges = None if other is None else _fitted(other)
    if other is None or edges is None or _with_edges(other, None).bucketize != _with_edges(feature, None).bucketize:
        return feature
    return _with_edges(feature, edges)
