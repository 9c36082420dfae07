"""A run and a checkpoint are served from each kind of place that a log can be in."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import persia
from persia.publish import Publisher, PublishOptions, PublishOrder, publish_checkpoint
from persia.serve import Predictor
from support.change_log import assert_equal_rows, begun, everywhere, replica_of

pytestmark = pytest.mark.processes


@everywhere()
def test_a_run_and_a_checkpoint_are_served(url, tmp_path):
    data = persia.data.synthetic(600, id_features=2, ids_per_feature=40, dim=4, batch_size=200)
    trainer = persia.Trainer(
        persia.nn.models.FFNN(data.schema, hidden=(8,)),
        data.schema,
        optimizer=lambda params: torch.optim.Adam(params, 1e-3),
        embedding_optimizer=persia.optim.Adagrad(lr=0.05),
        options=persia.TrainerOptions(progress=False, publish=PublishOptions(url, seconds=0.05)),
    )
    trainer.fit(data)
    batch = next(iter(data))
    with Predictor(url, lambda schema: persia.nn.models.FFNN(schema, hidden=(8,))) as predictor:
        found = predictor.predict(batch)
        assert (found.step, predictor.state().problem) == (3, "")
        (expected,) = trainer.predict([batch])
        np.testing.assert_array_equal(found.probabilities, expected)
        saved = tmp_path / "saved"
        trainer.save(saved)
        epoch = publish_checkpoint(saved, url)
        predictor.refresh()
        assert predictor.predict(batch).epoch == epoch
        np.testing.assert_array_equal(predictor.predict(batch).probabilities, expected)


@everywhere(pytest.mark.slow)
def test_old_entries_are_removed(url):
    log = begun(url, keep=1)
    for _ in range(12):
        log.train()
        log.publish()
    names = [name for name in log.names() if name.endswith(".json")]
    assert [name for name in names if name.endswith("snapshot.json")] == [min(names)]
    assert min(log.names()).startswith(min(names)[:10])
    assert int(min(names)[:10]) > 0
    assert_equal_rows(replica_of(log), log)


@everywhere()
def test_a_stream_that_has_begun_is_left_alone(url):
    log = begun(url)
    order = PublishOrder(log.options, log.epoch, log.run, 0, 0)
    again = Publisher(log.stores[0], {"item": 0, "user": 1}, order, lambda: log.step)
    again.start()
    again._thread.join(20)
    assert again.status.epoch == -1
    again.stop(last=True)
    assert not again.status.complete
    assert [name for name in log.names() if name.endswith(".json")] == ["0000000000-snapshot.json"]
