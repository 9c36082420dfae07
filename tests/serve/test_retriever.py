"""Retrieval over the log of changes, in process and over HTTP."""

from __future__ import annotations

import time

import httpx
import numpy as np
import pytest
import torch
from fastapi import FastAPI

import persia
from persia.batching.batch import Batch, IdColumn
from persia.errors import ClosedError
from persia.nn.models import TwoTower
from persia.publish import PublishOptions
from persia.schema import IdFeature, Schema
from persia.serve import Predictor, ServeOptions
from persia.serve.retrieval_http import MOST_BYTES, retrieval_router
from persia.serve.retriever import Retriever

ITEMS, USERS = 60, 30
SCHEMA = Schema(
    [IdFeature("user", dim=8), IdFeature("seen", dim=8, table="item", pooling="mean"), IdFeature("item", dim=8)],
    dense_features=["age", "price"],
    labels=["click"],
)


def batch(seed=0, n=600):
    rng = np.random.default_rng(seed)
    users, items = rng.integers(0, USERS, n).astype(np.uint64), rng.integers(0, ITEMS, n).astype(np.uint64)
    seen = IdColumn(rng.integers(0, ITEMS, 2 * n).astype(np.uint64), np.arange(0, 2 * n + 1, 2))
    dense = np.stack([users / USERS, items / ITEMS], 1).astype(np.float32)
    clicks = (users % 5 == items % 5).astype(np.float32)[:, None]
    return Batch({"user": IdColumn(users), "seen": seen, "item": IdColumn(items)}, dense, clicks)


def network():
    return TwoTower(SCHEMA, item=["item", "price"], hidden=(8,), dim=8)


def catalogue():
    ids = np.arange(ITEMS, dtype=np.uint64)
    dense = np.stack([np.zeros(ITEMS), ids / ITEMS], 1).astype(np.float32)
    return Batch({"item": IdColumn(ids)}, dense, np.empty((ITEMS, 0), np.float32))


@pytest.fixture
def run(tmp_path):
    torch.manual_seed(0)
    return persia.Trainer(
        network(),
        SCHEMA,
        optimizer=lambda params: torch.optim.Adam(params, 1e-2),
        embedding_optimizer=persia.optim.Adagrad(lr=0.1),
        options=persia.TrainerOptions(progress=False, publish=PublishOptions(str(tmp_path), seconds=0.05)),
    )


def nearest(run, users, k):
    """Returns what `predict` orders items by, for each user."""
    items, best = catalogue(), []
    for row in range(len(users)):
        one = users.take(np.full(ITEMS, row))
        dense = np.stack([one.dense[:, 0], items.dense[:, 1]], 1)
        (scores,) = run.predict([Batch({**one.id_features, "item": items.id_features["item"]}, dense, items.labels)])
        best.append(np.argsort(-scores[:, 0], kind="stable")[:k])
    return np.array(best)


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_it_follows_a_run(run, tmp_path):
    run.fit([batch(seed) for seed in range(5)])
    users = batch(99, 12)
    with Predictor(str(tmp_path), network(), ServeOptions(poll_seconds=0.05)) as predictor:
        late = Retriever(predictor, catalogue())
        with pytest.raises(ClosedError, match="The retriever has not started"):
            late.search(users, 1)
        with Retriever(predictor, catalogue(), seconds=0.05) as retriever:
            found = retriever.search(users, 5)
            assert found.step == 5
            assert np.mean(found.ids == nearest(run, users, 5)) > 0.9
            run.fit([batch(seed) for seed in range(5, 9)])
            until(lambda: retriever.index.step == 9)
            assert np.mean(retriever.search(users, 5).ids == nearest(run, users, 5)) > 0.9
            # An increment that removes a row, as the log has it.
            predictor._updater._tell([persia.publish.Change("item", *_removed(7))])
            assert 7 not in retriever.search(users, ITEMS).ids


def _removed(item):
    none = np.empty(0, np.uint64)
    return none, np.empty((0, 8), np.float32), np.array([item], np.uint64), 9


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.anyio
async def test_over_http(run, tmp_path, anyio_backend):
    run.fit([batch(seed) for seed in range(3)])
    with Predictor(str(tmp_path), network()) as predictor, Retriever(predictor, catalogue()) as retriever:
        app = FastAPI()
        app.include_router(retrieval_router(retriever))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            body = {"users": {"user": [3, 4], "seen": [[1, 2], []], "age": [0.1, 0.2]}, "k": 4}
            answer = await client.post("/retrieve", json=body)
            assert answer.status_code == 200, answer.text
            users = Batch.from_columns(
                Schema(SCHEMA.id_features[:2], dense_features=SCHEMA.dense_features, tables=[persia.Table("item", 8)]),
                {"user": [3, 4], "seen": [[1, 2], []], "age": [0.1, 0.2], "price": [0.0, 0.0]},
                require_labels=False,
            )
            expected = retriever.search(users, 4)
            assert answer.json() == {
                "ids": expected.ids.tolist(),
                "scores": expected.scores.tolist(),
                "step": 3,
            }
            for wrong, status, message in (
                (b"{", 422, "another form"),
                ({"users": {}}, 422, "is missing; give it"),
                ({**body, "k": 0}, 422, "another form"),
                ({**body, "more": 1}, 422, "another form"),
                ({"users": {**body["users"], "price": [1, 2]}}, 422, "'price' is no feature of the user"),
                ({"users": {**body["users"], "age": [1]}}, 422, "age"),
                (b" " * (MOST_BYTES + 1), 413, "The body has more than"),
            ):
                content = {"content": wrong} if isinstance(wrong, bytes) else {"json": wrong}
                answer = await client.post("/retrieve", **content)
                assert answer.status_code == status, answer.text
                assert message in answer.json()["message"]
            assert (await client.get("/retrieve")).status_code == 405
        closed = Retriever(predictor, catalogue())
        app = FastAPI()
        app.include_router(retrieval_router(closed))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            answer = await client.post("/retrieve", json=body)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
