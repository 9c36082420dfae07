"""Weights of ids from the samples to the rows: pooling and gradients are those of a loop, in any way of training."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import persia
from persia import Batch, IdColumn
from persia.modes import Hybrid, Sync
from persia.nn.pooling import Expander
from persia.nn.staging import CpuStaging
from persia.nn.transfer import Transfer
from persia.optim import SGD
from persia.replay import Setting, simulate, steady
from persia.replay.virtual import VirtualTraining
from persia.services import Connection
from persia.worker import Worker, WorkerOptions
from support import nn_processes
from support.examples import examples
from support.nn_processes import Model, Services, parameters
from support.several_ps import several_servers


class Cluster:
    """PSs in this process."""

    def __init__(self, compression="none"):
        self.compression = compression

    def connect(self, schema, optimizer, mode, seed):
        tables = schema.resolved_tables()
        self.servers = several_servers(2, tables, optimizer, mode, seed)
        return Connection(Worker(schema, self.servers, options=WorkerOptions(self.compression)), self.servers)


@st.composite
def cases(draw):
    """Several features of two tables, with a batch of ragged lists; some are not weighted."""
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float16"]))
    tables = [persia.Table("a", draw(st.sampled_from([1, 4, 5])), dtype=dtype), persia.Table("b", 3)]
    rows = draw(st.integers(1, 5))
    features, columns = [], {}
    for number in range(draw(st.integers(1, 4))):
        name, pooling = f"f{number}", draw(st.sampled_from(["sum", "mean", "sqrtn"]))
        most, keep = draw(st.none() | st.integers(1, 3)), draw(st.sampled_from(["first", "last"]))
        table, weights = draw(st.sampled_from("ab")), draw(st.sampled_from([None, "w"]))
        features.append(
            persia.IdFeature(name, table=table, pooling=pooling, max_length=most, keep=keep, weights=weights)
        )
        lengths = [draw(st.integers(0, 5)) for _ in range(rows)]
        single = draw(st.booleans())
        count = rows if single else sum(lengths)
        ids = np.array(draw(st.lists(st.integers(0, 6), min_size=count, max_size=count)), np.uint64)
        quarters = st.integers(-8 if pooling == "sum" else 0, 8)
        drawn = np.array(draw(st.lists(quarters, min_size=count, max_size=count)), np.float32) / 4
        offsets = None if single else np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        columns[name] = IdColumn(ids, offsets, drawn if weights else None)
    schema = persia.Schema(
        [*features], labels=[], tables=[t for t in tables if any(f.table == t.name for f in features)]
    )
    return schema, Batch(columns, np.zeros((rows, 0), np.float32), np.zeros((rows, 0), np.float32))


def pooled_by_a_loop(schema, batch, rows):
    """Embeddings `[batch, dim]` by feature, in float64; `rows` are by table and id, and get gradients."""
    found = {}
    for feature in schema.id_features:
        column, samples = batch.id_features[feature.name], []
        for sample in range(len(batch)):
            one = column.slice(sample, sample + 1)
            part = slice(None) if feature.max_length is None else slice(-feature.max_length, None)
            if feature.keep == "first":
                part = slice(feature.max_length)
            ids = one.values[part].tolist()
            weights = [1.0] * len(ids) if one.weights is None else one.weights[part].tolist()
            table = rows[feature.table]
            total = sum((w * table[id_] for id_, w in zip(ids, weights, strict=True)), torch.zeros(table.shape[1]))
            by = {"sum": 1.0, "mean": sum(weights), "sqrtn": sum(w * w for w in weights) ** 0.5}[feature.pooling]
            samples.append(total / by if by else 0 * total)
        found[feature.name] = torch.stack(samples)
    return found


@settings(max_examples=examples(100), deadline=None)
@given(cases(), st.booleans(), st.sampled_from(["none", "fp16"]))
def test_values_and_gradients_are_those_of_a_loop(case, on_host, compression):
    schema, batch = case
    batch.validate(schema)
    worker = Cluster(compression).connect(schema, SGD(lr=0.5), Sync(), 3).worker
    number = worker.register(batch.id_features)
    ids = worker.distinct_ids(number)
    expander = Expander(schema, torch.device("cpu"), 1)
    transfer = Transfer(CpuStaging(), on_host, schema.resolved_tables(), expander=expander)
    prepared, ready = transfer.rows(batch, worker.lookup(number))
    ready()
    by_id = {}
    for name, leaf in prepared.rows.items():
        by_id[name] = torch.zeros(7, leaf.shape[1], dtype=torch.float64)
        by_id[name][ids[name].astype(np.int64)] = leaf.double()
        by_id[name].requires_grad_()
        leaf.requires_grad_()
    if not on_host:
        prepared.pooled.leaf.requires_grad_()
    expected = pooled_by_a_loop(schema, batch, by_id)
    index = prepared.inverse, prepared.offsets, prepared.id_weights
    found = expander(prepared.rows, *index) if on_host else prepared.pooled.embeddings()
    targets = {name: torch.randn_like(pooled) for name, pooled in found.items()}
    for name, pooled in expected.items():
        torch.testing.assert_close(found[name], pooled.float(), rtol=1e-5, atol=1e-6)
    for values, leaves in ((found, prepared.rows), (expected, by_id)):
        terms = [(values[name] * target).sum() for name, target in targets.items()]
        sum(terms + [0 * leaf.sum() for leaf in leaves.values()]).backward()
    gradients = {name: leaf.grad for name, leaf in prepared.rows.items()}
    if not on_host:
        gradients = prepared.pooled.take_gradients(gradients, None)
    for name, gradient in gradients.items():
        wanted = by_id[name].grad[ids[name].astype(np.int64)].float()
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6)


SCHEMA = persia.Schema(
    [
        persia.IdFeature("tags", dim=4, pooling="mean", max_length=3, keep="last", weights="w"),
        persia.IdFeature("words", dim=4, table="tags", pooling="sqrtn", weights="v"),
        persia.IdFeature("item", dim=4, pooling="sum", weights="u"),
    ],
    ["age"],
    ["click"],
)
PLAIN = persia.Schema(
    [persia.IdFeature(f.name, f.dim, f.table, f.pooling, f.max_length, keep=f.keep) for f in SCHEMA.id_features],
    ["age"],
    ["click"],
)


def batches(weigh, count=12):
    rng = np.random.default_rng(3)
    made = []
    for _ in range(count):
        columns = {}
        for feature in SCHEMA.id_features:
            lengths = np.ones(8, np.int64) if feature.name == "item" else rng.integers(0, 5, 8)
            offsets = None if feature.name == "item" else np.concatenate(([0], np.cumsum(lengths)))
            ids = rng.integers(0, 30, lengths.sum()).astype(np.uint64)
            drawn = rng.random(len(ids)).astype(np.float32)
            columns[feature.name] = IdColumn(ids, offsets, weigh(drawn))
        labels = (rng.random((8, 1)) < 0.5).astype(np.float32)
        made.append(Batch(columns, rng.random((8, 1)).astype(np.float32), labels))
    return made


def trained(schema, data, cluster=None, mode=None):
    torch.manual_seed(0)
    cluster = cluster or Cluster()
    trainer = persia.Trainer(
        Model(schema),
        schema,
        optimizer=lambda p: torch.optim.SGD(p, 0.5, momentum=0.5),
        embedding_optimizer=SGD(lr=0.1),
        mode=mode or Sync(),
        cluster=cluster,
        options=persia.TrainerOptions(progress=False),
    )
    trainer.fit(data)
    return trainer


def predicted(trainer, data):
    return np.concatenate(list(trainer.predict(data)))


def assert_same(one, other):
    for name, values in parameters(one.model).items():
        np.testing.assert_array_equal(values.view(np.uint32), parameters(other.model)[name].view(np.uint32))


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_weights_of_one_train_the_same_bits(compression):
    data = batches(np.ones_like), batches(lambda _: None)
    mine = trained(SCHEMA, data[0], Cluster(compression))
    theirs = trained(PLAIN, data[1], Cluster(compression))
    assert_same(mine, theirs)
    np.testing.assert_array_equal(predicted(mine, data[0]), predicted(theirs, data[1]))


def test_weights_change_training_and_predictions():
    data = batches(lambda drawn: drawn)
    mine = trained(SCHEMA, data)
    unweighted = [
        dataclasses.replace(b, id_features=a.id_features) for a, b in zip(batches(lambda _: None), data, strict=True)
    ]
    assert np.abs(predicted(mine, data) - predicted(mine, unweighted)).max() > 1e-4
    assert mine.evaluate(data) != mine.evaluate(unweighted)


def test_weights_travel_with_batches_of_data_loaders():
    """Data loaders, embedding workers and PSs behind sockets train the same bits as those in this process."""
    data = batches(lambda drawn: drawn)
    one = trained(SCHEMA, data)
    with Services(SCHEMA, data, 1) as services:
        other = nn_processes.trainer(0, 1, services.addresses, SCHEMA)
        other.fit(None)
        assert_same(one, other)
        np.testing.assert_array_equal(predicted(one, data), predicted(other, data))


def test_copies_of_rows_are_weighted():
    """Gradients of zero change no row, so that features are those of a run that looks up all rows."""

    def features_of(cache_rows):
        tables = [persia.Table(name, 4, cache_rows=cache_rows) for name in ("tags", "item")]
        schema = persia.Schema(SCHEMA.id_features, ["age"], ["click"], tables)
        embeddings = persia.nn.EmbeddingCollection(
            schema, optimizer=SGD(lr=0.1), mode=Hybrid(3, warmup=0), cluster=Cluster()
        )
        found = []
        for batch in embeddings.prefetch(batches(lambda drawn: drawn)):
            features = embeddings(batch)
            found.append(torch.cat(list(features.values()), 1).detach().numpy().copy())
            sum((values * 0).sum() for values in features.values()).backward()
        assert bool(cache_rows) == bool(embeddings.cached.hits)
        return np.concatenate(found)

    np.testing.assert_array_equal(features_of(64), features_of(0))


def test_virtual_training_weighs_as_training_does():
    data = batches(lambda drawn: drawn)
    trainer = trained(SCHEMA, data)
    torch.manual_seed(0)
    model, seed = Model(SCHEMA), persia.TrainerOptions().seed
    virtual = VirtualTraining(
        model, SCHEMA, data.__getitem__, lambda p: torch.optim.SGD(p, 0.5, momentum=0.5), SGD(lr=0.1), seed
    )
    virtual.run(simulate(Sync(), Setting(steady([1.0]), local_batch=8), len(data)))
    np.testing.assert_allclose(1 / (1 + np.exp(-virtual.evaluate(data))), predicted(trainer, data), atol=1e-6)
