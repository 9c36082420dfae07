"""Tables larger than memory: the rate of the SSD tier against the disk itself, memory alone, and RocksDB.

    python -m benchmarks ssd.train ssd.read ssd.vs_rocksdb [--preset smoke|laptop|full] [--json FILE]

ssd.read
    Rows per second that lookups bring back from disk, against `pread` of blocks of 4 KiB at random places of a file of
    the same size, O_DIRECT, by as many threads of C++ as the tier has reads in flight. No row comes twice.
ssd.train
    Rows per second of a training loop whose lookups run ahead by two batches, as in Hybrid(2): Zipf(1.05) ids, memory
    for a tenth of the rows, against the smaller of the same with all rows in memory, and the rate of ssd.read divided
    by the share of rows that miss.
ssd.vs_rocksdb
    Lookups and updates per second against rocksdict with the same memory for its block cache, and Adagrad by NumPy.
    rocksdict is called from Python, with `bytes` for each key and each value, so the ratio flatters us: a caller in C++
    would be faster. `in_rocksdict` is the share of its time within calls of rocksdict, which make such objects, too,
    and `without_python` the ratio if all else that Python and NumPy do for it took no time.

Files lie in the directory of PERSIA_SSD, else in that of temporary files: put it on the disk to be measured. Reads and
writes of the tier bypass the page cache.
"""

from __future__ import annotations

import collections
import os
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks import runner
from benchmarks.ssd import ssd
from benchmarks.store import ids_of
from persia.store import NativeStore, TableConfig
from persia.store.disk import DEPTH, random_reads

try:
    import rocksdict
except ImportError:  # an extra
    rocksdict = None

DIM = 16
EXPONENT = 1.05
BATCH = 16_384
PAGE = 4096
THREADS = 2
AHEAD = 2
"""Batches whose lookups run ahead."""


@dataclass(frozen=True)
class Scale:
    """How much of everything a preset does."""

    rows: int
    peer_rows: int
    batches: int
    rounds: int


SCALES = {
    "smoke": Scale(60_000, 20_000, 2, 1),
    "laptop": Scale(50_000_000, 4_000_000, 24, 5),
    "full": Scale(50_000_000, 50_000_000, 100, 9),
}


def filled(rows: np.ndarray, path: Path | None = None, memory_rows: int = 0) -> NativeStore:
    """A store with these rows, the last ones in memory."""
    store = NativeStore(THREADS)
    config = TableConfig("table", DIM, memory_rows=memory_rows)
    store.create_table(config, spill=None if path is None else str(path / "rows"))
    out = np.empty((BATCH, DIM), np.float32)
    for start in range(0, len(rows), BATCH):
        ids = ids_of(rows[start : start + BATCH])
        store.lookup([0], [ids], True, [out[: len(ids)]])
    return store


def cold_rate(store: NativeStore, batches: Iterator[np.ndarray], count: int) -> float:
    """Rows per second that come back from disk."""
    out = np.empty((BATCH, DIM), np.float32)
    ids = [ids_of(next(batches)) for _ in range(count)]
    before = store.tier_counts(0)["promoted"]
    start = time.perf_counter()
    for each in ids:
        store.lookup([0], [each], True, [out[: len(each)]])
    seconds = time.perf_counter() - start
    return (store.tier_counts(0)["promoted"] - before) / seconds


class Blocks:
    """Reads of 4 KiB at random places of a file, by a loop of `pread` in each of `DEPTH` threads of C++.

    Args:
        path: of the file, which is written.
        size: bytes.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._blocks, self._seed = str(path), size // PAGE, 0
        chunk = np.random.default_rng(0).bytes(1 << 20)
        with path.open("wb") as file:
            for _ in range(0, size, len(chunk)):
                file.write(chunk)
            os.fsync(file.fileno())

    def rate(self, count: int) -> float:
        """Blocks per second, past the page cache."""
        self._seed += 1
        return count / random_reads(
            self._path, self._blocks, count, block_bytes=PAGE, seed=self._seed, threads=DEPTH
        )  # fmt: skip


def cold_batches(rows: int) -> Iterator[np.ndarray]:
    """Batches without any row that came before, over and over: with few rows in memory, all of them miss."""
    order = np.random.default_rng(0).permutation(rows)
    while True:
        for start in range(0, rows - BATCH + 1, BATCH):
            yield order[start : start + BATCH]


@runner.measures("ssd.read")
def read(preset: str) -> runner.Measure:
    """Rows per second that come back from disk, against the disk itself."""
    scale = SCALES[preset]
    with ssd() as path:
        store = filled(np.arange(scale.rows), path, max(scale.rows // 100, BATCH // 8))
        disk = store.tier_counts(0)["disk_bytes"]
        batches = cold_batches(scale.rows)
        blocks = Blocks(path / "blocks", disk)
        measure = runner.ratio(
            "ssd.read",
            ours=lambda: cold_rate(store, batches, scale.batches),
            theirs=lambda: blocks.rate(scale.batches * BATCH),
            of="rows/s over blocks of 4 KiB/s",
            rounds=scale.rounds,
            at_least=0.7,
        )
    return replace(measure, details={**measure.details, "rows": scale.rows, "disk_bytes": disk})


class Training:
    """A loop of lookups and pushes, of which lookups run ahead.

    Args:
        store: with one table.
        popular: row numbers by popularity; Zipf(1.05) over them.
    """

    def __init__(self, store: NativeStore, popular: np.ndarray) -> None:
        self._store = store
        self._random = np.random.default_rng(1)
        self._weights = np.cumsum(np.arange(1, len(popular) + 1, dtype=np.float64) ** -EXPONENT)
        self._popular = popular
        self._step = 0

    def batch(self) -> np.ndarray:
        """Returns the distinct ids of a batch of `BATCH` ids."""
        ranks = np.searchsorted(self._weights, self._random.random(BATCH) * self._weights[-1])
        return ids_of(np.unique(self._popular[ranks]))

    def rate(self, count: int) -> float:
        """Returns rows per second of `count` batches."""
        batches = [self.batch() for _ in range(count)]
        gradients = np.full((BATCH, DIM), 0.01, np.float32)
        ahead: collections.deque[Future[None]] = collections.deque()
        waiting = iter(batches)
        with ThreadPoolExecutor(AHEAD) as pool:
            start = time.perf_counter()
            for ids in batches:
                while len(ahead) < AHEAD and (following := next(waiting, None)) is not None:
                    ahead.append(pool.submit(self._look, following))
                ahead.popleft().result()
                self._step += 1
                self._store.update([0], [ids], [gradients[: len(ids)]], [0.05], self._step, 1, self._step)
            seconds = time.perf_counter() - start
        return sum(map(len, batches)) / seconds

    def _look(self, ids: np.ndarray) -> None:
        self._store.lookup([0], [ids], True, [np.empty((len(ids), DIM), np.float32)])


@runner.measures("ssd.train")
def train(preset: str) -> runner.Measure:
    """Training with memory for a tenth of the rows, against what memory and the disk permit."""
    scale = SCALES[preset]
    popular = np.random.default_rng(0).permutation(scale.rows)
    pairs = []
    with ssd() as path:
        # The most popular rows come last, so that they are in memory: as after a long time of training.
        tiered = filled(popular[::-1], path, scale.rows // 10)
        memory = filled(popular[::-1])
        ours, theirs = Training(tiered, popular), Training(memory, popular)
        blocks = Blocks(path / "blocks", tiered.tier_counts(0)["disk_bytes"])
        for _ in range(scale.rounds):
            before = tiered.tier_counts(0)["promoted"], tiered.statistics(0)["lookups"]
            own = ours.rate(scale.batches)
            after = tiered.tier_counts(0)["promoted"], tiered.statistics(0)["lookups"]
            missed = (after[0] - before[0]) / (after[1] - before[1])
            pairs.append((own, theirs.rate(scale.batches), blocks.rate(scale.batches * BATCH), missed))
        counts = tiered.tier_counts(0)
    details = {
        "of": "rows/s over the smaller of rows/s in memory, and blocks of 4 KiB/s over the share of rows that miss",
        "ours": statistics.median(pair[0] for pair in pairs),
        "memory": statistics.median(pair[1] for pair in pairs),
        "blocks": statistics.median(pair[2] for pair in pairs),
        "missed": statistics.median(pair[3] for pair in pairs),
        "rows": scale.rows,
        "write_amplification": (counts["spilled"] + counts["compacted"]) / max(1, counts["spilled"]),
    }
    ratios = [own / min(memory, blocks / max(missed, 1e-9)) for own, memory, blocks, missed in pairs]
    return runner.quantity("ssd.train", ratios, "ratio", at_least=0.7, details=details)


class Rocks:
    """The same rows in RocksDB: Adagrad by NumPy over values read and written in batches.

    Args:
        path: of the database.
        memory_bytes: of its block cache.
    """

    def __init__(self, path: Path, memory_bytes: int) -> None:
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        table = rocksdict.BlockBasedOptions()
        table.set_block_cache(rocksdict.Cache(memory_bytes))
        table.set_bloom_filter(10, False)
        options.set_block_based_table_factory(table)
        options.set_use_direct_reads(True)
        options.set_use_direct_io_for_flush_and_compaction(True)
        options.set_compression_type(rocksdict.DBCompressionType.none())
        options.increase_parallelism(THREADS)
        self.seconds = 0.0  # within calls of rocksdict by `train`
        self._rows = rocksdict.Rdict(str(path), options)

    def fill(self, ids: np.ndarray) -> None:
        """Writes rows of ids."""
        row = np.full(2 * DIM, 0.01, np.float32).tobytes()
        batch = rocksdict.WriteBatch(raw_mode=True)
        for key in keys_of(ids):
            batch.put(key, row)
        self._rows.write(batch)

    def train(self, ids: np.ndarray) -> None:
        """Looks rows up, and writes them back with a gradient applied."""
        keys = keys_of(ids)
        start = time.perf_counter()
        values = self._rows[keys]
        self.seconds += time.perf_counter() - start
        rows = np.frombuffer(b"".join(values), np.float32).reshape(len(keys), 2, DIM).copy()
        rows[:, 1] += 1e-4
        rows[:, 0] -= 0.05 * 0.01 / np.sqrt(rows[:, 1])
        batch = rocksdict.WriteBatch(raw_mode=True)
        for key, row in zip(keys, rows, strict=True):
            batch.put(key, row.tobytes())
        start = time.perf_counter()
        self._rows.write(batch)
        self.seconds += time.perf_counter() - start

    def close(self) -> None:
        """Closes the database."""
        self._rows.close()


def keys_of(ids: np.ndarray) -> list[bytes]:
    """The keys of ids in RocksDB."""
    raw = ids.tobytes()
    return [raw[i : i + 8] for i in range(0, len(raw), 8)]


@runner.measures("ssd.vs_rocksdb")
def vs_rocksdb(preset: str) -> runner.Measure | None:
    """Lookups with updates per second, against rocksdict with as much memory."""
    if rocksdict is None:
        print("rocksdict was not found; `pip install rocksdict`", file=sys.stderr)
        return None
    scale = SCALES[preset]
    rows = scale.peer_rows
    popular = np.random.default_rng(0).permutation(rows)
    with ssd() as path:
        store = filled(popular[::-1], path, rows // 10)
        rocks = Rocks(path / "rocks", rows // 10 * store.config(0).row_bytes)
        for start in range(0, rows, BATCH):
            rocks.fill(ids_of(popular[::-1][start : start + BATCH]))
        ours, theirs = Training(store, popular), Training(store, popular)
        taken = []

        def peer() -> float:
            batches = [theirs.batch() for _ in range(scale.batches)]
            start = time.perf_counter()
            for ids in batches:
                rocks.train(ids)
            taken.append(time.perf_counter() - start)
            return sum(map(len, batches)) / taken[-1]

        measure = runner.ratio(
            "ssd.vs_rocksdb",
            ours=lambda: ours.rate(scale.batches),
            theirs=peer,
            of="rows/s",
            rounds=scale.rounds,
            at_least=3.0,
        )
        rocks.close()
    share = rocks.seconds / sum(taken)
    details = {"rows": rows, "in_rocksdict": share, "without_python": measure.value * share}
    return replace(measure, details={**measure.details, **details})
