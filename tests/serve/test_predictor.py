"""A predictor computes what the trainer computes, from the rows and the network of the log of changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import persia
from persia.publish import PublishOptions
from persia.serve import Predictor


def trained(url, schema, batches, *, model=None, **options):
    torch.manual_seed(1)
    trainer = persia.Trainer(
        model or persia.nn.models.FFNN(schema, hidden=(16,)),
        schema,
        optimizer=lambda params: torch.optim.Adam(params, 1e-2),
        embedding_optimizer=persia.optim.Adagrad(lr=0.1),
        options=persia.TrainerOptions(progress=False, publish=PublishOptions(str(url), seconds=0.05), **options),
    )
    trainer.fit(batches)
    return trainer


@pytest.fixture
def data():
    return persia.data.synthetic(4_000, id_features=3, dense_features=2, dim=8, batch_size=200)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_it_predicts_the_same_bits_as_the_trainer(tmp_path, data, precision):
    trainer = trained(tmp_path / "log", data.schema, data, precision=precision)
    batches = list(data)[:3]
    with Predictor(str(tmp_path / "log"), lambda schema: persia.nn.models.FFNN(schema, hidden=(16,))) as predictor:
        for batch, expected in zip(batches, trainer.predict(batches), strict=True):
            found = predictor.predict(batch)
            np.testing.assert_array_equal(found.probabilities, expected)
            assert found.step == trainer.global_step
        state = predictor.state()
        print(state)
        assert state.problem == ""
