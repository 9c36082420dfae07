"""What must hold of the rows at the end of a run, by mode: see `chaos_invariants` for each of the invariants."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from chaos_invariants import Rows, counts, once, stale, sums, values
from chaos_records import collect
from chaos_training import BATCH, LEARNING_RATE, MODES, make_schema

ROUNDS_OF_A_CHANGE = 6
"""In which a change of the number of processes may end a step early: a move of rows is given up at most 5 times."""


class Course(NamedTuple):
    """What happened in a run, as far as it explains gradients of `Gba` that do not count as others do.

    Attributes:
        mode: one of `MODES`.
        nn_workers: most that have pushed at the same time.
        restarts: deaths of embedding PSs and NN workers.
        changes: how often the number of embedding PSs or of NN workers was to change, or rows were to move.
        dropped: rows of gradients that PSs have dropped as too old.
        least: rows whose values must be compared; None for `chaos_invariants.LEAST_COMPARED`.
    """

    mode: str
    nn_workers: int
    restarts: int
    changes: int
    dropped: int
    least: int | None = None


class Checked(NamedTuple):
    """What came of the checks.

    Attributes:
        wrong: invariants that do not hold.
        compared: rows whose values were compared, by table.
        counted: rows whose update counts were compared.
        differ: gradients of rows that are missing in `Gba`, or of steps that were cut short.
    """

    wrong: list[str]
    compared: dict[str, int]
    counted: int
    differ: int


def check_rows(rows: Mapping[str, Rows], folder: Path, course: Course) -> Checked:
    """Compares all rows with the pushes that the PSs have recorded.

    Args:
        rows: of all PSs, by table.
        folder: of the records.
        course: of the run.
    """
    # In Gba a push may be in another step at a PS than at the token scheduler, which numbers arrivals. So an id has at
    # most as many updates as it has pushes.
    by_push = course.mode == "gba"
    pushes = collect(folder, by_step=not by_push)
    counted = sum(len(of.ids) for of in pushes.values())
    wrong = once(rows) + counts(rows, pushes, acknowledged=not by_push)
    if not by_push:
        apart, compared = values(rows, pushes, LEARNING_RATE, seed=0, least=course.least)
        return Checked(wrong + apart, compared, counted, 0)
    rows_of_a_batch = BATCH * len(make_schema().id_features)
    tolerance, group = MODES["gba"].tolerance, MODES["gba"].group(course.nn_workers, BATCH)
    wrong += stale(course.dropped, course.restarts, tolerance, course.nn_workers, rows_of_a_batch)
    pushes_that_differ = course.restarts * course.nn_workers * (tolerance + 2) + group
    pushes_that_differ += course.changes * ROUNDS_OF_A_CHANGE * group
    most = pushes_that_differ * rows_of_a_batch
    apart, compared, differ = sums(rows, pushes, LEARNING_RATE, group, 0, most, course.least)
    return Checked(wrong + apart, compared, counted, differ)
