"""The reader that adds drawn items to each batch, which all its samples share, and log(q) of items."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from persia.batching.batch import Batch
from persia.batching.computed_ids import add_computed
from persia.batching.id_column import IdColumn
from persia.checks import check_choice, check_integer, check_number
from persia.data.event_budget import sequence_lengths
from persia.data.item_catalogs import (
    IdSequence,
    ItemCatalog,
    ItemCounts,
    ItemDraws,
    check_catalog,
    counted_of,
    events_of,
    single,
)
from persia.data.negative_sampling import SampledReader
from persia.data.reader import Order, StreamReader, canonical
from persia.errors import ConfigError, DataError
from persia.schema import DenseFeature, IdFeature, Schema
from persia.types import Floats

__all__ = ["SharedNegatives"]

WINDOW = 100
"""Default `window` in batches."""


@dataclass(frozen=True)
class SharedNegatives(SampledReader):
    """The reader that `shared_negatives` returns. Its fields are the function's arguments, and its share.

    `schema` is the schema of the other reader and what is added: ID-type features `negative_<feature>`, of which
    consecutive samples have about equally many, also for features mapped from the item's, and dense features `log_q`,
    `history_log_q` and `negative_log_q`.
    """

    count: int | None = None
    by: Literal["in_batch", "uniform", "popularity"] = "uniform"
    catalog: ItemCatalog | None = None
    history: tuple[str, ...] | None = None
    power: float = 0.75
    per_sample: int = 1
    window: int = WINDOW

    def __post_init__(self) -> None:
        self._check_item()
        check_choice("by", self.by, ("in_batch", "uniform", "popularity"))
        if self.by == "in_batch" and self.count is not None:
            raise ConfigError(
                'by = "in_batch" takes no count: the items of the batch are the negatives, and none are drawn.',
                field="count",
            )
        if self.by != "in_batch":
            check_integer("count", self.count, 1)
        check_integer("per_sample", self.per_sample, 1)
        check_integer("window", self.window, 1)
        check_number("power", self.power, 0)
        if self.catalog is not None:
            check_catalog(self.catalog, self.features, self.by)
        counted_of(self.reader.schema, self.features, self.history)
        self._check_smallest_batches()
        _ = self.schema  # Raises ConfigError if a name is taken.

    @cached_property
    def schema(self) -> Schema:
        """The schema of the batches."""
        schema = self.reader.schema
        ids, dense = [*schema.id_features], [*schema.dense_features]
        if self.by != "in_batch":
            for of in map(schema.feature, (*self.features, *self._mapped)):
                ids.append(
                    IdFeature(
                        _negative(of.name),
                        table=of.table_name,
                        pooling=None,
                        max_length=self.per_sample,
                        kind=of.kind,
                        of=None if of.of is None else _negative(of.of),
                        mapping=of.mapping,
                    )
                )
        if self.by != "uniform":
            dense.append(DenseFeature("log_q", fill=0.0))
            if self._events:
                dense.append(DenseFeature("history_log_q", size=self._events[0].most, fill=0.0))
        if self.by == "popularity":
            dense.append(DenseFeature("negative_log_q", size=self.per_sample, fill=0.0))
        return _with_features(schema, ids, dense)

    def inner_schema(self, schema: Schema) -> Schema:
        """Returns the schema of the other reader if that of this one is `schema`."""
        of = self.reader.schema
        dense = [each for each in schema.dense if each.name in of.dense_names]
        drawn = {_negative(name) for name in (*self.features, *self._mapped)}
        return _with_features(schema, [f for f in schema.id_features if f.name not in drawn], dense)

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """See `Reader.batches`."""
        index, every = self.share
        window = _Window(self, epoch)
        for number, batch in enumerate(self._positives(epoch, start), start):
            at = number * every + index
            if at == 0 and not self._similar:  # Else it may be the rest of a block.
                self._check_capacity(batch)
            draws = window.draws(at, batch) if self.catalog is None else None
            yield self.added(batch, self.generator(epoch, at), at, draws)

    def counts(self) -> ItemCounts:
        """Returns counts of the items that are drawn, without any."""
        if self.by == "in_batch":  # Each sample's item is a negative of the others, chosen or not; no event is one.
            return ItemCounts(self.features, positive_only=False)
        return ItemCounts(self.features, self._events)

    def draws_of(self, batches: Iterable[tuple[int, Batch]]) -> ItemDraws | None:
        """Returns draws of the items of some batches, which are numbered for errors; None if they have none."""
        counts = self.counts()
        for number, batch in batches:
            counts.add(batch, number)
        return self.draws_by(counts)

    def draws_by(self, counts: ItemCounts) -> ItemDraws | None:
        """Returns draws of the items that were counted; None without any."""
        catalog = counts.catalog()
        return None if catalog is None else self._draws_from(catalog)

    def added(self, batch: Batch, rng: np.random.Generator, number: int, draws: ItemDraws | None = None) -> Batch:
        """Returns a batch with drawn items and log(q).

        Args:
            batch: the samples.
            rng: generator that draws the items.
            number: number of the batch, for errors.
            draws: draws items; None for those of the catalog, or of the batch if there is no catalog.
        """
        if draws is None:
            draws = self.draws_of([(number, batch)]) if self._of_catalog is None else self._of_catalog
        rows, ids, dense = len(batch), dict(batch.id_features), [batch.dense]
        if self.by != "uniform":
            dense.append(_log_q(draws, [single(batch, name, number) for name in self.features])[:, None])
            if self._events:
                columns = events_of(batch, self._events, number)
                log_q = _log_q(draws, [column.values for column in columns])
                dense.append(_padded(log_q, columns[0].offsets, self._events[0].most))
        if self.by != "in_batch":
            total = 0 if draws is None else min(self.count or 0, rows * self.per_sample)
            offsets = np.arange(rows + 1) * total // max(rows, 1)
            drawn, log_q = [np.empty(0, np.uint64)] * len(self.features), np.empty(0, np.float32)
            if draws is not None:
                places = draws.draw(rng, total)
                drawn = draws.ids(places)
                if self.by == "popularity":
                    log_q = draws.log_q_of_drawn(places)
            for name, values in zip(self.features, drawn, strict=True):
                ids[_negative(name)] = IdColumn(values, offsets)
            add_computed(self.schema, ids)
            if self.by == "popularity":
                dense.append(_padded(log_q, offsets, self.per_sample))
        return canonical(dataclasses.replace(batch, id_features=ids, dense=np.concatenate(dense, 1)))

    def _draws_from(self, catalog: ItemCatalog) -> ItemDraws:
        if self.by == "in_batch":
            return ItemDraws(catalog, self.features, "popularity", 1.0)
        return ItemDraws(catalog, self.features, self.by, self.power)

    def _check_capacity(self, batch: Batch) -> None:
        """Raises DataError if the first batch is too small for all negatives."""
        if self.by != "in_batch" and self.count is not None and len(batch) * self.per_sample < self.count:
            raise DataError(
                f"The first batch has {len(batch)} samples with up to {self.per_sample} negatives each, fewer than "
                f"count = {self.count}; set per_sample to {-(-self.count // max(len(batch), 1))}, or a lower count.",
                batch=0,
            )

    def _check_smallest_batches(self) -> None:
        """Raises ConfigError if batches of similar lengths are too small for all negatives where they are longest."""
        if self.by == "in_batch" or self.count is None or not self._similar:
            return
        order = self._similar
        longest = max(sequence_lengths(self.reader.schema, order.tokens_per_batch).values())
        rows = min(order.batch_size, order.tokens_per_batch // longest)
        if rows * self.per_sample < self.count:
            raise ConfigError(
                f"Batches of the longest histories have {rows} samples (tokens_per_batch = {order.tokens_per_batch}) "
                f"with up to {self.per_sample} negatives each, fewer than count = {self.count}; set per_sample to "
                f"{-(-self.count // rows)}, or a lower count.",
                field="per_sample",
            )

    @cached_property
    def _similar(self) -> Order | None:
        """How the other reader cuts batches of similar lengths; None if it cuts none."""
        order = self.reader.order if isinstance(self.reader, StreamReader) else None
        return order if order is not None and order.similar_lengths else None

    @cached_property
    def _mapped(self) -> tuple[str, ...]:
        """The features whose ids are mapped from those of the item's features, such as prefixes of its codes."""
        return tuple(each.name for each in self.reader.schema.id_features if each.of in self.features)

    @cached_property
    def _events(self) -> tuple[IdSequence, ...]:
        return counted_of(self.reader.schema, self.features, self.history)

    @cached_property
    def _of_catalog(self) -> ItemDraws | None:
        return None if self.catalog is None else self._draws_from(self.catalog)


class _Window:
    """The items of the whole window of batches before the window of a batch, of one pass. Not thread-safe.

    It depends on the number of a batch only, not on where the pass began, nor on the share that is read.
    """

    def __init__(self, sampling: SharedNegatives, epoch: int) -> None:
        self._sampling = sampling
        self._epoch = epoch
        self._number = -1
        self._draws: ItemDraws | None = None
        self._counts = sampling.counts()
        self._counted = 0
        """Number of batches of the present window in the counts."""

    def draws(self, at: int, batch: Batch) -> ItemDraws | None:
        """Returns draws of the items before a batch, and notes its own; None in the first window.

        Args:
            at: number of the batch, larger than that of the call before.
            batch: the batch.
        """
        size, sampling = self._sampling.window, self._sampling
        number = at // size
        if number != self._number:
            if number == 0:
                self._draws = None
            elif self._number == number - 1 and self._counted == size:
                self._draws = sampling.draws_by(self._counts)
            else:
                first = (number - 1) * size
                before = islice(sampling.reader.batches(self._epoch, first), size)
                self._draws = sampling.draws_of(enumerate(before, first))
            self._number, self._counts, self._counted = number, sampling.counts(), 0
        if sampling.share[1] == 1:
            self._counts.add(batch, at)
            self._counted += 1
        return self._draws


def _negative(name: str) -> str:
    """Returns the name of the feature of drawn items for a feature of the item."""
    return f"negative_{name}"


def _with_features(schema: Schema, ids: Sequence[IdFeature], dense: Sequence[str | DenseFeature]) -> Schema:
    return msgspec.structs.replace(schema, id_features=ids, dense_features=dense)


def _log_q(draws: ItemDraws | None, items: Sequence[NDArray[np.uint64]]) -> Floats:
    return np.zeros(len(items[0]), np.float32) if draws is None else draws.log_q(items)


def _padded(values: Floats, offsets: NDArray[np.int64] | None, length: int) -> Floats:
    """Returns lists of at most `length` numbers side by side, `[rows, length]`, followed by zeros."""
    assert offsets is not None
    rows = len(offsets) - 1
    if len(values) == rows * length:  # No list is longer than that.
        return values.reshape(rows, length)
    padded = np.zeros((rows, length), np.float32)
    padded[np.arange(length) < np.diff(offsets)[:, None]] = values
    return padded
