"""The coordinator of a cluster on Ray dies while it trains, and goes on where it was."""

from __future__ import annotations

from pathlib import Path

import pytest

import persia
from persia.modes import Gba, Sync
from persia.ps.regions import leftovers

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from support.cluster_samples import BATCH, eventually, killing, make_trainer, options, pids, reader, watched

pytestmark = pytest.mark.usefixtures("ray_here")


@pytest.mark.parametrize("mode", [Gba(2 * BATCH), pytest.param(Sync(), marks=pytest.mark.slow)])
def test_a_coordinator_that_dies_loses_no_batch(mode, tmp_path):
    batches = 300
    with persia.cluster.Ray(1, 1, 1, 2, options(regions=str(tmp_path))) as cluster:
        trainer = make_trainer(cluster, mode)
        trainer.fit(reader(20))
        (victim,) = pids(cluster, "coordinator")
        with killing(cluster, "coordinator") as gated:
            result = trainer.fit(gated(reader(batches, 2)))
        assert (result.failures, result.rows, result.steps) == (0, batches * BATCH, batches // 2)
        assert result.lost_batches == result.lost_gradients == 0
        if result.asynchronous is not None:
            report = result.asynchronous
            # One that was slow meanwhile may come too late to count.
            assert report.rows + report.dropped_rows == (batches + 20) * BATCH
            assert (report.lost_tokens, report.lost_batches, report.abandoned) == (0, 0, 0)
        eventually(lambda: pids(cluster, "coordinator") not in ([], [victim]), "the driver knows that it is back")
        left = leftovers(str(tmp_path))
        assert [Path(one.path).name for one in left] == ["coordinator", "ps-0"]
        assert all(one.in_use for one in left)
        cluster.scale(data_loaders=2)  # Membership goes on, too.
        still_running = watched(cluster)
    eventually(lambda: not still_running(), "all processes have ended")
    assert not list(tmp_path.iterdir())
