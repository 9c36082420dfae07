"""How long the threads of torch should spin, beside other processes: persia over plain PyTorch, and over what it did.

    python -m benchmarks 'threads.*' [--preset smoke|laptop|full] [--json FILE]

Each way to run is a process of its own; they train in turn, while 0, 1 or 2 other processes keep a core busy. Plain
PyTorch has torch's own spins in each. 8 features of dim 16 over 10,000 ids each, batches of 512.

threads.program.load_N   A user's program: the default mode, torch's own spins.
threads.command.load_N   As `persia train` runs: the default mode, shorter spins.
threads.ahead.load_N     As before there was one thread: Hybrid(4), half of the cores for torch, short spins.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection

from benchmarks import runner
from benchmarks.baselines.step_torch import Plain, Variant, Workload, generate
from benchmarks.elsewhere import AS_A_COMMAND, AS_A_PROGRAM, busy, started
from persia.openmp import SPINS_SHARED

LOADS = {"smoke": (0, 1), "laptop": (0, 1, 2), "full": (0, 1, 2)}
STEPS = {"smoke": 2, "laptop": 50, "full": 600}
ROUNDS = {"smoke": 1, "laptop": 7, "full": 15}
SMALL = Workload(features=8, dense=4, rows=10_000, batch=512, batches=8)
SMOKE = Workload(features=2, dense=1, rows=100, batch=64, batches=2)
CORES = len(os.sched_getaffinity(0))
AS_BEFORE = {"GOMP_SPINCOUNT": str(SPINS_SHARED), "OMP_NUM_THREADS": str(max(1, CORES // 2))}


class Way:
    """A process that trains when it is asked to.

    Args:
        kind: "plain", "default" or "ahead".
        work: what it trains.
        variables: for its environment, in addition to this process's.
    """

    def __init__(self, kind: str, work: Workload, variables: Mapping[str, str]) -> None:
        self._pipe, self._process = started(_train, variables, kind, work)
        self.threads: int = self._pipe.recv()
        self._rows = work.batch

    def rate(self, steps: int) -> float:
        """Trains `steps` steps, and returns samples/s."""
        self._pipe.send(steps)
        return steps * self._rows / float(self._pipe.recv())

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.join()


def _train(pipe: Connection, kind: str, work: Workload) -> None:
    import torch

    from benchmarks.step import Persia
    from persia.modes import Hybrid
    from persia.schema import Adagrad

    data = generate(work)
    modes = {"default": Hybrid(), "ahead": Hybrid(4, warmup=0)}
    variant: Variant = Plain(work, data) if kind == "plain" else Persia(work, data, Adagrad(lr=0.05), mode=modes[kind])
    variant.time(2 * len(data))
    pipe.send(torch.get_num_threads())
    while True:
        pipe.send(variant.time(pipe.recv()))


def compare(
    preset: str, name: str, kind: str, variables: Mapping[str, str], idle: float | None, loaded: float | None
) -> Iterator[runner.Measure]:
    """Samples/s of one way over samples/s of plain PyTorch, under each load. `idle` and `loaded` are targets."""
    work = SMOKE if preset == "smoke" else SMALL
    persia_way, other = Way(kind, work, variables), Way("plain", work, AS_A_PROGRAM)
    try:
        for load in LOADS[preset]:
            with busy(load):
                yield runner.ratio(
                    f"{name}.load_{load}",
                    ours=lambda: persia_way.rate(STEPS[preset]),
                    theirs=lambda: other.rate(STEPS[preset]),
                    of="rows/s",
                    rounds=ROUNDS[preset],
                    at_least=loaded if load else idle,
                    details={"cores": CORES, "threads": persia_way.threads, "threads_theirs": other.threads},
                )
    finally:
        persia_way.close()
        other.close()


def names(name: str) -> list[str]:
    """One for each load."""
    return [f"{name}.load_{load}" for load in LOADS["full"]]


@runner.measures(*names("threads.program"))
def program(preset: str) -> Iterator[runner.Measure]:
    return compare(preset, "threads.program", "default", AS_A_PROGRAM, None, 1.0)


@runner.measures(*names("threads.command"))
def command(preset: str) -> Iterator[runner.Measure]:
    return compare(preset, "threads.command", "default", AS_A_COMMAND, None, 2.5)


@runner.measures(*names("threads.ahead"))
def ahead(preset: str) -> Iterator[runner.Measure]:
    return compare(preset, "threads.ahead", "ahead", AS_BEFORE, None, None)
