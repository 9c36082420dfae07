"""TwoTower: the softmax over a batch against NumPy, what counts as the same item, precision, and bad arguments."""

import numpy as np
import pytest
import torch

import persia
from persia.errors import ConfigError
from persia.nn.item_catalogue import item_features, user_features
from persia.nn.models import TwoTower
from persia.nn.output import predictions_of, probabilities_of
from persia.schema import DenseFeature, IdFeature, Schema
from support.histories import Numbers, history_schema, made_inputs, outcome, softmax


def two_tower_schema(dense=("price", "age", "log_q")):
    return Schema([IdFeature("user", dim=3), IdFeature("item", dim=4), IdFeature("shop", dim=2)], dense_features=dense)


@pytest.mark.parametrize("log_q", [None, "log_q"])
def test_two_tower_is_a_softmax_over_the_items_of_the_batch(log_q):
    schema = two_tower_schema()
    model = TwoTower(schema, item=["item", "shop", "price"], log_q=log_q, hidden=(8,), dim=5, temperature=0.3)
    dense, embeddings = made_inputs(schema, rows=6)
    with torch.no_grad():
        for feature in (embeddings["item"], embeddings["shop"]):
            feature[3] = feature[1]  # One item twice, at two prices.
    labels = torch.tensor([[1.0], [0.0], [0.5], [1.0], [0.0], [1.0]])
    numbers = Numbers(model, dense, embeddings)
    users, items = [], []
    for row in range(6):
        extra = [] if log_q else numbers.dense[row, 2:]  # Without correction the column is the user's.
        user = np.concatenate([numbers.pooled["user"][row], numbers.dense[row, 1:2], extra])
        item = np.concatenate([numbers.pooled["item"][row], numbers.pooled["shop"][row], numbers.dense[row, :1]])
        for vectors, name, x in ((users, "user", user), (items, "item", item)):
            y = numbers.mlp(name, x)
            vectors.append(y / np.linalg.norm(y))
    terms = 0.0
    for i in range(6):
        competitors = [j for j in range(6) if j == i or {i, j} != {1, 3}]
        scores = [users[i] @ items[j] / 0.3 - (numbers.dense[j, 2] if log_q else 0) for j in competitors]
        terms -= labels[i, 0].item() * np.log(softmax(np.array(scores))[competitors.index(i)])
    logits, loss = outcome(model, dense, embeddings, labels)
    expected = [[u @ v / 0.3] for u, v in zip(users, items, strict=True)]
    np.testing.assert_allclose(logits.detach().numpy(), expected, rtol=1e-4, atol=1e-5)
    assert loss.item() == pytest.approx(terms / 6, rel=1e-4)
    np.testing.assert_allclose(model.users(dense, embeddings).detach().numpy(), users, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model.items(dense, embeddings).detach().numpy(), items, rtol=1e-4, atol=1e-5)
    assert isinstance(model.eval()(dense, embeddings), torch.Tensor)


def test_two_tower_takes_items_without_rows_for_different_ones():
    schema = two_tower_schema()
    model = TwoTower(schema, item=["item", "shop", "price"])
    dense, embeddings = made_inputs(schema)
    for name in ("item", "shop"):
        embeddings[name] = torch.zeros_like(embeddings[name])
    assert model(dense, embeddings).extra.isfinite().all()
    embeddings["shop"] = torch.ones_like(embeddings["shop"])
    assert model(dense, embeddings).extra.isfinite().sum() == len(dense)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_tower_scores_are_float32_under_autocast(dtype):
    schema = two_tower_schema()
    model = TwoTower(schema, item=["item", "shop"], temperature=0.01)
    dense, embeddings = made_inputs(schema)
    with torch.autocast("cpu", dtype):
        users, items = model.users(dense, embeddings), model.items(dense, embeddings)
        logits, scores = model(dense, embeddings)
    assert users.dtype == items.dtype == scores.dtype == torch.float32
    torch.testing.assert_close(items.square().sum(1), torch.ones(len(items)))
    exact = users.double() @ items.double().T / 0.01
    torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(logits.squeeze(1).double(), exact.diagonal(), rtol=1e-5, atol=1e-4)


def test_two_tower_treats_an_uncounted_item_as_the_rarest():
    schema = two_tower_schema()
    model = TwoTower(schema, item=["item", "shop"], log_q="log_q")
    dense, embeddings = made_inputs(schema)
    dense[:, 2] = torch.tensor([-3.0, -9.0, -4.0, -3.0, -1.0, -2.0, -5.0])
    finite = dense.clone()
    dense[[2, 4], 2] = -torch.inf
    finite[[2, 4], 2] = -9.0
    assert torch.equal(model(dense, embeddings).extra, model(finite, embeddings).extra)
    dense[:, 2] = -torch.inf
    assert outcome(model, dense, embeddings)[1].isfinite()


def test_two_tower_learns_from_clicks_and_corrects_popularity():
    """Users of group g choose items of group g, each as often as its popularity says."""
    torch.manual_seed(0)
    schema = two_tower_schema(dense=("log_q",))
    generator = torch.Generator().manual_seed(0)
    popularity = torch.tensor([8.0, 1.0, 8.0, 1.0])
    share = popularity / popularity.sum()
    scores = {}
    for corrected in (True, False):
        model = TwoTower(schema, item=["item", "shop"], log_q="log_q" if corrected else None, dim=8, temperature=1.0)
        dims = {"user": 3, "item": 4, "shop": 2}
        rows_of = {name: torch.randn(4, dim, generator=generator) for name, dim in dims.items()}
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for _ in range(60):
            item = torch.multinomial(share, 256, replacement=True, generator=generator)
            dense = share[item].log().unsqueeze(1) if corrected else torch.zeros(256, 1)
            index = {"user": item // 2, "item": item, "shop": item}
            embeddings = {name: rows[index[name]] for name, rows in rows_of.items()}
            _, loss = outcome(model, dense, embeddings)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        every = rows_of | {"user": rows_of["user"][[0, 0, 0, 0]]}
        scores[corrected] = model(torch.zeros(4, 1), every).squeeze(1)
    # The user's group wins, and with the correction the popular item of it does more clearly.
    assert all(found[:2].min() > found[2:].max() for found in scores.values())
    assert scores[True][0] - scores[True][1] > scores[False][0] - scores[False][1] + 0.1


@pytest.mark.parametrize("rows", [0, 1])
def test_two_tower_takes_batches_of_hardly_any_rows(rows):
    schema = two_tower_schema()
    model = TwoTower(schema, item=["item"])
    dense, embeddings = made_inputs(schema, rows)
    logits, loss = outcome(model, dense, embeddings)
    assert len(logits) == rows
    if rows:
        loss.backward()
        assert loss.item() == 0
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: TwoTower(two_tower_schema(), item=["nope"]), "no ID-type feature 'nope'"),
        (lambda: TwoTower(two_tower_schema(), item="item"), "Invalid item = 'item'; expected a list of names"),
        (lambda: TwoTower(two_tower_schema(), item=3), "Invalid item = 3"),
        (lambda: TwoTower(two_tower_schema(), item=["item"], log_q=3), "log_q = 3 is no dense feature"),
        (lambda: TwoTower(two_tower_schema(), item=["item"], hidden="8"), "width in hidden = '8'"),
        (lambda: TwoTower(two_tower_schema(), item=[]), "leaves a tower without"),
        (lambda: TwoTower(two_tower_schema(), item=["user", "item", "shop"]), "leaves a tower without"),
        (lambda: TwoTower(two_tower_schema(), item=["item"], log_q="item"), "log_q = 'item' is no dense feature"),
        (lambda: TwoTower(two_tower_schema(), item=["item"], temperature=0.0), "temperature"),
        (lambda: TwoTower(two_tower_schema(), item=["item"], dim=0), "dim"),
        (lambda: TwoTower(two_tower_schema(), item=["item"], hidden=(0,)), "width"),
        (lambda: TwoTower(history_schema(labels=("a", "b")), item=["item"]), "one label"),
    ],
)
def test_bad_arguments_are_refused(build, match):
    with pytest.raises(ConfigError, match=match):
        build()


def test_predictions_keep_the_order_of_logits():
    """At the default temperature most sigmoids of trained towers are 1."""
    schema = two_tower_schema(())
    rng = np.random.default_rng(0)
    columns = {"user": rng.integers(0, 8, 512), "item": rng.integers(0, 64, 512), "shop": rng.integers(0, 4, 512)}
    columns["label"] = (columns["user"] % 8 == columns["item"] % 8).astype(np.float32)
    data = persia.Batch.from_columns(schema, columns)
    torch.manual_seed(0)
    trainer = persia.Trainer(
        TwoTower(schema, item=["item", "shop"], hidden=(16,), dim=8, temperature=0.01),
        schema,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2),
        embedding_optimizer=persia.optim.Adagrad(lr=0.3),
        options=persia.TrainerOptions(progress=False),
    )
    trainer.fit([data.slice(start, start + 128) for start in range(0, 512, 128)] * 5)
    (scores,) = trainer.predict([data])
    ((_, logits),) = trainer._components.evaluator.scored([data])
    np.testing.assert_array_equal(scores, logits)
    assert len(np.unique(probabilities_of(logits))) < len(np.unique(scores))


def test_a_model_says_whether_its_logits_are_log_odds():
    logits = np.float32([[20.0], [30.0]])
    assert predictions_of(torch.nn.Linear(1, 1), logits).tolist() == [[1.0], [1.0]]
    ranking = torch.nn.Linear(1, 1)
    ranking.are_log_odds = False
    assert predictions_of(ranking, logits).tolist() == [[20.0], [30.0]]


WIDE = [DenseFeature("v", size=3), DenseFeature("q", fill=0.0, missing_indicator=True), "lq"]


def test_towers_read_all_columns_of_their_dense_features():
    schema = two_tower_schema(WIDE)
    model = TwoTower(schema, item=["item", "shop", "q"], log_q="lq", hidden=(8,))
    assert (model.user_columns.tolist(), model.item_columns.tolist(), model.log_q) == ([0, 1, 2], [3, 4], 5)
    assert model.user_features == ("user", "v")
    assert (user_features(model, schema).dense, item_features(model, schema).dense) == (("v",), ("q",))
    assert outcome(model, *made_inputs(schema))[1].isfinite()
    for name, width in (("v", 3), ("q", 2)):
        with pytest.raises(ConfigError, match=f"log_q = '{name}' has {width} columns"):
            TwoTower(schema, item=["item"], log_q=name)
