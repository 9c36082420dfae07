"""The reader that adds samples of items that users did not choose, and its base."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, Literal, Self

import numpy as np

from persia.batching.batch import Batch
from persia.batching.computed_ids import add_computed
from persia.batching.id_column import IdColumn
from persia.checks import MAX_SEED, check_choice, check_integer, check_number
from persia.data.item_catalogs import (
    ItemCatalog,
    ItemDraws,
    check_binary,
    check_catalog,
    check_features,
    positive,
    single,
)
from persia.data.reader import InputReader, Reader, share_of
from persia.errors import ConfigError
from persia.schema import InputRules, Schema, input_rules_of
from persia.services import Divisible, Seekable, Sharded, fingerprint_of
from persia.types import BoolArray, Ids, Int64Array, SourceFingerprint

__all__ = ["NegativeSampling", "SampledReader"]

MAX_DRAWS = 20
"""Maximum number of redraws of a negative that equals the positive item; then the negative is left out."""


@dataclass(frozen=True)
class SampledReader(ABC):
    """A reader that adds drawn items to the batches of another one. Its share of them is a field, as are its arguments.

    The draws for a batch depend on the seed, the epoch and the number of the batch.
    """

    reader: Reader
    features: tuple[str, ...]
    seed: int = field(default=0, kw_only=True)
    share: tuple[int, int] = field(default=(0, 1), kw_only=True)

    def _check_item(self) -> None:
        """Raises ConfigError if the item's features cannot be drawn, a label is not binary, or the seed is bad."""
        check_integer("seed", self.seed, 0, MAX_SEED)
        check_features(self.reader.schema, self.features)
        check_binary(self.reader.schema)
        for feature in map(self.reader.schema.feature, self.features):
            if feature.computed:
                follow = ", and mapped features follow" if feature.of else ""
                raise ConfigError(
                    f"{feature.name!r} is computed from {', '.join(feature.cross) or feature.of}; name the item's "
                    f"features among these{follow}.",
                    field="features",
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

    def with_schema(self, schema: Schema) -> Self:
        """Returns a reader of the same samples for another schema, such as one that is fitted.

        Raises:
            ConfigError: the schema of the other reader is fixed.
        """
        return replace(self, reader=self._input_reader().with_schema(self.inner_schema(schema)))

    @abstractmethod
    def added(self, batch: Batch, rng: np.random.Generator, number: int) -> Batch:
        """Returns a batch with drawn items.

        Args:
            batch: the samples.
            rng: generator that draws the items.
            number: number of the batch, for errors.
        """

    def generator(self, *key: int) -> np.random.Generator:
        """Returns the generator of the draws for a batch, from the numbers that identify it."""
        return np.random.Generator(np.random.PCG64((self.seed, *key)))

    def inner_schema(self, schema: Schema) -> Schema:
        """Returns the schema of the other reader if that of this one is `schema`."""
        return schema

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
            at = number * every + index
            yield self.added(batch, self.generator(epoch, at), at)

    def __iter__(self) -> Iterator[Batch]:
        """Iterates over the first pass."""
        return self.batches()

    def fingerprint(self) -> SourceFingerprint | None:
        """Returns the fingerprint of the other reader: negatives do not move its samples to other batches."""
        of_reader = fingerprint_of(self.reader)
        return None if of_reader is None else of_reader.ordered(share=self.share)

    def of_parts(self, order: Sequence[int], read: Sequence[int]) -> Self:
        """See `persia.services.Divisible`."""
        assert isinstance(self.reader, Divisible)  # Else it has one part.
        return replace(self, reader=self.reader.of_parts(order, read))

    def shard(self, index: int, count: int) -> Self:
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


@dataclass(frozen=True)
class NegativeSampling(SampledReader):
    """The reader that `negatives` returns. Its fields are the function's arguments, and its share of the batches."""

    count: int
    by: Literal["in_batch", "uniform", "popularity"] = "in_batch"
    catalog: ItemCatalog | None = None
    power: float = 0.75

    def __post_init__(self) -> None:
        self._check_item()
        check_integer("count", self.count, 1)
        check_choice("by", self.by, ("in_batch", "uniform", "popularity"))
        check_number("power", self.power, 0)
        if (self.by == "in_batch") != (self.catalog is None):
            raise ConfigError(
                f"by = {self.by!r} {'takes no' if self.by == 'in_batch' else 'needs a'} catalog; give "
                'item_catalog(reader, features) for "uniform" and "popularity" only.',
                field="catalog",
            )
        if self.catalog is not None:
            check_catalog(self.catalog, self.features, self.by)
        vars(self)  # Here, as two threads that make it corrupt memory with CPython 3.11 (python/cpython#97922).

    def added(self, batch: Batch, rng: np.random.Generator, number: int) -> Batch:
        """Returns a batch with negatives; see `SampledReader.added`."""
        own = {name: single(batch, name, number) for name in self.features}
        pool = own if self.catalog is None else self.catalog.ids
        of = np.repeat(np.flatnonzero(positive(batch, number)), self.count)
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
        return rng.integers(0, rows, count) if self._draws is None else self._draws.draw(rng, count)

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
    def _draws(self) -> ItemDraws | None:
        if self.catalog is None or self.by == "in_batch":
            return None
        return ItemDraws(self.catalog, self.features, self.by, self.power)
