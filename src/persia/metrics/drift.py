"""Drift between training and serving: the distributions of inputs and predictions on both sides."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Final

import msgspec
import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from persia.errors import ConfigError, DataError
from persia.metrics.checks import State
from persia.metrics.psi import ID_BUCKETS, LENGTH_BUCKETS, bucket_ids, bucket_lengths, psi
from persia.schema import Schema
from persia.types import Floats, Ids, Int64Array

__all__ = [
    "MIN_ROWS",
    "DriftCounts",
    "DriftReference",
    "ValueBuckets",
    "compared_columns",
    "count_ids",
    "merged_drift",
]

MIN_ROWS: Final = 1000
"""Minimum number of rows of each side for an index. With fewer rows chance alone would make it large."""

QUANTILES: Final = 10
KEYS: Final = 1 << 16
HALVED_AT: Final = 1 << 20
SCORES_HALVED_AT: Final = 1 << 14
"""Lower than `HALVED_AT`: predictions change as the network learns, so old ones are no reference."""

MAX_VALUES: Final = 8
"""Maximum number of values of a dense feature whose drift is measured."""

LARGEST: Final = float(np.finfo(np.float32).max)

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
Name = Annotated[str, msgspec.Meta(max_length=1024)]


def count_ids(columns: Sequence[tuple[Ids, Int64Array | None]]) -> Int64Array:
    """Counts the ids of some rows.

    Args:
        columns: by feature, the ids `[n]`, and offsets `[rows + 1]`, or None if each row has one id.

    Returns:
        int64 `[features, ID_BUCKETS + LENGTH_BUCKETS]`: ids by bucket of a hash, then rows by their number of ids.
    """
    counts = np.zeros((len(columns), ID_BUCKETS + LENGTH_BUCKETS), np.int64)
    for number, (values, offsets) in enumerate(columns):
        counts[number, :ID_BUCKETS] = bucket_ids(values)
        lengths = np.ones(len(values), np.int64) if offsets is None else np.diff(offsets)
        counts[number, ID_BUCKETS:] = bucket_lengths(lengths)
    return counts


class ValueBuckets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The distribution of a number.

    Args:
        edges: edges of the buckets, float32, ascending. A value that equals an edge belongs to the bucket above it.
        counts: rows below the first edge, between two edges, from the last edge on, and NaN.
    """

    edges: Annotated[list[float], msgspec.Meta(max_length=QUANTILES + 1)]
    counts: Annotated[list[Count], msgspec.Meta(max_length=QUANTILES + 3)]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in itertools.pairwise(self.edges))
        finite = all(abs(edge) <= LARGEST for edge in self.edges)
        if len(self.counts) != len(self.edges) + 2 or not rising or not finite:
            raise ConfigError(
                f"Invalid buckets with {len(self.counts)} counts for {len(self.edges)} edges; expected finite, "
                "ascending edges, and two more counts than edges.",
                field="edges",
            )


class DriftReference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Distributions in training, the reference for distributions in serving.

    Args:
        rows: number of counted rows.
        ids: by ID-type feature, ids by bucket of a hash.
        lengths: by ID-type feature, rows by their number of ids.
        dense: distribution of values, by dense value, see `Schema.dense_values`.
        predictions: distribution of predictions, by label: of logits, or as `single_values` of labels of other kinds.
    """

    rows: Count
    ids: dict[Name, Annotated[list[Count], msgspec.Meta(min_length=ID_BUCKETS, max_length=ID_BUCKETS)]]
    lengths: dict[Name, Annotated[list[Count], msgspec.Meta(min_length=LENGTH_BUCKETS, max_length=LENGTH_BUCKETS)]]
    dense: dict[Name, ValueBuckets]
    predictions: dict[Name, ValueBuckets]


def compared_columns(schema: Schema) -> dict[str, int]:
    """Returns the columns of `Batch.dense` that drift is measured of, by name.

    Vectors of more than 8 values are left out: counts take up to 512 KiB for each value.
    """
    names, slices = schema.dense_values, schema.dense_slices
    parts = [slices[each.name] for each in schema.dense if each.values <= MAX_VALUES]
    return {names[column]: column for part in parts for column in range(part.start, part.stop)}


class DriftCounts:
    """The distributions of inputs and predictions, in bounded memory. Not thread-safe.

    Numbers are counted by their upper 16 bits, so a bucket is at most 0.8 % wide, and the counts of several NN workers
    can be added. Counts are halved whenever they reach a million rows, or 16,384 predictions, so recent ones weigh
    more. Memory: at most 512 KiB for each dense value and label.

    Args:
        ids: names of the ID-type features.
        dense: names of the dense values, `Schema.dense_values`.
        labels: names of the labels.
    """

    def __init__(self, ids: Sequence[str], dense: Sequence[str], labels: Sequence[str]) -> None:
        self.names = tuple(ids), tuple(dense), tuple(labels)
        self.clear()

    def clear(self) -> None:
        """Removes all rows."""
        ids, dense, labels = self.names
        self.rows = self._scored = 0
        self._ids = np.zeros((len(ids), ID_BUCKETS + LENGTH_BUCKETS), np.int64)
        self._dense = np.zeros((len(dense), KEYS), np.int64)  # Pages that are never written take no memory.
        self._logits = np.zeros((len(labels), KEYS), np.int64)

    def add_rows(self, dense: Floats, ids: Int64Array) -> None:
        """Counts rows.

        Args:
            dense: dense values, float32 `[rows, dense values]`.
            ids: counts of the ids of the same rows, from `count_ids`.
        """
        self._ids += ids
        _add(self._dense, dense)
        self.rows += len(dense)
        if self.rows >= HALVED_AT:
            self._ids >>= 1
            self._dense >>= 1
            self.rows >>= 1

    def add_logits(self, logits: Floats) -> None:
        """Counts predictions, float32 `[rows, labels]`: see `single_values`."""
        _add(self._logits, logits)
        self._scored += len(logits)
        if self._scored >= SCORES_HALVED_AT:
            self._logits >>= 1
            self._scored >>= 1

    def merge(self, other: DriftCounts) -> None:
        """Adds the rows of another object with the same names."""
        for own_counts, other_counts in zip(self._arrays(), other._arrays(), strict=True):
            own_counts += other_counts
        self.rows += other.rows
        self._scored += other._scored

    def _arrays(self) -> tuple[Int64Array, ...]:
        return self._ids, self._dense, self._logits

    # --- results ------------------------------------------------------------------------------------------------

    def reference(self) -> DriftReference | None:
        """Returns the distributions, numbers in buckets of about equal size; None below `MIN_ROWS` rows."""
        if self.rows < MIN_ROWS:
            return None
        names, dense, labels = self.names
        ids, lengths = np.split(self._ids, [ID_BUCKETS], axis=1)
        return DriftReference(
            self.rows,
            dict(zip(names, ids.tolist(), strict=True)),
            dict(zip(names, lengths.tolist(), strict=True)),
            {name: _quantiles(counts) for name, counts in zip(dense, self._dense, strict=True)},
            {name: _quantiles(counts) for name, counts in zip(labels, self._logits, strict=True)},
        )

    def compared(self, reference: DriftReference) -> dict[str, float]:
        """Returns the PSI against a reference; empty below `MIN_ROWS` rows on either side.

        Names are "<feature>" for ids and dense values, "<feature>.length" for numbers of ids, and "<label>.prediction".
        Names that only one side has are left out.
        """
        if min(self.rows, reference.rows) < MIN_ROWS:
            return {}
        names, dense, labels = self.names
        indices: dict[str, float] = {}
        for name, counts in zip(names, self._ids, strict=True):
            if name in reference.ids and name in reference.lengths:
                indices[name] = psi(reference.ids[name], counts[:ID_BUCKETS])
                indices[f"{name}.length"] = psi(reference.lengths[name], counts[ID_BUCKETS:])
        for keys, known, suffix, counted in (
            (dense, reference.dense, "", self._dense),
            (labels, reference.predictions, ".prediction", self._logits),
        ):
            for name, counts in zip(keys, counted, strict=True):
                if name in known:
                    buckets = known[name]
                    indices[name + suffix] = psi(buckets.counts, _by_edges(counts, buckets.edges))
        return {name: index for name, index in indices.items() if not math.isnan(index)}

    # --- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """Returns the nonzero counts with their positions."""
        state: State = {"rows": np.array([self.rows, self._scored])}
        for number, counts in enumerate(self._arrays()):
            places = np.flatnonzero(counts)
            state[f"{number}.places"], state[f"{number}.counts"] = places, counts.reshape(-1)[places]
        return state

    def load_state_dict(self, state: Mapping[str, NDArray[np.int64]]) -> None:
        """Replaces the counts by the counts of a state with the same names."""
        self.clear()
        self.rows, self._scored = (int(n) for n in state["rows"])
        for number, counts in enumerate(self._arrays()):
            counts.reshape(-1)[state[f"{number}.places"]] = state[f"{number}.counts"]


def merged_drift(counts: DriftCounts, gather: Callable[[bytes], list[bytes]]) -> DriftCounts:
    """Returns the sum of the counts of all NN workers, the same on each. Blocks.

    Args:
        counts: counts of this NN worker; not modified.
        gather: `AllReduce.gather`, or `SingleReplica.gather`.
    """
    total = DriftCounts(*counts.names)
    for payload in gather(safetensors.numpy.save(counts.state_dict())):
        part = DriftCounts(*counts.names)
        part.load_state_dict(safetensors.numpy.load(payload))
        total.merge(part)
    return total


def _add(counts: Int64Array, values: Floats) -> None:
    """Adds values `[rows, n]` to counts by key, `[n, KEYS]`.

    Raises:
        DataError: there are more or fewer columns than counts.
    """
    if values.shape[1] != len(counts):
        raise DataError(
            f"Drift counts of {len(counts)} columns got values with {values.shape[1]}; pass one name for each column, "
            "as Schema.dense_values has them."
        )
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    keys = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)) >> 16  # Ascends with the value.
    places = (keys + (np.arange(values.shape[1], dtype=np.uint32) << 16)).reshape(-1)
    used, amounts = np.unique(places, return_counts=True)
    counts.reshape(-1)[used] += amounts


def _key(value: float) -> int:
    """Returns the key of a value: the upper half of its bits, flipped so that it ascends with the value."""
    bits = int(np.float32(value).view(np.uint32))
    return ((~bits if bits >> 31 else bits | 1 << 31) & 0xFFFFFFFF) >> 16


def _least(key: int) -> float:
    """Returns the least value of a key."""
    bits = np.uint32(key << 16)
    bits = bits & np.uint32(0x7FFFFFFF) if bits >> 31 else ~bits
    return float(bits.view(np.float32))


LOWEST, HIGHEST = _key(-math.inf), _key(math.inf)
"""Smallest and largest key of numbers; keys outside belong to NaN."""


def _quantiles(counts: Int64Array) -> ValueBuckets:
    """Returns the buckets of a number, given its counts by key: below the smallest value, ten quantiles, above all."""
    used = LOWEST + np.flatnonzero(counts[LOWEST : HIGHEST + 1])
    edges: list[float] = []
    if len(used):
        sums = np.cumsum(counts[used])
        last = used[np.searchsorted(sums, np.arange(1, QUANTILES) * sums[-1] / QUANTILES)]  # Last key of each bucket.
        keys = np.unique([used[0], *(last + 1), used[-1] + 1]).tolist()
        edges = [edge for edge in map(_least, keys) if math.isfinite(edge)]
    return ValueBuckets(edges, _by_edges(counts, edges))


def _by_edges(counts: Int64Array, edges: Sequence[float]) -> list[int]:
    """Converts counts by key to counts by bucket, `[len(edges) + 2]`. Exact, as edges are the least values of keys."""
    bounds = [LOWEST, *map(_key, edges), HIGHEST + 1]
    numbers = [int(counts[a:b].sum()) for a, b in itertools.pairwise(bounds)]
    return [*numbers, int(counts.sum()) - sum(numbers)]
