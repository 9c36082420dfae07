"""Asynchronous modes and switches with several NN workers on Ray."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from typer.testing import CliRunner

import persia
from persia.cli.app import app
from persia.modes import Gba, Sync

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia[ray]"')

from cluster_samples import BATCH, eventually, make_trainer, options, reader

pytestmark = pytest.mark.usefixtures("ray_here")


@pytest.mark.slow
def test_gba_on_one_nn_worker_is_the_same_as_in_one_process():
    data = reader(12)
    here = make_trainer(persia.cluster.Embedded(1), Gba(2 * BATCH))
    expected = here.fit(data, max_steps=2), here.fit(data)
    with persia.cluster.Ray(2, 1, 1, 1, options()) as cluster:
        there = make_trainer(cluster, Gba(2 * BATCH))
        found = there.fit(data, max_steps=2), there.fit(data)
        for mine, theirs in zip(expected, found, strict=True):
            assert (mine.rows, mine.steps, mine.global_step) == (theirs.rows, theirs.steps, theirs.global_step)
        assert (there.epoch, there.position) == (here.epoch, here.position)
        for a, b in zip(here.model.parameters(), there.model.parameters(), strict=True):
            np.testing.assert_allclose(a.detach(), b.detach(), atol=1e-5)


def test_two_nn_workers_switch_while_they_train():
    data = reader(400)
    with persia.cluster.Ray(1, 1, 2, 2, options(dense_ps=2)) as cluster:
        trainer = make_trainer(cluster, Sync())
        results = []
        thread = threading.Thread(target=lambda: results.append(trainer.fit(data)))
        thread.start()
        eventually(lambda: "nn_worker-1" in cluster.statistics(), "the NN workers have joined")
        arguments = ["control", "switch", cluster.control_address, "gba", "--set", f"global_batch_size={2 * BATCH}"]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        thread.join(90)
        assert not thread.is_alive()
        (result,) = results
        assert result.rows == 400 * BATCH
        assert 0 < result.asynchronous.batches <= 400
        assert set(result.asynchronous.workers) == {0, 1}
        assert isinstance(trainer.mode, Gba)
        refused = CliRunner().invoke(app, [*arguments[:4], "--set", f"global_batch_size={2 * BATCH + 1}"])
        assert "no multiple" in str(refused.exception)
