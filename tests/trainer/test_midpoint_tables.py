"""Tables with midpoint insertion in training: what came again stays, through checkpoints as well."""

import numpy as np
import pytest
import torch
from test_resume import assert_same_rows

import persia
from persia.modes import Hybrid, Sync
from persia.optim import Adagrad

HOT = np.arange(200)
CAPACITY = 800


def trainer(eviction, mode=None):
    schema = persia.Schema(
        [persia.IdFeature("item", dim=4)], tables=[persia.Table("item", 4, capacity=CAPACITY, eviction=eviction)]
    )
    torch.manual_seed(0)
    return persia.Trainer(
        persia.nn.models.FFNN(schema, hidden=(4,)),
        schema,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        embedding_optimizer=Adagrad(lr=0.1),
        mode=mode or Sync(),
        options=persia.TrainerOptions(progress=False),
    )


def batches(t, *requests):
    return [
        persia.Batch.from_columns(t.schema, {"item": items, "label": np.arange(len(items)) % 2}) for items in requests
    ]


def once(first):
    """Returns requests of ids that come once, twice as many as the table has rows."""
    return [np.arange(at, at + len(HOT)) for at in range(first, first + 2 * CAPACITY, len(HOT))]


def found(t):
    """Returns how many of `HOT` have a row."""
    return int(t.embeddings.rows("item", HOT).found.sum())


@pytest.mark.parametrize("mode", [Sync(), Hybrid(2, warmup=0)], ids=["sync", "hybrid"])
@pytest.mark.parametrize(("eviction", "kept"), [("lru", 0), ("midpoint", len(HOT))])
def test_rows_of_repeated_ids_outlive_rows_of_single_ids(mode, eviction, kept):
    t = trainer(eviction, mode)
    t.fit(batches(t, *once(1000), HOT, HOT, *once(5000)))
    assert t.embeddings.statistics()["item"]["evicted"] == len(HOT) + 3 * CAPACITY
    assert found(t) == kept


@pytest.mark.parametrize("saved_by", ["lru", "midpoint"])
def test_a_checkpoint_keeps_what_came_again(tmp_path, saved_by):
    """Stamps are part of it. A table with midpoint insertion takes those of one with exact LRU, too."""
    first = trainer(saved_by)
    before = [*once(1000), HOT, HOT]
    first.fit(batches(first, *before))
    first.save(str(tmp_path))
    second = trainer("midpoint")
    second.load(str(tmp_path))
    assert_same_rows(first, second)
    second.fit(batches(second, *once(5000)))
    assert second.global_step == len(before) + len(once(5000))
    assert found(second) == len(HOT)
