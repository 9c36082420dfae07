"""The driver of a run on Ray is killed at random moments: how soon the same command trains again, and what is lost.

    python -m benchmarks 'driver.*' [--preset smoke|laptop|full] [--json FILE]

Hybrid on 2 embedding PSs; each sample has a row of its own, whose updates are counted. The driver is a program in a Ray
that stays. Most kills come while it trains, some while it starts.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import runner

ROWS = 32
BATCHES = 1_000_000
DEADLINE = 180.0
STARTING = 5
"""Each so many kills one comes while the driver starts."""


@dataclass(frozen=True)
class Scale:
    """How often the driver is killed, and the longest time for which it trains before."""

    kills: int
    seconds: float


SCALES = {"smoke": Scale(1, 0.5), "laptop": Scale(10, 4.0), "full": Scale(50, 8.0)}


class Life(NamedTuple):
    """What a driver finds before it trains: the batch at which it goes on, and the updates of each row so far."""

    position: int
    updates: np.ndarray


class Figures(NamedTuple):
    """Of all lives of a run.

    Attributes:
        seconds: from the start of the command to the next step, for each start after a kill in training.
        lost: rows that were not trained although training went on behind them.
        doubled: rows that were trained again though they are before the recovery point, or twice by one driver.
        again: rows that were trained again as they are behind the recovery point.
        left: directories that are left behind.
    """

    seconds: list[float]
    lost: int
    doubled: int
    again: int
    left: int


def compare(lives: list[Life]) -> tuple[int, int, int]:
    """Returns the numbers of rows that are lost, doubled, and trained again by the rules; see `Figures`.

    A driver trains from its recovery point on in order, each row once. The last entry is the end of the run.
    """
    lost = doubled = again = 0
    for life, following in itertools.pairwise(lives):
        rows = max(len(life.updates), len(following.updates))
        before, after = (np.pad(of.updates, (0, rows - len(of.updates))) for of in (life, following))
        times = after - before
        begin, end = life.position * ROWS, following.position * ROWS
        lost += int((times[begin:end] < 1).sum()) + int((times < 0).sum()) + max(0, end - rows)
        doubled += int((times[:begin] > 0).sum()) + int((times[begin:] > 1).sum())
        again += int((times[end:] > 0).sum())
    return lost, doubled, again


@contextlib.contextmanager
def ray_cluster() -> Iterator[str]:
    """Starts Ray for the drivers, unless this process has one; yields its address."""
    import ray

    from persia.cluster.ray.processes import connect

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    started = connect("local")
    try:
        # It listens only there; see `of_this_host_only`.
        yield f"127.0.0.1:{ray.get_runtime_context().gcs_address.rpartition(':')[2]}"
    finally:
        if started:
            ray.shutdown()


class Program:
    """A driver: this module as a program."""

    def __init__(self, folder: Path, address: str) -> None:
        (folder / "trains").unlink(missing_ok=True)
        self.folder = folder
        self.began = time.time()
        source = Path(__file__).resolve().parents[1]
        paths = os.pathsep.join([str(source / "src"), str(source), *sys.path])
        with (folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.driver", str(folder), address],
                env={**os.environ, "PYTHONPATH": paths, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},
                stdout=log,
                stderr=log,
            )

    def seconds(self) -> float:
        """Waits for a step; returns the seconds since the start, without those in which the rows were counted."""
        end = time.monotonic() + DEADLINE
        while not (self.folder / "trains").exists():
            assert self._process.poll() is None, (self.folder / "log").read_text()[-5000:]
            assert time.monotonic() < end, "the driver does not train"
            time.sleep(0.01)
        trains, counting = map(float, (self.folder / "trains").read_text().split())
        return trains - self.began - counting

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Lets it end in order."""
        (self.folder / "end").touch()
        assert self._process.wait(DEADLINE) == 0, (self.folder / "log").read_text()[-5000:]


def measured(scale: Scale) -> Figures:
    """Kills drivers of one run, and compares what they have found."""
    chance, seconds = random.Random(44), []
    with (
        tempfile.TemporaryDirectory(prefix="persia-driver-") as name,
        tempfile.TemporaryDirectory(prefix="persia-bench-", dir="/dev/shm") as regions,
        ray_cluster() as address,
    ):
        folder = Path(name)
        (folder / "settings").write_text(json.dumps({"regions": regions}))
        program = Program(folder, address)
        for number in range(scale.kills):
            if number % STARTING == STARTING - 1:
                time.sleep(chance.random() * max(seconds, default=1.0))
            else:
                taken = program.seconds()
                if number:
                    seconds.append(taken)
                time.sleep(chance.random() * scale.seconds)
            program.kill()
            program = Program(folder, address)
        seconds.append(program.seconds())
        program.end()
        left = [*os.listdir(regions), *(entry for entry in os.listdir(folder) if entry == "run")]
        paths = sorted(folder.glob("life-*.npz"), key=lambda path: int(path.stem.partition("-")[2]))
        lives = [Life(int(life["position"]), life["updates"]) for life in map(np.load, paths)]
    return Figures(seconds, *compare(lives), len(left))


@runner.measures("driver.restart_s", "driver.lost_rows", "driver.left_regions")
def restarts(preset: str) -> list[runner.Measure]:
    """Seconds to the next step, rows that are lost or doubled, and what is left behind at the end."""
    scale = SCALES[preset]
    figures = measured(scale)
    details = {"kills": scale.kills, "slowest": max(figures.seconds), "trained_again": figures.again}
    details |= {"lost": figures.lost, "doubled": figures.doubled}
    return [
        runner.quantity("driver.restart_s", figures.seconds, "s", details=details),
        runner.Measure("driver.lost_rows", float(figures.lost + figures.doubled), "rows", at_most=0.0, details=details),
        runner.Measure("driver.left_regions", float(figures.left), "violations", at_most=0.0, details=details),
    ]


# --- the driver ---------------------------------------------------------------------------------------------------


def main(folder: Path, address: str) -> None:
    import torch

    import persia
    from persia.cluster import RayOptions

    schema = persia.Schema([persia.IdFeature("id", 4)])

    class Data:
        batch_size = ROWS

        def batches(self, epoch: int = 0, start: int = 0) -> Iterator[persia.Batch]:
            for number in range(start, BATCHES):
                ids = np.arange(number * ROWS, (number + 1) * ROWS, dtype=np.uint64)
                zeros = np.zeros((ROWS, 1), np.float32)
                yield persia.Batch({"id": persia.IdColumn(ids)}, zeros[:, :0], zeros)

        def __iter__(self) -> Iterator[persia.Batch]:
            return self.batches()

        def fingerprint(self) -> Any:
            from persia.types import SourceFingerprint, SourcePart

            return SourceFingerprint("numbered", (SourcePart("numbers"),))

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 1)
            self.steps = 0

        def forward(self, dense: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> Any:
            self.steps += self.training
            if self.steps == 2:  # The first step is done.
                (folder / "trains.new").write_text(f"{time.time()} {(folder / 'counting').read_text()}")
                (folder / "trains.new").replace(folder / "trains")
            time.sleep(0.002)  # So that the run does not have more rows than are counted in a moment.
            return self.linear(embeddings["id"])

    def record(trainer: persia.Trainer) -> None:
        began = time.time()
        chunks = [chunk.arrays for server in trainer.embeddings.connection.servers for chunk in server.export_rows()]
        ids = np.concatenate([chunk["ids"] for chunk in chunks] or [np.zeros(0, np.uint64)]).astype(np.int64)
        counts = np.concatenate([chunk["update_count"] for chunk in chunks] or [np.zeros(0, np.uint32)])
        updates = np.zeros(int(ids.max(initial=-1)) + 1, np.int64)
        updates[ids] = counts
        number = len(list(folder.glob("life-*.npz")))
        np.savez(folder / "life.npz", position=trainer.position, updates=updates)
        (folder / "life.npz").replace(folder / f"life-{number}.npz")
        (folder / "counting").write_text(str(time.time() - began))

    torch.manual_seed(0)
    regions = json.loads((folder / "settings").read_text())["regions"]
    options = RayOptions(address=address, threads=1, timeout=120.0, regions=regions, run=str(folder / "run"))
    with persia.cluster.Ray(2, 1, 1, 1, options) as cluster:
        trainer = persia.Trainer(
            Net(),
            schema,
            optimizer=lambda params: torch.optim.SGD(params, 0.1),
            embedding_optimizer=persia.optim.SGD(lr=0.1),
            mode=persia.modes.Hybrid(4, warmup=0),
            cluster=cluster,
            options=persia.TrainerOptions(progress=False, recovery_point_every_seconds=1.0),
        )
        record(trainer)

        def end() -> None:
            while not (folder / "end").exists():
                time.sleep(0.05)
            trainer.stop()

        threading.Thread(target=end, daemon=True).start()
        trainer.fit(Data())
        record(trainer)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
