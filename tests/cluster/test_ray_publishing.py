"""A run on Ray publishes; a PS is killed meanwhile."""

from __future__ import annotations

import re

import pytest
import torch

import persia
from persia.publish import PublishOptions, Replica, follow

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from support.cluster_samples import killing, make_trainer, options, reader

pytestmark = [pytest.mark.usefixtures("ray_here"), pytest.mark.slow]

BATCHES = 400


def rows_of(servers):
    found: dict[str, dict[int, bytes]] = {}
    for server in servers:
        for chunk in server.export_rows():
            ids, rows = chunk.arrays["ids"].tolist(), chunk.arrays["embeddings"]
            found.setdefault(chunk.table, {}).update((id_, row.tobytes()) for id_, row in zip(ids, rows, strict=True))
    return found


def test_a_ps_that_dies_begins_an_epoch_with_all_of_its_rows(tmp_path):
    torch.set_num_threads(1)
    url = str(tmp_path / "log")
    replica = Replica(follow(url))
    with persia.cluster.Ray(2, options=options(regions=str(tmp_path / "regions"))) as cluster:
        trainer = make_trainer(cluster, publish=PublishOptions(url, seconds=0.1))
        with killing(cluster, "embedding_ps", once=lambda: replica.refresh() or replica.epoch == 0) as gated:
            result = trainer.fit(gated(reader(BATCHES)))
        replica.refresh()
        assert not replica.problem
        assert replica.epoch >= 1
        assert replica.steps == dict.fromkeys((0, 1), result.global_step)
        assert replica.network.step == result.global_step
        stored = rows_of(trainer.embeddings.connection.servers)
        assert stored == {name: {i: row.tobytes() for i, row in replica.rows(name).items()} for name in stored}
        assert all(re.fullmatch("epoch-[0-9]{10}", path.name) for path in (tmp_path / "log").iterdir())
