"""Data to evaluate that can be read only once, or have no batch."""

import pytest
import torch

import persia
from persia.checkpoint import CheckpointReader
from persia.errors import ConfigError, DataError

READER = persia.data.synthetic(1_000, id_features=2, ids_per_feature=20, batch_size=100)


def trainer(**options):
    torch.manual_seed(0)
    return persia.Trainer(
        persia.nn.models.FFNN(READER.schema, hidden=(4,)),
        READER.schema,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2),
        embedding_optimizer=persia.optim.Adagrad(lr=0.1),
        mode=persia.modes.Sync(),
        options=persia.TrainerOptions(progress=False, **options),
    )


def test_one_shot_data_are_refused_to_evaluate_each_checkpoint(tmp_path):
    options = {"checkpoint_dir": str(tmp_path), "checkpoint_every_steps": 4, "keep_best": "auc"}
    t = trainer(**options)
    with pytest.raises(ConfigError, match="eval_data is an iterator, which can be read only once, and keep_best"):
        t.fit(READER, iter(READER))
    assert t.global_step == 0
    result = t.fit(READER, list(READER))
    assert result.evaluation.rows == 1_000
    assert CheckpointReader(str(tmp_path)).manifest.global_step == 10


def test_one_shot_data_are_fine_for_a_single_evaluation():
    t, once = trainer(), READER.batches(epoch=7)
    assert t.fit(READER, once).evaluation.rows == 1_000
    with pytest.raises(DataError, match="eval_data is an iterator that was read before"):
        t.fit(READER, once, epochs=2)
    assert t.global_step == 10


def test_no_batch_to_evaluate_is_an_error():
    t = trainer()
    for nothing in ([], iter([])):
        with pytest.raises(DataError, match="The data to evaluate are empty: no batch was scored"):
            t.evaluate(nothing)
    with pytest.raises(DataError, match="eval_data are empty"):
        t.fit(READER, [])
    with pytest.raises(DataError, match="The data to evaluate are empty"):
        t.fit(READER, iter([]))
    assert t.global_step == 10


def test_no_batch_to_evaluate_may_be_allowed():
    assert trainer(allow_empty=True).fit(READER, []).evaluation.rows == 0


def test_a_stop_before_the_first_batch_is_no_empty_evaluation():
    t = trainer()

    class Stopping:
        def __iter__(self):
            t.stop()
            return iter(READER)

    assert t.fit(READER, Stopping()).evaluation is None
