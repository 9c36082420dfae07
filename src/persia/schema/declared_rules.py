"""Rules of a reader that a schema now declares: a run that continues may move them from one to the other."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from persia.schema.dense import DenseFeature
from persia.schema.features import IdFeature, Schema
from persia.schema.input_rules import InputRules

__all__ = ["with_declared_rules"]


def with_declared_rules(saved: Schema, rules: InputRules, schema: Schema) -> Schema:
    """Returns a saved schema that declares those rules of its reader which another schema declares in the same way.

    `lists` of a reader is `IdFeature.split`, and `fill` of a number without rules is `DenseFeature.fill`: values become
    the same ids and numbers.

    Args:
        saved: schema of a checkpoint.
        rules: rules of the reader that trained it.
        schema: schema of the model that continues.
    """
    splits = {each.name: each.split for each in schema.id_features if each.split is not None}
    fills = {each.name: each.fill for each in schema.dense if each.fill is not None}
    return msgspec.structs.replace(
        saved,
        id_features=[_splitting(each, rules.lists.get(each.name), splits) for each in saved.id_features],
        dense_features=[_filled(each, rules.fill, fills) for each in saved.dense_features],
    )


def _splitting(feature: IdFeature, separator: str | None, splits: dict[str, str]) -> IdFeature:
    if separator is None or feature.split is not None or splits.get(feature.name) != separator:
        return feature
    return msgspec.structs.replace(feature, split=separator)


def _filled(
    feature: str | DenseFeature, rules: Mapping[str, float], fills: Mapping[str, float | str]
) -> str | DenseFeature:
    name = feature if isinstance(feature, str) else feature.name
    plain = isinstance(feature, str) or feature.plain
    if not plain or name not in rules or fills.get(name) != rules[name]:
        return feature
    return DenseFeature(name, fill=rules[name])
