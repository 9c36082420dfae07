"""The peer of the model zoo looks up what persia looks up, and the data of the zoo are what they say."""

import os

import numpy as np
import pytest
import torch
from benchmarks.baselines import zoo_torch

import persia
from benchmarks import runner, zoo, zoo_runs
from persia.metrics import Metrics
from persia.nn import SequenceEmbedding
from persia.schema import IdFeature, Schema

SCHEMA = Schema(
    [
        IdFeature("item", dim=2),
        IdFeature("before", table="item", pooling=None, max_length=2),
        IdFeature("mean", table="item", pooling="mean"),
        IdFeature("user", dim=3),
    ],
    labels=["click"],
)


def test_the_peer_gives_the_network_the_same_embeddings():
    columns = {
        "item": [7, 900, 7],
        "before": [[900, 5, 7], [], [5]],
        "mean": [[7, 5], [900], []],
        "user": [3, 3, 10**12],
        "click": [1, 0, 1],
    }
    batch = persia.Batch.from_columns(SCHEMA, columns)
    (one,), ids = zoo_torch.prepared(SCHEMA, [batch])
    assert {table: found.tolist() for table, found in ids.items()} == {"item": [5, 7, 900], "user": [3, 10**12]}
    peer = zoo_torch.Embeddings(SCHEMA, zoo_runs.first_values(SCHEMA, ids, 7))
    options = persia.nn.CollectionOptions(seed=7)
    collection = persia.nn.EmbeddingCollection(
        SCHEMA, optimizer=persia.optim.Adagrad(lr=0.1), mode=persia.modes.Sync(), options=options
    )
    for name, ours in collection(batch).items():
        theirs = peer(one)[name]
        if isinstance(ours, SequenceEmbedding):
            assert torch.equal(ours.mask, theirs.mask)
            ours, theirs = ours.values, theirs.values
        torch.testing.assert_close(ours, theirs)


def test_sequences_tell_the_click_by_their_newest_event():
    clicks = zoo_runs.sequences(20_480)
    metrics = Metrics(["label"])
    for batch in clicks.batches:
        newest = batch.id_features["history"].values.reshape(len(batch), -1)[:, -1]
        like = newest % zoo_runs.CATEGORIES == batch.id_features["item"].values % zoo_runs.CATEGORIES
        metrics.update(like[:, None].astype(np.float32), batch.labels)
    assert abs(metrics.result().auc - clicks.best) < 0.01


def test_the_share_of_embeddings_is_what_is_not_the_network(monkeypatch):
    clicks = zoo_runs.sequences(2_048)
    clock = iter(range(1_000))
    monkeypatch.setattr(zoo_torch.time, "perf_counter", lambda: next(clock) ** 2)
    # Of each step, the clock gives the parts 1, 3, 5, or 9, 11, 13: that in the middle is the network's.
    share = zoo_runs.embedding_share(clicks, zoo_runs.MODELS["din"])
    assert share == 1 - 11 / 33


def test_every_sequential_model_has_a_row_on_generated_sequences():
    models = {name.rpartition(".")[2] for name in runner.names() if name.startswith("zoo.auc.sequences.")}
    assert models == {"din", "dien", "youtube_dnn", "sasrec", "hstu", "two_tower"}
    result = zoo_runs.train(zoo_runs.sequences(2_048), zoo_runs.MODELS["two_tower"], 0)
    assert 0.4 < result.auc < 0.7  # Two batches: it runs.


def test_training_in_plain_pytorch_differs_by_rounding_only():
    arguments = zoo_runs.sequences(8_192), zoo_runs.MODELS["youtube_dnn"], 3
    assert abs(zoo_runs.train(*arguments).auc - zoo_runs.train_in_torch(*arguments).auc) < 1e-4


@pytest.mark.processes
def test_each_side_trains_in_a_process_as_a_user_starts_it():
    ours, theirs = zoo.sides()
    with runner.RESOURCES:
        for side in (ours, theirs):
            assert side.call(os.getenv, "GOMP_SPINCOUNT") == os.getenv("GOMP_SPINCOUNT")
        mine, other = zoo.in_turn("sequences", "two_tower", "smoke", 1)
        assert abs(mine.auc - other.auc) < 0.1
        assert min(mine.rows_per_s, other.rows_per_s) > 0
        with pytest.raises(KeyError, match="unknown"):
            ours.call(zoo.trained, "sequences", "unknown", "smoke", 1)
    assert zoo.sides.cache_info().currsize == 0


def test_long_histories_have_1000_events():
    clicks = zoo_runs.long_sequences(8, 4)
    assert [len(batch.id_features["history"].values) for batch in clicks.batches] == [4_000, 4_000]
    assert zoo_runs.candidates(clicks.schema) == ["item"]


def test_a_switch_that_changes_nothing_learns_alike():
    days, test = zoo_runs.days_of(256, 0)
    assert [sum(map(len, day.batches)) for day in days] == [256] * 5
    first, second = (zoo_runs.switched(days, test, zoo_runs.MODELS["youtube_dnn"], ("sync",) * 5, 0) for _ in range(2))
    assert first == second
    assert len(first) == 5
