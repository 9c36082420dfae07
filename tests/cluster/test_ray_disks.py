"""A cluster on Ray whose disk for rows is full, or stalls."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch
from typer.testing import CliRunner

import persia
from persia.cli.app import app
from persia.errors import StoreFullError
from support.cluster_samples import eventually, make_trainer, reader
from support.disks import filled, freezing_disk, frozen, small_disk

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

pytestmark = [pytest.mark.usefixtures("ray_here"), pytest.mark.slow]

BATCHES = 400
TIMEOUT = 60.0
STALL_SECONDS = 20.0


def options(tmp_path, timeout=TIMEOUT):
    return persia.cluster.RayOptions(threads=1, timeout=timeout, regions=str(tmp_path / "regions"))


def test_a_disk_that_stays_full_ends_training(tmp_path):
    """With the error of the PS, which says where and what to do, before its callers give up."""
    torch.set_num_threads(1)
    with small_disk(tmp_path / "disk", "64m") as disk, persia.cluster.Ray(2, options=options(tmp_path)) as cluster:
        trainer = make_trainer(cluster, table={"spill": disk / "ssd", "memory_rows": 60})
        filled(disk)
        began = time.monotonic()
        with pytest.raises(StoreFullError, match=r"no room to grow .*waited 5\d\.\d s for space") as caught:
            trainer.fit(reader(BATCHES))
        assert time.monotonic() - began < 2 * TIMEOUT
        assert f"{disk}/ssd" in str(caught.value)


def test_a_disk_that_stalls_kills_nothing(tmp_path):
    """All processes report and answer meanwhile, and training goes on as if nothing had been."""
    torch.set_num_threads(1)
    expected = make_trainer(persia.cluster.Embedded(1)).fit(reader(BATCHES))
    with freezing_disk(tmp_path) as disk, persia.cluster.Ray(2, options=options(tmp_path, 120.0)) as cluster:
        trainer = make_trainer(cluster, table={"spill": disk / "ssd", "memory_rows": 60})
        results = []
        training = threading.Thread(target=lambda: results.append(trainer.fit(reader(BATCHES))))
        training.start()

        def health():
            file = tmp_path / "health.json"
            done = CliRunner().invoke(
                app, ["health", cluster.control_address, "--timeout", "20", "--json", str(file)], env={"COLUMNS": "600"}
            )
            assert done.exit_code == 0, done.output
            return " ".join(done.output.split()), json.loads(file.read_text())

        def step():
            return sum(f["value"] for one in health()[1] for f in one["metrics"] if f["name"] == "nn_step")

        eventually(lambda: step() > 5, "it trains", 60.0)
        before = {(one["role"], one["rank"]): one["pid"] for one in health()[1]}
        with frozen(disk):
            end = time.monotonic() + STALL_SECONDS
            waiting = 0
            while time.monotonic() < end:
                text, found = health()
                assert training.is_alive()
                assert {(one["role"], one["rank"]): one["pid"] for one in found} == before
                assert {(one["state"], one["incarnation"]) for one in found} == {("alive", 1)}
                waiting += "waiting for its disk or a lock for" in text
                time.sleep(0.5)
            late = [f["value"] for one in found for f in one["metrics"] if f["name"] == "ps_metrics_late_seconds"]
            assert waiting > 3
            assert max(late) > STALL_SECONDS / 2
            ages = {name: counts["age"] for name, counts in cluster.statistics().items()}
            assert max(ages.values()) < 10, ages
        training.join(120.0)
        (result,) = results
        assert (result.rows, result.lost_batches, result.lost_gradients) == (expected.rows, 0, 0)
        assert result.progressive == expected.progressive
        assert not result.failures
        assert "waiting for" not in health()[0]
