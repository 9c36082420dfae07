"""Draws items that users did not choose: the catalog, and the reader that adds the samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from persia.batching.batch import Batch
from persia.batching.computed_ids import add_computed
from persia.batching.id_column import IdColumn
from persia.checks import MAX_SEED, check_choice, check_integer, check_number
from persia.data.reader import InputReader, Reader, share_of
from persia.errors import ConfigError, DataError
from persia.schema import InputRules, Schema, input_rules_of
from persia.services import Divisible, Seekable, Sharded, fingerprint_of
from persia.types import BoolArray, Floats, Ids, Int64Array, SourceFingerprint

__all__ = ["ItemCatalog", "NegativeSampling", "check_features", "item_catalog"]

MERGED_ROWS = 1 << 16
"""Minimum number of positive samples that `item_catalog` collects before it merges them. Once it has more items than
that, it collects as many samples as items."""

MAX_DRAWS = 20
"""Maximum number of redraws of a negative that equals the positive item; then the negative is left out."""


@dataclass(frozen=True)
class ItemCatalog:
    """The items of a data set.

    Attributes:
        ids: ids by feature of the item, uint64 `[items]`; entry i of each array is of item i.
        counts: number of positive samples of each item, int64 `[items]`.

    Raises:
        ConfigError: there are no items, or an array has another dtype or shape, or a count is negative.
    """

    ids: Mapping[str, Ids]
    counts: Int64Array

    def __post_init__(self) -> None:
        if not isinstance(self.ids, Mapping) or not self.ids:
            raise ConfigError("ItemCatalog.ids has no feature; give a dict with the ids of each.", field="ids")
        items = len(self.counts) if isinstance(self.counts, np.ndarray) and self.counts.ndim == 1 else 0
        columns = [(f"ids[{name!r}]", ids, np.uint64) for name, ids in self.ids.items()]
        for name, array, dtype in [("counts", self.counts, np.int64), *columns]:
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != (items,) or not items:
                actual = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
                raise ConfigError(
                    f"ItemCatalog.{name} is {actual}; give {np.dtype(dtype)}[{items or 'items'}], one number for each "
                    "of one or more items.",
                    field=name,
                )
        if self.counts.min() < 0:
            at = int(self.counts.argmin())
            raise ConfigError(
                f"ItemCatalog.counts has {self.counts[at]} for item {at}; counts are 0 or more.", field="counts"
            )


def item_catalog(reader: Reader, features: Sequence[str]) -> ItemCatalog:
    """Collects the items of the positive samples of a reader in one pass.

    Args:
        reader: the samples.
        features: the item's ID-type features, the parts of its identity.

    Raises:
        ConfigError: a feature is unknown, or there is none.
        DataError: a sample has no id, or several, of a feature; or no sample is positive.
    """
    check_features(reader.schema, features)
    _check_binary(reader.schema)
    items = np.empty((0, len(features)), np.uint64)
    counts = np.empty(0, np.int64)
    pending: list[NDArray[np.uint64]] = []
    pending_rows = 0
    for number, batch in enumerate(reader.batches()):
        rows = np.stack([_single(batch, name, number) for name in features], 1)[_positive(batch, number)]
        pending.append(rows)
        pending_rows += len(rows)
        # Merging as many samples as there are items bounds the memory by the items, and each sample is sorted
        # only a few times, for any number of batches.
        if pending_rows >= max(MERGED_ROWS, len(items)):
            items, counts = _merged(items, counts, pending)
            pending, pending_rows = [], 0
    items, counts = _merged(items, counts, pending)
    if not len(items):
        raise DataError("No sample is positive, so there are no items; see the reader's labels.")
    return ItemCatalog({name: items[:, i].copy() for i, name in enumerate(features)}, counts)


def _merged(
    items: NDArray[np.uint64], counts: Int64Array, rows: Sequence[NDArray[np.uint64]]
) -> tuple[NDArray[np.uint64], Int64Array]:
    """Returns the distinct items `[items, features]` and their counts after adding `rows`."""
    merged, inverse = np.unique(np.concatenate([items, *rows]), axis=0, return_inverse=True)
    total = np.bincount(inverse.reshape(-1)[len(items) :], minlength=len(merged))
    total[inverse.reshape(-1)[: len(items)]] += counts
    return merged, total.astype(np.int64)


def _check_binary(schema: Schema) -> None:
    """Raises ConfigError if a label is not binary, as a negative sample has no value of it."""
    for label in schema.targets:
        if label.kind != "binary":
            raise ConfigError(
                f"Label({label.name!r}) is of kind {label.kind!r}, of which a negative sample has no value; sample "
                "negatives for binary labels only.",
                field="labels",
            )


@dataclass(frozen=True)
class NegativeSampling:
    """The reader that `negatives` returns. Its fields are the function's arguments, and its share of the batches."""

    reader: Reader
    features: tuple[str, ...]
    count: int
    by: Literal["in_batch", "uniform", "popularity"] = "in_batch"
    catalog: ItemCatalog | None = None
    power: float = 0.75
    seed: int = 0
    share: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        check_features(self.schema, self.features)
        _check_binary(self.schema)
        check_integer("count", self.count, 1)
        check_choice("by", self.by, ("in_batch", "uniform", "popularity"))
        check_number("power", self.power, 0)
        check_integer("seed", self.seed, 0, MAX_SEED)
        for feature in map(self.schema.feature, self.features):
            if feature.computed:
                raise ConfigError(
                    f"{feature.name!r} is computed from {', '.join(feature.cross) or feature.of}; name the item's "
                    "features among these, and computed features follow.",
                    field="features",
                )
        if (self.by == "in_batch") != (self.catalog is None):
            raise ConfigError(
                f"by = {self.by!r} {'takes no' if self.by == 'in_batch' else 'needs a'} catalog; give "
                'item_catalog(reader, features) for "uniform" and "popularity" only.',
                field="catalog",
            )
        if self.catalog is not None:
            for name in self.features:
                if name not in self.catalog.ids:
                    raise ConfigError(
                        f"The catalog lacks feature {name!r}; it has {list(self.catalog.ids)}.", field=name
                    )
            if self.by == "popularity" and not self.catalog.counts.any():
                raise ConfigError(
                    'All counts of the catalog are 0, so popularity is undefined; set by = "uniform".', field="catalog"
                )

    @property
    def schema(self) -> Schema:
        """The schema of the other reader."""
        return self.reader.schema

    @property
    def input_rules(self) -> InputRules | None:
        """The rules of the other reader for missing values and lists."""
        return input_rules_of(self.reader)

    def inputs(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yields columns of the other reader before the rules of features are applied, without negatives."""
        return self._input_reader().inputs(names)

    def with_schema(self, schema: Schema) -> NegativeSampling:
        """Returns a reader of the same samples for another schema, such as one that is fitted.

        Raises:
            ConfigError: the schema of the other reader is fixed.
        """
        return replace(self, reader=self._input_reader().with_schema(schema))

    def _input_reader(self) -> InputReader:
        if not isinstance(self.reader, InputReader):
            raise ConfigError(
                f"The schema of {type(self.reader).__name__} is fixed; give a reader of persia.data.csv, parquet, "
                "jsonl or arrow.",
                field="reader",
            )
        return self.reader

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """See `Reader.batches`."""
        index, every = self.share
        for number, batch in enumerate(self._positives(epoch, start), start):
            yield self._with_negatives(batch, epoch, number * every + index)

    def __iter__(self) -> Iterator[Batch]:
        """Iterates over the first pass."""
        return self.batches()

    def fingerprint(self) -> SourceFingerprint | None:
        """Returns the fingerprint of the other reader: negatives do not move its samples to other batches."""
        of_reader = fingerprint_of(self.reader)
        return None if of_reader is None else of_reader.ordered(share=self.share)

    def of_parts(self, order: Sequence[int], read: Sequence[int]) -> NegativeSampling:
        """See `persia.services.Divisible`."""
        assert isinstance(self.reader, Divisible)  # Else it has one part.
        return replace(self, reader=self.reader.of_parts(order, read))

    def shard(self, index: int, count: int) -> NegativeSampling:
        """Returns a reader of the batches with number % count == index.

        It skips other batches as cheaply as the other reader does; a reader without `shard` reads them.
        """
        return replace(self, share=share_of(self.share, index, count))

    def _positives(self, epoch: int, start: int) -> Iterator[Batch]:
        """Iterates over the share of the other reader, without its first `start` batches."""
        index, every = self.share
        if every > 1 and isinstance(self.reader, Sharded):
            part: Seekable = self.reader.shard(index, every)
            return part.batches(epoch, start)
        return islice(self.reader.batches(epoch, start * every + index), None, None, every)

    def _with_negatives(self, batch: Batch, epoch: int, number: int) -> Batch:
        return self.added(batch, np.random.Generator(np.random.PCG64((self.seed, epoch, number))), number)

    def added(self, batch: Batch, rng: np.random.Generator, number: int) -> Batch:
        """Returns a batch with negatives.

        Args:
            batch: the samples.
            rng: generator that draws the negatives.
            number: number of the batch, for errors.
        """
        own = {name: _single(batch, name, number) for name in self.features}
        pool = own if self.catalog is None else self.catalog.ids
        of = np.repeat(np.flatnonzero(_positive(batch, number)), self.count)
        drawn = self._draw(rng, len(of), len(batch))
        for _ in range(MAX_DRAWS):
            same = self._same(pool, drawn, own, of)
            if not same.any():
                break
            drawn[same] = self._draw(rng, int(same.sum()), len(batch))
        different = ~self._same(pool, drawn, own, of)
        of, drawn = of[different], drawn[different]
        # A stable sort by the sample that each row belongs to puts negatives after their positive sample.
        order = np.argsort(np.concatenate([np.arange(len(batch)), of]), kind="stable")
        samples = batch.take(np.concatenate([np.arange(len(batch)), of])[order])
        replaced = {name: IdColumn(np.concatenate([own[name], pool[name][drawn]])[order]) for name in self.features}
        labels = samples.labels.copy()
        labels[order >= len(batch)] = 0.0
        ids = {name: column for name, column in samples.id_features.items() if name not in self._following}
        ids |= replaced
        add_computed(self.schema, ids)
        ids = {name: ids[name] for name in samples.id_features}
        return dataclasses.replace(samples, id_features=ids, labels=labels)

    def _draw(self, rng: np.random.Generator, count: int, rows: int) -> Int64Array:
        """Draws items of the pool."""
        if self.catalog is None:
            return rng.integers(0, rows, count)
        if self.by == "uniform":
            return rng.integers(0, len(self.catalog.counts), count)
        return np.searchsorted(self._cumulative, rng.random(count), side="right").astype(np.int64)

    def _same(self, pool: Mapping[str, Ids], drawn: Int64Array, own: Mapping[str, Ids], of: Int64Array) -> BoolArray:
        """Returns which drawn items equal the item of their positive sample."""
        same = np.ones(len(of), np.bool_)
        for name in self.features:
            np.logical_and(same, pool[name][drawn] == own[name][of], out=same)
        return same

    @cached_property
    def _following(self) -> frozenset[str]:
        """Returns the features that are computed from the item's features."""
        names = set(self.features)
        names |= {f.name for f in self.schema.id_features if names.intersection(f.cross)}
        names |= {f.name for f in self.schema.id_features if f.of in names}  # Also of crosses.
        return frozenset(names.difference(self.features))

    @cached_property
    def _cumulative(self) -> Floats:
        """Returns the cumulative probabilities of the items, without the last one, which is 1."""
        assert self.catalog is not None
        # Relative to the largest count, as powers of counts may exceed float64.
        weights = np.cumsum((self.catalog.counts / self.catalog.counts.max()) ** self.power)
        cumulative: Floats = weights[:-1] / weights[-1]
        return cumulative


def check_features(schema: Schema, features: Sequence[str]) -> None:
    """Raises ConfigError for features that negatives cannot replace."""
    if isinstance(features, str) or not features:
        raise ConfigError(f"Invalid features = {features!r}; expected a list of the item's features.", field="features")
    for name in features:
        schema.feature(name)


def _positive(batch: Batch, number: int) -> BoolArray:
    """Returns which samples are positive."""
    if not batch.labels.shape[1]:
        raise DataError(f"Batch {number} has no labels, which mark positive samples; read them.", batch=number)
    positive: BoolArray = np.asarray((batch.labels > 0).any(1))
    return positive


def _single(batch: Batch, name: str, number: int) -> Ids:
    """Returns the ids of a feature that has one for each sample."""
    column = batch.id_features[name]
    if column.weights is not None:
        raise DataError(
            f"Feature {name!r} of the item has weights of its ids, which a negative would lack; declare it without "
            "weights.",
            feature=name,
        )
    if column.offsets is None:
        return column.values
    lengths = np.diff(column.offsets)
    if (lengths != 1).any():
        row = int((lengths != 1).argmax())
        raise DataError(
            f"Feature {name!r} of the item has {lengths[row]} ids at row {row} of batch {number}; an item has one id "
            "of each of its features.",
            feature=name,
            row=row,
        )
    return column.values
