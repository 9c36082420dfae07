"""What was asked of embedding PSs and what they have answered, kept where no kill can reach it."""

from __future__ import annotations

import functools
import os
import pickle
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from persia.errors import StaleMapError, StalePushError

Key = tuple[int, ...]
"""Of what changes a row at most once: a push, or the step that it is summed into."""

WHOLE = "many"
"""The table whose rows are all compared by value."""


class Recorded:
    """An embedding PS that writes down every push before it is applied, and when it has been.

    Args:
        role: the PS.
        folder: of the files.
        every: only every so many-th id is recorded; of the table `WHOLE` all are.
        rank: of the PS.
    """

    def __init__(self, role: Any, folder: str, every: int, rank: int) -> None:
        self._role = role
        self._every = every
        path = f"{folder}/{rank}-{os.getpid()}.pushes"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._role, name)

    @property
    def push(self) -> Any:
        """The role's own, with its records around it."""

        def push(header: Any, gradients: Any, map_version: int = 0) -> Any:
            known = {}
            for table, (ids, values) in gradients.items():
                mine = ids % np.uint64(1 if table == WHOLE else self._every) == 0
                known[table] = (ids[mine].copy(), values[mine].copy())
            self._write(("begun", tuple(header), known))
            try:
                answer = self._role.push(header, gradients, map_version)
            except (StaleMapError, StalePushError):
                self._write(("refused", tuple(header), None))
                raise
            self._write(("done", tuple(header), None))
            return answer

        return functools.update_wrapper(push, self._role.push)

    def _write(self, record: Any) -> None:
        data = pickle.dumps(record)
        os.write(self._file, struct.pack("<I", len(data)) + data)


class Pushes(NamedTuple):
    """What all PSs have recorded of one table, by row. A push counts once; where a mode sums a step, so does the step.

    Attributes:
        ids: of rows with a gradient, ascending, `[n]`.
        begun: number of pushes with a gradient for the row, `[n]`.
        done: those of them that were answered, `[n]`.
        known: whether each push of the row was answered or refused, `[n]`. Refused is a step that NN workers that have
            restarted will not complete.
        sums: of the row's gradients, each push (or the average of each step) once, without those refused, `[n, dim]`.
        starts: where each row's gradients begin in `each`, `[n]`.
        each: those gradients, row after row, zero where refused, `[m, dim]`.
        names: the push (or step) of each of them, a number, `[m]`.
        answered: whether it was answered or refused, `[m]`.
    """

    ids: Any
    begun: Any
    done: Any
    known: Any
    sums: Any
    starts: Any
    each: Any
    names: Any
    answered: Any


class _Gradients(NamedTuple):
    """Gradients of all pushes to one table, in the order of the records.

    `pushes` numbers the keys, `updates` the keys at each PS.
    """

    ids: list[Any]
    pushes: list[Any]
    ranks: list[Any]
    updates: list[Any]
    weights: list[Any]
    values: list[Any]


def collect(folder: Path, by_step: bool) -> dict[str, Pushes]:
    """Reads the files; returns the pushes by table.

    Args:
        folder: of the files.
        by_step: whether the pushes of a step are one update, as the mode sums them.
    """
    numbers: dict[Key, int] = {}
    done: set[int] = set()
    refused: set[int] = set()
    updates: dict[tuple[str, int], int] = {}
    weights: list[dict[int, int]] = []
    tables: dict[str, _Gradients] = defaultdict(lambda: _Gradients(*([] for _ in _Gradients._fields)))
    for ps, (what, header, gradients) in _records(folder):
        generation, rank, sequence, step, weight = header[:5]
        key: Key = (generation, step) if by_step else (generation, rank, sequence)
        push = numbers.setdefault(key, len(numbers))
        if what == "done":
            done.add(push)
        elif what == "refused":
            refused.add(push)
        else:
            update = updates.setdefault((ps, push), len(updates))
            if update == len(weights):
                weights.append({})
            weight = weights[update].setdefault(rank, weight)  # Also of a push without a gradient for this PS.
            for table, (ids, values) in gradients.items():
                of = tables[table]
                of.ids.append(ids)
                of.values.append(values)
                columns = (of.pushes, push), (of.ranks, rank), (of.updates, update), (of.weights, weight)
                for column, value in columns:
                    column.append(np.full(len(ids), value))
    outcome = np.zeros(len(numbers), np.int8)
    outcome[list(refused - done)] = _REFUSED
    outcome[list(done)] = _DONE
    totals = np.array([sum(of.values()) for of in weights], np.float64)
    return {table: _by_row(of, outcome, totals) for table, of in tables.items()}


_REFUSED, _DONE = 1, 2


def _by_row(of: _Gradients, outcome: Any, totals: Any) -> Pushes:
    ids, pushes, ranks, updates, weights, values = map(np.concatenate, of)
    order = np.lexsort((ranks, pushes, ids))  # Stable: of a push that was repeated, the first record comes first.
    ids, pushes, ranks = ids[order], pushes[order], ranks[order]
    first = _starts(ids, pushes, ranks)
    order, ids, pushes = order[first], ids[first], pushes[first]
    share = weights[order] / totals[updates[order]]  # Of all ranks, as the reduction "global" has it.
    update = np.flatnonzero(_starts(ids, pushes))
    averages = np.add.reduceat(values[order] * share[:, None], update, axis=0)
    ids, outcomes = ids[update], outcome[pushes[update]]
    averages[outcomes == _REFUSED] = 0.0
    row = np.flatnonzero(_starts(ids))
    return Pushes(
        ids[row],
        np.diff(np.append(row, len(ids))),
        np.add.reduceat((outcomes == _DONE).astype(np.int64), row),
        np.minimum.reduceat(outcomes, row) > 0,
        np.add.reduceat(averages, row, axis=0),
        row,
        averages,
        pushes[update],
        outcomes > 0,
    )


def _starts(*columns: Any) -> Any:
    """Where any of the columns differs from the row before, `[n]`."""
    found = np.ones(len(columns[0]), bool)
    found[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return found


def _records(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yields all records, each with the rank of its PS."""
    for path in sorted(folder.glob("*.pushes")):
        data = path.read_bytes()
        place = 0
        while place + 4 <= len(data):
            (length,) = struct.unpack_from("<I", data, place)
            place += 4
            if place + length <= len(data):  # Else it was killed while it wrote.
                yield path.name.partition("-")[0], pickle.loads(data[place : place + length])
            place += length
