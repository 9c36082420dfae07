"""What was asked of embedding PSs and what they have answered, kept where no kill can reach it."""

from __future__ import annotations

import functools
import os
import pickle
import struct
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from persia.errors import StalePushError

Key = tuple[int, ...]
"""Of what changes a row at most once: a push, or the step that it is summed into."""

Row = tuple[str, int]
"""Table and id."""


class Recorded:
    """An embedding PS that writes down every push before it is applied, and when it has been.

    Args:
        role: the PS.
        folder: of the files.
        every: of the ids, only so many-th ones are written down.
    """

    def __init__(self, role: Any, folder: str, every: int) -> None:
        self._role = role
        self._every = every
        path = f"{folder}/{os.getpid()}.pushes"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._role, name)

    @property
    def push(self) -> Any:
        """The role's own, with its records around it."""

        def push(header: Any, gradients: Any) -> Any:
            known = {}
            for table, (ids, values) in gradients.items():
                mine = ids % np.uint64(self._every) == 0
                known[table] = (ids[mine].copy(), values[mine].copy())
            self._write(("begun", tuple(header), known))
            try:
                answer = self._role.push(header, gradients)
            except StalePushError:
                self._write(("refused", tuple(header), None))
                raise
            self._write(("done", tuple(header), None))
            return answer

        return functools.update_wrapper(push, self._role.push)

    def _write(self, record: Any) -> None:
        data = pickle.dumps(record)
        os.write(self._file, struct.pack("<I", len(data)) + data)


class Pushes(NamedTuple):
    """What all PSs have written down.

    Attributes:
        begun: by row, which pushes (or steps) had a gradient for it.
        done: those of them that were answered.
        refused: those that were refused: a step for which NN workers that have begun anew will not push any more.
        sums: by row, the sum of its gradients, each push (or the average of each step) once; without those refused.
    """

    begun: dict[Row, set[Key]]
    done: set[Key]
    refused: set[Key]
    sums: dict[Row, Any]


def collect(folder: Path, by_step: bool, tables: Collection[str]) -> Pushes:
    """Reads the files.

    Args:
        folder: of them.
        by_step: whether the pushes of a step are one update, as the mode sums them.
        tables: that count: not those from which rows are evicted.
    """
    begun: dict[Row, set[Key]] = defaultdict(set)
    done: set[Key] = set()
    refused: set[Key] = set()
    parts: dict[tuple[Row, Key], dict[int, tuple[int, Any]]] = defaultdict(dict)
    for what, header, gradients in _records(folder):
        generation, rank, sequence, step, weight = header[:5]
        key: Key = (generation, step) if by_step else (generation, rank, sequence)
        if what == "done":
            done.add(key)
            continue
        if what == "refused":
            refused.add(key)
            continue
        for table, (ids, values) in gradients.items():
            if table not in tables:
                continue
            for number, value in zip(ids.tolist(), values, strict=True):
                row = table, number
                begun[row].add(key)
                parts[row, key].setdefault(rank, (weight, value))
    refused -= done
    sums: dict[Row, Any] = {}
    for (row, key), of in parts.items():
        if key not in refused:  # The average as `Reduction.PER_ID` has it.
            total = sum(weight for weight, _ in of.values())
            average = sum(weight / total * value.astype(np.float64) for weight, value in of.values())
            sums[row] = sums.get(row, 0.0) + average
    return Pushes(begun, done, refused, sums)


def _records(folder: Path) -> Iterator[Any]:
    for path in sorted(folder.glob("*.pushes")):
        data = path.read_bytes()
        place = 0
        while place + 4 <= len(data):
            (length,) = struct.unpack_from("<I", data, place)
            place += 4
            if place + length <= len(data):  # Else it was killed while it wrote.
                yield pickle.loads(data[place : place + length])
            place += length
