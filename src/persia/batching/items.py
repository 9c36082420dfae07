"""Checks that data yield batches; an error names the position of an item of another type."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping

from persia.batching.batch import Batch
from persia.batching.frames import is_frame
from persia.errors import DataError
from persia.types import RegisteredBatch

__all__ = ["check_data", "checked_items", "not_a_batch"]

_REMEDY = (
    "For columns or a frame: [persia.Batch.from_columns(schema, frame)]; for files: a reader, such as "
    "persia.data.parquet(...)."
)


def not_a_batch(item: object, position: int | None = None) -> DataError:
    """Returns the error for an item of the data that is not a batch.

    Args:
        item: the item.
        position: position of the item in the data, from 0; None if the caller adds it.
    """
    kind = "None" if item is None else f"a {type(item).__name__}"
    if position is None:
        return DataError(f"The data yielded {kind}; expected persia.Batch. {_REMEDY}")
    message = f"The data yielded {kind} at position {position} (from 0); expected persia.Batch. {_REMEDY}"
    return DataError(message, batch=position)


def checked_items(items: Iterable[object], start: int = 0) -> Iterator[Batch | RegisteredBatch]:
    """Yields the items of the data after checking that each is a batch.

    Args:
        items: items of a reader, a list or a `DataLoader`.
        start: position of the first item in the data.

    Raises:
        DataError: an item is not a batch; names its position.
    """
    for position, item in enumerate(items, start):
        if not isinstance(item, Batch | RegisteredBatch):
            raise not_a_batch(item, position)
        yield item


def check_data(name: str, data: object) -> None:
    """Checks the type of data before they are read; `checked_items` checks their items.

    Args:
        name: name of the argument.
        data: a reader, or any iterable of batches.

    Raises:
        DataError: `data` is a single batch, a frame, a dict or a path, or is not iterable.
    """
    if isinstance(data, Batch):
        raise DataError(f"{name} is a single persia.Batch; give a list: [batch].")
    iterable = any(hasattr(data, method) for method in ("__iter__", "__getitem__", "batches"))
    if not iterable or isinstance(data, (str, bytes, os.PathLike, Mapping)) or is_frame(data):
        raise DataError(
            f"{name} is a {type(data).__name__}; expected a reader, or an iterable of persia.Batch. {_REMEDY}"
        )
