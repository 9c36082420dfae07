"""Eviction and growth of the embedding store: their cost, and the longest requests.

    python -m benchmarks 'store.evict*' store.ttl store.grow_pause_p999 [--preset smoke|laptop|full] [--json FILE]

Rows have 16 floats and Adagrad's state; one thread. In a full table half of the rows are in use (the even ones) and the
other half is evicted, oldest first, so that each new id evicts one row and no other id misses. In store.ttl the other
half has left, so that each new id takes the memory of one of its rows.

With `eviction="midpoint"` (`.midpoint`) new ids enter among the rows of the other half, so that in time they evict one
another; the rows in use stay above them. Two details say whether a run did what its measure assumes: `evicted_per_new`
is 1, and `known_misses`, of ids in use, are few.

A pause is the 99.9th percentile of the time of a request less the median. It is wall-clock time, so it contains what
other processes take. Two details tell how much that is: `cpu`, the same in processor time of the calling thread, and
`index_select`, the same of `torch.index_select` on as many rows.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks import runner
from benchmarks.store import BATCH, DIM, filled, ids_of
from persia.store import NativeStore, TableConfig
from persia.store.table_config import EvictionKind

REQUEST = 8192
SHARE_NEW = 0.1
EVICT_PAUSE, GROW_PAUSE = 0.001, 0.003


@dataclass(frozen=True)
class Scale:
    """How much of everything a preset does."""

    rows: int  # of the table in store.evict and store.ttl
    batches: int  # per timing there
    rounds: int
    full: tuple[int, int]  # rows of the tables in store.evict_pause_p999
    requests: int  # per round there
    grow: tuple[int, int]  # first and last size in store.grow_pause_p999


SCALES = {
    "smoke": Scale(200_000, 2, 5, (100_000, 200_000), 100, (50_000, 200_000)),
    "laptop": Scale(4_000_000, 10, 9, (1_000_000, 20_000_000), 4_000, (1_000_000, 20_000_000)),
    "full": Scale(12_000_000, 20, 15, (1_000_000, 20_000_000), 10_000, (1_000_000, 50_000_000)),
}


class Stream:
    """Endless requests: 10 % of their ids are new, and the others belong to even rows among the first `rows`."""

    def __init__(self, rows: int, size: int) -> None:
        self.rows, self.size, self.first_new = rows, size, rows
        self.random = np.random.default_rng(0)

    def __next__(self) -> np.ndarray:
        fresh = int(self.size * SHARE_NEW)
        new = np.arange(self.first_new, self.first_new + fresh)
        self.first_new += fresh
        known = 2 * self.random.integers(0, self.rows // 2, self.size - fresh)
        return ids_of(self.random.permutation(np.concatenate([known, new])))


def in_use(
    rows: int, capacity: int, ttl: int = 0, eviction: EvictionKind = "lru", files: str | None = None
) -> NativeStore:
    """A table that has met `rows` rows, and the even ones of them last; the others have left if there is a `ttl`."""
    store = filled(rows, files=files, capacity=capacity, ttl=ttl, eviction=eviction)
    store.advance_clock(0, 0)
    out = np.empty((BATCH, DIM), np.float32)
    # Even rows that left while the table filled are new ones in the first pass. Only the second makes those recent if
    # they were inserted at the midpoint.
    for _ in range(1 if eviction == "lru" else 2):
        for start in range(0, rows, 2 * BATCH):
            ids = ids_of(np.arange(start, min(start + 2 * BATCH, rows), 2))
            store.lookup([0], [ids], True, [out[: len(ids)]])
    store.advance_clock(0, ttl)
    return store


def capacity_of_a_full_table(rows: int) -> int:
    """A bit below `rows`: ids are not spread evenly over shards, and each of them has to be full."""
    return rows - rows // 32


def with_new_ids(store: NativeStore, rows: int, batches: int) -> Callable[[], float]:
    """Rows per second of the next batches."""
    stream, out = Stream(rows, BATCH), [np.empty((BATCH, DIM), np.float32)]

    def measure() -> float:
        keys = [next(stream) for _ in range(batches)]
        start = time.perf_counter()
        for ids in keys:
            store.lookup([0], [ids], True, out)
        return batches * BATCH / (time.perf_counter() - start)

    measure()
    return measure


def full_against_roomy(name: str, preset: str, eviction: EvictionKind) -> runner.Measure:
    """Lookups in a full table where 10 % of the ids are new, against those in a table that has room."""
    scale = SCALES[preset]
    full = in_use(scale.rows, capacity_of_a_full_table(scale.rows), eviction=eviction)
    roomy = in_use(scale.rows, 2**30, eviction=eviction)
    ours = with_new_ids(full, scale.rows, scale.batches)
    theirs = with_new_ids(roomy, scale.rows, scale.batches)
    before = full.statistics(0)
    measure = runner.ratio(name, ours=ours, theirs=theirs, of="rows/s", rounds=scale.rounds, at_least=0.95)
    return replace(measure, details={**measure.details, **what_new_ids_did(before, full.statistics(0), BATCH)})


def what_new_ids_did(before: dict[str, int], after: dict[str, int], size: int) -> dict[str, float]:
    """Rows evicted per new id, and misses of other ids, between two statistics of a table; requests have `size` ids."""
    lookups, misses, evicted = (after[name] - before[name] for name in ("lookups", "misses", "evicted"))
    new = lookups // size * int(size * SHARE_NEW)
    return {"evicted_per_new": evicted / new, "known_misses": misses - new}


@runner.measures("store.evict")
def evict(preset: str) -> runner.Measure:
    """Lookups in a full table where 10 % of the ids are new, against those in a table that has room."""
    return full_against_roomy("store.evict", preset, "lru")


@runner.measures("store.evict.midpoint")
def evict_midpoint(preset: str) -> runner.Measure:
    """The same of tables with `eviction="midpoint"`, where new ids count as less recent than most rows."""
    return full_against_roomy("store.evict.midpoint", preset, "midpoint")


@runner.measures("store.ttl")
def ttl(preset: str) -> runner.Measure:
    """Lookups in a table that half of the rows have left, 10 % of the ids new, against those in one that has room."""
    scale = SCALES[preset]
    left, roomy = in_use(scale.rows, 2**30, ttl=1), in_use(scale.rows, 2**30)
    ours = with_new_ids(left, scale.rows, scale.batches)
    theirs = with_new_ids(roomy, scale.rows, scale.batches)
    measure = runner.ratio("store.ttl", ours=ours, theirs=theirs, of="rows/s", rounds=scale.rounds, at_least=0.95)
    return replace(measure, details={**measure.details, "rows": left.size(0), "rows_with_room": roomy.size(0)})


def pause(seconds: Sequence[float]) -> float:
    """The 99.9th percentile less the median."""
    return float(np.quantile(seconds, 0.999) - np.median(seconds))


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Returns (wall-clock, processor) seconds of a call."""
    cpu, wall = time.thread_time(), time.perf_counter()
    call()
    return time.perf_counter() - wall, time.thread_time() - cpu


def pause_measure(
    name: str, rounds: Sequence[Sequence[tuple[float, float]]], rows: object, control: float, at_most: float
) -> runner.Measure:
    """The median over rounds of the pause in wall-clock time, with what tells it from noise."""
    walls = [[wall for wall, _ in each] for each in rounds]
    return runner.quantity(
        name,
        [pause(each) for each in walls],
        "s",
        at_most=at_most,
        details={
            "rows": rows,
            "requests": len(rounds[0]),
            "median": float(np.median([np.median(each) for each in walls])),
            "longest": float(np.median([max(each) for each in walls])),
            "cpu": float(np.median([pause([cpu for _, cpu in each]) for each in rounds])),
            "index_select": control,
        },
    )


def pause_of_index_select(rows: int, requests: int) -> float:
    """The pause of `torch.index_select`, which evicts nothing, so the pause comes from the machine."""
    torch.set_num_threads(1)
    table, out = torch.ones(rows, DIM), torch.empty(REQUEST, DIM)
    random = np.random.default_rng(0)
    walls = []
    for _ in range(requests):
        index = torch.from_numpy(random.integers(0, rows, REQUEST))
        walls.append(timed(lambda index=index: torch.index_select(table, 0, index, out=out))[0])
    return pause(walls)


def pause_of_a_full_table(name: str, rows: int, preset: str, eviction: EvictionKind = "lru") -> runner.Measure:
    """Requests of 8,192 ids to a full table, of which 10 % are new."""
    requests = SCALES[preset].requests
    store = in_use(rows, capacity_of_a_full_table(rows), eviction=eviction)
    stream, out = Stream(rows, REQUEST), [np.empty((REQUEST, DIM), np.float32)]
    before = store.statistics(0)
    rounds = []
    for _ in range(runner.rounds_of(preset)):
        times = []
        for _ in range(requests):
            ids = next(stream)
            times.append(timed(lambda ids=ids: store.lookup([0], [ids], True, out)))
        rounds.append(times)
    measure = pause_measure(name, rounds, rows, pause_of_index_select(rows, requests), EVICT_PAUSE)
    return replace(measure, details={**measure.details, **what_new_ids_did(before, store.statistics(0), REQUEST)})


@runner.measures("store.evict_pause_p999", "store.evict_pause_p999.small", "store.evict_pause_p999.large")
def evict_pause(preset: str) -> Iterator[runner.Measure]:
    """Requests of 8,192 ids to a full table, of which 10 % are new; 1 M rows, 20 M rows, and the worse of both."""
    measures = []
    for kind, rows in zip(("small", "large"), SCALES[preset].full, strict=True):
        measures.append(pause_of_a_full_table(f"store.evict_pause_p999.{kind}", rows, preset))
        yield measures[-1]
    yield runner.worst("store.evict_pause_p999", measures)


@runner.measures("store.evict_pause_p999.midpoint")
def evict_pause_midpoint(preset: str) -> runner.Measure:
    """As store.evict_pause_p999.small, of a table with `eviction="midpoint"`."""
    return pause_of_a_full_table("store.evict_pause_p999.midpoint", SCALES[preset].full[0], preset, "midpoint")


@runner.measures("store.evict_after_restart")
def evict_after_restart(preset: str) -> runner.Measure:
    """The first request to a full table that a new process attaches to, less the median of those after it.

    Each round attaches again, in this process, to rows in files in shared memory.
    """
    rows = SCALES[preset].rows
    config = TableConfig("table", DIM, capacity=capacity_of_a_full_table(rows))
    stream, out = Stream(rows, REQUEST), [np.empty((REQUEST, DIM), np.float32)]
    pauses, attaching = [], []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        files = f"{directory}/table"
        in_use(rows, config.capacity, files=files)
        for _ in range(runner.rounds_of(preset)):
            store = NativeStore(1)
            attaching.append(timed(lambda store=store: store.create_table(config, files, attach=True))[0])
            times = []
            for _ in range(100):
                ids = next(stream)
                times.append(timed(lambda ids=ids, store=store: store.lookup([0], [ids], True, out))[0])
            pauses.append(times[0] - float(np.median(times)))
            del store
    details = {"rows": rows, "attaching": float(np.median(attaching))}
    return runner.quantity("store.evict_after_restart", pauses, "s", details=details)


@runner.measures("store.grow_pause_p999")
def grow_pause(preset: str) -> runner.Measure:
    """Requests of 8,192 new ids while a table grows from 1 M to 50 M rows (`laptop`: 20 M)."""
    first, last = SCALES[preset].grow
    out = [np.empty((REQUEST, DIM), np.float32)]
    rounds = []
    for _ in range(runner.rounds_of(preset)):
        store = filled(first)
        times = []
        for start in range(first, last, REQUEST):
            ids = ids_of(np.arange(start, start + REQUEST))
            times.append(timed(lambda ids=ids, store=store: store.lookup([0], [ids], True, out)))
        rounds.append(times)
    control = pause_of_index_select(last, len(rounds[0]))
    return pause_measure("store.grow_pause_p999", rounds, [first, last], control, GROW_PAUSE)
