"""What publishing takes from training at the load of `online.freshness_p99`: 2 PSs on Ray, a new increment every 2 s.

    python -m benchmarks publish.slowdown_ray [--preset smoke|laptop|full] [--json FILE]

Two clusters train the clicks, the network and the mode of examples/online, from a Parquet file and as fast as they can,
in alternation; one of them publishes. Each call of `fit` begins with a snapshot of all rows, as a new epoch of the log
does, and ends with the last changes. Files go to PERSIA_BENCH_DIR, or the directory for temporary files.
"""

from __future__ import annotations

import importlib
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq

import persia
from benchmarks import runner
from benchmarks.cluster import ray_here
from benchmarks.publish import SECONDS, folder
from persia.cluster import Ray
from persia.publish import PublishOptions

CLICKS = {"smoke": 4_000, "laptop": 500_000, "full": 2_000_000}
ROUNDS = {"smoke": 1, "laptop": 5, "full": 9}
BATCH = 1024
EXAMPLE = Path(__file__).parents[1] / "examples" / "online"


@contextmanager
def example() -> Iterator[ModuleType]:
    """Imports `news` of examples/online, also in processes that start within the block."""
    here, before = str(EXAMPLE), os.environ.get("PYTHONPATH")
    sys.path.insert(0, here)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, before]))
    try:
        yield importlib.import_module("news")
    finally:
        sys.path.remove(here)
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@runner.measures("publish.slowdown_ray")
def slowdown_ray(preset: str) -> runner.Measure:
    """Samples/s while 2 PSs on Ray publish rows and network, over those while they do not, in alternation."""
    with ExitStack() as used:
        path, news = used.enter_context(folder()), used.enter_context(example())
        clicks, log = path / "clicks.parquet", path / "log"
        pq.write_table(pa.concat_tables(islice(news.parts(news.clicks(0), 200), CLICKS[preset] // 200)), clicks)
        used.enter_context(ray_here(preset))
        trainers: list[persia.Trainer] = []
        for publish in (PublishOptions(str(log), seconds=SECONDS[preset]), None):
            cluster = used.enter_context(Ray(ps=1 if preset == "smoke" else 2))
            trainers.append(news.trainer(cluster=cluster, publish=publish))

        def rate(which: int) -> float:
            result = trainers[which].fit(persia.data.parquet(clicks, news.schema(), BATCH), again=True)
            return result.rows / result.seconds

        for which in (0, 1):  # Which makes the rows.
            rate(which)
        rates: list[list[float]] = [[], []]
        for number in range(ROUNDS[preset]):
            for which in [0, 1] if number % 2 else [1, 0]:
                rates[which].append(rate(which))
        stored = trainers[0].embeddings.statistics()
        details = {
            "of": "samples/s, publishing over not",
            "seconds": SECONDS[preset],
            "clicks": CLICKS[preset],
            "stored_rows": sum(table["rows"] for table in stored.values()),
            "samples_per_s": [statistics.median(each) for each in rates],
            "entries": entries(log),
        }
    if not details["entries"]:
        raise RuntimeError("Nothing was published, so there is nothing to measure; the log says why.")
    ratios = [ours / theirs for ours, theirs in zip(*rates, strict=True)]
    return runner.quantity("publish.slowdown_ray", ratios, "ratio", at_least=0.93, details=details)


def entries(log: Path) -> int:
    """Returns how many snapshots and increments of rows the last call of `fit` has left in the log."""
    return len(list(log.glob("epoch-*/rows-*/*.json")))
