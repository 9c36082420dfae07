"""From a click to the row that is served: the programs of examples/online, with larger numbers.

    python -m benchmarks 'online.*' [--preset smoke|laptop|full] [--json FILE]

Clicks are sent to librdkafka's mock cluster (or to KAFKA_BOOTSTRAP), trained on, published and served, each by a
process of its own, and all on this machine.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks import runner
from persia import data

EXAMPLE = Path(__file__).parents[1] / "examples" / "online" / "run.py"
SECONDS = {"smoke": 4, "laptop": 60, "full": 600}
RATE = {"smoke": 2_000, "laptop": 20_000, "full": 20_000}
"""Clicks a second of `online.freshness_p99`."""
LIMIT_SECONDS = 300


def run(preset: str, **options: float) -> dict[str, Any]:
    """Runs the example. Returns what it has measured."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        environment = {**os.environ, **({"PERSIA_EXAMPLE_SMALL": "1"} if preset == "smoke" else {})}
        subprocess.run(
            [sys.executable, str(EXAMPLE), f"--json={path}", *words],
            check=True,
            env=environment,
            stdout=sys.stderr,
            timeout=LIMIT_SECONDS + SECONDS[preset],
        )
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


@runner.measures("online.freshness_p99")
def freshness(preset: str) -> runner.Measure:
    """From a click of a new user to the row that the server has of it: training on Ray with 2 PSs."""
    found = run(preset, rate=RATE[preset], seconds=SECONDS[preset], ps=0 if preset == "smoke" else 2)
    seconds = found["freshness_s"] or [math.inf]
    if preset != "smoke" and (len(seconds) < 50 or found["clicks_per_s"] < 0.9 * RATE[preset]):
        raise RuntimeError(f"Too few new users ({len(seconds)}), or clicks ({found['clicks_per_s']:.0f}/s), to tell.")
    details = {
        "clicks_per_s": found["clicks_per_s"],
        "samples": len(seconds),
        "median": float(np.median(seconds)),
        "largest": max(seconds),
    }
    return runner.Measure("online.freshness_p99", float(np.quantile(seconds, 0.99)), "s", at_most=5.0, details=details)


@runner.measures("online.auc_gain")
def auc_gain(preset: str) -> runner.Measure:
    """Progressive AUC of what is served on the last day of globo_ctr, less that of the model of the day before."""
    options: dict[str, float] = {"seconds": SECONDS[preset]}
    folder = data.find("globo_ctr")
    if folder is not None and preset != "smoke":
        *_, before, last = (pq.read_metadata(path).num_rows for path in sorted(folder.glob("*.parquet")))
        options |= {"first_day": 14, "before": before, "rate": last / SECONDS[preset], "asks": 10}
    found = run(preset, **options)
    details = {name: found[name] for name in ("auc_served", "auc_frozen", "clicks", "clicks_per_s")}
    gain = found["auc_served"] - found["auc_frozen"]
    return runner.Measure("online.auc_gain", gain, "AUC", at_least=0.0, details=details)
