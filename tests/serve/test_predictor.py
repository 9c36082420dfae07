"""A predictor computes what the trainer computes, from the rows and the network of the log of changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import persia
from persia.batching.id_column import IdColumn
from persia.cli.run_config import ModelConfig
from persia.errors import ConfigError, DataError, DeadlineError
from persia.publish import ModelDescription, PublishOptions, publish_checkpoint
from persia.serve import Predictor, ServeOptions

HISTORIES = persia.Schema(
    [
        persia.IdFeature("item", 8, table="items"),
        persia.IdFeature("history", table="items", pooling=None, max_length=4, keep="last"),
        persia.IdFeature("tags", 4, pooling="mean"),
    ],
    ["age", "price"],
    tables=[persia.Table("items", 8, dtype="bfloat16", capacity=5_000)],
)


def batches(count=8, rows=50):
    random = np.random.default_rng(5)

    def lists(most):
        return [random.integers(0, 300, random.integers(0, most)).tolist() for _ in range(rows)]

    for _ in range(count):
        columns = {"item": random.integers(0, 300, rows), "history": lists(8), "tags": lists(4)}
        columns |= {"age": random.random(rows), "price": random.random(rows), "label": random.integers(0, 2, rows)}
        yield persia.Batch.from_columns(HISTORIES, columns)


def trained(model, schema=HISTORIES, data=None, **options):
    trainer = persia.Trainer(
        model,
        schema,
        optimizer=lambda params: torch.optim.Adam(params, 1e-2),
        embedding_optimizer=persia.optim.Adagrad(lr=0.1),
        options=persia.TrainerOptions(progress=False, **options),
    )
    trainer.fit(data or list(batches()))
    return trainer


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_predictions_are_the_bits_of_the_trainer(tmp_path, precision):
    torch.manual_seed(1)
    url = str(tmp_path / "log")
    model = ModelConfig("din", {"hidden": [16], "history": [["history", "item"]]}).build(HISTORIES)
    trainer = trained(model, precision=precision, publish=PublishOptions(url, seconds=0.05))
    data = list(batches(2))
    unlabelled = persia.Batch(data[0].id_features, data[0].dense, np.empty((50, 0), np.float32))
    with Predictor(url) as predictor:  # The log says what the model is.
        for batch, expected in zip(data, trainer.predict(data), strict=True):
            found = predictor.predict(batch)
            np.testing.assert_array_equal(found.probabilities, expected)
            assert (found.step, found.epoch) == (trainer.global_step, 0)
        np.testing.assert_array_equal(
            predictor.predict(unlabelled).probabilities, predictor.predict(data[0]).probabilities
        )
        ids = np.array([3, 10**9], np.uint64)
        stored = trainer.embeddings.rows("items", ids)
        found, rows = predictor.embeddings("items", ids)
        np.testing.assert_array_equal(found, stored.found)
        np.testing.assert_array_equal(rows, stored.values)
        with pytest.raises(ConfigError, match="no table 'users'"):
            predictor.embeddings("users", ids)
        with pytest.raises(DataError, match="lacks feature 'tags'"):
            columns = {name: data[0].id_features[name] for name in ("item", "history")}
            predictor.predict(persia.Batch(columns, data[0].dense, data[0].labels))


def test_features_with_one_id_are_looked_up_in_one_go(tmp_path):
    torch.manual_seed(1)
    data = list(persia.data.synthetic(800, id_features=3, dense_features=2, dim=5, batch_size=200))
    schema = persia.data.synthetic(1, id_features=3, dense_features=2, dim=5).schema
    trainer = trained(persia.nn.models.DCNv2(schema), schema, data, publish=PublishOptions(str(tmp_path)))
    unknown = persia.Batch(
        {**data[0].id_features, "id_1": IdColumn(np.arange(200, dtype=np.uint64))}, data[0].dense, data[0].labels
    )
    with Predictor(str(tmp_path), persia.nn.models.DCNv2) as predictor:
        for batch, expected in zip([*data, unknown], trainer.predict([*data, unknown]), strict=True):
            for array in (batch.dense, *(column.values for column in batch.id_features.values())):
                array.flags.writeable = False  # As arrays of messages are.
            np.testing.assert_array_equal(predictor.predict(batch).probabilities, expected)


@pytest.mark.parametrize("described", [True, False])
def test_a_published_checkpoint_is_served(tmp_path, described):
    torch.manual_seed(1)
    description = ModelDescription("ffnn", {"hidden": [8]})
    model = ModelConfig("ffnn", {"hidden": [8]}).build(HISTORIES)
    trainer = trained(model if described else _copy(model), checkpoint_dir=str(tmp_path / "checkpoints"))
    log, data = str(tmp_path / "log"), list(batches(1))
    counts: list[int] = []
    given = None if described else description
    assert publish_checkpoint(tmp_path / "checkpoints", log, model=given, progress=counts.append) == 0
    with Predictor(log, options=ServeOptions(poll_seconds=3600.0)) as predictor:
        expected = next(trainer.predict(data))
        np.testing.assert_array_equal(predictor.predict(data[0]).probabilities, expected)
        assert predictor.state().rows == sum(counts)
        assert publish_checkpoint(tmp_path / "checkpoints", log, dtype="int8", model=given) == 1
        predictor.refresh()
        found = predictor.predict(data[0])
        assert found.epoch == 1
        np.testing.assert_allclose(found.probabilities, expected, atol=0.02)
    assert [path.name for path in (tmp_path / "log").iterdir()] == ["epoch-0000000001"]


@pytest.mark.parametrize("mode", [persia.modes.Sync(), persia.modes.Gba(100)])
def test_rows_of_a_frozen_table_are_served(tmp_path, mode):
    """Those that were set before training, those that it admits, and those that are set between two calls of `fit`."""
    torch.manual_seed(1)
    schema = persia.Schema(
        [persia.IdFeature("item"), persia.IdFeature("tags", 4, pooling="mean")],
        tables=[persia.Table("item", 8, trainable=False)],
    )
    random = np.random.default_rng(5)
    columns = {"item": np.arange(50), "tags": random.integers(0, 9, 50), "label": random.integers(0, 2, 50)}
    data = [persia.Batch.from_columns(schema, columns)] * 4
    ids, live, saved = np.arange(60, dtype=np.uint64), str(tmp_path / "live"), str(tmp_path / "saved")
    trainer = persia.Trainer(
        persia.nn.models.FFNN(schema),
        schema,
        optimizer=lambda params: torch.optim.Adam(params, 1e-2),
        embedding_optimizer=persia.optim.Adagrad(lr=0.1),
        mode=mode,
        options=persia.TrainerOptions(
            progress=False, publish=PublishOptions(live, seconds=0.05), checkpoint_dir=str(tmp_path / "checkpoints")
        ),
    )
    given = random.normal(size=(60, 8)).astype(np.float32)
    trainer.embeddings.set_rows("item", ids[:40], given[:40])
    trainer.fit(data)
    given[40:50] = trainer.embeddings.rows("item", ids[40:50]).values
    with Predictor(live, persia.nn.models.FFNN, ServeOptions(poll_seconds=3600.0)) as predictor:
        found, rows = predictor.embeddings("item", ids)
        np.testing.assert_array_equal(found, ids < 50)
        np.testing.assert_array_equal(rows[:50], given[:50])
        np.testing.assert_array_equal(predictor.predict(data[0]).probabilities, next(trainer.predict(data)))
        tags = predictor.embeddings("tags", ids)[1]
        trainer.embeddings.set_rows("item", ids[50:], given[50:])
        trainer.fit(data, again=True)
        predictor.refresh()
        np.testing.assert_array_equal(predictor.embeddings("item", ids)[1], given)
        assert (predictor.embeddings("tags", ids)[1] != tags).any()  # The other table was trained.
    publish_checkpoint(tmp_path / "checkpoints", saved)
    with Predictor(saved, persia.nn.models.FFNN, ServeOptions(poll_seconds=3600.0)) as predictor:
        np.testing.assert_array_equal(predictor.embeddings("item", ids)[1], given)
        np.testing.assert_array_equal(predictor.predict(data[0]).probabilities, next(trainer.predict(data)))


def test_a_checkpoint_in_place_of_a_log_names_the_command_that_publishes_it(tmp_path):
    trained(persia.nn.models.FFNN(HISTORIES), checkpoint_dir=str(tmp_path))
    (step,) = tmp_path.glob("step-*")
    for directory in (tmp_path, step):
        with pytest.raises(DeadlineError, match=f"no epoch in {directory}, but .*publish {directory} --output LOG"):
            Predictor(str(directory), persia.nn.models.FFNN).start(timeout=0.0)


def _copy(model):
    """Returns a network that was not built from a description."""
    made = persia.nn.models.FFNN(HISTORIES, hidden=(8,))
    made.load_state_dict(model.state_dict())
    return made


@pytest.mark.parametrize("arguments", [("x", 5), ("x", None, {"poll_seconds": 1})])
def test_arguments_are_checked(tmp_path, arguments):
    with pytest.raises(ConfigError, match="expected"):
        Predictor(*arguments)
    with pytest.raises(ConfigError, match="poll_seconds"):
        ServeOptions(poll_seconds=0.0)
