"""The regulariser of embeddings, and dimensions by frequency."""

import numpy as np
import pytest
import torch

import persia
from persia.errors import ConfigError
from persia.nn import EmbeddingCollection, embedding_l2

SCHEMA = persia.Schema(
    [
        persia.IdFeature("item", dim=2),
        persia.IdFeature("before", table="item", pooling=None, max_length=3),
        persia.IdFeature("user", dim=3),
    ],
)


def test_the_squares_of_what_the_model_gets_reach_the_rows():
    collection = EmbeddingCollection(SCHEMA, optimizer=persia.optim.SGD(lr=1.0), mode=persia.modes.Sync())
    collection.set_rows("item", np.array([1, 2], np.uint64), np.array([[1, 2], [3, 4]], np.float32))
    collection.set_rows("user", np.array([5], np.uint64), np.full((1, 3), 2, np.float32))
    columns = {"item": [1, 2], "before": [[2, 2], []], "user": [5, 5], "label": [1, 0]}
    batch = persia.Batch.from_columns(SCHEMA, columns)
    for prepared in collection.prefetch([batch]):
        embeddings = collection(prepared)
        # Of items 5 and 25, of the sequence 25 twice, of users 12 twice; 2 samples.
        assert embedding_l2(embeddings, {"item": 1.0}).item() == 15
        assert embedding_l2(embeddings, {"before": 2.0, "user": 0.5}).item() == 56
        found = embedding_l2(embeddings, 0.5)
        assert found.item() == 26
        found.backward()
    # The gradient of 0.5 * square / 2 is half of the embedding, for each place.
    np.testing.assert_allclose(collection.rows("item", [1, 2]).values, [[0.5, 1], [-1.5, -2]])
    np.testing.assert_allclose(collection.rows("user", [5]).values, [[0, 0, 0]])
    with pytest.raises(ConfigError, match="no feature 'shop'; the model gets item, before, user"):
        embedding_l2({"item": torch.zeros(1, 2), "before": torch.zeros(1, 2), "user": torch.zeros(1, 1)}, {"shop": 1.0})
    with pytest.raises(ConfigError, match="no features to regularise"):
        embedding_l2({}, 1.0)


def test_dimensions_fall_with_the_number_of_ids():
    distinct = {"shop": 80, "item": 5_000, "user": 120_000}
    assert persia.dims_by_frequency(distinct) == {"shop": 32, "item": 9, "user": 4}
    assert persia.dims_by_frequency(distinct, power=0) == dict.fromkeys(distinct, 32)
    assert persia.dims_by_frequency(distinct, 64, power=1, multiple=4) == {"shop": 64, "item": 4, "user": 4}
    for arguments in ([{}], [{"shop": 0}], [distinct, 0]):
        with pytest.raises(ConfigError, match=r"distinct|widest"):
            persia.dims_by_frequency(*arguments)
    with pytest.raises(ConfigError, match="power"):
        persia.dims_by_frequency(distinct, power=2)
