"""From a click to the row that is served: the programs of examples/online, with larger numbers; and back to no row.

    python -m benchmarks 'online.*' [--preset smoke|laptop|full] [--json FILE]

Clicks are sent to librdkafka's mock cluster (or to KAFKA_BOOTSTRAP), trained on, published and served, each by a
process of its own, and all on this machine. In online.stale_tombstones one process trains and serves.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

import persia
from benchmarks import runner
from benchmarks.publish import folder, trainer_of
from benchmarks.serve_predict import network_of
from persia import data
from persia.publish import PublishOptions
from persia.serve import Predictor, ServeOptions

EXAMPLE = Path(__file__).parents[1] / "examples" / "online" / "run.py"
SECONDS = {"laptop": 60, "full": 600}
RATE = 20_000
"""Clicks a second of `online.freshness_p99`."""
LIMIT_SECONDS = 300


@functools.cache
def run(preset: str, **options: float) -> dict[str, Any]:
    """Runs the example, of which a smoke run changes nothing. Returns what it has measured."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        environment = {**os.environ, **({"PERSIA_EXAMPLE_SMALL": "1"} if preset == "smoke" else {})}
        subprocess.run(
            [sys.executable, str(EXAMPLE), f"--json={path}", *words],
            check=True,
            env=environment,
            stdout=sys.stderr,
            timeout=LIMIT_SECONDS + SECONDS.get(preset, 0),
        )
        results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return results


@runner.measures("online.freshness_p99")
def freshness(preset: str) -> runner.Measure:
    """From a click to a `/predict` that has used the row that it has changed: training on Ray with 2 PSs.

    Of users who were trained before and of new ones; the larger 99th percentile of both.
    """
    options = {} if preset == "smoke" else {"rate": RATE, "seconds": SECONDS[preset], "ps": 2}
    results = run(preset, **options)
    details: dict[str, Any] = {name: results[name] for name in ("clicks_per_s", "waited_s")}
    p99s = []
    for kind, seconds in results["freshness_s"].items():
        if preset != "smoke" and (len(seconds) < 50 or results["clicks_per_s"] < 0.9 * RATE):
            raise RuntimeError(
                f"Too few {kind} users ({len(seconds)}), or clicks ({results['clicks_per_s']:.0f}/s), to tell."
            )
        seconds = seconds or [math.inf]
        p99s.append(float(np.quantile(seconds, 0.99, method="higher")))  # Not between a number and infinity.
        details |= {
            f"{kind}_users": len(seconds),
            f"{kind}_median": float(np.quantile(seconds, 0.5, method="higher")),
            f"{kind}_p99": p99s[-1],
            f"{kind}_largest": max(seconds),
        }
    return runner.Measure("online.freshness_p99", max(p99s), "s", at_most=5.0, details=details)


@runner.measures("online.auc_gain")
def auc_gain(preset: str) -> runner.Measure:
    """Progressive AUC of served predictions on the last day of globo_ctr, less the AUC of the model one day older."""
    options: dict[str, float] = {} if preset == "smoke" else {"seconds": SECONDS[preset]}
    folder = data.find("globo_ctr")
    if folder is not None and preset != "smoke":
        *_, before, last = (pq.read_metadata(path).num_rows for path in sorted(folder.glob("*.parquet")))
        options |= {"first_day": 14, "before": before, "rate": last / SECONDS[preset], "asks": 10}
    results = run(preset, **options)
    details = {name: results[name] for name in ("auc_served", "auc_frozen", "clicks", "clicks_per_s")}
    gain = results["auc_served"] - results["auc_frozen"]
    return runner.Measure("online.auc_gain", gain, "AUC", at_least=0.0, details=details)


@dataclass(frozen=True)
class Aging:
    """How `online.stale_tombstones` trains: each id comes in `WINDOW` batches in a row, and never again."""

    capacity: int  # of each of the 2 tables
    new: int  # ids of a batch and table that come for the first time
    checks: int
    publish_seconds: float


AGINGS = {
    "smoke": Aging(3_000, 32, 5, 0.1),
    "laptop": Aging(100_000, 256, 60, 0.5),
    "full": Aging(500_000, 1_280, 300, 0.5),
}
"""Tables are so large that many increments come between two snapshots, which would drop stale rows."""

BATCHES_PER_SECOND = 50
WINDOW = 4
MARGIN = 32
"""Batches after which ids that have come have a row, or have had one: more than are looked up at once."""

INCREMENT_SECONDS = 60.0
"""Maximum wait for the next increment."""


def aging(schema: persia.Schema, plan: Aging, over: Callable[[], bool]) -> Iterator[persia.Batch]:
    """Yields batches until `over()`."""
    random, began = np.random.default_rng(0), time.monotonic()
    for number in itertools.count():
        if over():
            return
        time.sleep(max(0.0, began + number / BATCHES_PER_SECOND - time.monotonic()))
        end = (number + 1) * plan.new
        ids = np.arange(max(0, end - WINDOW * plan.new), end, dtype=np.uint64)
        labels = random.integers(0, 2, (len(ids), 1)).astype(np.float32)
        features = {feature.name: persia.IdColumn(random.permutation(ids)) for feature in schema.id_features}
        yield persia.Batch(features, np.zeros((len(ids), 0), np.float32), labels)


def evicted_ids(trainer: persia.Trainer, table: str, plan: Aging) -> np.ndarray:
    """Returns the ids that have had a row of a table, and have none any more; they do not come again."""
    chunks = [chunk for server in trainer.embeddings.connection.servers for chunk in server.export_rows()]
    live = np.concatenate([chunk.arrays["ids"] for chunk in chunks if chunk.table == table] or [np.zeros(0, np.uint64)])
    gone = np.ones(max(0, int(live.max(initial=0)) - MARGIN * plan.new), np.bool_)
    gone[live[live < len(gone)]] = False
    return np.flatnonzero(gone).astype(np.uint64)


def count_stale(trainer: persia.Trainer, url: str, plan: Aging) -> dict[str, float]:
    """Looks for evicted ids in what a predictor serves, after the next increment of each PS, while training goes on."""
    counts = {"stale": 0, "asked": 0, "evicted": 0}
    tables = list(trainer.schema.resolved_tables())
    with Predictor(url, network_of, ServeOptions(poll_seconds=0.1, device="cpu")) as predictor:
        checks = 0
        while checks < plan.checks:
            evicted = {table: evicted_ids(trainer, table, plan) for table in tables}
            looked, end = time.time(), time.monotonic() + INCREMENT_SECONDS
            while predictor.current().rows.time() < looked:  # The rows of all PSs are as they were later than that.
                if time.monotonic() > end:
                    raise RuntimeError(f"No increment came within {INCREMENT_SECONDS:g} s: {predictor.state().problem}")
                time.sleep(0.01)
            for table, ids in evicted.items():
                there, rows = predictor.embeddings(table, ids)
                counts["stale"] += int((there | rows.any(axis=1)).sum())
                counts["asked"] += len(ids)
            counts["evicted"] = sum(map(len, evicted.values()))
            checks += counts["evicted"] > 0
        counts |= {"updates": predictor.state().updates, "snapshots": predictor.state().snapshots}
    return {**counts, "checks": checks}


@runner.measures("online.stale_tombstones")
def stale_tombstones(preset: str) -> runner.Measure:
    """Evicted ids that a predictor answers with a value after the next increment, while training goes on."""
    plan = AGINGS[preset]
    features = [persia.IdFeature(name, 16) for name in ("user", "item")]
    schema = persia.Schema(features, tables=[persia.Table(each.name, 16, capacity=plan.capacity) for each in features])
    with folder() as path, ThreadPoolExecutor(1) as threads:
        url = str(path / "log")
        trainer = trainer_of(schema, PublishOptions(url, seconds=plan.publish_seconds))
        counting = threads.submit(count_stale, trainer, url, plan)
        trainer.fit(aging(schema, plan, counting.done))
        counts = counting.result()
    stale = counts.pop("stale")
    return runner.Measure("online.stale_tombstones", stale, "rows", at_most=0, details=counts)
