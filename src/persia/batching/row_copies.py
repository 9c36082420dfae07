"""Plans which rows of a batch are served from copies on a device (docs/decisions/0009-device-cache.md)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from persia.batching.native import ThreadPool, as_data_error
from persia.types import BoolArray, Ids, Int32Array, Int64Array

__all__ = ["CopiedTable", "plan_copies"]

_row_copies: Any = importlib.import_module("persia._core").row_copies


class CopiedTable(NamedTuple):
    """The ids of a batch in a table, and the slots of its copies; Fibonacci hashing assigns one slot to each id.

    Attributes:
        ids: distinct ids, uint64 `[n]`.
        slot_ids: id in each slot, uint64 `[slots]`; changed.
        slot_steps: 1 + the number of steps that the row in each slot contains; 0 if it is empty. int64 `[slots]`;
            changed.
        wanted: bool `[n]`; set to whether the row is to be looked up.
        first_row: added to positions among the rows of the batch.
        first_slot: added to slots.
        spare: slot of rows that have lost their own to a later row of the batch.
    """

    ids: Ids
    slot_ids: Ids
    slot_steps: Int64Array
    wanted: BoolArray
    first_row: int
    first_slot: int
    spare: int


def plan_copies(
    tables: Sequence[CopiedTable], step: int, applied: int, limit: int, places: Int32Array, pool: ThreadPool
) -> tuple[list[int], int]:
    """Decides which rows of a batch to look up, and takes slots for them (docs/decisions/0009-device-cache.md).

    Args:
        tables: distinct tables.
        step: step of the batch.
        applied: number of steps that a row looked up now contains.
        limit: number of steps that a copy may lack.
        places: int32 `[2 * ids of all tables]`; receives, each table after table: the positions of the rows that
            copies serve, and their slots; the positions of the other rows, and the slots that they take.
        pool: threads to run on, over tables.

    Returns:
        Number of rows that copies serve, by table, and the number of steps that the oldest of these copies lacks.

    Raises:
        DataError: an array has another dtype or size; nothing has changed.

    Blocks until done, without the GIL.
    """
    with as_data_error:
        hits, oldest = _row_copies.plan(list(tables), step, applied, limit, places, pool)
    return hits, oldest
