"""One step to the digit: what is scored, how far gradients are clipped, which learning rate rows get."""

import numpy as np
import pytest
import torch

import persia
from persia.modes import Sync

LR = 0.5


def one_step(data, *, row_schedule=None, spread=0.0, **options):
    """A trainer whose rows are there already, with values of this spread."""
    torch.manual_seed(0)
    trainer = persia.Trainer(
        persia.nn.models.FFNN(data.schema, hidden=(16,)),
        data.schema,
        optimizer=lambda p: torch.optim.SGD(p, LR),
        embedding_optimizer=persia.optim.SGD(lr=LR, schedule=row_schedule),
        mode=Sync(),
        options=persia.TrainerOptions(progress=False, **options),
    )
    generator = np.random.default_rng(0)
    for name, table in data.schema.resolved_tables().items():
        ids = np.arange(60, dtype=np.uint64)
        trainer.embeddings.set_rows(name, ids, generator.normal(0, spread, (60, table.dim)).astype(np.float32))
    return trainer


def reader(rows=200):
    return persia.data.synthetic(rows, id_features=3, ids_per_feature=50, dense_features=2, batch_size=200)


def parameters(trainer):
    return torch.cat([p.detach().reshape(-1).clone() for p in trainer.model.parameters()])


def rows_of(trainer):
    tables = trainer.schema.resolved_tables()
    return np.concatenate([trainer.embeddings.rows(name, np.arange(60, dtype=np.uint64)).values for name in tables])


def test_a_batch_is_scored_before_it_is_trained():
    data = reader()
    trainer = one_step(data, spread=1.0)
    (before,) = trainer.predict(data)
    labels = next(iter(data)).labels
    expected = -np.mean(np.log(np.where(labels > 0, before, 1 - before)))
    result = trainer.fit(data)
    assert result.progressive.log_loss == pytest.approx(expected, rel=1e-5)
    (after,) = trainer.predict(data)
    assert -np.mean(np.log(np.where(labels > 0, after, 1 - after))) < expected - 0.01  # Else nothing is shown.


def test_the_gradient_of_the_network_is_clipped_to_its_norm():
    data = reader()
    moved = {}
    for clip in (None, 0.01):
        trainer = one_step(data, spread=1.0, clip_norm=clip)
        before = parameters(trainer)
        trainer.fit(data)
        moved[clip] = (parameters(trainer) - before).norm().item() / LR
    assert moved[None] > 0.05
    assert moved[0.01] == pytest.approx(0.01, rel=1e-3)


def test_rows_follow_the_schedule_of_their_optimizer():
    data = reader(400)
    moved = {}
    for schedule in (None, persia.Schedule(warmup_steps=4)):
        trainer = one_step(data, row_schedule=schedule, spread=1.0)
        before = rows_of(trainer)
        trainer.fit(data, max_steps=1)
        first = rows_of(trainer)
        moved[schedule is None] = first - before
    changed = np.abs(moved[True]) > 1e-4
    assert changed.any()
    np.testing.assert_allclose(moved[False][changed] / moved[True][changed], 0.25, rtol=1e-2)
