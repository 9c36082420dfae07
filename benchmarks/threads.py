"""How many threads torch should compute with beside persia's own threads and other processes.

    python -m benchmarks 'threads.*' [--preset smoke|laptop|full] [--json FILE]

Each way to run is a process of its own; they train in turn, while 0, 1 or 2 other processes keep a core busy. Half of
the cores for torch is compared with all of them, whose threads spin for a short time (`small`, `large`); and that with
all cores whose threads spin for long, or never.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection

from benchmarks import runner
from benchmarks.elsewhere import LONG_SPINS, SHORT_SPINS, started

LOADS = {"smoke": (0, 1), "laptop": (0, 1, 2), "full": (0, 1, 2)}
SECONDS = {"smoke": 0.05, "laptop": 1.0, "full": 3.0}
ROUNDS = {"smoke": 1, "laptop": 9, "full": 15}


@dataclass(frozen=True)
class Work:
    """Shape of a training run."""

    features: int
    dense: int
    hidden: tuple[int, ...]
    batch: int
    batches: int = 8


SMALL = Work(features=8, dense=4, hidden=(64, 32), batch=512)
LARGE = Work(features=26, dense=13, hidden=(256, 128), batch=4096)
SMOKE = Work(features=2, dense=1, hidden=(8,), batch=64, batches=2)


class Way:
    """A process that trains when it is asked to.

    Args:
        work: what it trains.
        variables: of its environment, beside those of this process.
    """

    def __init__(self, work: Work, variables: Mapping[str, str]) -> None:
        self._pipe, self._process = started(_train, variables, work)
        self.threads: int = self._pipe.recv()

    def rate(self, seconds: float) -> float:
        """Trains for so long, and returns samples/s."""
        self._pipe.send(seconds)
        return float(self._pipe.recv())

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.join()


def _train(pipe: Connection, work: Work) -> None:
    import torch

    import persia

    rows = work.batch * work.batches
    reader = persia.data.synthetic(
        rows,
        id_features=work.features,
        ids_per_feature=10_000,
        dense_features=work.dense,
        batch_size=work.batch,
    )
    data = list(reader)
    trainer = persia.Trainer(
        persia.nn.models.FFNN(reader.schema, hidden=work.hidden),
        reader.schema,
        optimizer=lambda params: torch.optim.Adam(params, 1e-3),
        embedding_optimizer=persia.optim.Adagrad(lr=0.05),
        mode=persia.modes.Hybrid(4, warmup=0),
        options=persia.TrainerOptions(device="cpu", progress=False),
    )
    trainer.fit(data)
    pipe.send(torch.get_num_threads())
    while True:
        seconds = pipe.recv()
        trained, spent = 0, 0.0
        while spent < seconds:
            result = trainer.fit(data)
            trained, spent = trained + result.rows, spent + result.seconds
        pipe.send(trained / spent)


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that do nothing, all the time."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def compare(
    preset: str, name: str, work: Work, ours: Mapping[str, str], theirs: Mapping[str, str]
) -> Iterator[runner.Measure]:
    """Samples/s of one way over those of the other, under each load."""
    cores = len(os.sched_getaffinity(0))
    work = SMOKE if preset == "smoke" else work
    mine, other = Way(work, ours), Way(work, theirs)
    try:
        for load in LOADS[preset]:
            with busy(load):
                found = runner.ratio(
                    f"{name}.load_{load}",
                    ours=lambda: mine.rate(SECONDS[preset]),
                    theirs=lambda: other.rate(SECONDS[preset]),
                    of="rows/s",
                    rounds=ROUNDS[preset],
                )
            details = {**found.details, "cores": cores, "threads": mine.threads, "threads_theirs": other.threads}
            yield runner.Measure(found.name, found.value, found.unit, spread=found.spread, details=details)
    finally:
        mine.close()
        other.close()


HALF = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2))}
ALL = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}


def names(name: str) -> list[str]:
    """One for each load."""
    return [f"{name}.load_{load}" for load in LOADS["full"]]


@runner.measures(*names("threads.small"))
def small(preset: str) -> Iterator[runner.Measure]:
    return compare(preset, "threads.small", SMALL, HALF, {**ALL, **SHORT_SPINS})


@runner.measures(*names("threads.large"))
def large(preset: str) -> Iterator[runner.Measure]:
    return compare(preset, "threads.large", LARGE, HALF, {**ALL, **SHORT_SPINS})


@runner.measures(*names("threads.spinning"))
def spinning(preset: str) -> Iterator[runner.Measure]:
    return compare(preset, "threads.spinning", SMALL, {**ALL, **SHORT_SPINS}, {**ALL, **LONG_SPINS})


@runner.measures(*names("threads.passive"))
def passive(preset: str) -> Iterator[runner.Measure]:
    return compare(preset, "threads.passive", SMALL, {**ALL, **SHORT_SPINS}, {**ALL, "OMP_WAIT_POLICY": "passive"})
