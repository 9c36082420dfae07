"""Training in virtual time against the real trainer."""

import numpy as np
import pytest
import torch

from persia import Schema, Table, Trainer, TrainerOptions, data
from persia.errors import ConfigError, DataError
from persia.modes import Gba, Hybrid, Sync
from persia.nn import ModelOutput
from persia.nn.models import DeepFM
from persia.optim import Adagrad, Adam
from persia.replay import Setting, simulate, steady
from persia.replay.virtual import VirtualTraining

ROWS, BATCH = 2048, 64


def model_of(schema):
    torch.manual_seed(3)
    return DeepFM(schema, hidden=(16,))


class Twofold(DeepFM):
    """A model whose own loss needs more than logits."""

    def forward(self, dense, embeddings):
        logits = super().forward(dense, embeddings)
        return ModelOutput(logits, logits.square()) if self.training else logits

    def loss(self, logits, labels, extra):
        return 2 * torch.nn.functional.binary_cross_entropy_with_logits(logits, labels) + 0.1 * extra.mean()


def twofold_of(schema):
    torch.manual_seed(3)
    return Twofold(schema, hidden=(16,))


def virtual(reader, rows=Adagrad(lr=0.05), model=model_of, schema=None, **options):  # noqa: B008
    batches = list(reader)
    schema = schema or reader.schema
    training = VirtualTraining(
        model(schema),
        schema,
        batches.__getitem__,
        lambda parameters: torch.optim.Adam(parameters, 1e-2),
        rows,
        seed=5,
        **options,
    )
    return training, batches


@pytest.fixture
def reader():
    return data.synthetic(ROWS, id_features=4, ids_per_feature=200, batch_size=BATCH, dim=4)


def trained(schema, batches, model=model_of, **options):
    trainer = Trainer(
        model(schema),
        schema,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2),
        embedding_optimizer=Adagrad(lr=0.05),
        mode=Sync(),
        options=TrainerOptions(seed=5, progress=False, **options),
    )
    trainer.fit(batches)
    return trainer


@pytest.mark.parametrize("model", [model_of, twofold_of])
@pytest.mark.parametrize("mode", [Sync(), Gba(BATCH)])
def test_one_nn_worker_trains_as_the_trainer_does(reader, mode, model):
    training, batches = virtual(reader, model=model)
    training.run(simulate(mode, Setting(steady([1.0]), local_batch=BATCH), len(batches)))
    trainer = trained(reader.schema, batches, model)
    test = list(data.synthetic(ROWS, id_features=4, ids_per_feature=200, batch_size=BATCH, dim=4, seed=0).batches(1))
    theirs = np.concatenate(list(trainer.predict(test)))
    ours = 1 / (1 + np.exp(-training.evaluate(test)))
    np.testing.assert_allclose(ours.reshape(theirs.shape), theirs, atol=2e-5)
    assert sorted(training.logits) == list(range(len(batches)))


def test_several_nn_workers_train(reader):
    training, batches = virtual(reader)
    before = training.evaluate(batches)
    half = len(batches) // 2
    setting = Setting(steady([1.0, 1.0, 4.0, 2.0]), local_batch=BATCH)
    first = simulate(Hybrid(2, warmup=0), setting, half)
    training.run(first)
    training.run(simulate(Gba(4 * BATCH), setting, range(half, len(batches)), step=first.end_step))
    labels = torch.from_numpy(np.concatenate([b.labels for b in batches]))
    losses = [
        torch.nn.functional.binary_cross_entropy_with_logits(torch.from_numpy(logits), labels).item()
        for logits in (before, training.evaluate(batches))
    ]
    assert losses[1] < losses[0] - 0.01


@pytest.mark.parametrize("rows", [Adagrad(lr=0.05), Adam(lr=0.01)])
def test_a_copy_continues_as_the_original_does(reader, rows):
    trainings = [virtual(reader, rows)[0] for _ in range(3)]
    base, copied, again = trainings
    batches = list(reader)
    half = len(batches) // 2
    setting = Setting(steady([1.0, 2.0]), local_batch=BATCH)
    first = simulate(Sync(), setting, half)
    base.run(first)
    state = base.state_dict()
    second = simulate(Gba(2 * BATCH), setting, range(half, len(batches)), step=first.end_step)
    copied.load_state_dict(state)
    for training in (base, copied):
        training.run(second)
    again.load_state_dict(state)
    again.run(second)
    expected = base.evaluate(batches)
    np.testing.assert_array_equal(copied.evaluate(batches), expected)
    np.testing.assert_array_equal(again.evaluate(batches), expected)
    with pytest.raises(DataError, match="has started"):
        copied.load_state_dict(state)


def rows_of(training):
    """The rows of the ids of each table."""
    return {
        (chunk.table, int(id_)): row
        for store in training.stores
        for chunk in store.export_rows()
        for id_, row in zip(chunk.arrays["ids"], chunk.arrays["embeddings"], strict=True)
    }


def test_gradients_of_rows_are_clipped_as_the_trainer_does(reader):
    free, batches = virtual(reader)
    training, _ = virtual(reader, clip_embedding_norm=1e-3)
    for each in (free, training):
        each.run(simulate(Sync(), Setting(steady([1.0]), local_batch=BATCH), len(batches)))
    trainer = trained(reader.schema, batches, clip_embedding_norm=1e-3)
    rows, unclipped = rows_of(training), rows_of(free)
    for name in reader.schema.resolved_tables():
        ids = np.array([id_ for table, id_ in rows if table == name], np.uint64)
        ours = np.stack([rows[name, int(id_)] for id_ in ids])
        np.testing.assert_allclose(ours, trainer.embeddings.rows(name, ids).values, atol=1e-5)
        assert np.abs(ours - np.stack([unclipped[name, int(id_)] for id_ in ids])).max() > 1e-2
    with pytest.raises(ConfigError, match="clip_embedding_norm = 0"):
        virtual(reader, clip_embedding_norm=0)


@pytest.mark.parametrize("mode", [Sync(), Gba(2 * BATCH)])
def test_rows_of_a_frozen_table_stay(reader, mode):
    frozen, *others = reader.schema.resolved_tables()
    schema = Schema(reader.schema.id_features, reader.schema.dense_features, tables=[Table(frozen, 4, trainable=False)])
    training, batches = virtual(reader, schema=schema)
    setting = Setting(steady([1.0, 2.0]), local_batch=BATCH)
    first = simulate(mode, setting, len(batches))
    training.run(first)
    before = rows_of(training)
    training.run(simulate(mode, setting, len(batches), step=first.end_step))
    moved = {table: [] for table in (frozen, *others)}
    for (table, id_), row in rows_of(training).items():
        moved[table].append((row != before[table, id_]).any())
    assert not any(moved[frozen])
    assert all(any(moved[table]) for table in others)
