"""The best checkpoint, and training that ends early, by a metric among all items."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest
import torch

import persia
from persia import DenseFeature, IdFeature, Schema, TrainerOptions
from persia.errors import ConfigError
from persia.metrics import RetrievalFigures
from persia.nn.models import FFNN, NextItem, TwoTower
from persia.trainer.retrieval_evaluation import RetrievalEvaluator

ITEMS = 20
SCHEMA = Schema(
    [IdFeature("item", dim=8), IdFeature("history", table="item", pooling=None, max_length=4, keep="last")],
    labels=["chosen"],
)


def chains(seed, users=200):
    """Events of users: each item is followed by the next number."""
    first = np.random.default_rng(seed).integers(0, ITEMS, users)
    items = (first[:, None] + np.arange(5)) % ITEMS
    return pa.table({"who": np.repeat(np.arange(users), 5), "when": np.arange(users * 5), "item": items.reshape(-1)})


def samples(part, **options):
    rule = {"chosen": "item is not None"}
    return persia.data.event_log(
        chains(0), SCHEMA, 50, owner="who", time="when", labels=rule, min_history=1, leave_one_out=part, **options
    )


def made(model=None, schema=SCHEMA, **options):
    torch.manual_seed(0)
    return persia.Trainer(
        NextItem(schema, backbone="gru", layers=1) if model is None else model,
        schema,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2),
        embedding_optimizer=persia.optim.Adagrad(lr=0.1),
        mode=persia.modes.Sync(),
        options=TrainerOptions(**{"progress": False} | options),
    )


def test_the_best_checkpoint_is_the_one_with_the_best_ranks(tmp_path):
    options = {"keep_best": "retrieval_mrr", "retrieval_leave_out": ["history"]}
    t = made(checkpoint_dir=str(tmp_path), eval_every_epochs=1, **options)
    seen = []
    t.callbacks.append(callback := persia.Callback())
    callback.on_evaluation = lambda step, result: seen.append((step, result.retrieval.mrr))
    result = t.fit(samples("train"), samples("validation"), epochs=3)
    assert result.watched == "retrieval_mrr"
    assert result.best == max(mrr for _, mrr in seen) > seen[0][1] > 0
    assert len(seen) == 3
    figures = t.evaluate_retrieval(samples("validation"), leave_out=["history"])
    assert result.evaluation.retrieval.mrr == figures.mrr == seen[-1][1]
    assert figures.mrr > t.evaluate_retrieval(samples("validation")).mrr
    assert result.evaluation.summary().endswith(f"MRR {figures.mrr:.4f}")
    best = made(**options)
    best.load(tmp_path, step="best")
    assert best.global_step == result.best_step
    assert best.evaluate_retrieval(samples("validation"), leave_out=["history"]).mrr == result.best


def test_training_ends_early_by_ranks(monkeypatch):
    values = iter([0.3, 0.5, 0.4, 0.5])
    asked = []

    def evaluate(self, data, items, options, **_):
        asked.append(options)
        value = next(values)
        return RetrievalFigures(7, ITEMS, 0, {3: value}, {3: value}, value, {3: 1.0})

    monkeypatch.setattr(RetrievalEvaluator, "evaluate", evaluate)
    t = made(keep_best="retrieval_ndcg@3", patience=2, eval_every_epochs=1)
    result = t.fit(samples("train"), samples("validation"), epochs=10)
    assert (result.best, t.state.data.number) == (0.5, 4)
    assert "held-out NDCG@3 of retrieval has not improved" in result.stopped_early
    assert {tuple(each.at) for each in asked} == {(3,)}


def test_held_out_data_need_only_what_is_ranked():
    history = ["history"]
    reader = persia.data.shared_negatives(samples("train"), ["item"], 20, history=history)
    model = NextItem(reader.schema, backbone="gru", history=[("history", "item")], negatives=["negative_item"])
    t = made(model, reader.schema, keep_best="retrieval_hr@5")
    result = t.fit(reader, samples("test"))
    assert result.evaluation.retrieval.rows == 200
    assert result.evaluation.retrieval.hit_rate.keys() == {5}


def test_held_out_data_without_samples_are_an_error():
    t = made(keep_best="retrieval_hr")
    held_out = [dataclasses.replace(batch, labels=np.zeros_like(batch.labels)) for batch in samples("test")]
    with pytest.raises(persia.errors.DataError, match="no sample whose label is above 0"):
        t.fit(samples("train"), held_out)


def test_models_that_cannot_retrieve_are_refused_before_training():
    with pytest.raises(ConfigError, match="FFNN has no towers"):
        made(FFNN(Schema([IdFeature("item", dim=8)], labels=["chosen"])), keep_best="retrieval_hr@10")
    priced = Schema(
        [IdFeature("user", dim=8), IdFeature("item", dim=8)], dense_features=[DenseFeature("price")], labels=["chosen"]
    )
    with pytest.raises(ConfigError, match="give `items`"):
        made(TwoTower(priced, item=["item", "price"]), priced, keep_best="retrieval_mrr")
    with pytest.raises(ConfigError, match="leave_out has 'past'"):
        made(keep_best="retrieval_mrr", retrieval_leave_out=["past"])
    with pytest.raises(ConfigError, match="metric = 'retrieval_mrr' ranks items"):
        made().importance(samples("test"), metric="retrieval_mrr")
