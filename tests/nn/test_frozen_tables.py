"""Tables whose rows are looked up and never trained."""

import numpy as np
import pytest
import torch
from test_transfer import Compressing

import persia
from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.errors import ConfigError, StoreError
from persia.modes import Hybrid, Sync
from persia.nn import EmbeddingCollection
from persia.optim import SGD, Adam
from persia.worker import Worker

NAMES = {"item": "fixed", "user": "user", "seen": "fixed", "page": "page"}


def schema_of(*frozen):
    tables = [persia.Table(name, 4, trainable=name not in frozen) for name in ("fixed", "user", "page")]
    options = {"page": {"pooling": None, "max_length": 2}}
    features = [persia.IdFeature(name, table=table, **options.get(name, {})) for name, table in NAMES.items()]
    return persia.Schema(features, tables=tables)


def batches(count):
    rng = np.random.default_rng(0)
    ends = np.arange(0, 17, 2, dtype=np.int64)
    return [
        Batch(
            {name: IdColumn(rng.integers(0, 20, 8).astype(np.uint64)) for name in ("item", "user", "page")}
            | {"seen": IdColumn(rng.integers(0, 20, 16).astype(np.uint64), ends)},
            np.zeros((8, 0), np.float32),
            np.zeros((8, 1), np.float32),
        )
        for _ in range(count)
    ]


def collection(schema, mode=None, on_host=True, cluster=None):
    embeddings = EmbeddingCollection(schema, optimizer=Adam(lr=0.1), mode=mode or Sync(), cluster=cluster)
    if not on_host:  # The way of a GPU.
        embeddings._expander.on_host = False
        embeddings._transfer._on_host = False
    return embeddings


def squares(embeddings, batch):
    outputs = embeddings(batch)
    values = [outputs["page"].values, *(outputs[name] for name in ("item", "user", "seen"))]
    return sum(value.square().sum() for value in values)


def rows_of(embeddings):
    ids = np.arange(20, dtype=np.uint64)
    return {name: embeddings.rows(name, ids, state=True) for name in ("fixed", "user", "page")}


@pytest.fixture
def pushed(monkeypatch):
    """The tables of each push."""
    tables = []
    push = Worker.push

    def noted(worker, header, contributions):
        tables.extend(sorted(contribution.gradients) for contribution in contributions)
        return push(worker, header, contributions)

    monkeypatch.setattr(Worker, "push", noted)
    return tables


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("mode", [Sync(), Hybrid(2)])
@pytest.mark.parametrize("on_host", [True, False])
def test_other_tables_train_as_if_it_were_trained(pushed, mode, on_host, compressed):
    """With a loss whose gradients of a table do not depend on other tables."""
    found = []
    for schema in (schema_of("fixed"), schema_of()):
        embeddings = collection(schema, mode, on_host, Compressing() if compressed else None)
        for batch in embeddings.prefetch(batches(6)):
            squares(embeddings, batch).backward()
        found.append(rows_of(embeddings))
    frozen, trained = found
    assert pushed == [["page", "user"]] * 6 + [["fixed", "page", "user"]] * 6
    for name in ("user", "page"):
        np.testing.assert_array_equal(frozen[name].values, trained[name].values)
    assert frozen["fixed"].found.all()  # Admitted and initialised as usual ...
    untouched = collection(schema_of("fixed"))
    for _ in untouched.prefetch(batches(6)):
        pass
    np.testing.assert_array_equal(frozen["fixed"].values, rows_of(untouched)["fixed"].values)  # ... and no more.
    assert (frozen["fixed"].values != trained["fixed"].values).any()
    assert frozen["fixed"].state.values.shape == (20, 0)
    assert not frozen["fixed"].state.update_count.any()


@pytest.mark.parametrize("on_host", [True, False])
def test_no_gradient_of_its_features_is_computed(on_host):
    embeddings = collection(schema_of("fixed"), on_host=on_host)
    (batch,) = batches(1)
    for prepared in embeddings.prefetch([batch]):
        outputs = embeddings(prepared)
        assert not outputs["item"].requires_grad
        assert not outputs["seen"].requires_grad
        assert outputs["user"].requires_grad
        assert outputs["page"].values.requires_grad
        assert not prepared.rows["fixed"].requires_grad
        outputs["user"].sum().backward()
        assert prepared.rows["fixed"].grad is None


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("compressed", [False, True])
def test_a_model_of_frozen_tables_only(pushed, on_host, compressed):
    schema = schema_of("fixed", "user", "page")
    embeddings = collection(schema, Hybrid(2), on_host, Compressing() if compressed else None)
    weight = torch.ones((), requires_grad=True)
    for batch in embeddings.prefetch(batches(3)):
        (weight * squares(embeddings, batch)).backward()
    assert weight.grad > 0
    assert pushed == [[]] * 3
    assert embeddings.pushed.released == 0
    assert embeddings.global_step == 3


def test_rows_of_it_can_be_set():
    embeddings = collection(schema_of("fixed"))
    values = np.arange(8, dtype=np.float32).reshape(2, 4)
    embeddings.set_rows("fixed", np.array([1, 30], np.uint64), values)
    for batch in embeddings.prefetch(batches(3)):
        squares(embeddings, batch).backward()
    np.testing.assert_array_equal(embeddings.rows("fixed", np.array([1, 30], np.uint64)).values, values)


def test_a_push_for_it_is_refused_by_its_server():
    """Of a process that has another schema."""
    (batch,) = batches(1)
    cluster = Compressing()
    collection(schema_of("fixed"), cluster=cluster)
    worker = Worker(schema_of(), [cluster.server])
    batch_id = worker.register(batch.id_features)
    rows = worker.lookup(batch_id).rows
    gradients = {"fixed": np.ones_like(rows["fixed"])}
    with pytest.raises(StoreError, match="'fixed' is not trainable"):
        worker.push(persia.types.PushHeader(1, 0, 1, 0, 8), [persia.types.Contribution(batch_id, gradients)])


def test_an_optimizer_of_its_own_is_refused():
    with pytest.raises(ConfigError, match=r"Table\('t'\)\.optimizer = .* has no effect with trainable = False"):
        persia.Table("t", 4, optimizer=SGD(lr=0.1), trainable=False)
    with pytest.raises(ConfigError, match=r"trainable = 'no'; expected True or False"):
        persia.Table("t", 4, trainable="no")
