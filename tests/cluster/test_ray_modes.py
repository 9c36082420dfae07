"""Asynchronous modes and switches with several NN workers on Ray."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import persia
from persia.cli.app import app
from persia.modes import Gba, HopBw, Hybrid, Sync
from persia.nn.models import FFNN
from persia.replay import load_timeline
from persia.replay.virtual import VirtualTraining

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from support.cluster_samples import BATCH, Gated, eventually, make_trainer, options, reader
from support.listed import Listed

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


@pytest.mark.slow
@pytest.mark.parametrize("mode", [Gba(2 * BATCH, tolerance=1), HopBw(1), Hybrid(2, warmup=0)], ids=str)
def test_a_run_is_its_replay(mode, tmp_path):
    """What two NN workers did comes out again in virtual time: two PSs of both kinds, two embedding workers."""
    data = reader(60)

    def adam(params):
        return torch.optim.Adam(params, 1e-2)

    def network():
        torch.manual_seed(0)
        return FFNN(data.schema, hidden=(16,), dropout=0.0)

    with persia.cluster.Ray(2, 2, 1, 2, options(dense_ps=2)) as cluster:
        trainer = persia.Trainer(
            network(),
            data.schema,
            optimizer=adam,
            embedding_optimizer=persia.optim.Adagrad(lr=0.05),
            mode=mode,
            cluster=cluster,
            options=persia.TrainerOptions(progress=False, timeout=60.0, record_dir=str(tmp_path)),
        )
        result = trainer.fit(data)
        # More than one phase: a recovery point may be due after each.
        count = len(list(tmp_path.glob("phase-*.jsonl")))
        schedules = [load_timeline(tmp_path / f"phase-{number + 1}.jsonl") for number in range(count)]
        batches = list(data)
        virtual = VirtualTraining(network(), data.schema, batches.__getitem__, adam, persia.optim.Adagrad(lr=0.05))
        for schedule in schedules:
            virtual.run(schedule)
        virtual.evaluate(batches[:1])
        assert len(virtual.stores) == 2
        for mine, theirs in zip(virtual.model.parameters(), trainer.model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
        if result.asynchronous is not None:
            summaries = [schedule.summary() for schedule in schedules]
            assert sum(s.dropped + s.decayed for s in summaries) == result.asynchronous.dropped_batches
            assert sum(s.applied_rows for s in summaries) == result.asynchronous.rows


def test_two_nn_workers_switch_while_they_train(tmp_path):
    data = Gated(reader(400), 200, tmp_path / "requested")
    with persia.cluster.Ray(1, 1, 2, 2, options(dense_ps=2)) as cluster:
        trainer = make_trainer(cluster, Sync())
        results = []
        thread = threading.Thread(target=lambda: results.append(trainer.fit(data)))
        thread.start()
        eventually(lambda: "nn_worker-1" in cluster.statistics(), "the NN workers have joined")
        arguments = ["control", "switch", cluster.control_address, "gba", "--set", f"global_batch_size={2 * BATCH}"]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        data.gate.touch()
        thread.join(90)
        assert not thread.is_alive()
        (result,) = results
        assert result.rows == 400 * BATCH
        assert 0 < result.asynchronous.batches <= 400
        assert set(result.asynchronous.workers) == {0, 1}
        assert isinstance(trainer.mode, Gba)
        refused = CliRunner().invoke(app, [*arguments[:4], "--set", f"global_batch_size={2 * BATCH + 1}"])
        assert "no multiple" in str(refused.exception)


def test_gba_goes_on_with_the_last_partial_batch_of_a_pass(tmp_path):
    """A list declares no batch size: what NN workers have seen comes back to this process, and with the checkpoint."""
    data = Listed(reader(7))
    data[-1] = data[-1].slice(0, 5)

    def make(cluster):
        return make_trainer(cluster, Gba(2 * BATCH))

    with persia.cluster.Ray(1, 1, 1, 2, options()) as cluster:
        first = make(cluster)
        first.fit(data, max_steps=3)
        assert (first.position, first.state.local_batch) == (6, BATCH)
        first.save(str(tmp_path))
    with persia.cluster.Ray(1, 1, 1, 2, options()) as cluster:
        second = make(cluster)
        second.load(str(tmp_path))
        result = second.fit(data)
        assert (result.rows, result.steps, result.global_step) == (5, 1, 4)


def test_gba_trains_a_list_of_one_small_batch():
    """Smaller than a local batch, and no divisor of the global one."""
    with persia.cluster.Ray(1, 1, 1, 2, options()) as cluster:
        result = make_trainer(cluster, Gba(2 * BATCH)).fit([next(iter(reader(1))).slice(0, 5)])
        assert (result.rows, result.steps) == (5, 1)
