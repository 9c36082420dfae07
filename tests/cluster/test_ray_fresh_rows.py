"""`Sync` with lookups ahead on Ray: a PS that dies changes no bit, though its successor knows no moment."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import persia
from persia.modes import Sync
from persia.nn import collection
from persia.testing import Threads

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from support.cluster_samples import eventually, killing, one_torch_thread, options, reader

pytestmark = pytest.mark.usefixtures("ray_here")

BATCHES, IDS = 160, np.arange(500, dtype=np.uint64)


def trained(cluster: Any, model: torch.nn.Module, data: Any) -> list[Any]:
    """Returns rows with their state, and the network."""
    schema = reader(1).schema
    trainer = persia.Trainer(
        copy.deepcopy(model),
        schema,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        embedding_optimizer=persia.optim.Adagrad(lr=0.05),
        mode=Sync(),
        cluster=cluster,
        options=persia.TrainerOptions(progress=False, timeout=60.0),
    )
    result = trainer.fit(data)
    assert (result.lost_batches, result.lost_gradients) == (0, 0)
    rows = [trainer.embeddings.rows(feature.name, IDS, state=True) for feature in schema.id_features]
    arrays = [array for part in rows for array in (part.found, part.values, *(part.state or ()))]
    return [*arrays, *(value.numpy() for value in trainer.model.state_dict().values())]


def test_a_ps_that_dies_while_lookups_run_ahead_changes_no_bit(tmp_path, monkeypatch):
    """Against lookups that wait, in this process. After the death all rows of the PS count as changed."""
    model = persia.nn.models.FFNN(reader(1).schema, hidden=(16,))
    with one_torch_thread(), monkeypatch.context() as patched:
        patched.setattr(collection, "refreshes", lambda *_: None)
        expected, _ = Threads(2, ps=2).run(lambda member: trained(member, model, reader(BATCHES)))
    with persia.cluster.Ray(2, nn_workers=2, options=options(regions=str(tmp_path))) as cluster:
        with killing(cluster, "embedding_ps") as gated:
            found = trained(cluster, model, gated(reader(BATCHES)))
        process = cluster._roles.processes.of("embedding_ps")[0]
        eventually(lambda: process.info.incarnation == 2, "the driver knows that it is back")
        calls = cluster.statistics()["embedding_worker-0"]["rpc.calls"]
    assert calls > 3.9 * BATCHES  # Each batch is registered, looked up, refreshed and pushed.
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
