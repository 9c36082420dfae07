"""The delay that changes of rows add to predictions, from the log of changes on.

    python -m benchmarks serve.update_pause_p999 [--preset smoke|laptop|full] [--json FILE]

A `Predictor` of 26 features of dim 16 and an MLP 256-128 computes batches of 256, one after another, in one thread. In
every other round, its own thread follows 100,000 changed rows per second: as in examples/online, an increment and a
network every 2 s, and a look at the log every 0.5 s. A tenth of the rows are new, and as many older ones are removed.

A `StreamWriter` has written all entries before the round. Within it only their manifests get their names, so that
nothing but the work of the server is beside requests. The log goes to PERSIA_BENCH_DIR, or the directory for temporary
files.

Times are wall-clock times, so they contain what other processes take, and waits for the interpreter lock. The detail
`cpu` is the same difference in processor time of the thread that sends requests.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import persia
from benchmarks import runner
from benchmarks.publish import folder
from benchmarks.serve_predict import BATCH, DIM, FEATURES, network_of
from benchmarks.serve_rows import NEW, PAUSE, UPDATES_PER_SECOND
from benchmarks.store import ids_of
from benchmarks.store_pauses import timed
from persia.checkpoint.storage import Storage
from persia.publish.epochs import begin_epoch
from persia.publish.format import NETWORK, Kind, TableChanges, entry_name, epoch_name, stream_of
from persia.publish.stream import StreamWriter
from persia.serve import Predictor, ServeOptions
from persia.types import BucketMap

SCHEMA = persia.Schema(
    [persia.IdFeature(f"f{number:02}", DIM) for number in range(FEATURES)], [f"d{number}" for number in range(13)]
)
BATCHES = 100
"""Different batches of requests."""


@dataclass(frozen=True)
class Scale:
    """How much of everything a preset does."""

    rows: int  # of each of the 26 tables
    increments: int  # of a round
    seconds: float  # between two increments
    poll_seconds: float


SCALES = {
    "smoke": Scale(4_000, 2, 0.2, 0.05),
    "laptop": Scale(200_000, 5, 2.0, 0.5),
    "full": Scale(1_000_000, 15, 2.0, 0.5),
}


class LaterStorage(Storage):
    """A directory in which manifests get another name while `hiding`, which readers of a log do not know."""

    hiding = False

    def put(self, path: str, data: bytes) -> None:
        """See `Storage.put`."""
        super().put(str(hidden(Path(path))) if self.hiding else path, data)


class Log:
    """A log of changes, whose entries are written first and become visible later.

    Args:
        url: directory.
        scale: rows, and how many of them change at once.
    """

    def __init__(self, url: Path, scale: Scale) -> None:
        self._scale = scale
        self._random = np.random.default_rng(0)
        self._storage = storage = LaterStorage(url)
        epoch = begin_epoch(storage, BucketMap.even(1), SCHEMA)
        self._epoch = url / epoch_name(epoch.epoch)
        self._rows = StreamWriter(storage, epoch.epoch, epoch.run, stream_of(0), keep=3)
        self._network = StreamWriter(storage, epoch.epoch, epoch.run, NETWORK, keep=3)
        self._hidden: deque[list[Path]] = deque()
        """Manifests of entries that are written and not visible."""
        self.changed = round(UPDATES_PER_SECOND * scale.seconds / FEATURES)
        """Rows of a table in an increment."""
        self._fresh = self.changed // NEW
        self.step = 0
        """Of the last entry that is visible."""
        for place in range(FEATURES):
            self._rows.add_part(self._part(place, np.arange(scale.rows)))
        self._commit("snapshot", self.step, scale.rows, 0)

    def _part(self, place: int, rows: np.ndarray) -> dict[str, np.ndarray]:
        values = self._random.standard_normal((len(rows), DIM), np.float32) / 10
        return {f"{place}.ids": ids_of(rows), f"{place}.values": values}

    def _commit(self, kind: Kind, step: int, rows: int, removed: int) -> None:
        """Completes the entry of rows, and writes a network of the same step."""
        tables = [TableChanges(name=each.name, dim=DIM, rows=rows, removed=removed) for each in SCHEMA.id_features]
        self._rows.commit(kind, step, time.monotonic(), tables)
        torch.manual_seed(step)
        self._network.add_part({name: each.numpy() for name, each in network_of(SCHEMA).state_dict().items()})
        self._network.commit("network", step, time.monotonic(), [])

    def write(self) -> None:
        """Writes an increment and a network that stay invisible until `show`."""
        number = self._rows.sequence
        gone = np.arange(number * self._fresh, (number + 1) * self._fresh)
        fresh = self._scale.rows + gone
        known = self._random.choice(
            np.arange(gone[-1] + 1, fresh[0]), self.changed - self._fresh, replace=False, shuffle=False
        )
        part: dict[str, np.ndarray] = {}
        for place in range(FEATURES):
            part |= self._part(place, np.concatenate([known, fresh])) | {f"{place}.removed": ids_of(gone)}
        self._rows.add_part(part)
        self._storage.hiding = True
        self._commit("increment", number + 1, self.changed, self._fresh)
        self._storage.hiding = False
        manifests = [
            self._epoch / stream_of(0) / entry_name(self._rows.sequence, "increment"),
            self._epoch / NETWORK / entry_name(self._network.sequence, "network"),
        ]
        self._hidden.append(manifests)

    def show(self) -> None:
        """Makes the next increment and network visible."""
        for manifest in self._hidden.popleft():
            hidden(manifest).rename(manifest)
        self.step += 1

    @contextmanager
    def growing(self) -> Iterator[None]:
        """Makes the increments of a round visible at equal intervals, while the block runs."""
        began = time.perf_counter()

        def run() -> None:
            for number in range(self._scale.increments):
                time.sleep(max(0.0, began + number * self._scale.seconds - time.perf_counter()))
                self.show()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            thread.join()


def hidden(manifest: Path) -> Path:
    """Returns another name of a manifest, which readers of the log do not know."""
    return manifest.with_suffix(".later")


def requests(predictor: Predictor, batches: list[persia.Batch], seconds: float) -> np.ndarray:
    """Predicts for so long. Returns wall-clock and processor seconds of each request, `[2, requests]`."""
    measured: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        measured.append(timed(functools.partial(predictor.predict, batches[len(measured) % len(batches)])))
    return np.transpose(measured)


def batches_of(rows: int) -> list[persia.Batch]:
    random = np.random.default_rng(1)
    return [
        persia.Batch(
            {each.name: persia.IdColumn(ids_of(random.integers(0, rows, BATCH))) for each in SCHEMA.id_features},
            random.standard_normal((BATCH, 13), np.float32),
            np.zeros((BATCH, 0), np.float32),
        )
        for _ in range(BATCHES)
    ]


@runner.measures("serve.update_pause_p999")
def update_pause(preset: str) -> runner.Measure:
    """The 99.9th percentile of the time of `predict` while a log of changes grows, less that while it does not."""
    scale = SCALES[preset]
    torch.set_num_threads(1)  # One core for requests, one for updates.
    batches, round_seconds = batches_of(scale.rows), scale.increments * scale.seconds
    quiet, busy, late = [], [], 0
    with folder() as path:
        log = Log(path / "log", scale)
        options = ServeOptions(poll_seconds=scale.poll_seconds, device="cpu")
        with Predictor(str(path / "log"), network_of, options) as predictor:
            requests(predictor, batches, round_seconds / 2)
            for number in range(2 * runner.MIN_ROUNDS):
                if number % 4 in (0, 3):
                    quiet.append(requests(predictor, batches, round_seconds))
                    continue
                for _ in range(scale.increments):
                    log.write()
                with log.growing():
                    busy.append(requests(predictor, batches, round_seconds))
                late += log.step - predictor.state().row_steps[0]
                predictor.refresh()
            state = predictor.state()
    if state.problem or state.row_steps[0] != log.step:
        raise RuntimeError(f"The predictor has rows of step {state.row_steps[0]}, not {log.step}: {state.problem}")
    pauses, details = [], []
    for round_busy, round_quiet in zip(busy, quiet, strict=True):
        p999 = [float(np.quantile(each, 0.999)) for each in (*round_busy, *round_quiet)]
        pauses.append(p999[0] - p999[2])
        details.append(p999)
    wall, cpu, wall_quiet, cpu_quiet = np.median(details, axis=0).tolist()
    if preset != "smoke" and late:
        pauses = [math.nan] * len(pauses)  # Which fails: changes that wait cause no delay.
    return runner.quantity(
        "serve.update_pause_p999", pauses, "s", at_most=None if preset == "smoke" else PAUSE,
        details={
            "requests": sum(each.shape[1] for each in busy),
            "rows": FEATURES * scale.rows,
            "updates": FEATURES * log.changed / scale.seconds,
            "increment_rows": FEATURES * log.changed,
            "late_increments": late,
            "p999": wall,
            "p999_without": wall_quiet,
            "cpu": cpu - cpu_quiet,
            "median": float(np.median(np.concatenate(busy, axis=1)[0])),
            "median_without": float(np.median(np.concatenate(quiet, axis=1)[0])),
            "longest": max(float(each[0].max()) for each in busy),
            "longest_without": max(float(each[0].max()) for each in quiet),
        },
    )  # fmt: skip
