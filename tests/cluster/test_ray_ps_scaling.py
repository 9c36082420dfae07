"""Embedding PSs of a cluster on Ray join and leave while it trains: no update is lost, none is applied twice."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import persia
from persia.types import BucketMap

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from support.cluster_samples import eventually, options, pids
from support.moved_rows import EndlessBatches, expected_rows, make_trainer, rows_of

pytestmark = pytest.mark.usefixtures("ray_here")

NN_WORKERS = 2


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
        assert rows_of(self.trainer) == expected_rows(self.trainer.global_step, NN_WORKERS)


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
