"""Checks whether a model can be loaded from a checkpoint, and lists the reasons if not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from persia.checkpoint.format import Manifest
from persia.errors import CheckpointError
from persia.schema import (
    SGD,
    DenseFeature,
    EmbeddingOptimizer,
    IdFeature,
    Label,
    Schema,
    with_values_of,
    without_values,
)
from persia.types.half_floats import LARGEST, Dtype, largest_finite

__all__ = ["NEW_OPTIMIZER", "check_values", "differences", "id_difference", "same_rule", "schema_differences"]

NEW_OPTIMIZER = "reset its state with new_optimizer=True (`--new-optimizer` of persia train and continual)"
"""Remedy for another optimizer, for errors."""

_MAY_DIFFER = ("name", "fitted", "missing", "weight", "rule", "unit")
"""Fields of dense features and labels that a continued run may change; `fitted` is compared by itself."""


def differences(
    manifest: Manifest[Any],
    saved: Schema,
    schema: Schema,
    optimizer: EmbeddingOptimizer | None,
    *,
    new_optimizer: bool = False,
    refit: bool = False,
) -> list[str]:
    """Lists the reasons why a model cannot use the rows or the dense model of a checkpoint, one sentence each.

    Args:
        manifest: manifest of the checkpoint.
        saved: schema of the checkpoint.
        schema: schema of the model.
        optimizer: optimizer of the model's tables that declare none.
        new_optimizer: whether tables may change their optimizer.
        refit: whether fitted values of features may differ.
    """
    return [
        *_tables(manifest, schema, optimizer, new_optimizer),
        *_features(saved, schema),
        *_columns(saved, schema, "the checkpoint"),
        *([] if refit else _fitted(saved, schema)),
    ]


def schema_differences(
    saved: Schema, schema: Schema, *, saved_in: str = "the checkpoint", used_in: str = "the model"
) -> list[str]:
    """Lists the reasons why rows and networks of one schema cannot be used with another one, one sentence each.

    Initialisers, optimizers, capacities, dtypes, admission and fitted values may differ.

    Args:
        saved: schema that the rows and networks were trained with.
        schema: schema that they will be used with.
        saved_in: what has the schema `saved`, for the sentences.
        used_in: what has the schema `schema`, for the sentences.
    """
    tables, saved_tables = schema.resolved_tables(), saved.resolved_tables()
    dims = sorted(
        f"table {name!r} has dim {tables[name].dim}, in {saved_in} {saved_tables[name].dim}"
        for name in tables.keys() & saved_tables.keys()
        if tables[name].dim != saved_tables[name].dim
    )
    return [*dims, *_features(saved, schema, saved_in, used_in), *_columns(saved, schema, saved_in)]


def id_difference(saved: Schema, schema: Schema, table: str, source: str) -> str:
    """Returns the reason why the features of a model would not find the rows of a table; empty if they would.

    Args:
        saved: schema of the checkpoint.
        schema: schema of the model.
        table: name of the table in the model.
        source: name of the table in the checkpoint.
    """
    saved_ids = {_ids_of(saved, f): f.name for f in saved.id_features if f.table_name == source}
    ids = {_ids_of(schema, f): f.name for f in schema.id_features if f.table_name == table}
    if not saved_ids or not ids or saved_ids.keys() & ids.keys():
        return ""
    (kind, feature), (saved_kind, saved_feature) = next(iter(ids.items())), next(iter(saved_ids.items()))
    return (
        f"rows of table {source!r} have other ids: feature {feature!r} of the model has {kind}, {saved_feature!r} of "
        f"the checkpoint {saved_kind}, so values would not find their rows. Declare it in the same way, or leave the "
        "table out."
    )


def _ids_of(schema: Schema, feature: IdFeature) -> str:
    """Describes how values of a feature become ids. Numbers have the same ids with the kinds "auto" and "number"."""
    if feature.of is not None:
        return f"{feature.mapping} of {_ids_of(schema, schema.feature(feature.of))}"
    if feature.cross:
        return f"a cross of {' and '.join(_ids_of(schema, schema.feature(part)) for part in feature.cross)}"
    if feature.age_since is not None:
        return "ages"
    return "hashes of texts (kind='text')" if feature.kind == "text" else "numbers (kind='auto' or 'number')"


def check_values(path: str, table: str, rows: dict[str, NDArray[Any]], dtype: Dtype) -> None:
    """Checks that a dtype can represent the embeddings of rows. NaN and infinities pass, as every dtype has them.

    Args:
        path: path of the checkpoint, for the error.
        table: table of the rows.
        rows: `ids` uint64 `[n]` and `embeddings` float32 `[n, dim]`.
        dtype: dtype in which the rows will be stored.

    Raises:
        CheckpointError: a finite value exceeds the largest number of the dtype.
    """
    values = rows["embeddings"]
    if largest_finite(values) > LARGEST[dtype]:
        too_large = np.isfinite(values) & (np.abs(values) > LARGEST[dtype])
        row, column = (int(position) for position in np.argwhere(too_large)[0])
        raise CheckpointError(
            f"{path}: table {table!r} has {values[row, column]:g} in the row of id {rows['ids'][row]}, beyond "
            f"{LARGEST[dtype]:g}, the largest number of {dtype}. Use float32.",
            path=path,
            table=table,
            id=int(rows["ids"][row]),
        )


def same_rule(one: EmbeddingOptimizer | None, other: EmbeddingOptimizer | None) -> bool:
    """Returns whether two optimizers have the same state per row, so that one can continue with the other's."""
    return one is not None and other is not None and _rule(one) == _rule(other)


def _tables(
    manifest: Manifest[Any], schema: Schema, default: EmbeddingOptimizer | None, new_optimizer: bool
) -> list[str]:
    reasons: list[str] = []
    tables = schema.resolved_tables()
    for name, table in tables.items():
        record = manifest.tables.get(name)
        if record is None:
            reasons.append(f"table {name!r} is not in the checkpoint")
            continue
        if record.dim != table.dim:
            reasons.append(f"table {name!r} has dim {table.dim}, in the checkpoint {record.dim}")
        optimizer = table.optimizer_or(default)  # None: rows may stop and begin to be trained.
        if optimizer is not None and record.optimizer is not None and not new_optimizer:
            rule, saved_rule = _rule(optimizer), _rule(record.optimizer)
            if rule != saved_rule:
                reasons.append(f"table {name!r} is trained by {rule}, in the checkpoint by {saved_rule}")
    unused = [name for name in manifest.tables if name not in tables]
    return reasons + [f"table {name!r} of the checkpoint is not in the model" for name in unused]


def _rule(optimizer: EmbeddingOptimizer) -> str:
    """Names the update rule, which determines the meaning of a row's optimizer state."""
    name = type(optimizer).__name__
    return f"{name} with momentum" if isinstance(optimizer, SGD) and optimizer.momentum > 0 else name


def _features(saved: Schema, schema: Schema, saved_in: str = "the checkpoint", used_in: str = "the model") -> list[str]:
    reasons: list[str] = []
    saved_features = {feature.name: feature for feature in saved.id_features}
    features = {feature.name: feature for feature in schema.id_features}
    for name in features.keys() | saved_features.keys():
        if name not in saved_features or name not in features:
            place = saved_in if name not in saved_features else used_in
            reasons.append(f"ID-type feature {name!r} is not in {place}")
            continue
        saved_properties = _trained_properties(saved_features[name])
        for field, value in _trained_properties(features[name]).items():
            saved_value = saved_properties[field]
            if value != saved_value:
                reasons.append(f"ID-type feature {name!r} has {field} {value!r}, in {saved_in} {saved_value!r}")
    return sorted(reasons)


def _trained_properties(feature: IdFeature) -> dict[str, Any]:
    """Returns the properties of a feature that the trained rows and network depend on."""
    length = feature.max_length if feature.pooling is None else None
    return {
        "table": feature.table_name,
        "pooling": feature.pooling,
        "max_length": length,
        "cross": tuple(feature.cross),
        "kind": feature.kind,
        "keep": feature.keep if feature.max_length is not None else "first",
        "age_since": feature.age_since,
        "of": feature.of,
        "mapping": feature.mapping,
        "bucketize": feature.bucketize and msgspec.structs.replace(feature.bucketize, fitted=None),
        "time": feature.time,
        "tokens": feature.tokens,
        "split": feature.split,
        "fill": feature.fill,
        "weights": feature.weights,
    }


def _columns(saved: Schema, schema: Schema, saved_in: str) -> list[str]:
    return [
        *_records("dense_features", "dense feature", saved.dense, schema.dense, saved_in),
        *_records("labels", "label", saved.targets, schema.targets, saved_in),
    ]


def _records(
    field: str, kind: str, saved: Sequence[DenseFeature | Label], own: Sequence[DenseFeature | Label], saved_in: str
) -> list[str]:
    """Lists differences of dense features or labels, apart from fitted values and what only affects the loss."""
    theirs, declared = {each.name: each for each in saved}, {each.name: each for each in own}
    only = [f"{name!r}" for name in [*declared, *theirs] if name not in theirs or name not in declared]
    if only:
        return [f"{field} differ in {', '.join(only[:8])}"]
    if list(theirs) != list(declared):
        return [f"{field} are in another order"]
    return [
        f"{kind} {name!r} has {rule} {getattr(declared[name], rule)!r}, in {saved_in} {getattr(other, rule)!r}"
        for name, other in theirs.items()
        for rule in other.__struct_fields__
        if rule not in _MAY_DIFFER and getattr(declared[name], rule) != getattr(other, rule)
    ]


def _fitted(saved: Schema, schema: Schema) -> list[str]:
    """Lists features with the same rules, but other fitted values."""
    if without_values(saved) == saved:
        return []
    taken = with_values_of(schema, saved)
    dense = [one.name for one, other in zip(schema.dense, taken.dense, strict=True) if one != other]
    ids = [one.name for one, other in zip(schema.id_features, taken.id_features, strict=True) if one != other]
    return [
        f"feature {name!r} has other fitted values (persia.schema.with_values_of takes the checkpoint's; refit=True, "
        "or --refit, continues with the new ones)"
        for name in [*dense, *ids]
    ]
