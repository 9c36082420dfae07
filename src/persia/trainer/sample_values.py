"""The values of a column for each sample to evaluate, for metrics by value."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from persia.batching.batch import Batch
from persia.batching.items import checked_items
from persia.errors import ConfigError, DataError
from persia.schema import Label, Schema
from persia.types import Floats, Ids, Int64Array, RegisteredBatch

__all__ = ["SampleValues", "single_ids"]

MISSING = "(missing)"
"""Name of missing values."""


class SampleValues:
    """Values of a column, batch by batch: of the source of a reader, which may have others than the schema.

    Of batches without a reader it is an ID-type feature with one id for each sample, or a label.

    Args:
        schema: of the batches.
        column: name of the column.
        data: a reader, or batches.

    Raises:
        ConfigError: there is no such column, or the reader has another order than its source.
    """

    def __init__(self, schema: Schema, column: str, data: object) -> None:
        self._column = column
        self._labels = {each.name: (k, each) for k, each in enumerate(schema.targets)}
        self._features = [each.name for each in schema.id_features]
        self._waiting: collections.deque[tuple[list[str], Int64Array]] = collections.deque()
        self._source: _Pieces | None = None
        # Here, as all readers come with it, which a program with its own batches does not need.
        from persia.data.reader import ColumnSource, StreamReader

        if isinstance(data, StreamReader) and isinstance(data.source, ColumnSource):
            if data.order.shuffle_rows or data.order.shard != (0, 1):
                raise ConfigError(
                    f"Metrics by {column!r} read the column in the order of the source, but the reader shuffles or "
                    "shards its rows; leave shuffle_rows and shard out.",
                    field="metrics_by",
                )
            self._source = _Pieces(column, data.columns([column]))
        elif column not in self._labels and column not in self._features:
            names = [*self._features, *self._labels]
            raise ConfigError(
                f"There is no column {column!r} for metrics by value; the batches have {', '.join(names)}. A reader of "
                "files can also give columns that the schema does not name.",
                field="metrics_by",
            )

    def of(self, data: Iterable[Batch | RegisteredBatch], rank: int, count: int) -> Iterator[Batch]:
        """Yields batches `rank`, `rank + count`, ..., and keeps the values of each until its `next`.

        Another thread may draw them.
        """
        for position, batch in enumerate(checked_items(iter(data))):
            if not isinstance(batch, Batch):
                raise DataError(
                    f"Batch {position} was fed to embedding workers, and its columns are not here; evaluate `Batch`es, "
                    "or leave `metrics_by` out.",
                    batch=position,
                )
            source = self._source
            pieces = [] if source is None else source.next_rows(len(batch))
            if position % count == rank:
                self._waiting.append(self._of_batch(batch) if source is None else _joined(pieces))
                yield batch

    def next(self) -> tuple[list[str], Int64Array]:
        """Returns the distinct values of the oldest batch of `of` that was not asked for yet, and each row's place."""
        return self._waiting.popleft()

    def _of_batch(self, batch: Batch) -> tuple[list[str], Int64Array]:
        if self._column in self._features:
            ids = single_ids(self._column, batch, "divide samples", "Take")
            distinct, places = np.unique(ids, return_inverse=True)
            return [str(value) for value in distinct.tolist()], places
        k, label = self._labels[self._column]
        values, places = np.unique(batch.labels[:, k] if batch.labels.shape[1] else _NONE, return_inverse=True)
        return [_label_name(label, value) for value in values.tolist()], places


_NONE: Floats = np.empty(0, np.float32)


def single_ids(feature: str, batch: Batch, what: str, remedy: str) -> Ids:
    """Returns the ids of a feature, uint64 `[batch]`.

    Raises:
        DataError: a sample has no id, or several.
    """
    column = batch.id_features[feature]
    lengths = np.diff(column.offsets) if column.offsets is not None else np.ones(len(batch))
    if (lengths != 1).any():
        raise DataError(
            f"Feature {feature!r} cannot {what}: some have no id, or several. {remedy} by a feature that has one id "
            "for each sample.",
            feature=feature,
        )
    return column.values


class _Pieces:
    """Values of a column, in pieces of the requested sizes."""

    def __init__(self, name: str, pieces: Iterator[dict[str, Any]]) -> None:
        self._name = name
        self._pieces = pieces
        self._rest: Any = None

    def next_rows(self, rows: int) -> list[Any]:
        """Returns pyarrow arrays of the next rows."""
        slices = []
        while rows:
            if self._rest is None or not len(self._rest):
                self._rest = next(self._pieces)[self._name]
            slices.append(self._rest.slice(0, rows))
            self._rest = self._rest.slice(rows)
            rows -= len(slices[-1])
        return slices


def _joined(pieces: list[Any]) -> tuple[list[str], Int64Array]:
    """Returns the distinct values of pyarrow arrays as texts, and the place of each row's value."""
    names: dict[str, int] = {}
    places = []
    for piece in pieces:
        encoded = piece.dictionary_encode("encode")
        for array in getattr(encoded, "chunks", [encoded]):
            numbers = [names.setdefault(_text(value), len(names)) for value in array.dictionary.to_pylist()]
            places.append(np.array(numbers, np.int64)[array.indices.to_numpy(zero_copy_only=False)])
    return list(names), np.concatenate(places) if places else np.empty(0, np.int64)


def _text(value: Any) -> str:
    if value is None:
        return MISSING
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _label_name(label: Label, value: float) -> str:
    if np.isnan(value):
        return MISSING
    return label.class_names[int(value)] if label.class_names else f"{value:g}"
