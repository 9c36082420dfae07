"""How all features of a group of tables are pooled by one operation, whatever their number and kind.

A *bag* is the sum of the rows of some ids. A pooled feature has a bag for each sample, a sequence one of at most one id
for each position of each sample. The bags of all features follow each other, and so do their ids: one sum of segments
makes them all. "mean" and "sqrtn" divide bags, and weights multiply rows. The arrays are made on the host, where the
lookup is, so that no shape depends on values that a device has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from persia.nn.row_groups import GroupLayout
from persia.schema import Pooling
from persia.types import BoolArray, Floats, Int32Array, Int64Array, Inverse

__all__ = ["FeatureIndex", "GroupPlan", "PooledFeature", "plan_group"]

PooledFeature = tuple[str, Pooling | None, int | None]
"""Table, pooling and maximum length of a feature."""


class FeatureIndex(NamedTuple):
    """Which rows the samples of a batch have, by feature.

    Attributes:
        inverse: index of each id's row in its table.
        offsets: int64 `[batch + 1]`, without features that have one id per sample.
        weights: of ids, float32, as long as the index; without features whose ids all have weight 1.
    """

    inverse: Mapping[str, Inverse]
    offsets: Mapping[str, Int64Array]
    weights: Mapping[str, Floats]


class GroupPlan(NamedTuple):
    """How the features of a group of tables are pooled.

    Attributes:
        layout: of the rows.
        features: names of the features: pooled ones, and then sequences by their maximum length.
        lengths: maximum length of each if it is a sequence, else None.
        samples: of the batch.
        arrays: by name: `places`, int32, of the rows of all ids; `ends`, int32 `[bags + 1]`, of the ids of each bag,
            from 0 on, if not all bags have one id; `divisors`, float32 `[bags, 1]`, if a bag is divided; `weights`,
            float32 `[ids, 1]`, if an id is weighted; `masks`, bool, of the positions of all sequences.
    """

    layout: GroupLayout
    features: list[str]
    lengths: list[int | None]
    samples: int
    arrays: dict[str, NDArray[Any]]


class _Bags(NamedTuple):
    """The bags of a feature; attributes as in `GroupPlan.arrays`, with ends None for one id each, and counts."""

    inverse: Inverse
    counts: Int64Array | None
    bags: int
    divisors: NDArray[np.float64] | None = None
    weights: Floats | None = None
    mask: BoolArray | None = None


def plan_group(layout: GroupLayout, features: Mapping[str, PooledFeature], index: FeatureIndex) -> GroupPlan | None:
    """Returns how the features of a group of tables are pooled; None without any.

    Args:
        layout: of the group.
        features: of all groups, by name.
        index: of all features.
    """
    first = layout.first()
    own = [(name, table, pooling, most) for name, (table, pooling, most) in features.items() if table in first]
    if not own:
        return None
    # Sequences of one length together, as one operation cuts them apart.
    own.sort(key=lambda feature: (feature[2] is None, feature[3] or 0 if feature[2] is None else 0))
    names, places = [name for name, *_ in own], [first[table] for _, table, _, _ in own]
    if own[-1][2] is not None and not index.offsets and not index.weights:  # Each bag has one id.
        inverse = [index.inverse[name] for name in names]
        return GroupPlan(layout, names, [None] * len(own), len(inverse[0]), {"places": _places(inverse, places)})
    made = []
    for name, _, pooling, most in own:
        of_feature = index.inverse[name], index.offsets.get(name)
        if pooling is None:
            made.append(_sequence(*of_feature, cast("int", most)))
        else:
            made.append(_pooled(*of_feature, pooling, index.weights.get(name)))
    arrays: dict[str, NDArray[Any]] = {"places": _places([bags.inverse for bags in made], places)}
    if any(bags.counts is not None for bags in made):
        arrays["ends"] = _ends(made)
    if any(bags.divisors is not None for bags in made):
        arrays["divisors"] = _joined([bags.divisors for bags in made], [bags.bags for bags in made])
    if any(bags.weights is not None for bags in made):
        arrays["weights"] = _joined([bags.weights for bags in made], [len(bags.inverse) for bags in made])
    if masks := [bags.mask for bags in made if bags.mask is not None]:
        arrays["masks"] = np.concatenate([mask.reshape(-1) for mask in masks])
    _, _, pooling, most = own[0]
    samples = made[0].bags if pooling is not None else made[0].bags // cast("int", most)
    lengths = [None if pooling is not None else most for _, _, pooling, most in own]
    return GroupPlan(layout, names, lengths, samples, arrays)


def _pooled(index: Inverse, offsets: Int64Array | None, pooling: Pooling, weights: Floats | None) -> _Bags:
    counts = None if offsets is None else offsets[1:] - offsets[:-1]
    bags = len(index) if counts is None else len(counts)
    if weights is None:
        divisors = None if counts is None or pooling == "sum" else np.maximum(counts, 1).astype(np.float64)
        if divisors is not None and pooling == "sqrtn":
            np.sqrt(divisors, out=divisors)
        return _Bags(index, counts, bags, divisors)
    if pooling == "sum":
        return _Bags(index, counts, bags, None, weights)
    powers = weights.astype(np.float64)
    if pooling == "sqrtn":
        powers *= powers
    if counts is not None:
        # Without any weight, bincount counts in integers.
        powers = np.bincount(np.repeat(np.arange(bags), counts), powers, bags).astype(np.float64, copy=False)
    divisors = powers if pooling == "mean" else np.sqrt(powers)
    divisors[divisors == 0] = np.inf  # Such a sample has zeros.
    return _Bags(index, counts, bags, divisors, weights)


def _sequence(index: Inverse, offsets: Int64Array | None, most: int) -> _Bags:
    counts = np.ones(len(index), np.int64) if offsets is None else np.diff(offsets)
    if len(counts) and counts.max() > most:
        assert offsets is not None
        position = np.arange(len(index)) - np.repeat(offsets[:-1], counts)
        index = index[position < most]
        counts = np.minimum(counts, most)
    mask = np.arange(most) < counts[:, None]
    of_positions = None if most == 1 and offsets is None else mask.reshape(-1).astype(np.int64)
    return _Bags(index, of_positions, mask.size, mask=mask)


def _places(inverse: list[Inverse], first: list[int]) -> Int32Array:
    """Returns the places of all ids in the group, from those in each table, whose first row has a place, too."""
    places = np.concatenate(inverse, dtype=np.int32, casting="unsafe")
    places += np.repeat(np.array(first, np.int32), list(map(len, inverse)))
    return places


def _ends(made: list[_Bags]) -> Int32Array:
    counts = [np.ones(bags.bags, np.int64) if bags.counts is None else bags.counts for bags in made]
    ends = np.zeros(1 + sum(bags.bags for bags in made), np.int32)
    np.cumsum(np.concatenate(counts), dtype=np.int32, out=ends[1:])
    return ends


def _joined(parts: list[Any], counts: list[int]) -> Floats:
    """Returns factors of all features, float32 `[n, 1]`; 1 for those that have none."""
    whole = np.ones(sum(counts), np.float32)
    end = 0
    for part, count in zip(parts, counts, strict=True):
        begin, end = end, end + count
        if part is not None:
            whole[begin:end] = part
    return whole[:, None]
