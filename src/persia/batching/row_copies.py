"""Plans of which rows of a batch copies on a device serve (docs/decisions/0009-device-cache.md)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from persia.batching.native import ThreadPool, as_data_error
from persia.types import BoolArray, Ids, Int32Array, Int64Array

__all__ = ["CopiedTable", "plan_copies"]

_row_copies: Any = importlib.import_module("persia._core").row_copies


class CopiedTable(NamedTuple):
    """The ids of a batch in a table, and the slots of its copies: an id has one, found by Fibonacci hashing.

    Attributes:
        ids: distinct, uint64 `[n]`.
        slot_ids: by slot the id that has it, uint64 `[slots]`; changed.
        slot_steps: by slot the number of steps that its row contains, and 1; 0 if it is empty. int64 `[slots]`;
            changed.
        wanted: bool `[n]`; set to whether the row is to be looked up.
        first_row: added to places among the rows of the batch.
        first_slot: added to slots.
        spare: instead of the slot of a row that has lost it to a later row of its batch.
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
        step: of the batch.
        applied: number of steps that a row contains that is looked up now.
        limit: number of steps that a copy may lack.
        places: int32 `[2 * ids of all tables]`; gets, each table after table: the places of the rows that copies
            serve, and their slots; the places of the others, and the slots that they take.
        pool: threads to run on, over tables.

    Returns:
        By table how many rows copies serve, and the number of steps that the oldest of these copies lacks.

    Raises:
        DataError: an array has another dtype or size; nothing has changed.

    Blocks until done, without the GIL.
    """
    with as_data_error:
        hits, oldest = _row_copies.plan(list(tables), step, applied, limit, places, pool)
    return hits, oldest
