"""Fits the rules of features that need statistics of the data, in one pass over raw columns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from persia.batching.dense_columns import raw_numbers, transformed
from persia.batching.derived_ids import bucket_numbers, raw_column
from persia.batching.numbers import is_pair
from persia.checks import check_integer
from persia.data.reader import InputReader, InputStream
from persia.errors import ConfigError, DataError
from persia.schema import DenseFeature, DenseStatistics, IdFeature, Schema, with_values_of, without_values

__all__ = ["fit_features"]

RANKS = 257
"""Quantiles of `scale="quantile"`, whose distance in rank is 1/256."""
SAMPLE_VALUES = 1 << 17
"""Values of a feature that quantiles are computed from: all of fewer, else a uniform sample, so that a rank is off by
0.14 % (standard deviation) at most."""
BLOCK_VALUES = 1 << 13
"""Values whose mean is computed at once."""
SEED = 0


def fit_features(
    schema: Schema,
    reader: InputReader | InputStream | Mapping[str, Any],
    rows: int | None = None,
    *,
    keep: Schema | None = None,
    refit: bool = False,
) -> Schema:
    """Fits the rules of features that need statistics of the training data; see `DenseFeature` and `Buckets`.

    Reads the columns of these features once. Means and deviations are exact; quantiles are exact up to 131,072 values,
    beyond which they come from a uniform sample of as many. Statistics are those of values that are present. The same
    rows in the same order give the same statistics, whatever they are read from.

    A stream is read by a separate consumer, so training reads the same messages again. If it has fewer than `rows`
    rows, more are awaited for its `timeout`; a warning says to how many the rules are fitted then.

    Args:
        schema: the schema. Features that are fitted already keep their values.
        reader: training data, made with this schema: a reader of `persia.data` for files or frames, or `kafka`; or
            columns by name.
        rows: number of rows to read, from the beginning, or from where training would begin in a stream; None for all,
            of a stream those that exist now.
        keep: schema with values to keep, such as that of a checkpoint that the run continues
            (`persia.checkpoint.CheckpointReader(directory).schema`): features with the same rules take them.
        refit: whether to fit all features again, also those that are fitted.

    Returns:
        The schema with fitted values, which `persia.schema.fitted_values` lists. Pass it to the trainer, and to
        readers: `reader.with_schema(schema)`.

    Raises:
        ConfigError: the reader has no columns of features, or an argument is invalid.
        DataError: a value is invalid, a feature has no values at all, or a stream has no messages.
        DeadlineError: no broker of a stream could be reached.
    """
    if rows is not None:
        check_integer("rows", rows, 1)
    if refit:
        schema = without_values(schema)
    elif keep is not None:
        schema = with_values_of(schema, keep)
    names = set(schema.needs_fit)
    if not names:
        return schema
    dense = {each.name: _DenseFit(each) for each in schema.dense if each.name in names}
    buckets = {each.name: _BucketsFit(each) for each in schema.id_features if each.name in names}
    fits: list[_DenseFit | _BucketsFit] = [*dense.values(), *buckets.values()]
    for columns in _pieces(reader, list(dict.fromkeys(fit.column for fit in fits)), rows):
        for fit in fits:
            fit.add(columns[fit.column])
    return msgspec.structs.replace(
        schema,
        dense_features=[
            msgspec.structs.replace(each, fitted=dense[each.name].found())
            if isinstance(each, DenseFeature) and each.name in dense
            else each
            for each in schema.dense_features
        ],
        id_features=[
            msgspec.structs.replace(each, bucketize=buckets[each.name].found()) if each.name in buckets else each
            for each in schema.id_features
        ],
    )


def _pieces(reader: Any, names: list[str], rows: int | None) -> Iterator[Mapping[str, Any]]:
    """Yields the columns of the first `rows` rows."""
    if isinstance(reader, Mapping):
        pieces: Iterator[Mapping[str, Any]] = iter([reader])
    elif isinstance(reader, InputReader):
        pieces = reader.inputs(names)
    elif isinstance(reader, InputStream):
        pieces = reader.first_inputs(names, rows)
    else:
        raise ConfigError(
            f"{type(reader).__name__} gives batches, but no columns of features, which fitting reads; give a reader of "
            "persia.data.csv, parquet, jsonl, arrow or kafka with the same columns, or the columns by name.",
            field="reader",
        )
    left = rows
    for piece in pieces:
        for name in names:
            if name not in piece:
                raise DataError(f"There is no column {name!r}, which a rule of the schema is fitted to.", column=name)
        if left is None:
            yield piece
            continue
        for name in names:
            if is_pair(piece[name]):
                raise DataError(
                    f"Column {name!r} is a pair of values and offsets, which `rows` cannot bound; give a list of lists "
                    "or an arrow array, or leave out `rows`.",
                    column=name,
                )
        count = min(left, len(piece[names[0]]))
        yield {name: piece[name][:count] for name in names}
        left -= count
        if not left:
            return


class _Moments:
    """Mean and squared deviations of values, merged by block (Chan, Golub, LeVeque: "Updating formulae", 1979).

    Blocks have a fixed size, so that sums do not depend on the pieces in which a reader gives the values.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.squares = 0.0
        self.low, self.high = np.inf, -np.inf
        self._block = np.empty(BLOCK_VALUES)
        self._filled = 0

    def add(self, values: NDArray[np.float64]) -> None:
        while len(values):
            part = values[: BLOCK_VALUES - self._filled]
            self._block[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            values = values[len(part) :]
            if self._filled == BLOCK_VALUES:
                self.merge()

    def merge(self) -> None:
        """Merges the values since the last block, after the last call of `add`."""
        values, self._filled = self._block[: self._filled], 0
        count = len(values)
        if not count:
            return
        mean = float(values.mean())
        squares = np.square(values - mean).sum()  # Not `np.dot`, which sums by threads in any order.
        total = self.count + count
        delta = mean - self.mean
        self.squares += float(squares) + delta * delta * self.count * count / total
        self.mean += delta * count / total
        self.count = total
        self.low, self.high = min(self.low, float(values.min())), max(self.high, float(values.max()))

    @property
    def deviation(self) -> float:
        """The standard deviation of the values; 0 if all are equal."""
        return float(np.sqrt(self.squares / self.count)) if self.high > self.low else 0.0


class _Reservoir:
    """A uniform sample of values (Vitter, "Random sampling with a reservoir", 1985, algorithm R)."""

    def __init__(self, size: int = SAMPLE_VALUES) -> None:
        self._values = np.empty(size)
        self._seen = 0
        self._random = np.random.Generator(np.random.PCG64(SEED))

    def add(self, values: NDArray[np.float64]) -> None:
        size = len(self._values)
        first = min(max(size - self._seen, 0), len(values))
        self._values[self._seen : self._seen + first] = values[:first]
        rest = values[first:]
        if len(rest):
            numbers = np.arange(self._seen + first + 1, self._seen + len(values) + 1)
            places = (self._random.random(len(rest)) * numbers).astype(np.int64)
            taken = places < size
            self._values[places[taken]] = rest[taken]
        self._seen += len(values)

    def quantiles(self, ranks: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the values at ranks from 0 to 1."""
        return np.quantile(self._values[: self._seen], ranks)


class _DenseFit:
    """Statistics of a non-ID-type feature."""

    def __init__(self, feature: DenseFeature) -> None:
        self.column = feature.name
        self._feature = feature
        self._mean = _Moments() if feature.fill == "mean" else None
        self._moments = _Moments() if feature.scale in ("standard", "minmax") else None
        self._sample = _Reservoir() if feature.scale == "quantile" else None
        self._rows = 0
        self._low, self._high = np.inf, -np.inf

    def add(self, column: Any) -> None:
        raw = raw_numbers(self._feature, column)
        self._rows += len(raw.values)
        values = raw.values if raw.missing is None else raw.values[~raw.missing]
        if not values.size:
            return
        if self._mean is not None:
            self._mean.add(values.reshape(-1))
        if self._moments is None and self._sample is None:
            return
        flat = transformed(self._feature, values, scale=False).reshape(-1)
        if self._moments is not None:
            self._moments.add(flat)
        if self._sample is not None:
            self._sample.add(flat)
            self._low, self._high = min(self._low, float(flat.min())), max(self._high, float(flat.max()))

    def found(self) -> DenseStatistics:
        for moments in (self._mean, self._moments):
            if moments is not None:
                moments.merge()
        if (self._mean and not self._mean.count) or (self._moments and not self._moments.count):
            raise _nothing(self.column)
        centre = width = None
        if self._moments is not None:
            statistics = self._moments
            standard = self._feature.scale == "standard"
            centre = statistics.mean if standard else statistics.low
            width = (statistics.deviation if standard else statistics.high - statistics.low) or 1.0
        quantiles: tuple[float, ...] = ()
        if self._sample is not None:
            if self._low > self._high:
                raise _nothing(self.column)
            inner = self._sample.quantiles(np.linspace(0, 1, RANKS))[1:-1]
            quantiles = (self._low, *np.clip(inner, self._low, self._high).tolist(), self._high)
        mean = None if self._mean is None else self._mean.mean
        return DenseStatistics(mean=mean, centre=centre, width=width, quantiles=quantiles, rows=self._rows)


class _BucketsFit:
    """Edges of buckets with about equally many rows."""

    def __init__(self, feature: IdFeature) -> None:
        assert feature.bucketize is not None
        self.column = feature.bucketize.column
        self._feature = feature
        self._buckets = feature.bucketize
        self._sample = _Reservoir()
        self._empty = True

    def add(self, column: Any) -> None:
        numbers, present = bucket_numbers(self._feature, raw_column(self.column, column))
        values = numbers[present]
        if len(values):
            self._empty = False
            self._sample.add(values)

    def found(self) -> Any:
        if self._empty:
            raise _nothing(self.column)
        count = self._buckets.quantiles
        assert count is not None
        edges = self._sample.quantiles(np.linspace(0, 1, count + 1)[1:-1])
        distinct = [edge for edge, _ in itertools.groupby(edges.tolist())]
        return msgspec.structs.replace(self._buckets, fitted=tuple(distinct))


def _nothing(column: str) -> DataError:
    return DataError(
        f"Column {column!r} has no values in the rows that were read, so its rule cannot be fitted; leave the feature "
        "out, or read more rows.",
        column=column,
    )
