"""Compares the embeddings of two checkpoints, table by table, in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from persia.checkpoint.format import StepChoice
from persia.checkpoint.row_view import Checkpoint, TableRows, open
from persia.errors import CheckpointError

__all__ = ["TableDifference", "diff"]

MEMORY_BYTES = 256 << 20


class TableDifference(msgspec.Struct, frozen=True):
    """Difference between two tables of the same name.

    Attributes:
        name: name of the table.
        only_first: rows that only the first table has.
        only_second: rows that only the second table has.
        same: rows whose embeddings are bitwise equal.
        changed: rows whose embeddings differ.
        largest: largest absolute difference of an element.
        mean: mean Euclidean distance over the changed rows.
    """

    name: str
    only_first: int
    only_second: int
    same: int
    changed: int
    largest: float
    mean: float


def diff(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    *,
    steps: tuple[StepChoice, StepChoice] = (None, None),
    progress: Callable[[int], object] = lambda _: None,
) -> list[TableDifference]:
    """Compares the embeddings of two checkpoints.

    Tables that do not fit in 256 MiB are read in several passes, each for a fraction of the ids.

    Args:
        first: directory of checkpoints, or of one step.
        second: directory of checkpoints, or of one step; may be the same directory.
        steps: steps to compare, or "best" or "latest"; None stands for the latest.
        progress: called with the number of rows after each part. The numbers of several passes add up to all rows.

    Raises:
        CheckpointError: a table has different dims, or a part is damaged.
    """
    a, b = open(first, steps[0]), open(second, steps[1])
    return [_compare(a, b, name, progress) for name in dict.fromkeys([*a.tables, *b.tables])]


def _compare(first: Checkpoint, second: Checkpoint, name: str, progress: Callable[[int], object]) -> TableDifference:
    a, b = first.tables.get(name), second.tables.get(name)
    if a is None or b is None:
        return TableDifference(name, len(a) if a else 0, len(b) if b else 0, 0, 0, 0.0, 0.0)
    if a.dim != b.dim:
        raise CheckpointError(
            f"Table {name!r} has dim {a.dim} in the first checkpoint and {b.dim} in the second; only tables of equal "
            "dim can be compared.",
            table=name,
        )
    passes = 1 + (len(a) + len(b)) * (8 + 4 * a.dim) // MEMORY_BYTES
    counts = np.zeros(4, np.int64)
    largest = distance = 0.0
    for number in range(passes):
        ids_a, rows_a = _rows_of_pass(a, number, passes, progress)
        ids_b, rows_b = _rows_of_pass(b, number, passes, progress)
        _, at_a, at_b = np.intersect1d(ids_a, ids_b, assume_unique=True, return_indices=True)
        gaps = rows_a[at_a] - rows_b[at_b]
        changed = (rows_a[at_a].view(np.uint32) != rows_b[at_b].view(np.uint32)).any(axis=1)
        counts += (len(ids_a) - len(at_a), len(ids_b) - len(at_b), int((~changed).sum()), int(changed.sum()))
        if changed.any():
            largest = max(largest, float(np.abs(gaps).max()))
            distance += float(np.linalg.norm(gaps[changed].astype(np.float64), axis=1).sum())
    only_a, only_b, same, different = (int(count) for count in counts)
    return TableDifference(name, only_a, only_b, same, different, largest, distance / different if different else 0.0)


def _rows_of_pass(
    rows: TableRows, number: int, passes: int, progress: Callable[[int], object]
) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
    ids = [np.empty(0, np.uint64)]
    embeddings = [np.empty((0, rows.dim), np.float32)]
    reported = seen = 0
    for arrays in rows:
        hashes = arrays["ids"] * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)
        chosen = hashes % np.uint64(passes) == number
        ids.append(arrays["ids"][chosen])
        embeddings.append(arrays["embeddings"][chosen])
        seen += len(chosen)
        done = seen * (number + 1) // passes - seen * number // passes
        progress(done - reported)
        reported = done
    return np.concatenate(ids), np.concatenate(embeddings)
