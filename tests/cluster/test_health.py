"""What a run tells of itself: in one process, and on Ray by `persia health`."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import urllib.request
from collections import Counter

import pytest
from typer.testing import CliRunner

import persia
from persia.cli.app import app
from persia.errors import ConfigError
from persia.telemetry.catalogue import CATALOGUE
from persia.telemetry.metrics import Health
from support.cluster_samples import BATCH, eventually, make_trainer, options, reader


def total(health: Health, name: str, **labels: str) -> float:
    return sum(f.value for f in health.metrics if f.name == name and labels.items() <= f.labels.items())


@pytest.mark.processes
def test_one_process_tells_what_it_did(tmp_path):
    cluster = persia.cluster.Embedded(1, prometheus_port=0)
    assert cluster.health().total("nn_step") == 0
    trainer = make_trainer(
        cluster,
        persia.modes.Hybrid(2, warmup=0),
        checkpoint_dir=str(tmp_path / "checkpoints"),
        checkpoint_every_steps=4,
    )
    result = trainer.fit(reader(10))
    health = cluster.health()
    assert {f.name for f in health.metrics} | {t.name for t in health.latencies} <= set(CATALOGUE)
    assert (health.role, health.pid) == ("embedded", os.getpid())
    assert health.total("nn_step") == 10
    assert health.total("nn_rows") == 10 * BATCH
    assert health.total("nn_staleness_lookups") == 10
    assert total(health, "nn_staleness_sum") / 10 == pytest.approx(result.staleness_mean)
    assert health.total("nn_staleness_max") == result.staleness_max
    assert health.total("nn_checkpoint_step") == 10
    assert health.total("nn_checkpoint_seconds") > 0
    assert 0 <= health.total("nn_checkpoint_age_seconds") < 60
    assert health.total("ps_rows") == result.stored_rows
    assert health.total("ps_hits") + health.total("ps_misses") == health.total("ps_lookups") > 0
    assert health.total("worker_pushed") == 10
    assert total(health, "worker_row_bytes", codec="none") == total(health, "worker_gradient_bytes", codec="none") > 0
    assert 0 < health.total("nn_loading_seconds") <= health.latencies[0].seconds
    waits, steps = health.latencies
    assert (waits.name, steps.name) == ("nn_wait_seconds", "nn_step_seconds")
    assert sum(steps.counts) == 10
    assert sum(waits.counts) >= 10
    with urllib.request.urlopen(health.metrics_url, timeout=10) as answer:
        text = answer.read().decode()
    assert f'persia_nn_rows_total{{rank="0",role="embedded"}} {10.0 * BATCH}' in text
    cluster.close()


def test_being_observed_keeps_nothing_alive():
    cluster = persia.cluster.Embedded(1)
    trainer = make_trainer(cluster)
    trainer.fit(reader(2))
    assert cluster.health().total("nn_step") == 2
    del trainer

    def gone() -> bool:
        gc.collect()
        return not any(f.name.startswith(("nn_", "ps_", "worker_")) for f in cluster.health().metrics)

    eventually(gone, "no thread has it any more")  # That which has read the metrics may be about to end.


@pytest.mark.parametrize("port", [-1, 65536, "9400", True])
def test_a_port_that_is_none(port):
    with pytest.raises(ConfigError, match="prometheus_port"):
        persia.cluster.Embedded(prometheus_port=port)
    with pytest.raises(ConfigError, match="prometheus_port"):
        persia.cluster.RayOptions(prometheus_port=port)


@pytest.mark.processes
@pytest.mark.usefixtures("ray_here")
def test_every_process_answers(tmp_path):
    with persia.cluster.Ray(1, 1, 1, 2, options(compression="fp16", prometheus_port=21000)) as cluster:
        trainer = make_trainer(cluster)
        data = reader(1_000_000)
        results: list[object] = []
        thread = threading.Thread(target=lambda: results.append(trainer.fit(data)))
        thread.start()
        found: list[dict] = []

        def ask(*more: str, seconds: str = "60") -> int:
            to = str(tmp_path / "health.json")
            arguments = ["health", cluster.control_address, "--json", to, "--timeout", seconds, *more]
            done = CliRunner().invoke(app, arguments, env={"COLUMNS": "240"})
            assert done.exit_code in (0, 1), done.output
            assert "coordinator 0" in done.output
            found[:] = json.loads((tmp_path / "health.json").read_text())
            return done.exit_code

        def trains() -> bool:
            # The coordinator may be about to start.
            if ask("--targets", str(tmp_path / "targets.json")) != 0:
                return False
            steps = [f["value"] for p in found for f in p["metrics"] if f["name"] == "nn_step"]
            return len(steps) == 2 and min(steps) > 3

        eventually(trains, "both NN workers answer and train")
        by_role = Counter(process["role"] for process in found)
        assert by_role == {"coordinator": 1, "embedding_ps": 1, "embedding_worker": 1, "data_loader": 1, "nn_worker": 2}
        assert len({process["pid"] for process in found}) == 6
        for process in found:
            assert {f["name"] for f in [*process["metrics"], *process["latencies"]]} <= set(CATALOGUE)
        (worker,) = (p for p in found if p["role"] == "embedding_worker")
        sent = {f["labels"]["codec"]: f["value"] for f in worker["metrics"] if f["name"] == "worker_row_bytes"}
        assert sent["fp16"] > 0
        assert sum(sum(t["counts"]) for t in worker["latencies"] if t["labels"] == {"method": "lookup_ahead"}) > 0
        (targets,) = json.loads((tmp_path / "targets.json").read_text())
        assert len(set(targets["targets"])) == 6
        with urllib.request.urlopen(f"http://{targets['targets'][1]}/metrics", timeout=10) as answer:
            assert 'role="embedding_ps"' in answer.read().decode()

        # One that stands still does not answer, and is named. The others have time enough.
        os.kill(worker["pid"], signal.SIGSTOP)
        try:
            eventually(lambda: ask(seconds="6") == 1 and sum(not p["healthy"] for p in found) == 1, "one is late")
            (late,) = (p for p in found if not p["healthy"])
            assert late["role"] == "embedding_worker"
            assert "6 s" in late["problem"]
        finally:
            os.kill(worker["pid"], signal.SIGCONT)
            trainer.stop()
        thread.join(90)
        assert results
