"""Embedding PSs of a cluster on Ray join and leave while it trains: no update is lost, none is applied twice."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

import persia
from persia import rpc
from persia.checkpoint import CheckpointReader
from persia.errors import ConfigError
from persia.services import BucketMaps
from persia.types import BucketMap

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from persia.cluster.ray import ps_scaling
from support.cluster_samples import eventually, options, pids, signal_process
from support.moved_rows import EndlessBatches, expected_rows, make_trainer, rows_of

pytestmark = pytest.mark.usefixtures("ray_here")

NN_WORKERS = 2
STEPS: dict[Any, list[int]] = {}
"""Steps of the runs on each cluster."""


class Run:
    """A cluster that trains in a thread until it is stopped."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.trainer = make_trainer(cluster)
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self.train)

    def train(self) -> None:
        try:
            self.result = self.trainer.fit(EndlessBatches(pause=0.002))
        except BaseException as error:
            self.failure = error

    def steps(self) -> float:
        found = self.cluster.statistics()
        return sum(c.get("rpc.calls", 0.0) for name, c in found.items() if name.startswith("embedding_worker"))

    def trains_on(self) -> None:
        before = self.steps()
        eventually(lambda: self.failure is not None or self.steps() > before + 20, "it trains")
        assert self.failure is None

    def stop(self) -> None:
        self.trainer.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()
        assert self.failure is None

    def check(self) -> None:
        """All rows, by value: as after this run, and the runs on this cluster before."""
        steps = STEPS.setdefault(self.cluster, [])
        steps.append(self.trainer.global_step)
        assert rows_of(self.trainer) == expected_rows(*steps, nn_workers=NN_WORKERS)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    regions = str(tmp_path_factory.mktemp("regions"))
    with persia.cluster.Ray(2, 1, 1, NN_WORKERS, options(regions=regions)) as made:
        yield made


def test_pss_join_and_leave_while_it_trains(cluster):
    run = Run(cluster)
    run.thread.start()
    eventually(lambda: cluster._roles.service is not None and run.failure is None, "the roles are there")
    run.trains_on()
    cluster.scale(ps=4)
    assert (cluster.ps, len(pids(cluster, "embedding_ps")), cluster.buckets) == (4, 4, BucketMap.even(2).moved(4))
    run.trains_on()
    cluster.scale(ps=2)
    assert (cluster.ps, len(pids(cluster, "embedding_ps")), cluster.buckets.servers) == (2, 2, 2)
    run.trains_on()
    cluster.move_rows(cluster.buckets.emptied([1]))
    run.trains_on()
    assert [len(list(server.export_rows())) > 0 for server in run.trainer.embeddings.connection.servers] == [
        True,
        False,
    ]
    cluster.move_rows(cluster.buckets.moved(2))
    run.trains_on()
    run.stop()
    run.check()


def test_pss_are_killed_while_rows_move(cluster):
    """A donor, one that has joined to receive, and one that receives the rows of one that leaves."""
    run = Run(cluster)
    run.thread.start()
    run.trains_on()
    for count, killed in ((3, 0), (2, 2), (3, 2), (2, 0)):
        failures: list[BaseException] = []

        def scale(count: int = count, failures: list[BaseException] = failures) -> None:
            try:
                cluster.scale(ps=count)
            except BaseException as error:
                failures.append(error)

        version = cluster.buckets.version
        scaling = threading.Thread(target=scale)
        scaling.start()
        maps = rpc.connect(cluster.control_address, BucketMaps, timeout=30.0)
        eventually(lambda maps=maps: maps.map_state().ordered is not None, "rows are to move")
        signal_process(cluster, "embedding_ps", rank=killed)
        rpc.close(maps)
        scaling.join(120)
        assert not scaling.is_alive()
        assert not failures
        assert (cluster.buckets.version, cluster.buckets.servers) == (version + 1, count)
        run.trains_on()
    run.stop()
    run.check()


def test_rows_move_between_two_runs(cluster):
    trainer = make_trainer(cluster)
    before = rows_of(trainer)
    cluster.scale(ps=3)
    assert rows_of(trainer) == before
    cluster.scale(ps=1)
    assert rows_of(trainer) == before
    with pytest.raises(ConfigError, match="A bucket map for 2 embedding PSs cannot be moved to: there are 1"):
        cluster.move_rows(cluster.buckets.moved(2))
    cluster.scale(ps=2)
    assert rows_of(trainer) == before
    assert len(pids(cluster, "embedding_ps")) == 2


def test_checkpoints_between_two_runs_have_all_rows_though_rows_move(cluster, tmp_path, monkeypatch):
    """Also if they begin once rows have moved, and before `scale` knows it."""
    monkeypatch.setattr(ps_scaling, "POLL_SECONDS", 0.7)
    trainer = make_trainer(cluster)
    before = rows_of(trainer)
    failures: list[BaseException] = []
    steps = iter(range(1000))

    def scale() -> None:
        try:
            for _ in range(20):
                for count in (3, 2):
                    cluster.scale(ps=count)
                if len(saved) > 5:  # However fast they are.
                    break
        except BaseException as error:
            failures.append(error)

    def save() -> int:
        directory = str(tmp_path / str(next(steps)))
        rows = CheckpointReader(trainer.save(directory)).manifest.tables["id"].rows
        assert trainer.load_rows(directory)["id"].rows == rows
        return rows

    expected, saved = save(), []
    scaling = threading.Thread(target=scale)
    scaling.start()
    while scaling.is_alive():
        saved.append(save())
        time.sleep(0.1)
    assert not failures
    assert len(saved) > 5
    assert set(saved) == {expected}
    assert rows_of(trainer) == before
