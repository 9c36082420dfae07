"""Batches in which one input is permuted among the rows, or carries nothing, for the importance of features."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from persia.batching.batch import Batch
from persia.batching.computed_ids import add_computed
from persia.batching.id_column import IdColumn
from persia.schema import IdFeature, Schema
from persia.types import Floats, Int64Array

__all__ = ["InputGroup", "emptied", "input_groups", "permuted"]


class InputGroup(NamedTuple):
    """Features that change together, as they read the same columns or are aligned.

    Attributes:
        name: the columns, or the name of a crossed feature that changes alone.
        id_features: names of ID-type features.
        dense_features: names of non-ID-type features.
        following: names of ID-type features that are computed again from the changed ids.
    """

    name: str
    id_features: tuple[str, ...]
    dense_features: tuple[str, ...] = ()
    following: tuple[str, ...] = ()

    @property
    def features(self) -> tuple[str, ...]:
        """The names of all features that change."""
        return self.id_features + self.dense_features + self.following


def input_groups(schema: Schema) -> list[InputGroup]:
    """Returns the groups of a schema: one for each source column, and then one for each crossed feature.

    Features are of one group if they read a column together (weights of ids are a column, too) or are aligned, so that
    each event stays whole. `age_since` does not join groups: ages belong to their events. Crossed and mapped features
    follow the features whose ids they are computed from. A crossed feature is also a group by itself, which tells what
    the cross adds to its parts.
    """
    features = {feature.name: feature for feature in schema.id_features}
    links: list[set[tuple[str, str]]] = []
    for feature in features.values():
        if not feature.computed:
            columns = [feature.column, *([feature.weights] if feature.weights is not None else [])]
            links.append({("feature", feature.name), *(("column", name) for name in columns)})
        if feature.aligned_with is not None:
            aligned = {*_sources(features, feature.name), *_sources(features, feature.aligned_with)}
            links.append({("feature", name) for name in aligned})
    links += [{("dense", name), ("column", name)} for name in schema.dense_names]
    groups = [_group(schema, members) for members in _joined(links)]
    aligned_names = {name for f in features.values() if f.aligned_with is not None for name in (f.name, f.aligned_with)}
    return groups + [InputGroup(n, (n,)) for n, f in features.items() if f.cross and n not in aligned_names]


def _sources(features: dict[str, IdFeature], name: str) -> list[str]:
    """Returns the features that are read for a feature: itself, unless it is computed."""
    feature = features[name]
    parts = feature.cross or ((feature.of,) if feature.of is not None else ())
    return [source for part in parts for source in _sources(features, part)] if parts else [name]


def _joined(links: Iterable[set[tuple[str, str]]]) -> list[set[tuple[str, str]]]:
    """Returns the unions of sets that have members in common, in the order of their first set."""
    joined: list[set[tuple[str, str]]] = []
    for link in links:
        touched = [each for each in joined if each & link]
        if not touched:
            joined.append(set(link))
            continue
        touched[0].update(link, *touched[1:])
        joined = [each for each in joined if not any(each is other for other in touched[1:])]
    return joined


def _group(schema: Schema, members: set[tuple[str, str]]) -> InputGroup:
    features = {feature.name: feature for feature in schema.id_features}
    own = [f for f in schema.id_features if ("feature", f.name) in members]
    dense = [name for name in schema.dense_names if ("dense", name) in members]
    names = {f.name for f in own}
    following = [n for n, f in features.items() if f.computed and not names.isdisjoint(_sources(features, n))]
    columns = dict.fromkeys([*(f.column for f in own), *dense])
    return InputGroup(", ".join(columns), tuple(f.name for f in own), tuple(dense), tuple(following))


def permuted(schema: Schema, batch: Batch, group: InputGroup, start: int, order: Int64Array) -> Batch:
    """Returns some rows of a batch, with the values of a group of other rows.

    Args:
        schema: of the batch.
        batch: all rows.
        group: what changes.
        start: the first row to return.
        order: int64 `[n]`; row `start + i` gets the group's values of row `order[i]`.
    """
    columns = {name: batch.id_features[name].take(order) for name in group.id_features}
    dense = batch.dense[order] if group.dense_features else batch.dense
    return _changed(schema, batch, group, start, len(order), columns, dense)


def emptied(schema: Schema, batch: Batch, group: InputGroup, start: int, count: int, means: Floats) -> Batch:
    """Returns some rows of a batch in which a group carries nothing.

    No row has an id of the ID-type features: pooled embeddings are zeros, and sequences are empty. Values of the others
    are replaced by means.

    Args:
        schema: of the batch.
        batch: all rows.
        group: what changes.
        start: the first row to return.
        count: number of rows.
        means: float32 `[Schema.dense_width]`.
    """
    nothing = IdColumn(np.empty(0, np.uint64), np.zeros(count + 1, np.int64))
    dense = np.broadcast_to(means, (count, len(means)))
    return _changed(schema, batch, group, start, count, dict.fromkeys(group.id_features, nothing), dense)


def _changed(
    schema: Schema,
    batch: Batch,
    group: InputGroup,
    start: int,
    count: int,
    columns: dict[str, IdColumn],
    dense: Floats,
) -> Batch:
    """Returns rows with these columns of a group, and what follows from them."""
    rows = batch.slice(start, start + count)
    ids = {**rows.id_features, **columns}
    for name in group.following:
        del ids[name]
    add_computed(schema, ids)
    values = rows.dense
    if group.dense_features:
        values = rows.dense.copy()
        for name in group.dense_features:
            values[:, schema.dense_slices[name]] = dense[:, schema.dense_slices[name]]
    return dataclasses.replace(rows, id_features={f.name: ids[f.name] for f in schema.id_features}, dense=values)
