"""NN workers of a cluster on Ray die while they train: `fit` goes on, in every mode, and says so."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
from typer.testing import CliRunner

import persia
from persia.cli.app import app
from persia.errors import DataError, RoleDiedError
from persia.modes import Gba, Hybrid, Sync

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from support.cluster_samples import (
    BATCH,
    eventually,
    kill_once_training,
    killing,
    make_trainer,
    options,
    pids,
    reader,
    signal_process,
)

pytestmark = pytest.mark.usefixtures("ray_here")


@pytest.mark.parametrize(
    ("mode", "nn_workers"),
    [
        pytest.param(Sync(), 2, id="sync"),
        pytest.param(Hybrid(2, warmup=0), 1, id="hybrid, alone", marks=pytest.mark.slow),
    ],
)
def test_all_restart_from_the_last_recovery_point(mode, nn_workers):
    batches = 250
    with persia.cluster.Ray(1, 1, 1, nn_workers, options()) as cluster:
        trainer = make_trainer(cluster, mode, recovery_point_every_seconds=0.5)
        with killing(cluster, "nn_worker", rank=nn_workers - 1) as gated:
            result = trainer.fit(gated(reader(batches)))
        assert result.failures == 1
        assert result.rows == batches * BATCH
        assert result.global_step == result.steps == batches // nn_workers
        assert result.progressive.rows == batches * BATCH
        assert result.lost_batches == result.lost_gradients == 0
        assert trainer.finished


def test_in_asynchronous_modes_the_others_go_on():
    batches = 1500
    with persia.cluster.Ray(1, 1, 1, 2, options()) as cluster:
        trainer = make_trainer(cluster, Gba(2 * BATCH))
        with killing(cluster, "nn_worker", rank=1) as gated:
            result = trainer.fit(gated(reader(batches)))
        assert result.failures == 1
        report = result.asynchronous
        assert report.lost_tokens <= 2
        assert report.lost_batches == 0
        assert set(report.workers) == {0, 1}
        # What the dead one had trained is counted here too; no batch arrived twice, or from nobody.
        assert report.rows + report.dropped_rows == batches * BATCH
        assert result.global_step >= batches // 2
        assert result.rows <= batches * BATCH
        assert trainer.finished


@pytest.mark.slow
def test_a_dead_dense_ps_is_filled_from_the_recovery_point():
    batches = 1000
    with persia.cluster.Ray(1, 1, 1, 2, options()) as cluster:
        trainer = make_trainer(cluster, Gba(2 * BATCH), recovery_point_every_seconds=0.5)
        with killing(cluster, "dense_ps") as gated:
            result = trainer.fit(gated(reader(batches)))
        assert result.failures == 1
        assert result.rows == result.progressive.rows == batches * BATCH
        assert result.global_step == result.steps == batches // 2
        assert result.asynchronous.lost_batches == 0
        assert trainer.finished


@pytest.mark.slow
def test_the_story_is_told_after_the_last_failure():
    with persia.cluster.Ray(1, 1, 1, 1, options()) as cluster:
        trainer = make_trainer(cluster, Hybrid(2, warmup=0), max_failures=1, recovery_point_every_seconds=0.5)
        told: list[RoleDiedError] = []

        def train() -> None:
            with pytest.raises(RoleDiedError) as caught:
                trainer.fit(reader(100_000))
            told.append(caught.value)

        thread = threading.Thread(target=train)
        thread.start()
        for _ in range(2):
            before = pids(cluster, "nn_worker")
            kill_once_training(cluster, "nn_worker", None)
            eventually(lambda before=before: pids(cluster, "nn_worker") != before, "its death is noticed")
        thread.join(60)
        (error,) = told
        assert re.match(r"NN worker 0 \(process \d+ on .*\) has died", error.message)
        assert "failure 2 of this call of `fit`, and TrainerOptions.max_failures = 1" in error.message
        assert re.search(
            r"Before:\n  \d\d:\d\d:\d\d: nn worker 0 died; all NN workers restart at step \d+", error.message
        )
        assert (error.fields["role"], error.fields["rank"], error.fields["failures"]) == ("nn_worker", 0, 2)
        assert trainer.global_step == 0  # The network here is as it was.


def test_between_two_calls_of_fit_and_data_that_are_a_list():
    """An NN worker that dies at leisure costs nothing; a list is read from its beginning as often as needed."""
    data = list(reader(20))
    with persia.cluster.Ray(1, 1, 1, 2, options()) as cluster:
        trainer = make_trainer(cluster, Gba(2 * BATCH))
        assert trainer.fit(data).rows == 20 * BATCH
        signal_process(cluster, "nn_worker", rank=1)
        eventually(lambda: len(cluster._roles.processes.of("nn_worker")) == 1, "its death is noticed")
        assert "embedding_ps-0" in cluster.statistics()
        again = trainer.fit(data, again=True)
        assert (again.rows, again.failures) == (20 * BATCH, 0)
        # A list cannot be shared by two data loaders: nothing changes.
        with pytest.raises(DataError, match="cannot share"):
            cluster.scale(data_loaders=2)
        assert trainer.fit(data, again=True).rows == 20 * BATCH
        assert len(cluster._roles.processes.of("data_loader")) == 1
        # Of a pass of which only the last, smaller batch is left, the size of others is still known.
        last = next(reader(1).batches()).slice(0, BATCH // 2 + 1)
        longer = [*data, last]
        assert trainer.fit(longer, max_steps=10).rows == 20 * BATCH
        assert trainer.fit(longer).rows == BATCH // 2 + 1


@pytest.mark.slow
def test_a_death_soon_after_a_switch_does_not_undo_it():
    with persia.cluster.Ray(1, 1, 1, 2, options()) as cluster:
        trainer = make_trainer(cluster, Sync(), recovery_point_every_seconds=1000.0)
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(trainer.fit(reader(2000))))
        thread.start()
        eventually(lambda: "nn_worker-1" in cluster.statistics(), "the NN workers have joined")
        switch = ["control", "switch", cluster.control_address, "gba", "--set", f"global_batch_size={2 * BATCH}"]
        assert CliRunner().invoke(app, switch).exit_code == 0
        eventually(lambda: cluster._roles.tokens.requested() is None, "the switch is being made")
        eventually(lambda: bool(pids(cluster, "dense_ps")), "the asynchronous mode has begun")
        kill_once_training(cluster, "dense_ps", None)
        thread.join(240)
        assert not thread.is_alive()
        (result,) = results
        assert result.failures == 1
        assert isinstance(trainer.mode, Gba)
        assert result.rows == 2000 * BATCH
