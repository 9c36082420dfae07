"""A PS of a cluster on Ray dies while it trains, and comes back with its rows."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import persia
from persia.errors import StalePushError
from persia.modes import Gba
from persia.ps.regions import leftovers

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from persia.cluster.ray import processes, runs
from support.cluster_samples import eventually, killing, make_trainer, options, reader, signal_process, watched

pytestmark = pytest.mark.usefixtures("ray_here")

BATCHES = 200
"""Of which half come after the death; see `killing`."""


def test_a_ps_that_dies_changes_no_number(tmp_path):
    torch.set_num_threads(1)
    expected = make_trainer(persia.cluster.Embedded(1)).fit(reader(BATCHES))
    with persia.cluster.Ray(2, options=options(regions=str(tmp_path))) as cluster:
        trainer = make_trainer(cluster)
        with killing(cluster, "embedding_ps") as gated:
            result = trainer.fit(gated(reader(BATCHES)))
        process = cluster._roles.processes.of("embedding_ps")[0]
        eventually(lambda: process.info.incarnation == 2, "the driver knows that it is back")
        assert (result.rows, result.lost_batches, result.lost_gradients) == (BATCHES * 64, 0, 0)
        assert result.progressive == expected.progressive
        left = leftovers(str(tmp_path))
        assert [Path(one.path).name for one in left] == ["coordinator", "ps-0", "ps-1"]
        assert all(one.in_use for one in left)
        still_running = watched(cluster)
    eventually(lambda: not still_running(), "all processes have ended")
    assert not list(tmp_path.iterdir())  # Nothing is left over.


def test_a_ps_that_dies_has_its_rows_on_disk(tmp_path):
    """Most rows of a table are there; nothing is left of them when the cluster ends."""
    torch.set_num_threads(1)
    expected = make_trainer(persia.cluster.Embedded(1)).fit(reader(BATCHES))
    regions, spill = tmp_path / "regions", tmp_path / "ssd"
    with persia.cluster.Ray(2, options=options(regions=str(regions))) as cluster:
        trainer = make_trainer(cluster, table={"spill": spill, "memory_rows": 60})
        with killing(cluster, "embedding_ps") as gated:
            result = trainer.fit(gated(reader(BATCHES)))
        assert (result.rows, result.lost_batches, result.lost_gradients) == (BATCHES * 64, 0, 0)
        assert result.progressive == expected.progressive
        counts = trainer.embeddings.statistics()["id_0"]
        assert counts["disk_rows"] > 300
        assert counts["spilled"] > counts["promoted"] > 0
        left = {Path(one.path).name: one.disk for one in leftovers(str(regions))}
        assert left["coordinator"] == 0
        assert min(left["ps-0"], left["ps-1"]) > 0
        assert {Path(one.path).name for one in leftovers(str(spill))} == {"ps-0", "ps-1"}
    assert not list(regions.iterdir())
    assert not list(spill.iterdir())


@pytest.mark.parametrize("late", [pytest.param(False, id="noticed at once", marks=pytest.mark.slow), True])
def test_a_ps_that_dies_in_an_asynchronous_mode(late, tmp_path, monkeypatch):
    """All restart from the last recovery point, also if its successor refuses pushes before its death is noticed."""
    refused = threading.Event()
    deaths, last_lines = runs.Recovery.deaths, processes.last_lines

    def asked(recovery, error):
        assert not late or isinstance(error, StalePushError)
        refused.set()
        return deaths(recovery, error)

    def slowly(process):
        if late:
            assert refused.wait(120.0)
        return last_lines(process)

    monkeypatch.setattr(runs.Recovery, "deaths", asked)
    monkeypatch.setattr(processes, "last_lines", slowly)
    with persia.cluster.Ray(2, options=options(regions=str(tmp_path))) as cluster:
        trainer = make_trainer(cluster, Gba(128), recovery_point_every_seconds=0.5)
        with killing(cluster, "embedding_ps") as gated:
            result = trainer.fit(gated(reader(2 * BATCHES)))
        assert (result.failures, result.rows, trainer.finished) == (1, 2 * BATCHES * 64, True)


def test_a_ps_that_is_dead_for_good_leaves_no_memory(tmp_path):
    """Its successor begins with the rows of the checkpoint, beside nothing."""
    with persia.cluster.Ray(2, options=options(restarts=0, regions=str(tmp_path / "regions"))) as cluster:
        trainer = make_trainer(cluster, checkpoint_dir=str(tmp_path / "saved"), checkpoint_every_steps=20)
        trainer.fit(reader(BATCHES), max_steps=30)
        with killing(cluster, "embedding_ps") as gated:
            result = trainer.fit(gated(reader(BATCHES)))
        assert result.failures == 1
        left = leftovers(str(tmp_path / "regions"))
        assert [Path(one.path).name for one in left] == ["coordinator", "ps-0.1", "ps-1"]
        signal_process(cluster, "embedding_ps")
        eventually(lambda: len(cluster._roles.processes.of("embedding_ps")) == 1, "its death is noticed")
    assert not (tmp_path / "regions").exists() or not list((tmp_path / "regions").iterdir())
