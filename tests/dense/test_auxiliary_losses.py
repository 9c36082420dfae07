"""Losses of the next event, and learned weights of labels: the same for any number of NN workers, and accumulated."""

import msgspec
import numpy as np
import pytest
import torch

import persia
from persia.modes import Sync
from persia.nn.models import DIEN, SASRec
from persia.nn.models.registry import build
from persia.optim import SGD
from persia.types import ModelDescription
from support.nn_processes import Remote, Services, parameters
from support.processes import TIMEOUT, Processes

IDS, LENGTH = 20, 5
SCHEMA = persia.Schema(
    [
        persia.IdFeature("item", dim=4),
        persia.IdFeature("history", table="item", pooling=None, max_length=LENGTH),
        persia.IdFeature("not_clicked", table="item", pooling=None, max_length=LENGTH),
    ],
    labels=["click"],
)
TWO_LABELS = msgspec.structs.replace(SCHEMA, labels=["click", "buy"])


def schema_of(kind):
    return TWO_LABELS if kind == "uncertain" else SCHEMA


def make_model(kind):
    torch.manual_seed(0)
    if kind == "uncertain":
        return build(ModelDescription("ffnn", {"hidden": (8,), "task_weights": "uncertainty"}), TWO_LABELS)
    options = {"history": [("history", "item")], "negatives": ["not_clicked"]}
    return SASRec(SCHEMA, **options) if kind == "sasrec" else DIEN(SCHEMA, hidden=(8,), **options)


def make_batches(sizes, kind):
    rng = np.random.default_rng(0)
    batches = []
    for size in sizes:
        lengths = rng.integers(0, LENGTH + 1, size)
        columns = {
            "item": rng.integers(0, IDS, size),
            "history": [rng.integers(0, IDS, length) for length in lengths],
            "not_clicked": [rng.integers(0, IDS, length) for length in lengths],
            "click": rng.integers(0, 2, size),
            "buy": rng.integers(0, 2, size),
        }
        batches.append(persia.Batch.from_columns(schema_of(kind), columns))
    return batches


def fit(data, kind, cluster=None, mode=None, **options):
    trainer = persia.Trainer(
        make_model(kind),
        schema_of(kind),
        optimizer=lambda p: torch.optim.SGD(p, 0.2),
        embedding_optimizer=SGD(lr=0.1),
        mode=mode or Sync(),
        cluster=cluster,
        options=persia.TrainerOptions(progress=False, timeout=TIMEOUT, **options),
    )
    trainer.fit(data)
    return trainer


def worker(rank, addresses, kind):
    return parameters(fit(None, kind, Remote(rank, 2, addresses), Sync("global")).model)


@pytest.fixture(scope="module")
def two():
    with Processes(2) as processes:
        yield processes


def in_pairs(batches):
    return [persia.Batch.concat(batches[i : i + 2]) for i in range(0, len(batches), 2)]


def rows_of(trainer):
    return trainer.embeddings.connection.servers[0].lookup({"item": np.arange(IDS, dtype=np.uint64)}, train=False)[
        "item"
    ]


def assert_equal(found, model):
    for name, value in parameters(model).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["dien", "sasrec", "uncertain"])
def test_two_nn_workers_equal_one_with_batches_twice_as_large(two, kind):
    batches = make_batches([5 + i % 3 for i in range(8)], kind)
    with Services(schema_of(kind), batches, 2, Sync("global")) as services:
        first, second = two.run(worker, services.addresses, kind)
        rows = services.rows("item", IDS)
    one = fit(in_pairs(batches), kind)
    assert_equal(first, one.model)
    assert_equal(second, one.model)
    np.testing.assert_allclose(rows, rows_of(one), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["dien", "sasrec", "uncertain"])
def test_accumulation_equals_batches_twice_as_large(kind):
    batches = make_batches([6] * 8, kind)
    accumulated, one = fit(batches, kind, accumulation_steps=2), fit(in_pairs(batches), kind)
    assert_equal(parameters(accumulated.model), one.model)
    np.testing.assert_allclose(rows_of(accumulated), rows_of(one), rtol=1e-4, atol=1e-6)
