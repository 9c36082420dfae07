"""Features whose ids are computed from ids of other features: crosses and mapped ids."""

from __future__ import annotations

import numpy as np

from persia.batching import ThreadPool, hash_cross
from persia.batching.id_column import IdColumn
from persia.batching.ids import offsets_of_present
from persia.batching.item_codes import prefix_ids
from persia.errors import DataError
from persia.schema import CodePrefix, HashTo, IdFeature, IdMapping, Quotient, Schema
from persia.types import Ids, Int64Array

__all__ = ["add_computed", "mapped_ids"]


def add_computed(schema: Schema, ids: dict[str, IdColumn]) -> None:
    """Adds the missing features that are computed from others: crossed and mapped features.

    Args:
        schema: schema of the model.
        ids: columns by feature, with all features that are not computed.

    Raises:
        DataError: a sample has several ids of two features that are crossed.
    """
    for feature in schema.id_features:
        if feature.cross and feature.name not in ids:
            ids[feature.name] = _cross(feature, [ids[part] for part in feature.cross])
    for feature in schema.id_features:
        if feature.of is not None and feature.mapping is not None and feature.name not in ids:
            column = ids[feature.of]
            ids[feature.name] = IdColumn(mapped_ids(feature.mapping, column.values), column.offsets)


def mapped_ids(mapping: IdMapping, ids: Ids) -> Ids:
    """Applies a mapping to ids.

    Raises:
        DataError: the file of a `CodePrefix` cannot be read.
    """
    if isinstance(mapping, CodePrefix):
        return prefix_ids(mapping.codes, mapping.length, ids)
    if isinstance(mapping, HashTo):
        return hash_cross([np.ascontiguousarray(ids)], ThreadPool(1), seed=mapping.seed) % np.uint64(mapping.buckets)
    by = np.uint64(mapping.by)
    return ids // by if isinstance(mapping, Quotient) else ids % by


def _cross(feature: IdFeature, parts: list[IdColumn]) -> IdColumn:
    """Combines the ids of each sample; a sample with several ids of one part has one combination for each of them."""
    if all(part.offsets is None for part in parts):
        return IdColumn(hash_cross([part.values for part in parts], ThreadPool(1)))
    rows = len(parts[0])
    counts = [np.ones(rows, np.int64) if part.offsets is None else np.diff(part.offsets) for part in parts]
    present = np.logical_and.reduce([count > 0 for count in counts])
    longest = np.maximum.reduce(counts)
    if longest.max(initial=0) <= 1:
        complete = [p.values[present] if p.offsets is None else p.values[p.offsets[:-1][present]] for p in parts]
        hashes = hash_cross(complete, ThreadPool(1))
        return IdColumn(hashes, None if present.all() else offsets_of_present(present, None))
    _check_lists(feature, counts)
    lengths: Int64Array = np.where(present, longest, 0)
    offsets = np.zeros(rows + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    row = np.repeat(np.arange(rows), lengths)
    place = np.arange(offsets[-1]) - offsets[row]  # Within the list of the sample.
    values = [
        part.values[row]
        if part.offsets is None
        else part.values[part.offsets[row] + np.where(count[row] > 1, place, 0)]
        for part, count in zip(parts, counts, strict=True)
    ]
    return IdColumn(hash_cross(values, ThreadPool(1)), offsets)


def _check_lists(feature: IdFeature, counts: list[Int64Array]) -> None:
    """Raises DataError if a sample has several ids of two parts."""
    bad = np.add.reduce([count > 1 for count in counts]) > 1
    if not bad.any():
        return
    row = int(bad.argmax())
    lists = [f"{count[row]} of {name!r}" for name, count in zip(feature.cross, counts, strict=True) if count[row] > 1]
    raise DataError(
        f"Feature {feature.name!r} crosses lists: row {row} has {' and '.join(lists)} ids; at most one feature of a "
        "cross may have several ids in a sample.",
        feature=feature.name,
        row=row,
    )
