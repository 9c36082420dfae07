"""Rows by id on Ray: from the driver's trainer, between two calls of `fit`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import persia
from persia.errors import ConfigError
from persia.nn import RowsSet, StoredRows

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from support.cluster_samples import eventually, make_trainer, options, reader

pytestmark = pytest.mark.usefixtures("ray_here")


IDS = np.arange(500, dtype=np.uint64)
NEW = 10**12


def trained(cluster: Any) -> tuple[StoredRows, StoredRows]:
    """Rows before some are set, and at the end."""
    trainer = make_trainer(cluster)
    trainer.fit(reader(8), max_steps=4)
    before = trainer.embeddings.rows("id_0", IDS)
    known = int(before.ids[before.found][0])
    done = trainer.embeddings.set_rows("id_0", [known, NEW], np.full((2, 8), 0.5))
    assert done == RowsSet(inserted=1, replaced=1, evicted=0)
    assert trainer.embeddings.rows("id_0", [NEW, known]).values.tolist() == [[0.5] * 8] * 2
    trainer.fit(reader(8))
    return before, trainer.embeddings.rows("id_0", [*IDS.tolist(), NEW], state=True)


def test_the_driver_reads_and_sets_rows_that_nn_workers_train():
    torch.set_num_threads(1)
    expected = trained(persia.cluster.Embedded(1))
    with persia.cluster.Ray(2, options=options()) as cluster:
        found = trained(cluster)
    for mine, theirs in zip(found, expected, strict=True):
        for a, b in zip([*mine[:3], *(mine.state or ())], [*theirs[:3], *(theirs.state or ())], strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_clusters_capacity_is_refused_if_it_cannot_fit():
    def collection(cluster: Any, capacity: int) -> persia.nn.EmbeddingCollection:
        schema = persia.Schema([persia.IdFeature("item", dim=4)], tables=[persia.Table("item", 4, capacity=capacity)])
        return persia.nn.EmbeddingCollection(schema, optimizer=persia.optim.SGD(0.1), cluster=cluster)

    with persia.cluster.Ray(2, options=options()) as cluster:
        with pytest.raises(ConfigError, match=r"and the 2 embedding PSs together have .* 1,000,000,000,000 rows of 52"):
            collection(cluster, 10**12)
        embeddings = collection(cluster, 20_001)
        embeddings.set_rows("item", np.arange(60_000, dtype=np.uint64), np.zeros((60_000, 4), np.float32))

        def rows() -> list[float]:
            """Of the last reports, of which a new one may be late."""
            found = cluster.statistics().items()
            return sorted(of.get("item.rows", 0) for name, of in found if name.startswith("embedding_ps"))

        eventually(lambda: rows() == [10_000, 10_001], "both PSs are full")
