"""The `Reader` Protocol, and the parts that all file readers share: skip, shuffle, batch, shard."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.checks import MAX_SEED, check_flag, check_integer, plain
from persia.data.event_budget import Budget, MeasuredRows, cut_events, cut_similar, event_counts, sequence_lengths
from persia.data.whole_groups import Groups, cut_groups, find_groups, permuted
from persia.errors import ConfigError
from persia.schema import InputRules, Schema, input_rules_of
from persia.services import Divisible, fingerprint_of
from persia.types import Int64Array, SourceFingerprint

__all__ = [
    "ColumnSource",
    "InputReader",
    "InputSource",
    "InputStream",
    "Order",
    "Reader",
    "RowSource",
    "StreamReader",
    "canonical",
    "cut",
    "share_of",
]


@runtime_checkable
class Reader(Protocol):
    """A source of batches that can be read repeatedly, from any batch on.

    The same (reader, epoch) always gives the same batches, so a position is one number. Readers are picklable and hold
    no open files. Iterators are independent; each must be used by one thread only.
    """

    @property
    def schema(self) -> Schema:
        """The schema of the batches."""
        ...

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Iterates over one pass, without the first `start` batches.

        Raises:
            DataError: while iterating, if the data do not match the schema; the message names the path and the row.
        """
        ...

    def __iter__(self) -> Iterator[Batch]:
        """The first pass, from its beginning."""
        ...


@runtime_checkable
class InputReader(Reader, Protocol):
    """A reader whose columns can be read before the rules of features are applied, and which takes another schema."""

    def inputs(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yields columns of the schema by name, as `Batch.from_columns` gets them, in pieces of any size."""
        ...

    def with_schema(self, schema: Schema) -> InputReader:
        """Returns a reader of the same rows for another schema."""
        ...


@runtime_checkable
class InputStream(Protocol):
    """A stream whose columns can be read before the rules of features are applied, and which takes another schema."""

    def first_inputs(self, names: Sequence[str], rows: int | None) -> Iterator[dict[str, Any]]:
        """Yields columns of the schema by name, as `Batch.from_columns` gets them, in pieces of any size. Blocks.

        The stream is left as it was: what is read here is also in its batches.

        Args:
            names: columns among `Schema.feature_columns`.
            rows: number of rows to read, from where the next batch begins, and to wait for if there are fewer; None
                for those that exist now.

        Raises:
            DataError: there are no rows, or they cannot be read.
        """
        ...

    def with_schema(self, schema: Schema) -> InputStream:
        """Returns a stream of the same rows for another schema."""
        ...


class RowSource(Protocol):
    """Rows in a fixed order, in pieces of any size."""

    def chunks(self, skip: int) -> Iterator[Batch]:
        """Yields all rows except the first `skip`, which the source skips as cheaply as its format allows."""
        ...


@runtime_checkable
class ColumnSource(RowSource, Protocol):
    """A row source that can also return unconverted columns."""

    def columns(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yields pyarrow arrays by name for all rows of `chunks(0)`, in pieces of any size."""
        ...


@runtime_checkable
class InputSource(RowSource, Protocol):
    """A row source that can return the columns of the schema before the rules of features are applied."""

    def inputs(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yields columns of the schema by name, as `Batch.from_columns` gets them, for all rows of `chunks(0)`."""
        ...

    def with_schema(self, schema: Schema) -> InputSource:
        """Returns a source of the same rows for another schema."""
        ...


@dataclass(frozen=True)
class Order:
    """Assignment of rows to batches: `batch_size` samples per batch, and seven of the options in `RowOptions`."""

    batch_size: int = 1024
    shuffle_rows: int = 0
    seed: int = 0
    drop_last: bool = False
    shard: tuple[int, int] = (0, 1)
    group_rows: int = 0
    tokens_per_batch: int = 0
    similar_lengths: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "shuffle_rows", "seed", "group_rows", "tokens_per_batch"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        check_integer("batch_size", self.batch_size, 1)
        check_integer("shuffle_rows", self.shuffle_rows, 0)
        check_integer("seed", self.seed, 0, MAX_SEED)
        check_flag("drop_last", self.drop_last)
        if not _is_shard(self.shard):
            raise ConfigError(
                f"Invalid shard = {self.shard!r}; expected (index, count) with 0 <= index < count.", field="shard"
            )
        check_integer("group_rows", self.group_rows, 0)
        check_integer("tokens_per_batch", self.tokens_per_batch, 0)
        check_flag("similar_lengths", self.similar_lengths)
        if self.group_rows:
            self._check_groups()
        self._check_budget()

    def _check_groups(self) -> None:
        least = 2 * self.group_rows - 1
        if self.batch_size < least:
            raise ConfigError(
                f"batch_size = {self.batch_size} with group_rows = {self.group_rows} leaves batches without a group; "
                f"set batch_size to {least} or more.",
                field="batch_size",
            )
        if 0 < self.shuffle_rows < self.group_rows:
            raise ConfigError(
                f"shuffle_rows = {self.shuffle_rows} is less than the rows of a group; set it to group_rows = "
                f"{self.group_rows} or more.",
                field="shuffle_rows",
            )
        if self.drop_last:
            raise ConfigError(
                "drop_last does not go with group_rows, as batches of whole groups vary in size; leave one out.",
                field="drop_last",
            )

    def _check_budget(self) -> None:
        if self.similar_lengths and not (self.tokens_per_batch and self.shuffle_rows):
            raise ConfigError(
                "similar_lengths sorts the rows of each block of shuffle_rows, and cuts them by tokens_per_batch; set "
                "both, or leave similar_lengths out.",
                field="similar_lengths",
            )
        if not self.tokens_per_batch:
            return
        for name in ("group_rows", "drop_last"):
            if getattr(self, name):
                raise ConfigError(
                    f"{name} does not go with tokens_per_batch, whose batches vary in size and end after any row; "
                    "leave one out.",
                    field=name,
                )

    @property
    def window(self) -> int:
        """The number of rows in which the groups of a batch begin, with `group_rows`."""
        return self.batch_size - self.group_rows + 1


def _is_shard(shard: object) -> bool:
    match shard:
        case [int() | np.integer() as index, int() | np.integer() as count]:
            return bool(0 <= index < count)
    return False


@dataclass(frozen=True)
class StreamReader:
    """A reader over a source of rows.

    Attributes:
        schema: schema of the batches.
        source: the rows.
        order: assignment of rows to batches.
    """

    schema: Schema
    source: RowSource
    order: Order = field(default_factory=Order)

    def __post_init__(self) -> None:
        if self.order.group_rows and self.schema.group is None:
            raise ConfigError(
                "group_rows keeps groups whole, but the schema declares none; set Schema.group, their column.",
                field="group_rows",
            )
        if self.order.tokens_per_batch:
            sequence_lengths(self.schema, self.order.tokens_per_batch)

    @property
    def input_rules(self) -> InputRules | None:
        """The rules of the source for missing values and lists; None if the source declares none."""
        return input_rules_of(self.source)

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Iterates over one pass, without the first `start` batches of this shard; see `Reader.batches`."""
        index, count = self.order.shard
        first = start * count + index
        if self.order.group_rows:
            return self._cut_groups(epoch, first)
        if self.order.tokens_per_batch:
            return self._cut_events(epoch, first)
        skip = first * self.order.batch_size
        if not self.order.shuffle_rows:
            return self._cut(self.source.chunks(skip), first)
        block = skip // self.order.shuffle_rows
        return self._cut(self._shuffled(epoch, block, skip), first)

    def __iter__(self) -> Iterator[Batch]:
        """The first pass, from its beginning."""
        return self.batches()

    def columns(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yields unconverted columns of the source, in the row order of batches that are not shuffled or sharded.

        Args:
            names: columns of the source; the schema need not have them.

        Returns:
            Pyarrow arrays by name, of the same rows as the batches, in pieces of other sizes.

        Raises:
            ConfigError: the source has no columns, as each sample is built from several rows.
        """
        if not isinstance(self.source, ColumnSource):
            raise ConfigError(
                "Samples of this reader are not rows of a file, so no column can be kept; leave `keep` out.",
                field="keep",
            )
        return self.source.columns(names)

    def inputs(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yields columns of the schema before the rules of features are applied, in pieces of any size.

        Args:
            names: columns among `Schema.feature_columns`.

        Raises:
            ConfigError: the source has no such columns, as each sample is built from several rows.
        """
        return self._source_of_inputs().inputs(names)

    def with_schema(self, schema: Schema) -> StreamReader:
        """Returns a reader of the same rows for another schema, such as one that `persia.fit_features` has returned.

        Raises:
            ConfigError: the schema does not fit the options of the reader, or samples are built from several rows.
        """
        return replace(self, schema=schema, source=self._source_of_inputs().with_schema(schema))

    def _source_of_inputs(self) -> InputSource:
        if not isinstance(self.source, InputSource):
            raise ConfigError(
                "Samples of this reader are built from several rows of a file, so its schema is fixed; write them to "
                "Parquet to declare other features.",
                field="schema",
            )
        return self.source

    def shard(self, index: int, count: int) -> StreamReader:
        """Returns a reader of the batches with number % count == index; see `persia.services.Sharded`.

        Rows of other batches are read from the source, but neither shuffled nor batched.
        """
        shard = share_of(self.order.shard, index, count)
        return replace(self, order=replace(self.order, shard=shard))

    def fingerprint(self) -> SourceFingerprint | None:
        """Returns what determines the rows of each batch; None if the source of rows has no fingerprint."""
        source = fingerprint_of(self.source)
        if source is None:
            return None
        order = self.order
        source = source.ordered(batch_size=order.batch_size, shuffle_rows=order.shuffle_rows, shard=order.shard)
        if order.group_rows:
            source = source.ordered(group_rows=order.group_rows)
        if order.tokens_per_batch:
            source = source.ordered(tokens_per_batch=order.tokens_per_batch, similar_lengths=order.similar_lengths)
        return source.ordered(seed=order.seed) if order.shuffle_rows else source

    def of_parts(self, order: Sequence[int], read: Sequence[int]) -> StreamReader:
        """See `persia.services.Divisible`."""
        assert isinstance(self.source, Divisible)  # Else it has one part.
        return replace(self, source=self.source.of_parts(order, read))

    def _shuffled(self, epoch: int, block: int, skip: int) -> Iterator[_Permuted]:
        """Yields rows from `skip` on, permuted within blocks of `shuffle_rows`; `skip` lies in block `block`."""
        size = self.order.shuffle_rows
        drop = skip - block * size
        for rows in cut(self.source.chunks(block * size), size):
            order = np.random.default_rng((self.order.seed, epoch, block)).permutation(len(rows))[drop:]
            if len(order):
                yield _Permuted(rows, order)
            drop, block = 0, block + 1

    def _cut(self, chunks: Iterator[Batch] | Iterator[_Permuted], first: int) -> Iterator[Batch]:
        index, count = self.order.shard
        size = self.order.batch_size
        for batch in cut(chunks, size, first=first, every=count, offset=index):
            if len(batch) == size or not self.order.drop_last:
                yield canonical(batch)

    def _cut_groups(self, epoch: int, first: int) -> Iterator[Batch]:
        """Yields batches of whole groups of this shard, from number `first` on; see `persia.data.whole_groups`."""
        order = self.order
        begin = max(first * order.window - 1, 0)
        pieces = (
            self._shuffled_groups(epoch, begin)
            if order.shuffle_rows
            else find_groups(self.source.chunks(begin), begin, order.group_rows)
        )
        index, count = order.shard
        for batch, _ in cut_groups(pieces, order.window, first=first, every=count, offset=index):
            yield canonical(batch)

    def _cut_events(self, epoch: int, first: int) -> Iterator[Batch]:
        """Yields batches by events of this shard, from number `first` on; see `persia.data.event_budget`."""
        order = self.order
        budget = Budget(order.tokens_per_batch, order.batch_size)
        index, count = order.shard
        pieces = self._measured(self._shuffled(epoch, 0, 0) if order.shuffle_rows else self.source.chunks(0))
        if order.similar_lengths:
            batches = cut_similar(pieces, budget, (order.seed, epoch), first=first, every=count, offset=index)
        else:
            batches = cut_events(pieces, budget, first=first, every=count, offset=index)
        return map(canonical, batches)

    def _measured(self, chunks: Iterator[Batch] | Iterator[_Permuted]) -> Iterator[MeasuredRows]:
        lengths = sequence_lengths(self.schema, self.order.tokens_per_batch)
        for rows in chunks:
            if isinstance(rows, _Permuted):
                yield MeasuredRows(rows, event_counts(rows.rows, lengths)[rows.order])
            elif len(rows):
                yield MeasuredRows(rows, event_counts(rows, lengths))

    def _shuffled_groups(self, epoch: int, begin: int) -> Iterator[Groups]:
        """Yields rows from `begin` or earlier on, with groups permuted within blocks of whole groups.

        A block has the groups that begin in `shuffle_rows` rows, so row `begin` may be in the block before its own.
        """
        order, size = self.order, self.order.shuffle_rows
        block = max(begin - order.group_rows + 1, 0) // size
        skip = max(block * size - 1, 0)
        pieces = find_groups(self.source.chunks(skip), skip, order.group_rows)
        for number, (rows, groups) in enumerate(cut_groups(pieces, size, first=block), block):
            random = np.random.default_rng((order.seed, epoch, number))
            moved, begins = permuted(groups.begins, random)
            yield Groups(groups.position, _Permuted(rows, moved), begins)


class _Permuted:
    """Rows in another order. Only requested rows are moved."""

    def __init__(self, rows: Batch, order: Int64Array) -> None:
        self.rows = rows
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def slice(self, start: int, stop: int) -> Batch:
        return self.rows.take(self.order[start:stop])

    def take(self, rows: Int64Array) -> Batch:
        return self.rows.take(self.order[rows])


def share_of(share: tuple[int, int], index: int, count: int) -> tuple[int, int]:
    """Returns the shard of the whole that is shard (index, count) of a share of it.

    Raises:
        ConfigError: not 0 <= index < count.
    """
    if not 0 <= index < count:
        raise ConfigError(f"shard({index}, {count}): give 0 <= index < count.", field="shard")
    first, every = share
    return first + index * every, every * count


def cut(
    chunks: Iterator[Batch] | Iterator[_Permuted], size: int, *, first: int = 0, every: int = 1, offset: int = 0
) -> Iterator[Batch]:
    """Groups a stream of rows into batches of `size`, numbered from `first`; yields batches i, i % every == offset.

    A batch that lies within one chunk is a view of it. Rows of other batches are not touched.
    """
    number, parts, filled = first, list[Batch](), 0
    for chunk in chunks:
        position = 0
        while position < len(chunk):
            stop = min(len(chunk), position + size - filled)
            if number % every == offset:
                parts.append(chunk.slice(position, stop))
            filled, position = filled + stop - position, stop
            if filled == size:
                if parts:
                    yield Batch.concat(parts)
                number, parts, filled = number + 1, [], 0
    if parts:
        yield Batch.concat(parts)


def canonical(batch: Batch) -> Batch:
    """Removes offsets if each sample has exactly one id, so that the form of a batch does not depend on its chunk."""
    features = {
        name: IdColumn(column.values, None, column.weights) if _single(column, len(batch)) else column
        for name, column in batch.id_features.items()
    }
    return dataclasses.replace(batch, id_features=features)


def _single(column: IdColumn, rows: int) -> bool:
    return column.offsets is not None and len(column.values) == rows and bool((np.diff(column.offsets) == 1).all())
