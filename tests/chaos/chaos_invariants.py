"""What must hold at the end, whatever went wrong: each function returns what does not."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from chaos_records import Pushes, Row

import persia
from persia.checkpoint import CheckpointReader, list_checkpoints
from persia.errors import CheckpointError

AUC_WITHIN = 0.002
ROUNDING = 1e-4
"""Of a row, relative to the sum of its gradients: the order of updates is not that of the reference."""

MOST_NAMED = 3


def rows_of(servers: Iterable[Any]) -> dict[Row, tuple[int, Any]]:
    """Update count and embedding of all rows."""
    found = {}
    for server in servers:
        for chunk in server.export_rows():
            arrays = chunk.arrays
            for number, count, values in zip(
                arrays["ids"].tolist(), arrays["update_count"].tolist(), arrays["embeddings"], strict=True
            ):
                found[chunk.table, number] = count, values
    return found


def counts(rows: dict[Row, tuple[int, Any]], pushes: Pushes, acknowledged: bool = True) -> list[str]:
    """Every update that was acknowledged is there, and none that was not asked for, nor one twice.

    What was under way when a process was killed may be there or not.

    Args:
        rows: of the PSs.
        pushes: their records.
        acknowledged: whether an answer means that the update was made; in asynchronous modes it is summed first.
    """
    wrong = []
    for row, begun in pushes.begun.items():
        least = len(begun & pushes.done) if acknowledged else 0
        found = rows.get(row, (0, None))[0]
        if not least <= found <= len(begun):
            wrong.append(f"{row} has {found} updates, {least} were acknowledged and {len(begun)} begun")
    return _some("update counts", wrong)


def values(rows: dict[Row, tuple[int, Any]], pushes: Pushes, learning_rate: float, seed: int) -> list[str]:
    """Every row whose gradients were all acknowledged, or refused, is its initial value minus their sum, by SGD.

    Args:
        rows: of the PSs.
        pushes: their records.
        learning_rate: of SGD.
        seed: of the initial values.
    """
    known = pushes.done | pushes.refused
    settled = [row for row, begun in pushes.begun.items() if begun <= known and row in pushes.sums]
    wrong = [] if settled else ["there is none whose gradients are all known"]
    for table in sorted({table for table, _ in settled}):
        ids = sorted(number for name, number in settled if name == table)
        initial = _initial_values(table, ids, len(pushes.sums[table, ids[0]]), seed)
        for number, start in zip(ids, initial, strict=True):
            change = learning_rate * pushes.sums[table, number]
            found = rows[table, number][1]
            if not np.allclose(found, start - change, rtol=0, atol=ROUNDING * (1 + float(np.abs(change).max()))):
                wrong.append(f"{(table, number)} is {found}, not {start - change}")
    return _some("rows", wrong)


def _initial_values(table: str, ids: list[int], dim: int, seed: int) -> Any:
    schema = persia.Schema([persia.IdFeature(table, dim)])
    cluster = persia.cluster.Embedded(1)
    (server,) = cluster.connect(schema, persia.optim.SGD(lr=1.0), persia.modes.Sync(), seed).servers
    return server.lookup({table: np.array(ids, np.uint64)}, True)[table]


def checkpoints(folder: Path, spoiled: Collection[int]) -> list[str]:
    """Each can be read as a whole, unless it was damaged: then that is noticed."""
    wrong = []
    for entry in list_checkpoints(str(folder)):
        try:
            CheckpointReader(str(folder), entry.step).verify()
            if entry.step in spoiled:
                wrong.append(f"the damage of step {entry.step} is not noticed")
        except CheckpointError as error:
            if entry.step not in spoiled:
                wrong.append(f"step {entry.step}: {error}")
    entries = list_checkpoints(str(folder))
    complete = {Path(entry.path).name for entry in entries} | {"LATEST"}
    wrong += [f"{path.name} is left behind" for path in folder.iterdir() if path.name not in complete]
    return _some("checkpoints", wrong if entries else ["there is none"])


def quality(found: float, undisturbed: float) -> list[str]:
    """The AUC is that of a run in which nothing went wrong."""
    if abs(found - undisturbed) <= AUC_WITHIN:
        return []
    return [f"AUC {found:.4f}, undisturbed {undisturbed:.4f}"]


class Before:
    """What there is before a cluster: afterwards there must not be more."""

    def __init__(self) -> None:
        self._threads = {thread.ident for thread in threading.enumerate()}

    def left(self, processes: Iterable[int], ports: Collection[int], regions: Path) -> list[str]:
        """What is left behind at this moment.

        Args:
            processes: that there have been.
            ports: that they listened at.
            regions: folder of them.
        """
        left = [f"process {pid}" for pid in processes if _runs(pid)]
        left += [f"region {path.name}" for path in regions.glob("persia-*")]
        for thread in threading.enumerate():
            if thread.ident not in self._threads and thread.name.startswith(("persia", "rpc")):
                left.append(f"thread {thread.name}")
        return left + [f"a connection to port {port}" for port in connected() if port in ports]


def connected() -> list[int]:
    """Ports that connections of this process lead to, or are being made to."""
    mine = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            mine.add(os.readlink(link))
        except OSError:
            continue
    all_of_them = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return [int(fields[2].rpartition(":")[2], 16) for fields in all_of_them if f"socket:[{fields[9]}]" in mine]


def _runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def _some(what: str, wrong: list[str]) -> list[str]:
    more = len(wrong) - MOST_NAMED
    return [f"{what}: {line}" for line in wrong[:MOST_NAMED]] + ([f"{what}: {more} more"] if more > 0 else [])
