"""Logs of changes of small runs, and what a server needs to serve them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

import persia
from persia.publish import PublishOptions
from persia.serve import Predictor, Retriever, ServeOptions
from support.served import SCHEMA as SEVERAL_LABELS

TOWERS = persia.Schema(
    [
        persia.IdFeature("user", dim=4),
        persia.IdFeature("user_b", dim=2, of="user", mapping=persia.Remainder(10)),
        persia.IdFeature("item", dim=4, kind="number"),
        persia.IdFeature("history", table="item", kind="number", pooling=None, max_length=3, keep="last"),
        persia.IdFeature("ages", 2, pooling=None, max_length=3, keep="last", aligned_with="history", age_since="now"),
    ],
    dense_features=["price", "age"],
    labels=["click"],
)
SCHEMAS = {"several_labels": SEVERAL_LABELS, "two_towers": TOWERS}
ROWS = 1024
"""Of the batch that is trained; enough for an index of drift."""


def network(schema):
    if len(schema.labels) == 1:
        return persia.nn.models.TwoTower(schema, item=["item", "price"], hidden=(4,), dim=4)
    return persia.nn.models.FFNN(schema, hidden=(4,))


def columns(schema):
    """Returns columns of ids that are easily met, with some samples that have none."""
    count = np.arange(ROWS)
    found = {feature.name: count % 9 for feature in schema.id_features if not feature.computed}
    if schema is TOWERS:
        lists = [[n % 5, n % 7, 3][: n % 4] for n in range(ROWS)]
        found |= {"history": lists, "ages": [[9 * n for n in each] for each in lists], "now": count + 60}
    else:
        found["tags"] = [[n % 5, n % 7][: n % 3] for n in range(ROWS)]
    found |= {name: np.float32(count % 64 / 64) for name in schema.dense_features}
    return found | {name: np.float32(count % 2) for name in schema.labels}


def train(schema, url):
    """Trains a few steps, and publishes to a log."""
    torch.manual_seed(0)
    trainer = persia.Trainer(
        network(schema),
        schema,
        optimizer=lambda params: torch.optim.Adam(params, 1e-2),
        embedding_optimizer=persia.optim.Adagrad(lr=0.1),
        options=persia.TrainerOptions(progress=False, publish=PublishOptions(url, seconds=0.05)),
    )
    trainer.fit([persia.Batch.from_columns(schema, columns(schema))] * 3)


class Services(NamedTuple):
    """What `create_app` takes; there is a retriever of a model with two towers."""

    predictor: Predictor
    retriever: Retriever | None


def serve(schema, url):
    """Returns what serves a log, not started."""
    predictor = Predictor(url, network, ServeOptions(poll_seconds=0.05))
    if schema is not TOWERS:
        return Services(predictor, None)
    items = persia.Batch.from_columns(schema, columns(schema), require_labels=False).slice(0, 9)
    return Services(predictor, Retriever(predictor, items, key="item", seconds=0.05))
