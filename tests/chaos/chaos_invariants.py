"""What must hold at the end, whatever went wrong: each function returns what does not."""

from __future__ import annotations

import itertools
import os
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from chaos_records import WHOLE, Pushes

import persia
from persia.checkpoint import CheckpointReader, list_checkpoints
from persia.errors import CheckpointError

AUC_WITHIN = 0.002
ROUNDING = 1e-4
"""Of a row, relative to the sum of its gradients: the order of updates is not that of the reference."""

MOST_NAMED = 3
EVICTING = ("extra_0",)
"""Tables whose rows are evicted."""
MOST_SUSPECTS = 7
"""Gradients of one row that may not count as others do."""
LEAST_COMPARED = 40_000
"""Rows of `WHOLE` whose values must have been compared, of 50,000."""


class Rows(NamedTuple):
    """The rows of one table.

    Attributes:
        ids: ascending, `[n]`.
        counts: number of updates, `[n]`.
        embeddings: `[n, dim]`.
    """

    ids: Any
    counts: Any
    embeddings: Any

    def of(self, ids: Any) -> tuple[Any, Any]:
        """Where these ids are, and whether they are there at all."""
        places = np.minimum(np.searchsorted(self.ids, ids), max(len(self.ids) - 1, 0))
        return places, self.ids[places] == ids


def rows_of(servers: Iterable[Any]) -> dict[str, Rows]:
    """The rows of all PSs, by table."""
    chunks: dict[str, list[Any]] = defaultdict(list)
    for server in servers:
        for chunk in server.export_rows():
            columns = ("ids", "update_count", "embeddings")
            chunks[chunk.table].append([chunk.arrays[name].copy() for name in columns])
    found = {}
    for table, parts in chunks.items():
        ids, updates, embeddings = map(np.concatenate, zip(*parts, strict=True))
        order = np.argsort(ids)
        found[table] = Rows(ids[order], updates[order], embeddings[order])
    return found


def once(rows: Mapping[str, Rows]) -> list[str]:
    """No row is on two PSs."""
    wrong = []
    for table, of in rows.items():
        wrong += [f"{(table, id_)} is on two PSs" for id_ in of.ids[1:][of.ids[1:] == of.ids[:-1]].tolist()]
    return _some("rows", wrong)


def counts(rows: Mapping[str, Rows], pushes: Mapping[str, Pushes], acknowledged: bool = True) -> list[str]:
    """Every update that was acknowledged is there, and none that was not asked for, nor one twice.

    An update that was in progress when a process was killed may be there or not; an evicted row has lost its updates.

    Args:
        rows: of the PSs, by table.
        pushes: recorded by the PSs, by table.
        acknowledged: whether an answer means that the update was made; asynchronous modes sum it first.
    """
    wrong = []
    for table, of in pushes.items():
        places, there = rows[table].of(of.ids)
        found = np.where(there, rows[table].counts[places], 0)
        least = of.done if acknowledged and table not in EVICTING else np.zeros_like(of.done)
        for i in np.flatnonzero((found < least) | (found > of.begun)).tolist():
            asked = f"{least[i]} were acknowledged and {of.begun[i]} begun"
            wrong.append(f"{(table, int(of.ids[i]))} has {found[i]} updates, {asked}")
    return _some("update counts", wrong)


def values(
    rows: Mapping[str, Rows], pushes: Mapping[str, Pushes], learning_rate: float, seed: int, least: int | None = None
) -> tuple[list[str], dict[str, int]]:
    """Every row whose gradients were all acknowledged or refused is its initial value minus their sum, by SGD.

    Where rows are evicted, only those with all their updates are compared: the others have begun again.

    Args:
        rows: of the PSs, by table.
        pushes: recorded by the PSs, by table.
        learning_rate: of SGD.
        seed: of the initial values.
        least: rows of `WHOLE` that must be compared; None for `LEAST_COMPARED`.

    Returns:
        What is wrong, and how many rows were compared, by table.
    """
    wrong, compared = [], {}
    for table, of in pushes.items():
        places, there = rows[table].of(of.ids)
        settled = of.known & (of.done > 0)
        if table in EVICTING:
            settled &= there & (rows[table].counts[places] == of.begun)
        ids, changes = of.ids[settled], learning_rate * of.sums[settled]
        compared[table] = len(ids)
        if not len(ids):
            continue
        expected = _initial_values(table, ids, changes.shape[1], seed) - changes
        found = np.where(there[settled, None], rows[table].embeddings[places[settled]], np.nan)
        bound = ROUNDING * (1 + np.abs(changes).max(axis=1, keepdims=True))
        for i in np.flatnonzero(~(np.abs(found - expected) <= bound).all(axis=1)).tolist():
            wrong.append(f"{(table, int(ids[i]))} is {found[i]}, not {expected[i]}")
    least = LEAST_COMPARED if least is None else least
    if compared.get(WHOLE, 0) < least:
        wrong.append(f"only {compared.get(WHOLE, 0)} of {WHOLE} could be compared, not {least}")
    return _some("rows", wrong), compared


def sums(
    rows: Mapping[str, Rows],
    pushes: Mapping[str, Pushes],
    learning_rate: float,
    group: int,
    seed: int,
    most: int,
    least: int | None = None,
) -> tuple[list[str], dict[str, int], int]:
    """Every row is its initial value minus a sum of its gradients, each at most once, by SGD.

    For modes whose PSs apply the mean of `group` pushes. A push counts a `group`-th; or not at all, if it was held by a
    PS when that died, or at the end, or its gradient was too old; or more, if its step was cut short, as a mode ends it
    before NN workers restart. With three pushes in a step that is 1 or 1/2, and two thirds would be a push that counts
    twice. Which pushes these are is not known. Each row in which one of them differs tells, though, and there are few
    of them: rows with several are compared with all their sums; not compared is a row with more than `MOST_SUSPECTS`.
    Tables with evictions are left out.

    Args:
        rows: of the PSs, by table.
        pushes: recorded by the PSs, by table, each push by itself.
        learning_rate: of SGD.
        group: pushes of a step.
        seed: of the initial values.
        most: gradients of rows that may differ.
        least: rows of `WHOLE` that must be compared; None for `LEAST_COMPARED`.

    Returns:
        What is wrong, how many rows were compared, by table, and how many gradients differ.
    """
    rate = learning_rate / group
    extra = np.array([0.0, 1.0, *(1 - group / cut for cut in range(1, group))])
    """What is missing of a gradient: nothing, all of it, or less than nothing."""
    sides = {name: _apart(name, rows[name], of, rate, seed) for name, of in pushes.items() if name not in EVICTING}
    suspects: set[int] = set()
    for table, side in sides.items():
        of = pushes[table]
        suspects.update(np.unique(of.names[~of.answered]).tolist())
        for apart in side:
            each = rate * extra[1:, None, None] * of.each[apart.gradients]
            _, fits = np.nonzero((np.abs(apart.difference - each) <= apart.bound).all(axis=2))
            if len(fits) == 1:
                suspects.update(of.names[apart.gradients][fits].tolist())
    wrong, compared, differ = [], {}, 0
    for table, side in sides.items():
        of, too_many = pushes[table], 0
        suspected = np.isin(of.names, list(suspects))
        for apart in side:
            candidates = of.each[apart.gradients][suspected[apart.gradients]]
            if len(candidates) > MOST_SUSPECTS:
                too_many += 1
                continue
            chosen = np.array(list(itertools.product(range(len(extra)), repeat=len(candidates))), np.intp)
            chosen = chosen.reshape(-1, len(candidates))
            fits = (np.abs(apart.difference - rate * (extra[chosen] @ candidates)) <= apart.bound).all(axis=1)
            if fits.any():
                differ += int((chosen[fits] > 0).sum(axis=1).min())
            else:
                wrong.append(
                    f"{(table, apart.id)} is no sum of its gradients: {apart.difference} apart from that of all"
                )
        compared[table] = len(of.ids) - too_many
    if differ > most:
        wrong.append(f"{differ} gradients of rows are missing, or of short steps, at most {most} expected")
    least = LEAST_COMPARED if least is None else least
    if compared.get(WHOLE, 0) < least:
        wrong.append(f"only {compared.get(WHOLE, 0)} of {WHOLE} could be compared, not {least}")
    return _some("rows", wrong), compared, differ


class _Apart(NamedTuple):
    """A row that differs from its initial value minus all of its gradients.

    Attributes:
        id: of the row.
        difference: from that, `[dim]`.
        bound: of rounding.
        gradients: where they are in `Pushes.each`.
    """

    id: int
    difference: Any
    bound: float
    gradients: slice


def _apart(table: str, rows: Rows, of: Pushes, rate: float, seed: int) -> list[_Apart]:
    places, there = rows.of(of.ids)
    initial = _initial_values(table, of.ids, of.sums.shape[1], seed)
    difference = np.where(there[:, None], rows.embeddings[places], initial) - (initial - rate * of.sums)
    bound = ROUNDING * (1 + rate * np.abs(of.sums).max(axis=1))
    ends = np.append(of.starts[1:], len(of.each)).tolist()
    return [
        _Apart(int(of.ids[i]), difference[i], float(bound[i]), slice(int(of.starts[i]), ends[i]))
        for i in np.flatnonzero(~(np.abs(difference) <= bound[:, None]).all(axis=1)).tolist()
    ]


def stale(dropped: int, restarts: int, tolerance: int, nn_workers: int, rows_of_a_batch: int) -> list[str]:
    """Gba drops rows of gradients only for what a restart left in flight.

    Args:
        dropped: rows of gradients that were too old.
        restarts: deaths of embedding PSs and NN workers.
        tolerance: of the mode, in steps.
        nn_workers: how many push.
        rows_of_a_batch: most that one push has.
    """
    most = restarts * nn_workers * (tolerance + 2) * rows_of_a_batch
    return [f"stale gradients: {dropped} rows dropped, at most {most} expected"] if dropped > most else []


def _initial_values(table: str, ids: Any, dim: int, seed: int) -> Any:
    schema = persia.Schema([persia.IdFeature(table, dim)])
    cluster = persia.cluster.Embedded(1)
    (server,) = cluster.connect(schema, persia.optim.SGD(lr=1.0), persia.modes.Sync(), seed).servers
    return server.lookup({table: ids}, True)[table]


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
