"""Work on a store whose process is killed: a sequence of requests that can be repeated, compared, and gone on with.

python benchmarks/recovery_load.py DIRECTORY SEED OPERATION...    (the process that is killed; see `Victim`)
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from persia.ps.regions import Regions
from persia.store import NativeStore, Rows, TableConfig

DEADLINE = 60.0
CLIENT = 7
PREPARED = 60
"""Operations that are prepared before they are done."""


class Load(NamedTuple):
    """Operation i is the same in every process: an insertion, or a push of client 7 with sequence i.

    Attributes:
        seed: of everything.
        ids: universe of ids; more than `capacity`, so that rows are evicted.
        capacity: of the table.
        batch: most ids of an operation.
        dim: of the table.
        optimizer: of the table.
        memory_rows: rows in memory of the table that is killed; 0: it has none on disk.
        spill: where those on disk are.
    """

    seed: int
    ids: int = 6000
    capacity: int = 4000
    batch: int = 800
    dim: int = 16
    optimizer: str = "adagrad"
    memory_rows: int = 0
    spill: str = ""

    def table(self, memory_rows: int = 0) -> TableConfig:
        return TableConfig(
            "table", self.dim, self.capacity, 4, self.seed, optimizer=self.optimizer, memory_rows=memory_rows
        )

    def open(self, store: NativeStore, directory: Path) -> bool:
        """Creates the table in these regions, or attaches to it."""
        roots = {"table": self.spill} if self.memory_rows else {}
        return Regions(str(directory)).create_or_attach(store, [self.table(self.memory_rows)], roots)

    def batch_of(self, operation: int) -> tuple[np.ndarray, np.random.Generator]:
        generator = np.random.default_rng([self.seed, operation])
        # Distinct, so that the state of a row is that before or that after an operation, and nothing else.
        return generator.choice(self.ids, generator.integers(1, self.batch), replace=False).astype(np.uint64), generator

    def prepare(self, operation: int) -> Operation:
        ids, generator = self.batch_of(operation)
        if operation % 3 == 0:
            return Operation(operation, ids, None)
        return Operation(operation, ids, generator.normal(size=(len(ids), self.dim)).astype(np.float32))

    def apply(self, store: NativeStore, operation: int) -> None:
        self.prepare(operation).run(store)


class Operation(NamedTuple):
    """What a store is asked to do: with gradients an update, else a lookup."""

    number: int
    ids: np.ndarray
    gradients: np.ndarray | None

    def run(self, store: NativeStore) -> None:
        if self.gradients is None:
            store.lookup([0], [self.ids], train=True)
        else:
            store.update([0], [self.ids], [self.gradients], [0.05], self.number, client=CLIENT, sequence=self.number)


def columns(store: NativeStore) -> dict[int, bytes]:
    """The bytes of each row by id, but for its recency, which depends on how often something was tried."""
    rows_by_id: dict[int, bytes] = {}
    for _, rows in store.iterate_rows(0):
        keep = Rows(*(np.ascontiguousarray(column) for column in rows))
        counts = np.stack([keep.update_count, keep.last_step], 1)
        values = np.concatenate([keep.embeddings, keep.state, counts.view(np.float32)], 1)
        for id_, row in zip(keep.ids.tolist(), values, strict=True):
            assert id_ not in rows_by_id, f"id {id_} has two rows"
            rows_by_id[id_] = row.tobytes()
    return rows_by_id


class Comparison(NamedTuple):
    """What was found after a kill.

    Attributes:
        rows: in the regions.
        wrong: of them, neither as before nor as after the operation in flight, or missing.
        seconds: that attaching took.
        recovery: what attaching found.
        tier: counts of rows on disk since the beginning.
    """

    rows: int
    wrong: int
    seconds: float
    recovery: dict[str, int]
    tier: dict[str, int]


class Victim:
    """A store in regions that another process works on until it is killed, and a twin that is not killed.

    Args:
        directory: of the regions.
        load: what is done.
    """

    def __init__(self, directory: Path, load: Load) -> None:
        self.directory = directory
        self.load = load
        self.twin = NativeStore()
        self.twin.create_table(load.table())
        self.twin.keep_last_steps(0)
        self.done = 0

    def run_and_kill(self, seconds: float, operations: int = 0) -> int:
        """Lets the process work from operation `done + 1` on: through so many, and then for a while.

        Returns the last operation it completed.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        progress = self.directory.parent / "progress"
        progress.write_bytes(self.done.to_bytes(8, "little"))

        def completed() -> int:
            return int.from_bytes(progress.read_bytes(), "little")

        process = subprocess.Popen(
            [sys.executable, __file__, str(self.directory), str(progress), str(self.done), *map(str, self.load)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"attached\n"
            deadline = time.monotonic() + DEADLINE
            while completed() < self.done + operations:  # However busy the machine is.
                assert time.monotonic() < deadline, f"{operations} operations were not done in {DEADLINE} s"
                time.sleep(0.001)
            time.sleep(seconds)  # The moment of the kill is what is drawn.
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(DEADLINE)
            process.stdout.close()
        return completed()

    def compare(self, completed: int) -> Comparison:
        """Attaches, compares, repeats the operation that was in flight, and compares again."""
        for operation in range(self.done + 1, completed + 1):
            self.load.apply(self.twin, operation)
        before = columns(self.twin)
        self.load.apply(self.twin, completed + 1)
        after = columns(self.twin)
        store = NativeStore(2)
        began = time.perf_counter()
        assert self.load.open(store, self.directory)
        seconds = time.perf_counter() - began
        after_kill = columns(store)
        wrong = sum(row not in (before.get(id_), after.get(id_)) for id_, row in after_kill.items())
        # (An insertion may have evicted what comes later in its own batch, and will insert it again.)
        coming = set(self.load.batch_of(completed + 1)[0].tolist())
        wrong += sum(id_ not in after_kill for id_ in (before.keys() & after.keys()) - coming)
        self.load.apply(store, completed + 1)
        repeated = columns(store)
        wrong += sum(repeated.get(id_) != after.get(id_) for id_ in repeated.keys() | after.keys())
        self.done = completed + 1
        return Comparison(len(after_kill), wrong, seconds, store.recovery(0), store.tier_counts(0))


def kills(directory: Path, load: Load, count: int, longest: float) -> list[Comparison]:
    """Kills one process after another, each after a few operations, and up to `longest` seconds."""
    draw = random.Random(load.seed)
    victim = Victim(directory, load)
    return [victim.compare(victim.run_and_kill(draw.random() * longest, draw.randrange(1, 4))) for _ in range(count)]


def _work(directory: str, progress: str, done: int, load: Load) -> None:
    store = NativeStore(2)
    load.open(store, Path(directory))
    store.keep_last_steps(0)
    with open(progress, "r+b") as file, mmap.mmap(file.fileno(), 8) as memory:
        while True:
            # Beforehand, so that a kill falls into the work of the store.
            operations = [load.prepare(done + i) for i in range(1, PREPARED + 1)]
            print("attached", flush=True)
            for operation in operations:
                operation.run(store)
                done = operation.number
                memory[:8] = done.to_bytes(8, "little")


if __name__ == "__main__":
    where, shared, first, *numbers = sys.argv[1:]
    _work(where, shared, int(first), Load(*map(int, numbers[:5]), numbers[5], int(numbers[6]), numbers[7]))
