"""The store against tables of other libraries: TensorFlow Recommenders Addons, and PaddlePaddle's parameter server.

    python -m benchmarks 'peers.*' [--preset smoke|laptop|full] [--json FILE]

They run in a process and an environment of their own: benchmarks/baselines/peers_env.sh creates build/peers-env; the
environment variable PERSIA_PEERS names another Python that has them. What is missing there is skipped, and named.

All sides meet the same ids, rows of 16 floats and Adagrad, and have as many cores as the name says. `lookup` is looking
up batches of 65,536 ids, `train` is that and an update of the same rows.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np

from benchmarks import runner
from benchmarks.baselines import peer
from persia.store import NativeStore, TableConfig

BASELINES = Path(peer.__file__).parent
PEERS = {"tfra": "tensorflow_recommenders_addons", "paddle": "paddle"}
"""The package of each one."""

WORK = {
    "smoke": peer.Work(rows=50_000, batch=8192, batches=2),
    "laptop": peer.Work(),
    "full": peer.Work(rows=10_000_000, batches=20),
}
ROUNDS = {"smoke": 1, "laptop": 7, "full": 15}
READY_SECONDS, ANSWER_SECONDS = 300.0, 120.0
AIM = 2.0


def python() -> str | None:
    """The interpreter that has the peers, or None."""
    configured = os.environ.get("PERSIA_PEERS")
    path = Path(configured) if configured else BASELINES.parents[1] / "build" / "peers-env" / "bin" / "python"
    return str(path) if path.exists() else None


class Persia(peer.Peer):
    """A table of the store."""

    def __init__(self, work: peer.Work) -> None:
        super().__init__(work)
        self.store = NativeStore(work.cores)
        self.store.create_table(TableConfig("table", work.dim))
        self.gradients = np.random.default_rng(1).standard_normal((work.batch, work.dim), np.float32)

    def prepare(self, ids: np.ndarray) -> np.ndarray:
        """See `Peer.prepare`."""
        return ids.view(np.uint64)

    def fill(self, ids: np.ndarray) -> None:
        """See `Peer.fill`."""
        self.lookup(ids)

    def lookup(self, ids: np.ndarray) -> np.ndarray:
        """See `Peer.lookup`."""
        return self.store.lookup([0], [ids], True)[0]

    def train(self, ids: np.ndarray) -> np.ndarray:
        """See `Peer.train`."""
        rows = self.lookup(ids)
        self.store.update([0], [ids], [self.gradients], [0.05], 1)
        return rows


class Process:
    """A peer in a separate process. `rate` measures it; the deadlines end a process that does not answer."""

    def __init__(self, script: str, work: peer.Work) -> None:
        interpreter = python()
        assert interpreter is not None
        self.work = work
        self.process = subprocess.Popen(
            [interpreter, str(BASELINES / f"peer_{script}.py"), json.dumps(asdict(work))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.expect("ready", READY_SECONDS)

    def expect(self, word: str, seconds: float) -> str:
        """Returns what follows the word in the next line."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        line = self.process.stdout.readline().split() if ready else []
        if line[:1] != [word]:
            self.close()
            raise RuntimeError(f"{self.process.args} has not answered {word!r} within {seconds} s, but {line}")
        return line[-1]

    def rate(self, call: str) -> float:
        """Rows per second."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{call}\n")
        self.process.stdin.flush()
        return self.work.batch * self.work.batches / float(self.expect("seconds", ANSWER_SECONDS))

    def close(self) -> None:
        """Ends the process."""
        with self.process as process:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def rate_here(table: peer.Peer, prepared: list[np.ndarray], call: str) -> float:
    """Rows per second of a table in this process."""
    of: Callable[[np.ndarray], object] = {"lookup": table.lookup, "train": table.train}[call]
    start = time.perf_counter()
    for ids in prepared:
        of(ids)
    return sum(map(len, prepared)) / (time.perf_counter() - start)


def has(interpreter: str, package: str) -> bool:
    """Whether a package is installed there."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([interpreter, "-c", code], check=False).returncode == 0


def compare(script: str, preset: str) -> Iterator[runner.Measure]:
    """Lookups and training of one peer, with one core and two."""
    interpreter = python()
    if interpreter is None or not has(interpreter, PEERS[script]):
        print(f"peers.{script} is skipped: create its environment: benchmarks/baselines/peers_env.sh", file=sys.stderr)
        return
    for cores in (1, 2):
        work = peer.Work(**{**asdict(WORK[preset]), "cores": cores})
        ours = Persia(work)
        for ids in peer.fills(work):
            ours.fill(ours.prepare(ids))
        prepared = [ours.prepare(ids) for ids in peer.batches(work)]
        with contextlib.closing(Process(script, work)) as theirs:
            for call in ("lookup", "train"):
                rate_here(ours, prepared, call)
                theirs.rate(call)
                yield runner.ratio(
                    f"peers.{script}.{call}_{cores}",
                    ours=lambda call=call, ours=ours, prepared=prepared: rate_here(ours, prepared, call),
                    theirs=lambda call=call, theirs=theirs: theirs.rate(call),
                    of="rows/s",
                    rounds=ROUNDS[preset],
                    at_least=AIM,
                )


def names(script: str) -> list[str]:
    """All that `compare` prints."""
    return [f"peers.{script}.{call}_{cores}" for cores in (1, 2) for call in ("lookup", "train")]


@runner.measures(*names("tfra"))
def tfra(preset: str) -> Iterator[runner.Measure]:
    """TensorFlow Recommenders Addons: a dynamic embedding variable."""
    return compare("tfra", preset)


@runner.measures(*names("paddle"))
def paddle(preset: str) -> Iterator[runner.Measure]:
    """PaddlePaddle: a sparse table, in the server process that it needs."""
    return compare("paddle", preset)
