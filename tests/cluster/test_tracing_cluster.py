"""`persia trace`: all processes of a cluster on one time line."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import persia
from persia.cli.app import app
from support.cluster_samples import eventually, make_trainer, options, reader
from support.trace_format import by_process

STEPS = 24
EXACT = 0.05
"""Uncertainty of a clock, in seconds; it is milliseconds on an idle machine."""


def traced(cluster: Any, mode: Any, folder: Path) -> dict[str, Any]:
    """The trace of some steps of a run."""
    trainer = make_trainer(cluster, mode)
    thread = threading.Thread(target=lambda: trainer.fit(reader(1_000_000)))
    thread.start()
    try:
        eventually(lambda: cluster.statistics().get("embedding_ps-0", {}).get("rpc.calls", 0) > 50, "it trains", 60.0)
        path = folder / "trace.json"
        words = ["trace", cluster.control_address, "--steps", str(STEPS), "--output", str(path), "--timeout", "30"]
        for _ in range(10):  # On a busy machine an answer about a clock may be late.
            done = CliRunner().invoke(app, words)
            assert done.exit_code == 0, done.output
            found: dict[str, Any] = json.loads(path.read_text())
            if uncertainty(found) < EXACT:
                break
    finally:
        trainer.stop()
        thread.join(90)
    assert "ui.perfetto.dev" in done.output
    return found


def uncertainty(trace: dict[str, Any]) -> float:
    """The largest of a clock, in seconds."""
    return max(float(clock["uncertainty_s"]) for clock in trace["otherData"]["clocks"].values())


@pytest.mark.usefixtures("ray_here")
def test_all_roles_are_on_one_time_line(tmp_path):
    with persia.cluster.Ray(1, 1, 1, 2, options()) as cluster:
        trace = traced(cluster, persia.modes.Sync(), tmp_path)
    spans = by_process(trace)
    roles = {"NN worker 0", "NN worker 1", "data loader 0", "embedding worker 0", "embedding PS 0", "coordinator 0"}
    assert spans.keys() == roles
    steps = {span["args"]["step"] for span in spans["NN worker 0"] if span["name"] == "step"}
    assert len(steps) >= STEPS
    steps = set(sorted(steps)[-STEPS:])  # Steps before run while these are looked up ahead.
    for rank in range(2):
        names = Counter(span["name"] for span in spans[f"NN worker {rank}"] if span["args"].get("step") in steps)
        for name in ("step", "forward", "backward", "all-reduce", "update", "push"):
            assert names[name] == STEPS, (rank, name, names)
        # Lookups run ahead, so the first ones may have been before the trace.
        assert 0 < names["lookup"] <= STEPS
        assert 0 < names["refresh"] <= STEPS
        assert names["transfer"] >= STEPS
    assert Counter(s["name"] for s in spans["data loader 0"]).keys() >= {"take", "register"}
    assert 0 <= uncertainty(trace) < EXACT
    # In causal order: a PS applies a push of a step while an NN worker's push lasts, whatever their clocks say.
    slack = 2e6 * uncertainty(trace)
    for step in steps:
        of_step = [s for of in spans.values() for s in of if s["args"].get("step") == step and s["name"] == "push"]
        pushes = [s for s in of_step if s in spans["NN worker 0"] or s in spans["NN worker 1"]]
        applied = [s for s in of_step if s in spans["embedding PS 0"]]
        assert len(applied) == 2
        assert min(s["ts"] for s in pushes) <= min(s["ts"] for s in applied) + slack
        assert max(s["ts"] + s["dur"] for s in applied) <= max(s["ts"] + s["dur"] for s in pushes) + slack
    # Batches carry the step to the embedding worker.
    of_worker = [span for span in spans["embedding worker 0"] if span["args"].get("step") in steps]
    assert {"lookup_ahead", "refresh"} <= {span["name"] for span in of_worker}
    assert steps <= {span["args"]["step"] for span in of_worker if span["name"] == "push"}


@pytest.mark.slow
@pytest.mark.usefixtures("ray_here")
def test_asynchronous_training_is_traced(tmp_path):
    with persia.cluster.Ray(1, 1, 1, 1, options()) as cluster:
        spans = by_process(traced(cluster, persia.modes.Async(), tmp_path))
    names = Counter(span["name"] for span in spans["NN worker 0"])
    assert {"gate", "lookup", "forward", "backward", "push"} <= names.keys()
    assert {"draw", "arrive"} <= {span["name"] for span in spans["coordinator 0"]}
    assert {"pull", "push"} <= {span["name"] for span in spans["dense PS 0"]}


def test_a_cluster_that_is_gone(tmp_path):
    done = CliRunner().invoke(
        app, ["trace", "tcp://127.0.0.1:9", "--timeout", "0.3", "--output", str(tmp_path / "trace.json")]
    )
    assert done.exit_code == 1
    assert "coordinator" in str(done.exception)
