"""Ranking gives each item the score of its row with the user's features in it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import persia
from persia.batching.id_column import IdColumn
from persia.cli.run_config import ModelConfig
from persia.errors import ConfigError, DataError
from persia.nn import RankingModel
from persia.nn.output import probabilities_of
from persia.serve.ranking import _can_split, expanded
from support.written_log import WrittenLog

SCHEMA = persia.Schema(
    [
        persia.IdFeature("user", 6),
        persia.IdFeature("city", 4),
        persia.IdFeature("item", 8, table="items"),
        persia.IdFeature("category", 4, table="categories"),
        persia.IdFeature("history", table="items", pooling=None, max_length=5, keep="last"),
        persia.IdFeature("seen", table="categories", pooling=None, max_length=5, keep="last", aligned_with="history"),
    ],
    ["age", "price", "hour"],
)
MODELS = {
    "two_tower": {"item": ["item", "category", "price"], "log_q": "hour", "hidden": [8]},
    "din": {"history": [["history", "item"], ["seen", "category"]], "hidden": [8], "attention": [5, 3]},
    "sasrec": {"history": [["history", "item"], ["seen", "category"]]},
    "hstu": {"history": [["history", "item"], ["seen", "category"]], "hidden": [8]},
    "dien": {"history": [["history", "item"], ["seen", "category"]]},
}
NAN = np.nan


def published(tmp_path, serve, kind, options):
    torch.manual_seed(2)
    model = ModelConfig(kind, options).build(SCHEMA)
    log = WrittenLog(tmp_path / "log", 2, SCHEMA, (kind, options))
    log.values = lambda ids, dim, step: np.sin(np.outer(ids + 1.0, np.arange(1.0, dim + 1))).astype(np.float32)
    log.begin(1, network=False)
    log.network(1, **model.state_dict())
    return serve(log, None), model


def columns(batch, names):
    return {name: batch.id_features[name] for name in names}


def user_and_items(history=(3, 9, 4), items=7, user=("user", "city", "history", "seen")):
    count = np.arange(items)
    full = {"user": count, "city": count + 1, "item": count + 2, "category": count % 3, "history": [[1, 2]] * items}
    full |= {"seen": [[0, 1]] * items, "age": count / 9, "price": count / 7, "hour": count / 5}
    rows = persia.Batch.from_columns(SCHEMA, full, require_labels=False)
    mine = {name: [column[-1]] for name, column in full.items()} | {"history": [history], "seen": [history]}
    one = persia.Batch.from_columns(SCHEMA, mine, require_labels=False)
    of_items = [name for name in full if name not in user and name in rows.id_features]
    dense = rows.dense.copy()
    dense[:, [0, 2]] = NAN  # Age and hour are the user's.
    one.dense[:, 1] = NAN
    return (
        persia.Batch(columns(one, user), one.dense, one.labels),
        persia.Batch(columns(rows, of_items), dense, rows.labels),
    )


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("history", [(3, 9, 4), (), (1, 2, 3, 4, 5, 6, 7)])
def test_it_is_predict_on_expanded_rows(tmp_path, serve, kind, history):
    predictor, model = published(tmp_path, serve, kind, MODELS[kind])
    user, items = user_and_items(history)
    calls = []
    inner = predictor._updater.view.network.module
    if isinstance(model, RankingModel):
        score = inner.score
        inner.score = lambda *arguments: (calls.append(len(arguments[1])), score(*arguments))[1]
    found = predictor.rank(user, items)
    rows = expanded(SCHEMA, user, items)
    assert rows.id_features["user"].values.tolist() == [6] * 7
    expected = predictor.predict(rows)
    assert (found.step, found.epoch) == (1, 0)
    assert found.scores.std() > 1e-4 or (kind == "sasrec" and not history)  # Its logits without a history are 0.
    if kind == "dien":  # Has no part for the user.
        np.testing.assert_array_equal(found.scores, expected.scores)
    else:
        np.testing.assert_allclose(found.scores, expected.scores, rtol=0, atol=2e-5)
        assert calls == [7]


@pytest.mark.parametrize("kind", ["two_tower", "din"])
@pytest.mark.parametrize("user", [("city", "history", "seen"), ("user", "city"), ("history", "seen", "item")])
def test_any_division_of_features_is_right(tmp_path, serve, kind, user):
    predictor, _ = published(tmp_path, serve, kind, MODELS[kind])
    mine, items = user_and_items(user=user)
    expected = predictor.predict(expanded(SCHEMA, mine, items)).scores
    np.testing.assert_allclose(predictor.rank(mine, items).scores, expected, rtol=0, atol=2e-5)


def test_a_user_column_that_the_items_have_is_theirs(tmp_path, serve):
    predictor, _ = published(tmp_path, serve, "two_tower", MODELS["two_tower"])
    user, items = user_and_items()
    items.dense[:, 0] = np.arange(7)
    rows = expanded(SCHEMA, user, items)
    assert rows.dense[:, 0].tolist() == list(range(7))
    expected = predictor.predict(rows).scores
    np.testing.assert_array_equal(predictor.rank(user, items).scores, expected)


def test_scores_keep_the_order_where_sigmoids_are_all_one(tmp_path, serve):
    predictor, model = published(tmp_path, serve, "two_tower", {**MODELS["two_tower"], "temperature": 0.002})
    user, items = user_and_items(items=64)
    found = predictor.rank(user, items)
    assert not found.are_log_odds
    assert len(np.unique(probabilities_of(found.scores))) < 40 < len(np.unique(found.scores))
    rows = expanded(SCHEMA, user, items)
    view = predictor.current()
    dense, _, embeddings = view.readers.whole.read(rows, view.rows)
    with torch.no_grad():
        cosine = (model.users(dense, embeddings) * model.items(dense, embeddings)).sum(1).double()
    best = found.scores[:, 0].argsort()[::-1][:10]
    np.testing.assert_array_equal(best, cosine.numpy().argsort()[::-1][:10])
    np.testing.assert_array_equal(predictor.predict(rows).scores[:, 0].argsort()[::-1][:10], best)


def test_logits_that_are_no_log_odds_have_no_probabilities(tmp_path, serve):
    predictor, _ = published(tmp_path, serve, "two_tower", MODELS["two_tower"])
    found = predictor.rank(*user_and_items())
    with pytest.raises(ConfigError, match="use `scores`"):
        _ = found.probabilities
    predictor, _ = published(tmp_path / "other", serve, "din", MODELS["din"])
    found = predictor.rank(*user_and_items())
    np.testing.assert_array_equal(found.probabilities, probabilities_of(found.scores))


def test_batches_that_do_not_fit_are_refused(tmp_path, serve):
    predictor, _ = published(tmp_path, serve, "din", MODELS["din"])
    user, items = user_and_items()
    with pytest.raises(DataError, match="one user"):
        predictor.rank(items, items)
    with pytest.raises(DataError, match="at least one item"):
        predictor.rank(user, items.slice(0, 0))
    lacking = persia.Batch(columns(user, ["city", "history", "seen"]), user.dense, user.labels)
    with pytest.raises(DataError, match="Neither the user nor the items have the feature 'user'"):
        predictor.rank(lacking, items)
    with pytest.raises(DataError, match="Dense features of the items"):
        predictor.rank(user, persia.Batch(items.id_features, items.dense[:, :2], items.labels))
    with pytest.raises(DataError, match="Dense feature"):
        predictor.rank(persia.Batch(user.id_features, np.full_like(user.dense, NAN), user.labels), items)
    with pytest.raises(DataError, match="aligned"):
        predictor.rank(*user_and_items(user=("user", "city", "seen")))
    uneven = dict(user.id_features) | {"seen": IdColumn(np.array([1], np.uint64), np.array([0, 1]))}
    with pytest.raises(DataError, match="aligned"):
        predictor.rank(persia.Batch(uneven, user.dense, user.labels), items)
    more = {**items.id_features, "more": items.id_features["item"]}
    with pytest.raises(DataError, match="'more' of the items is not in the schema"):
        predictor.rank(user, persia.Batch(more, items.dense, items.labels))


@pytest.mark.parametrize("column", range(6))
def test_all_columns_of_a_dense_feature_must_be_the_users(column):
    dense = [persia.DenseFeature("v", size=3), persia.DenseFeature("q", fill=0.0, missing_indicator=True), "lq"]
    schema = persia.Schema([persia.IdFeature("user", 4), persia.IdFeature("item", 4)], dense)
    model = persia.nn.models.TwoTower(schema, item=["item", "q"], log_q="lq", hidden=(8,))
    one, none = IdColumn(np.ones(1, np.uint64)), np.empty((1, 0), np.float32)
    values = np.array([[0, 0, 0, NAN, NAN, NAN]], np.float32)
    user = persia.Batch({"user": one}, values, none)
    items = persia.Batch({"item": one}, np.where(np.isnan(values), np.float32(1), np.float32(NAN)), none)
    assert _can_split(model, schema, user, items)
    items.dense[0, column] = 1
    assert _can_split(model, schema, user, items) == (column > 2)
    items.dense[0, column], user.dense[0, column] = NAN, NAN
    assert _can_split(model, schema, user, items) == (column > 2)
